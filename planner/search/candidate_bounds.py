"""Bounds and evaluates one candidate of the search, more closely each time.

A configuration begins as a :class:`Candidate` of which only arithmetic is known. Each evaluation of it is more
expensive and sharper:

1. ``work``: every decision at its own cheapest, all communication free;
2. ``relaxation``: the whole problem without the memory limit, by a few eliminations (:func:`lower_bounds`);
3. ``search``: the whole problem, as far as it can beat the best plan known.

A branch covers some steps of the Pareto frontier of recomputation
(:class:`planner.formulation.remat.levels.ParetoFrontier`): with the time of the first and the memory of the last it
bounds them all. Where that leaves a better plan possible it is split, first at the breakpoints of the frontier. Between
two of them costs change evenly, and the bounds of both ends at one price of memory hold for all. Where everything fits
at the first step, no other is evaluated: more recomputation would only take more time.

A configuration with micro-batches falls into its pipelines, one for each schedule and number of virtual stages. The
first evaluation bounds all of them by work and communication and by whole blocks, the second each by what its stages
wait and hold (:mod:`planner.search.pipeline_bounds`), and the third cuts it for what solved that.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from planner.analysis.pipeline.chain import Link, links_of
from planner.analysis.pipeline.staged import Staged, stage
from planner.base.errors import PinError
from planner.cost.model import CostModel
from planner.formulation.assignment import assignment_of
from planner.formulation.certificate import Decided
from planner.formulation.constraints.filters import filters
from planner.formulation.constraints.labels import Labels, label_dims
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.stored_layouts import StoredLayouts
from planner.formulation.decisions import DecisionGraph
from planner.formulation.pipeline_pace import OUT_OF_ORDER
from planner.formulation.remat.levels import Levels, ParetoFrontier, Recompute
from planner.formulation.search_space import Space
from planner.formulation.stage_costs import StageCosts
from planner.formulation.training import Training
from planner.formulation.unsharding import PER_MICRO_BATCH
from planner.ir.graph import Graph
from planner.ir.layout import Mesh
from planner.ops.sharding_rule import Rule
from planner.search.parallel_config import ParallelConfig, pipelines_of, schedules
from planner.search.pipeline_bounds import PipelineBounds, least_send_s
from planner.solve.choices import Bounds, lightest, lower_bound_between, lower_bounds, solve
from planner.solve.pipeline.master import Paths
from planner.solve.pipeline.stages import Pipeline
from planner.solve.problem import Evaluation, Problem, evaluate, least_bytes, most_bytes

Progress = Callable[[str], None]
PROVED = 1e-6
LIKELY = 0.02
"""A pipeline that is likely to be faster than the best plan by this part is cut at once."""
DOUBT = 1.5
"""So many times longer a step is expected where samples are too few for the ranks; see :func:`doubt_of`."""
GROWTH = 0.08
"""A step is expected to grow by this power of the micro-batches beyond those that it is bounded with."""
SIMILAR = 4
"""Up to so many times the micro-batches costs are near enough to those of a multiple to solve relaxations with them."""
GRACE_S = 1.0
"""What a problem gets of time after the limit, while no plan is known at all."""


@dataclass(frozen=True)
class Candidate:
    """One parallel configuration, and what is known of its plans.

    Attributes:
        config: the stages of its pipeline and the mesh of each.
        status: ``optimal`` (its best plan was found), ``feasible`` (a plan was found before the time limit),
            ``pruned`` (none can beat the best plan), ``infeasible`` (none fits), ``none found`` (none better was
            found, nor excluded), ``not tried`` (time limit).
        objective_s: seconds of its best plan found; infinite where none was sought, or none fits.
        bound_s: no plan of it is faster; infinite: none fits.
        peak_bytes: of that plan; without one, what every plan of it needs at least.
        proof: the evaluation that proved the bound: ``arithmetic``, ``work``, ``relaxation`` or ``search``.
    """

    config: ParallelConfig
    status: str
    objective_s: float
    bound_s: float
    peak_bytes: int
    proof: str = "search"

    @property
    def mesh(self) -> Mesh:
        """That of one stage."""
        return self.config.mesh

    def costing(self, found: Evaluation) -> Candidate:
        """The same with a plan that costs so much as its best."""
        return replace(self, objective_s=found.time_s, peak_bytes=found.peak_bytes)

    def having(self, found: Evaluation) -> Candidate:
        """The same with a plan that costs so much found as its best."""
        is_proved = found.time_s - self.bound_s <= PROVED * found.time_s
        return replace(self.costing(found), status="optimal" if is_proved else "feasible")

    def facts(self) -> dict[str, Any]:
        """What a plan says of it: see :class:`planner.plan.document.document.Search`."""
        return {
            "mesh": self.config.sizes,
            **({} if self.config.unsharding.once_per_step else {"gathers": self.config.unsharding.name}),
            "status": self.status,
            "step_time_s": self.objective_s,
            "bound_s": self.bound_s,
            "peak_bytes": self.peak_bytes,
            "proof": self.proof,
        }


@dataclass(frozen=True)
class Incumbent:
    """The best plan known: an assignment of the problem of a space, with what it costs."""

    space: Space
    choices: tuple[int, ...]
    recompute: Recompute
    evaluation: Evaluation
    staged: Staged | None = None

    @property
    def config(self) -> ParallelConfig:
        return ParallelConfig(self.space.stages, self.space.mesh, self.space.training.unsharding)


@dataclass(frozen=True)
class SearchContext:
    """What all candidates of a search share.

    ``levels`` are those of recomputation; ``spare_bytes`` are left of every device's memory; ``gap`` is the part of a
    step that need not be proved; ``seconds`` adds up where time goes; ``known`` holds the labels that were found,
    ``formulated`` the last space of each configuration, ``paths`` those of the schedule of each pipeline,
    ``own_bounds`` those of configurations by themselves, ``free_s`` what plans take if memory and waiting cost nothing,
    by micro-batches, ``typical`` what solves the problem of a typical rank, and ``chains`` those of choices.
    """

    cost: CostModel
    training: Training
    rules: Mapping[str, Rule]
    pins: Pins
    levels: Levels
    deadline: float
    progress: Progress | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    spare_bytes: int = 0
    gap: float = 0.0
    known: dict[str, Labels] = field(default_factory=dict)
    formulated: dict[ParallelConfig, Space] = field(default_factory=dict)
    paths: dict[Pipeline, Paths] = field(default_factory=dict)
    own_bounds: dict[ParallelConfig, PipelineBounds] = field(default_factory=dict)
    free_s: dict[object, dict[int, float]] = field(default_factory=dict)
    typical: dict[Space, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    chains: dict[tuple[Space, tuple[int, ...]], tuple[Link, ...]] = field(default_factory=dict)
    stored: StoredLayouts | None = None

    @property
    def limit_bytes(self) -> int:
        """Memory that a plan may fill by the search's own reckoning, ``spare_bytes`` less than a device has."""
        return self.cost.cluster.device.usable_bytes - self.spare_bytes

    def labels(self, graph: Graph, label: str) -> Labels:
        """:func:`planner.formulation.constraints.labels.label_dims`, found once."""
        if label not in self.known:
            self.known[label] = label_dims(graph, self.rules, label)
        return self.known[label]

    def formulate(self, decision_graph: DecisionGraph, config: ParallelConfig) -> Space:
        """Every decision to take in one configuration."""
        mesh, graph = config.mesh, decision_graph.graph
        kept = filters(self.pins, graph, self.rules, mesh, lambda label: self.labels(graph, label))
        if self.stored is not None:
            kept = kept[0], self.stored.allow_leaf(mesh)
        space = Space(
            decision_graph.folded,
            mesh,
            self.cost,
            replace(self.training, unsharding=config.unsharding),
            self.rules,
            *kept,
            decision_graph,
            config.pace(self.pins.schedule),
            like=self.formulated.get(config),
        )
        self.formulated[config] = space
        empty = [variable for variable, options in space.options.items() if not options]
        if empty:
            raise PinError(
                f"the pins leave no way to run {space.describe(empty[0])} on mesh {mesh.sizes}; relax one of them"
            )
        return space

    def bounds(self, decision_graph: DecisionGraph, config: ParallelConfig) -> PipelineBounds:
        """Bounds of the pipelines of one configuration, and of those with a multiple of its micro-batches."""
        space = self.formulate(decision_graph, config)
        waits = self.pins.schedule not in OUT_OF_ORDER
        found = PipelineBounds(StageCosts(space, self.levels), self.limit_bytes, least_send_s(space), waits)
        if self.is_even:
            self.free_s.setdefault(config.any_micro_batches, {})[config.mesh.micro_batches] = found.free_s
        return found

    @property
    def is_even(self) -> bool:
        """Whether nothing takes more than ``k`` times as long for ``k`` times as much; what was measured may."""
        return self.cost.cluster.calibration is None

    def raised(self, branch: Branch) -> Branch:
        """The branch bounded by what plans with fewer micro-batches take where memory and waiting cost nothing."""
        config = branch.candidate.config
        if branch.pipeline is None or branch.is_priced:
            return branch
        known = self.free_s.get(config.any_micro_batches, {})
        found = [free_s for fewer, free_s in known.items() if config.mesh.micro_batches % fewer == 0]
        bound_s = max(branch.candidate.bound_s, *found, 0.0)
        return replace(branch, candidate=replace(branch.candidate, bound_s=bound_s))

    def pipelines(self, config: ParallelConfig, blocks: int) -> list[Pipeline]:
        """Those of so many blocks that the pins leave of one configuration."""
        names, virtual_stages = schedules(self.pins), self.pins.virtual_stages
        return pipelines_of(config.stages, config.mesh.micro_batches, blocks, names, virtual_stages)

    def links(self, space: Space, choices: tuple[int, ...]) -> tuple[Link, ...]:
        """The chain that choices make of the blocks."""
        key = space, choices
        if key not in self.chains:
            self.chains[key] = links_of(assignment_of(space, choices), self.levels, self.pins.schedule)
        return self.chains[key]

    def say(self, text: str) -> None:
        """Tell whoever follows the search."""
        if self.progress is not None:
            self.progress(text)

    def is_late(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() > self.deadline

    def took(self, step: str, since: float) -> float:
        """Count the seconds since a moment for a step; the moment now."""
        now = time.monotonic()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - since
        return now


@dataclass(frozen=True)
class Branch:
    """How closely a candidate was evaluated, over the steps ``low`` to ``high`` of the Pareto frontier of
    recomputation.

    A micro-batched one has all of them, and one ``pipeline`` of its configuration; until its work is known also
    ``others``, the same configuration with more micro-batches.

    ``is_priced`` once its relaxation is proved, ``is_sought`` once a pipeline was cut; ``met`` are choices that solve
    the relaxation of a pipeline, ``bounds`` what that is of, and ``likely_s`` what it takes with those;
    ``choices`` and ``step`` are the best plan found there, ``evaluation`` what it costs, and ``staged`` how it runs
    micro-batched.
    """

    candidate: Candidate
    formulated: Space | None
    pareto_frontier: ParetoFrontier
    low: int
    high: int
    is_priced: bool = False
    is_sought: bool = False
    others: tuple[Branch, ...] = ()
    doubt: float = 1.0
    growth: float = 1.0
    pipeline: Pipeline | None = None
    likely_s: float = 0.0
    bounds: PipelineBounds | None = None
    met: tuple[tuple[int, ...], ...] = ()
    choices: tuple[int, ...] | None = None
    step: int = 0
    evaluation: Evaluation | None = None
    staged: Staged | None = None

    @property
    def space(self) -> Space:
        """Its decisions, once it was evaluated."""
        assert self.formulated is not None
        return self.formulated

    @property
    def breakpoints(self) -> list[int]:
        """Steps inside between which what is held changes evenly."""
        return [step for step in self.pareto_frontier.breakpoints if self.low < step < self.high]

    @property
    def is_even(self) -> bool:
        """Whether it covers several steps between which all costs change evenly."""
        return self.low < self.high and not self.breakpoints

    @property
    def is_tried(self) -> bool:
        """Whether a plan was sought."""
        return self.is_sought if self.candidate.config.micro_batched else self.is_priced

    @cached_property
    def every(self) -> tuple[Branch, ...]:
        """It by itself, and each of the others."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    @cached_property
    def bound_s(self) -> float:
        """No plan of any of them is faster."""
        return min(branch.candidate.bound_s for branch in self.every)

    @cached_property
    def expected_s(self) -> float:
        """Seconds that its plans may take: its bound, or unless waiting is in it that of a pipeline of even stages."""
        if self.likely_s and self.formulated is not None:
            return max(self.candidate.bound_s, self.likely_s)
        if self.likely_s:
            return self.likely_s * self.doubt * self.growth
        p = self.pipeline
        waits = 0.0 if p is None else (p.ranks - 1) / (p.micro_batches * p.virtual_stages)
        return self.bound_s * self.doubt * (1 + waits)

    @property
    def is_done(self) -> bool:
        """Whether it was evaluated as closely as can be."""
        if self.candidate.config.micro_batched:
            return self.is_sought and self.is_priced
        return self.low == self.high and self.candidate.proof == "search"

    @property
    def is_expensive(self) -> bool:
        """Whether what is left takes long: the problem is not formulated yet, or there are several amounts to
        evaluate.
        """
        amounts = self.high - self.low if self.is_priced and not self.candidate.config.micro_batched else 0
        return self.formulated is None or amounts > 0

    @property
    def amounts(self) -> tuple[Recompute, list[Recompute]]:
        """The least recomputation, and more of it in growing amounts."""
        least, *more = self.pareto_frontier.between(self.low, self.high)
        return least, more


def begin(config: ParallelConfig, bound_s: float, frontier: ParetoFrontier, doubt: float = 1.0) -> Branch:
    """A configuration of which only arithmetic is known."""
    candidate = Candidate(config, "not tried", math.inf, bound_s, 0, "arithmetic")
    return Branch(candidate, None, frontier, 0, len(frontier.steps) - 1, doubt=doubt)


def doubt_of(config: ParallelConfig, batch: int, span: int) -> float:
    """How many times longer than bounds say a step is expected: some where micro-batches have fewer samples than ranks
    to share them, unless the last axis is within a node and there are enough for the others.
    """
    samples = max(1, batch) // config.mesh.micro_batches
    ranks, last = config.mesh.size, config.mesh.sizes[-1]
    return 1.0 if samples >= ranks or (last <= span and samples >= ranks // last) else DOUBT


def begin_together(branches: Iterable[Branch]) -> list[Branch]:
    """The same, with those of one mesh and more micro-batches among the others of the one with the fewest."""
    found: dict[object, list[Branch]] = {}
    for branch in branches:
        config = branch.candidate.config
        found.setdefault((config.any_micro_batches, config.mesh.micro_batches == 1), []).append(branch)
    return [_together(branches) for branches in found.values()]


def _together(branches: Iterable[Branch]) -> Branch:
    least, *others = sorted(branches, key=lambda branch: branch.candidate.config.mesh.micro_batches)
    return replace(least, others=tuple(others))


def evaluate_branch(
    context: SearchContext, decision_graph: DecisionGraph, branch: Branch, best: Incumbent | None
) -> list[Branch]:
    """Evaluate a branch once more, all that it covers or its parts."""
    if branch.candidate.config.micro_batched:
        if branch.pipeline is None:
            return _by_pipeline(context, decision_graph, branch, best)
        if branch.likely_s and branch.formulated is not None:
            return [(_proved if branch.is_sought else _cut)(context, branch, best)]
        if branch.likely_s or branch.bounds is None:
            branch = _by_itself(context, decision_graph, branch)
        return [_estimated(context, branch, best)]
    if branch.formulated is None:
        return [_at_work(context, decision_graph, branch)]
    if not branch.is_priced:
        branch = _where_memory_counts(context, branch)
        return [(_between if branch.is_even else _relaxed)(context, branch, best)]
    if branch.low < branch.high:
        return _split(branch)
    return [_whole(context, branch, best)]


def _by_pipeline(
    context: SearchContext, decision_graph: DecisionGraph, branch: Branch, best: Incumbent | None
) -> list[Branch]:
    """Every pipeline of a configuration, bounded by its work and communication, if memory and waiting were free; and of
    those with a multiple of its micro-batches, if it covers others.

    The same configuration with parameters gathered in each micro-batch, where that may be, communicates as much at
    least; its memory is another.
    """
    reached, waiting = list[Branch](), list[Branch]()
    for each in branch.every:
        (reached if is_reached(each.candidate.bound_s, best) else waiting).append(each)
    fewest = waiting[0].candidate.config
    multiples = [each for each in waiting if each.candidate.config.mesh.micro_batches % fewest.mesh.micro_batches == 0]
    multiples = multiples if context.is_even else waiting[:1]
    rest = [each for each in waiting if each not in multiples]
    found = [*reached, *([_together(rest)] if rest else [])]
    context.say(f"mesh {fewest}")
    before = time.monotonic()
    bounds = context.bounds(decision_graph, fewest)
    context.took("build", before)
    again = []
    for each in multiples:
        config, micro_batches = each.candidate.config, each.candidate.config.mesh.micro_batches
        peak_bytes = bounds.costs.least_bytes(fewest.mesh.micro_batches / micro_batches)
        bound_s = max(bounds.free_s, bounds.packed_s(micro_batches), each.candidate.bound_s)
        bound_s = math.inf if peak_bytes > context.limit_bytes else bound_s
        status = "infeasible" if math.isinf(bound_s) else "not tried"
        candidate = replace(each.candidate, status=status, bound_s=bound_s, peak_bytes=peak_bytes, proof="work")
        is_similar = micro_batches <= SIMILAR * fewest.mesh.micro_batches
        growth = (micro_batches / fewest.mesh.micro_batches) ** GROWTH
        known = bounds if is_similar else None
        each = replace(each, candidate=candidate, bounds=known, met=bounds.choices, growth=growth)
        if config == fewest:
            each = replace(each, formulated=bounds.costs.space)
        found += [
            replace(each, pipeline=pipeline)
            for pipeline in context.pipelines(config, len(decision_graph.folded.instances))
        ]
        if config.unsharding.once_per_step and PER_MICRO_BATCH in context.pins.unshardings and config.mesh.size > 1:
            least_s = max(bounds.free_s, each.candidate.bound_s) if math.isfinite(bounds.free_s) else 0.0
            candidate = Candidate(
                replace(config, unsharding=PER_MICRO_BATCH), "not tried", math.inf, least_s, 0, "arithmetic"
            )
            again.append(Branch(candidate, None, branch.pareto_frontier, branch.low, branch.high, doubt=each.doubt))
    return [*found, *begin_together(again)]


def _by_itself(context: SearchContext, decision_graph: DecisionGraph, branch: Branch) -> Branch:
    """A pipeline with the costs of its own configuration."""
    before, config = time.monotonic(), branch.candidate.config
    bounds = context.own_bounds.get(config) or context.bounds(decision_graph, config)
    context.own_bounds[config] = bounds
    context.took("build", before)
    bound_s = max(branch.candidate.bound_s, bounds.free_s, bounds.packed_s(config.mesh.micro_batches))
    candidate = replace(branch.candidate, bound_s=bound_s)
    return replace(branch, candidate=candidate, formulated=bounds.costs.space, bounds=bounds)


def _estimated(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """A pipeline with what its stages wait and hold, and cut if that is likely to be faster than the best plan; bounded
    only where it is likely to be slower.
    """
    branch = _at_prices(context, branch, best, is_proof=False)
    is_likely = best is None or branch.expected_s < best.evaluation.time_s * (1 - LIKELY)
    return _cut(context, branch, best) if branch.formulated is not None and is_likely else branch


def _proved(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """A pipeline bounded with what its stages wait and hold, whatever its cut and its recomputation; and cut for what
    solved that.
    """
    branch = replace(_at_prices(context, branch, best, is_proof=True), is_priced=True)
    return close(branch, best) if is_near(context, branch, best) else _cut(context, branch, best)


def _at_prices(context: SearchContext, branch: Branch, best: Incumbent | None, is_proof: bool) -> Branch:
    assert branch.pipeline is not None and branch.bounds is not None
    before = time.monotonic()
    paths = context.paths.setdefault(branch.pipeline, Paths(branch.pipeline))
    enough_s = math.inf if best is None else min(_target_s(best), best.evaluation.time_s * (1 - context.gap))
    found = branch.bounds.of(paths, enough_s, is_proof)
    context.took("solve", before)
    bound_s = max(branch.candidate.bound_s, found.time_s)
    status = "infeasible" if math.isinf(bound_s) else "none found" if branch.is_sought else "not tried"
    candidate = replace(branch.candidate, status=status, bound_s=bound_s, proof="relaxation")
    return replace(branch, candidate=candidate, met=found.choices, likely_s=max(found.expected_s, bound_s))


def _cut(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """A pipeline cut for what solves its relaxation."""
    before = time.monotonic()
    for choices in dict.fromkeys((*reversed(branch.met), *_typical(context, branch))):
        branch = _with_pipeline(context, branch, choices, best)
        best = better(best, branch)
    if best is None:  # nothing fits so far
        space = branch.space.holding(branch.candidate.config.in_flight)
        light = lightest(space.problem(context.limit_bytes, branch.pareto_frontier.steps[-1]))
        branch = _with_pipeline(context, branch, light, best)
        best = better(best, branch)
    context.took("solve", before)
    branch = replace(branch, is_sought=True)
    return close(branch, best) if branch.is_done else branch


def _at_work(context: SearchContext, decision_graph: DecisionGraph, branch: Branch) -> Branch:
    """Every decision at its own cheapest, in seconds and in bytes, as if neighbours always agreed."""
    context.say(f"mesh {branch.candidate.config}")
    before = time.monotonic()
    space = context.formulate(decision_graph, branch.candidate.config)
    least, more = branch.amounts
    vertices = space.vertices(context.limit_bytes, least, more)
    bound_s = math.fsum(float(vertex.time_s.min()) for vertex in vertices)
    peak_bytes = least_bytes(Problem(vertices, ()))
    if peak_bytes > context.limit_bytes:
        bound_s = math.inf
    status = "infeasible" if math.isinf(bound_s) else "not tried"
    bound_s = max(bound_s, branch.candidate.bound_s)
    candidate = replace(branch.candidate, status=status, bound_s=bound_s, peak_bytes=peak_bytes, proof="work")
    context.took("build", before)
    return replace(branch, candidate=candidate, formulated=space)


def _where_memory_counts(context: SearchContext, branch: Branch) -> Branch:
    """The branch at its first step alone if everything fits there: more recomputation only takes more time."""
    if branch.low == branch.high:
        return branch
    before = time.monotonic()
    problem = branch.space.problem(context.limit_bytes, branch.pareto_frontier.steps[branch.low])
    context.took("build", before)
    return replace(branch, high=branch.low) if most_bytes(problem) <= context.limit_bytes else branch


def _bounded(context: SearchContext, branch: Branch, best: Incumbent | None) -> tuple[Branch, Bounds]:
    """The branch with the bound of the whole problem, bytes over the limit at a price; what it needs of memory."""
    before = time.monotonic()
    problem = branch.space.problem(context.limit_bytes, *branch.amounts)
    before = context.took("build", before)
    bounds = lower_bounds(problem, math.inf if best is None else _target_s(best))
    context.took("solve", before)
    fits = bounds.peak_bytes <= context.limit_bytes
    bound_s = max(branch.candidate.bound_s, bounds.time_s) if fits else math.inf
    return replace(
        branch, candidate=replace(branch.candidate, bound_s=bound_s, proof="relaxation"), is_priced=True
    ), bounds


def _relaxed(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """The whole problem, memory aside, and plans of what solves it."""
    known = branch.candidate.peak_bytes
    branch, bounds = _bounded(context, branch, best)
    fits = math.isfinite(branch.candidate.bound_s)
    peak_bytes = math.ceil(bounds.peak_bytes) if math.isfinite(bounds.peak_bytes) else known
    status = "not tried" if fits else "infeasible"
    branch = replace(branch, candidate=replace(branch.candidate, status=status, peak_bytes=peak_bytes))
    branch = _with_plan(context, branch, bounds.choices)
    if branch.choices or not fits:
        return branch
    light = bounds.lightest or lightest(branch.space.problem(context.limit_bytes, *branch.amounts))
    return _with_plan(context, branch, light)


def _typical(context: SearchContext, branch: Branch) -> tuple[tuple[int, ...], ...]:
    """What solves the problem of a typical rank, with a price on what all micro-batches in flight hold."""
    if branch.space not in context.typical:
        space = branch.space.holding(branch.candidate.config.in_flight)
        ends = (branch.pareto_frontier.steps[0], branch.pareto_frontier.steps[-1])
        first, last = (space.problem(context.limit_bytes, end) for end in ends)
        context.typical[branch.space] = lower_bound_between(first, last).choices
    return context.typical[branch.space]


def _with_pipeline(
    context: SearchContext, branch: Branch, choices: tuple[int, ...] | None, best: Incumbent | None
) -> Branch:
    """The branch with a pipeline of these choices as its plan, if one is found that fits and is faster."""
    if choices is None:
        return branch
    assert branch.pipeline is not None
    links = context.links(branch.space, choices)
    target_s = math.inf if best is None else _target_s(best)
    found = stage(links, [branch.pipeline], context.limit_bytes, min(target_s, branch.candidate.objective_s))
    if found is None:
        return branch
    candidate = replace(branch.candidate.costing(found.evaluation), status="feasible")
    return replace(branch, candidate=candidate, choices=choices, evaluation=found.evaluation, staged=found)


def _between(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """The whole problem, with memory at a price, at both ends of steps between which costs change evenly."""
    before = time.monotonic()
    first, last = (
        branch.space.problem(context.limit_bytes, branch.pareto_frontier.steps[step])
        for step in (branch.low, branch.high)
    )
    before = context.took("build", before)
    found = lower_bound_between(first, last, math.inf if best is None else _target_s(best))
    context.took("solve", before)
    bound_s = max(branch.candidate.bound_s, found.time_s)
    status = "infeasible" if math.isinf(bound_s) else "not tried"
    candidate = replace(branch.candidate, status=status, bound_s=bound_s, proof="relaxation")
    branch = replace(branch, candidate=candidate, is_priced=True)
    for choices in found.choices:
        branch = _with_plan(context, branch, choices)
    return branch


def _whole(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """The problem of one amount, solved as far as it can beat the best plan."""
    before = time.monotonic()
    problem = branch.space.problem(context.limit_bytes, branch.pareto_frontier.steps[branch.low])
    answer = solve(
        problem,
        time_limit_s=max(GRACE_S if best is None else 0.0, context.deadline - before),
        incumbent=branch.choices,
        cutoff_s=math.inf if best is None else _target_s(best),
        least_memory=False,
    )
    context.took("solve", before)
    bound_s = max(branch.candidate.bound_s, answer.bound_s)
    branch = _with_plan(context, branch, answer.choices or None)
    if answer.status == "optimal":
        status = "optimal"
    elif math.isinf(bound_s):
        status = "infeasible"
    else:
        status = "pruned" if is_reached(bound_s, best) else "feasible" if branch.choices else "not tried"
    return replace(branch, candidate=replace(branch.candidate, status=status, bound_s=bound_s, proof="search"))


def _split(branch: Branch) -> list[Branch]:
    """The same steps in parts.

    Where a plan fits without more recomputation, its step and all others; else at the breakpoints around the plan that
    is known, or in the middle, since what is far from the best plan is often pruned together; between breakpoints
    before, at and after the plan, or in halves.
    """
    step = branch.step if branch.choices is not None else -1
    if step == branch.low:
        cuts = [step, step + 1]
    elif branch.breakpoints:
        near = _around(branch.breakpoints, step) if step >= 0 else [branch.breakpoints[len(branch.breakpoints) // 2]]
        cuts = [branch.low, *(cut for end in near for cut in (end, end + 1))]
    else:
        middle = step if branch.low < step < branch.high else (branch.low + branch.high) // 2
        cuts = [branch.low, *([middle] if middle == step else []), middle + 1]
    nothing = replace(branch.candidate, status="not tried", objective_s=math.inf)
    found = []
    for low, end in itertools.pairwise(sorted({*cuts, branch.high + 1})):
        part = replace(branch, low=low, high=end - 1, is_priced=False)
        if low <= step < end:
            found.append(part)
        else:
            found.append(replace(part, candidate=nothing, choices=None, evaluation=None))
    return found


def _around(breakpoints: list[int], step: int) -> list[int]:
    """The last breakpoint up to a step, and the first from it on."""
    return [*[each for each in breakpoints if each <= step][-1:], *[each for each in breakpoints if each >= step][:1]]


def _with_plan(context: SearchContext, branch: Branch, choices: tuple[int, ...] | None) -> Branch:
    """The branch with these choices as its plan, if they fit with some of its recomputation and are faster."""
    if choices is None:
        return branch
    decided = Decided(assignment_of(branch.space, choices), branch.space.decision_graph)
    known: dict[int, Evaluation] = {}

    def priced(step: int) -> Evaluation:
        if step not in known:
            problem = decided.problem(context.limit_bytes, branch.pareto_frontier.steps[step])
            known[step] = evaluate(problem, (0,) * len(choices))
        return known[step]

    step = _first_that_fits(priced, [branch.low, *branch.breakpoints, branch.high], context.limit_bytes)
    if step is None or priced(step).time_s >= branch.candidate.objective_s:
        return branch
    found = priced(step)
    return replace(branch, candidate=branch.candidate.costing(found), choices=choices, step=step, evaluation=found)


def _first_that_fits(priced: Callable[[int], Evaluation], breakpoints: list[int], limit_bytes: int) -> int | None:
    """The first step at which an assignment fits; between breakpoints its peak changes evenly."""
    for low, high in itertools.pairwise((breakpoints[0], *breakpoints)):
        before, after = priced(low), priced(high)
        if before.feasible:
            return low
        if after.feasible:
            share = (before.peak_bytes - limit_bytes) / (before.peak_bytes - after.peak_bytes)
            step = min(high, low + math.ceil(share * (high - low)))
            return step if priced(step).feasible else high
    return None


def better(best: Incumbent | None, branch: Branch) -> Incumbent | None:
    """The best plan known, or a branch's that is faster."""
    if branch.choices is None or branch.evaluation is None:
        return best
    if best is not None and branch.evaluation.time_s >= best.evaluation.time_s * (1 - 1e-9):
        return best
    return Incumbent(
        branch.space, branch.choices, branch.pareto_frontier.steps[branch.step], branch.evaluation, branch.staged
    )


def close(branch: Branch, best: Incumbent | None) -> Branch:
    """A branch that is evaluated no further."""
    candidate = branch.candidate
    if math.isinf(candidate.bound_s):
        status = "infeasible"
    elif branch.choices and candidate.objective_s - candidate.bound_s <= PROVED * candidate.objective_s:
        status = "optimal"
    elif is_reached(candidate.bound_s, best):
        status = "pruned"
    else:
        status = "feasible" if branch.choices else "none found" if branch.is_priced else "not tried"
    return replace(branch, candidate=replace(candidate, status=status), bounds=None)


def _target_s(best: Incumbent) -> float:
    """Only plans below this are worth seeking: half of what counts as proved, so that reaching it proves."""
    return best.evaluation.time_s * (1 - PROVED / 2)


def is_near(context: SearchContext, branch: Branch, best: Incumbent | None) -> bool:
    """Whether a branch need not be searched: it is bounded, and no plan of it can be faster by more than the gap."""
    is_bounded = branch.is_priced or branch.likely_s > 0.0
    return is_bounded and best is not None and branch.candidate.bound_s >= best.evaluation.time_s * (1 - context.gap)


def is_reached(bound_s: float, best: Incumbent | None) -> bool:
    """Whether a bound leaves nothing that would beat the best plan."""
    return math.isinf(bound_s) or (best is not None and bound_s >= _target_s(best))
