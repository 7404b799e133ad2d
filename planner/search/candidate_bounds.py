"""Looks: what is found of a division by looking at it, always more closely.

A division begins as a :class:`Candidate` of which only arithmetic is known. Each look at it is dearer and sharper:

1. ``work``: every decision at its own cheapest, all communication free;
2. ``relaxation``: the whole problem without the memory limit, by a few eliminations (:func:`lower_bounds`);
3. ``search``: the whole problem, as far as it can beat the best plan known.

A look covers some steps of the ladder of recomputation (:class:`planner.formulation.remat.levels.Ladder`): with the
time of the first and the memory of the last it bounds them all. Where that leaves a better plan possible it is split,
first at the bends of the ladder. Between two of them costs change evenly, and the bounds of both ends at one price of
memory hold for all. Where everything fits at the first step, no other is looked at: more recomputation would only take
more time.

Of a division with micro-batches the second look bounds all its pipelines, by the problem of the average rank; the third
cuts pipelines for what solves that, and for what solves the problem of a typical rank, and where a better plan may be
left bounds them by their equal blocks, too (:mod:`planner.formulation.pipeline_pace`). A bound costs a fifth of a cut.
Where memory then leaves no plan that gathers parameters once a step, or not the fastest, the same division that gathers
them in each micro-batch is a candidate of its own.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner.analysis.pipeline.chain import Link, links_of
from planner.analysis.pipeline.staged import Staged, stage
from planner.base.errors import PinError
from planner.cost.model import CostModel
from planner.formulation.assignment import assignment_of
from planner.formulation.certificate import Decided
from planner.formulation.constraints.filters import Labels, filters, label_dims
from planner.formulation.constraints.pins import Pins
from planner.formulation.decisions import Skeleton
from planner.formulation.pipeline_pace import packing
from planner.formulation.remat.levels import Ladder, Levels, Recompute
from planner.formulation.search_space import Space
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.ir.layout import Mesh
from planner.ops.sharding_rule import Rule
from planner.search.parallel_config import Division, pipelines_of, schedules
from planner.solve.choices import Bounds, lightest, lower_bound_between, lower_bounds, solve
from planner.solve.pipeline.stages import Pipeline
from planner.solve.problem import Evaluation, Problem, evaluate, least_bytes, most_bytes

Progress = Callable[[str], None]
PROVED = 1e-6
GRACE_S = 1.0
"""What a problem gets of time after the limit, while no plan is known at all."""


@dataclass(frozen=True)
class Candidate:
    """One division, and what is known of its plans.

    Attributes:
        division: the stages of its pipeline and the mesh of each.
        status: ``optimal`` (its best plan was found), ``feasible`` (a plan was found before the time limit),
            ``bounded away`` (none can beat the best plan), ``infeasible`` (none fits), ``none found`` (none better was
            found, nor excluded), ``not tried`` (time limit).
        objective_s: seconds of its best plan found; infinite where none was looked for, or none fits.
        bound_s: no plan of it is faster; infinite: none fits.
        peak_bytes: of that plan; without one, what every plan of it needs at least.
        proof: the look that proved the bound: ``arithmetic``, ``work``, ``relaxation`` or ``search``.
    """

    division: Division
    status: str
    objective_s: float
    bound_s: float
    peak_bytes: int
    proof: str = "search"

    @property
    def mesh(self) -> Mesh:
        """That of one stage."""
        return self.division.mesh

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
            "mesh": self.division.sizes,
            **({"gathers": "each"} if self.division.gathers == "each" else {}),
            "status": self.status,
            "step_time_s": self.objective_s,
            "bound_s": self.bound_s,
            "peak_bytes": self.peak_bytes,
            "proof": self.proof,
        }


@dataclass(frozen=True)
class Best:
    """The best plan known: an assignment of the problem of a space, with what it costs."""

    space: Space
    choices: tuple[int, ...]
    recompute: Recompute
    evaluation: Evaluation
    staged: Staged | None = None

    @property
    def division(self) -> Division:
        return Division(self.space.stages, self.space.mesh, self.space.training.gathers)


@dataclass(frozen=True)
class Setting:
    """What all candidates of a search share.

    ``levels`` are those of recomputation; ``spare_bytes`` are left of every device's memory; ``gap`` is the part of a
    step that need not be proved; ``seconds`` adds up where time goes; ``known`` holds the labels that were found,
    ``posed`` the last space of each division.
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
    posed: dict[Division, Space] = field(default_factory=dict)

    @property
    def limit_bytes(self) -> int:
        """Memory that a plan may fill by the search's own reckoning, ``spare_bytes`` less than a device has."""
        return self.cost.cluster.device.usable_bytes - self.spare_bytes

    def labels(self, graph: Graph, label: str) -> Labels:
        """:func:`planner.formulation.constraints.filters.label_dims`, found once."""
        if label not in self.known:
            self.known[label] = label_dims(graph, self.rules, label)
        return self.known[label]

    def pose(self, skeleton: Skeleton, division: Division) -> Space:
        """Every decision to take on one division."""
        mesh, graph = division.mesh, skeleton.graph
        kept = filters(self.pins, graph, self.rules, mesh, lambda label: self.labels(graph, label))
        space = Space(
            skeleton.folded,
            mesh,
            self.cost,
            replace(self.training, gathers=division.gathers),
            self.rules,
            *kept,
            skeleton,
            division.pace(self.pins.schedule),
            like=self.posed.get(division),
        )
        self.posed[division] = space
        empty = [role for role, options in space.options.items() if not options]
        if empty:
            raise PinError(
                f"the pins leave no way to run {space.describe(empty[0])} on mesh {mesh.sizes}; relax one of them"
            )
        return space

    def pipelines(self, division: Division, blocks: int) -> list[Pipeline]:
        """Those of so many blocks that the pins leave on one division."""
        names, virtual_stages = schedules(self.pins), self.pins.virtual_stages
        return pipelines_of(division.stages, division.mesh.micro_batches, blocks, names, virtual_stages)

    def links(self, space: Space, choices: tuple[int, ...]) -> tuple[Link, ...]:
        """The chain that choices make of the blocks."""
        return links_of(assignment_of(space, choices), self.levels, self.pins.schedule)

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
class Look:
    """How closely a candidate was looked at, over the steps ``low`` to ``high`` of the ladder of recomputation.

    ``is_priced`` once its relaxation was, ``is_sought`` once a pipeline was looked for; ``relaxed`` solves the
    relaxation, and ``free_s`` is the bound before memory was priced in it, where it was; ``choices`` and ``step`` are
    the best plan found there, ``evaluation`` what it costs, and ``staged`` how it runs micro-batched.
    """

    candidate: Candidate
    posed: Space | None
    ladder: Ladder
    low: int
    high: int
    is_priced: bool = False
    is_sought: bool = False
    relaxed: tuple[int, ...] | None = None
    free_s: float | None = None
    choices: tuple[int, ...] | None = None
    step: int = 0
    evaluation: Evaluation | None = None
    staged: Staged | None = None

    @property
    def space(self) -> Space:
        """Its decisions, once it was looked at."""
        assert self.posed is not None
        return self.posed

    @property
    def bends(self) -> list[int]:
        """Steps inside between which what is held changes evenly."""
        return [step for step in self.ladder.bends if self.low < step < self.high]

    @property
    def is_even(self) -> bool:
        """Whether it covers several steps between which all costs change evenly."""
        return self.low < self.high and not self.bends

    @property
    def is_tried(self) -> bool:
        """Whether a plan was looked for."""
        return self.is_sought if self.candidate.division.micro_batched else self.is_priced

    @property
    def is_done(self) -> bool:
        """Whether it was looked at as closely as can be."""
        if self.candidate.division.micro_batched:
            return self.is_sought
        return self.low == self.high and self.candidate.proof == "search"

    @property
    def is_dear(self) -> bool:
        """Whether what is left takes long: the problem is not posed yet, or there are several amounts to look at."""
        amounts = self.high - self.low if self.is_priced and not self.candidate.division.micro_batched else 0
        return self.posed is None or amounts > 0

    @property
    def amounts(self) -> tuple[Recompute, list[Recompute]]:
        """The least recomputation, and more of it in growing amounts."""
        least, *more = self.ladder.between(self.low, self.high)
        return least, more


def begin(division: Division, bound_s: float, rungs: Ladder) -> Look:
    """A division of which only arithmetic is known."""
    candidate = Candidate(division, "not tried", math.inf, bound_s, 0, "arithmetic")
    return Look(candidate, None, rungs, 0, len(rungs.steps) - 1)


def look_closer(setting: Setting, skeleton: Skeleton, look: Look, best: Best | None) -> list[Look]:
    """The next look at a candidate, of all that it covers or of its parts."""
    if look.posed is None:
        closer = _at_work(setting, skeleton, look)
        return [closer, *_gathering_in_each(setting, look, closer)]
    if look.candidate.division.micro_batched:
        closer = (_for_pipeline if look.is_priced else _at_average)(setting, look, best)
        return [closer, *_gathering_in_each(setting, look, closer)]
    if not look.is_priced:
        look = _where_memory_counts(setting, look)
        return [(_between if look.is_even else _relaxed)(setting, look, best)]
    if look.low < look.high:
        return _split(look)
    return [_whole(setting, look, best)]


def _gathering_in_each(setting: Setting, look: Look, closer: Look) -> list[Look]:
    """The same division with parameters gathered in each micro-batch, if that may be better.

    It takes longer and holds less: so what bounds a step that gathers once bounds it, too, as long as no memory is
    priced in the bound, and it is looked at only where memory leaves no plan of the other, or another than the fastest.
    """
    if not _may_gather_in_each(setting, look):
        return []
    if not (math.isinf(closer.candidate.bound_s) or closer.is_sought):
        return []
    staged = closer.staged
    if staged is not None and closer.choices == closer.relaxed and not any(staged.cut.savings):
        return []
    return [_in_each(look, look.candidate.bound_s if look.free_s is None else look.free_s)]


def left_behind(setting: Setting, look: Look) -> list[Look]:
    """What no bound of a look that is left is one of: the same division with parameters gathered in each micro-batch,
    where memory is priced in the look's bound.
    """
    is_begun = look.is_sought or math.isinf(look.candidate.bound_s)
    if look.free_s is None or is_begun or not _may_gather_in_each(setting, look):
        return []
    return [_in_each(look, look.free_s)]


def _may_gather_in_each(setting: Setting, look: Look) -> bool:
    division = look.candidate.division
    is_once = division.micro_batched and division.gathers == "once" and "each" in setting.pins.gathers
    return is_once and division.mesh.micro_batched(1).size > 1


def _in_each(look: Look, bound_s: float) -> Look:
    """The look's division with parameters gathered in each micro-batch."""
    return begin(replace(look.candidate.division, gathers="each"), bound_s, look.ladder)


def _at_work(setting: Setting, skeleton: Skeleton, look: Look) -> Look:
    """Every decision at its own cheapest and leanest, as if neighbours always agreed."""
    setting.say(f"mesh {look.candidate.division}")
    before = time.monotonic()
    space = setting.pose(skeleton, look.candidate.division)
    least, more = look.amounts
    vertices = space.vertices(setting.limit_bytes, least, more)
    bound_s = math.fsum(float(vertex.time_s.min()) for vertex in vertices)
    peak_bytes = least_bytes(Problem(vertices, ()))
    if peak_bytes > setting.limit_bytes:
        bound_s = math.inf
    status = "infeasible" if math.isinf(bound_s) else "not tried"
    bound_s = max(bound_s, look.candidate.bound_s)
    candidate = replace(look.candidate, status=status, bound_s=bound_s, peak_bytes=peak_bytes, proof="work")
    setting.took("build", before)
    return replace(look, candidate=candidate, posed=space)


def _where_memory_counts(setting: Setting, look: Look) -> Look:
    """The look at its first step alone if everything fits there: more recomputation only takes more time."""
    if look.low == look.high:
        return look
    before = time.monotonic()
    problem = look.space.problem(setting.limit_bytes, look.ladder.steps[look.low])
    setting.took("build", before)
    return replace(look, high=look.low) if most_bytes(problem) <= setting.limit_bytes else look


def _bounded(setting: Setting, look: Look, best: Best | None) -> tuple[Look, Bounds]:
    """The look with the bound of the whole problem, bytes over the limit at a price; what it needs of memory."""
    before = time.monotonic()
    problem = look.space.problem(setting.limit_bytes, *look.amounts)
    before = setting.took("build", before)
    bounds = lower_bounds(problem, math.inf if best is None else _target_s(best))
    setting.took("solve", before)
    fits = bounds.peak_bytes <= setting.limit_bytes
    bound_s = max(look.candidate.bound_s, bounds.time_s) if fits else math.inf
    return replace(look, candidate=replace(look.candidate, bound_s=bound_s, proof="relaxation"), is_priced=True), bounds


def _relaxed(setting: Setting, look: Look, best: Best | None) -> Look:
    """The whole problem, memory aside, and plans of what solves it."""
    known = look.candidate.peak_bytes
    look, bounds = _bounded(setting, look, best)
    fits = math.isfinite(look.candidate.bound_s)
    peak_bytes = math.ceil(bounds.peak_bytes) if math.isfinite(bounds.peak_bytes) else known
    status = "not tried" if fits else "infeasible"
    look = replace(look, candidate=replace(look.candidate, status=status, peak_bytes=peak_bytes))
    look = _with_plan(setting, look, bounds.choices)
    if look.choices or not fits:
        return look
    light = bounds.lightest or lightest(look.space.problem(setting.limit_bytes, *look.amounts))
    return _with_plan(setting, look, light)


def _at_average(setting: Setting, look: Look, best: Best | None) -> Look:
    """The whole problem of the average rank, which no pipeline is below."""
    known_s = look.candidate.bound_s
    look, bounds = _bounded(setting, look, best)
    status = "infeasible" if math.isinf(look.candidate.bound_s) else "none found"
    candidate, free_s = replace(look.candidate, status=status), known_s if bounds.lightest is not None else None
    return replace(look, candidate=candidate, relaxed=bounds.choices, free_s=free_s)


def _for_pipeline(setting: Setting, look: Look, best: Best | None) -> Look:
    """Pipelines of what solves the problem of a typical rank, with a price on what all micro-batches in flight hold,
    and of what solved that of the average one.
    """
    before, space = time.monotonic(), look.space.holding(look.candidate.division.in_flight)
    ends = (look.ladder.steps[0], look.ladder.steps[-1])
    first, last = (space.problem(setting.limit_bytes, end) for end in ends)
    before = setting.took("build", before)
    for choices in lower_bound_between(first, last).choices:
        look = _with_pipeline(setting, look, choices, best)
    if look.staged is None and best is None:
        look = _with_pipeline(setting, look, lightest(last), best)
    look = _with_pipeline(setting, look, look.relaxed, best)
    setting.took("solve", before)
    best = better(best, look)
    return close(replace(_packed(setting, look, best), is_sought=True), best)


def _packed(setting: Setting, look: Look, best: Best | None) -> Look:
    """The look with the bound of equal blocks, each of which one rank has whole, where that may be higher."""
    pace = None if is_reached(look.candidate.bound_s, best) else packing(look.space.pace, look.space.skeleton)
    if pace is None:
        return look
    packed, _ = _bounded(setting, replace(look, posed=look.space.at(pace)), best)
    return replace(look, candidate=packed.candidate)


def _with_pipeline(setting: Setting, look: Look, choices: tuple[int, ...] | None, best: Best | None) -> Look:
    """The look with a pipeline of these choices as its plan, if one is found that fits and is faster."""
    if choices is None:
        return look
    links = setting.links(look.space, choices)
    wanted = setting.pipelines(look.candidate.division, len(links))
    target_s = math.inf if best is None else _target_s(best)
    found = stage(links, wanted, setting.limit_bytes, min(target_s, look.candidate.objective_s))
    if found is None:
        return look
    candidate = replace(look.candidate.costing(found.evaluation), status="feasible")
    return replace(look, candidate=candidate, choices=choices, evaluation=found.evaluation, staged=found)


def _between(setting: Setting, look: Look, best: Best | None) -> Look:
    """The whole problem, with memory at a price, at both ends of steps between which costs change evenly."""
    before = time.monotonic()
    first, last = (look.space.problem(setting.limit_bytes, look.ladder.steps[step]) for step in (look.low, look.high))
    before = setting.took("build", before)
    found = lower_bound_between(first, last, math.inf if best is None else _target_s(best))
    setting.took("solve", before)
    bound_s = max(look.candidate.bound_s, found.time_s)
    status = "infeasible" if math.isinf(bound_s) else "not tried"
    candidate = replace(look.candidate, status=status, bound_s=bound_s, proof="relaxation")
    look = replace(look, candidate=candidate, is_priced=True)
    for choices in found.choices:
        look = _with_plan(setting, look, choices)
    return look


def _whole(setting: Setting, look: Look, best: Best | None) -> Look:
    """The problem of one amount, solved as far as it can beat the best plan."""
    before = time.monotonic()
    problem = look.space.problem(setting.limit_bytes, look.ladder.steps[look.low])
    answer = solve(
        problem,
        time_limit_s=max(GRACE_S if best is None else 0.0, setting.deadline - before),
        incumbent=look.choices,
        cutoff_s=math.inf if best is None else _target_s(best),
        leanest=False,
    )
    setting.took("solve", before)
    bound_s = max(look.candidate.bound_s, answer.bound_s)
    look = _with_plan(setting, look, answer.choices or None)
    if answer.status == "optimal":
        status = "optimal"
    elif math.isinf(bound_s):
        status = "infeasible"
    else:
        status = "bounded away" if is_reached(bound_s, best) else "feasible" if look.choices else "not tried"
    return replace(look, candidate=replace(look.candidate, status=status, bound_s=bound_s, proof="search"))


def _split(look: Look) -> list[Look]:
    """The same steps in parts.

    Where a plan fits without more recomputation, its step and all others; else at the bends around the plan that is
    known, or in the middle, since what is far from the best plan is often bounded away together; between bends before,
    at and after the plan, or in halves.
    """
    step = look.step if look.choices is not None else -1
    if step == look.low:
        cuts = [step, step + 1]
    elif look.bends:
        near = _around(look.bends, step) if step >= 0 else [look.bends[len(look.bends) // 2]]
        cuts = [look.low, *(cut for bend in near for cut in (bend, bend + 1))]
    else:
        middle = step if look.low < step < look.high else (look.low + look.high) // 2
        cuts = [look.low, *([middle] if middle == step else []), middle + 1]
    nothing = replace(look.candidate, status="not tried", objective_s=math.inf)
    found = []
    for low, end in itertools.pairwise(sorted({*cuts, look.high + 1})):
        part = replace(look, low=low, high=end - 1, is_priced=False)
        if low <= step < end:
            found.append(part)
        else:
            found.append(replace(part, candidate=nothing, choices=None, evaluation=None))
    return found


def _around(bends: list[int], step: int) -> list[int]:
    """The last bend up to a step, and the first from it on."""
    return [*[bend for bend in bends if bend <= step][-1:], *[bend for bend in bends if bend >= step][:1]]


def _with_plan(setting: Setting, look: Look, choices: tuple[int, ...] | None) -> Look:
    """The look with these choices as its plan, if they fit with some of its recomputation and are faster."""
    if choices is None:
        return look
    decided = Decided(assignment_of(look.space, choices), look.space.skeleton)
    known: dict[int, Evaluation] = {}

    def priced(step: int) -> Evaluation:
        if step not in known:
            problem = decided.problem(setting.limit_bytes, look.ladder.steps[step])
            known[step] = evaluate(problem, (0,) * len(choices))
        return known[step]

    step = _first_that_fits(priced, [look.low, *look.bends, look.high], setting.limit_bytes)
    if step is None or priced(step).time_s >= look.candidate.objective_s:
        return look
    found = priced(step)
    return replace(look, candidate=look.candidate.costing(found), choices=choices, step=step, evaluation=found)


def _first_that_fits(priced: Callable[[int], Evaluation], bends: list[int], limit_bytes: int) -> int | None:
    """The first step at which an assignment fits; between bends its peak changes evenly."""
    for low, high in itertools.pairwise((bends[0], *bends)):
        before, after = priced(low), priced(high)
        if before.feasible:
            return low
        if after.feasible:
            share = (before.peak_bytes - limit_bytes) / (before.peak_bytes - after.peak_bytes)
            step = min(high, low + math.ceil(share * (high - low)))
            return step if priced(step).feasible else high
    return None


def better(best: Best | None, look: Look) -> Best | None:
    """The best plan known, with a look's."""
    if look.choices is None or look.evaluation is None:
        return best
    if best is not None and look.evaluation.time_s >= best.evaluation.time_s * (1 - 1e-9):
        return best
    return Best(look.space, look.choices, look.ladder.steps[look.step], look.evaluation, look.staged)


def close(look: Look, best: Best | None) -> Look:
    """A candidate that is looked at no further."""
    candidate = look.candidate
    if math.isinf(candidate.bound_s):
        status = "infeasible"
    elif look.choices and candidate.objective_s - candidate.bound_s <= PROVED * candidate.objective_s:
        status = "optimal"
    elif is_reached(candidate.bound_s, best):
        status = "bounded away"
    else:
        status = "feasible" if look.choices else "none found" if look.is_priced else "not tried"
    return replace(look, candidate=replace(candidate, status=status))


def _target_s(best: Best) -> float:
    """Only plans below this are worth looking for: half of what counts as proved, so that reaching it proves."""
    return best.evaluation.time_s * (1 - PROVED / 2)


def is_near(setting: Setting, look: Look, best: Best | None) -> bool:
    """Whether a look need not be searched: it is bounded, and none of its plans can be faster by more than the gap."""
    return look.is_priced and best is not None and look.candidate.bound_s >= best.evaluation.time_s * (1 - setting.gap)


def is_reached(bound_s: float, best: Best | None) -> bool:
    """Whether a bound leaves nothing that would beat the best plan."""
    return math.isinf(bound_s) or (best is not None and bound_s >= _target_s(best))
