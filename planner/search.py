"""Search: from a graph and a cluster to the best plan, with what is proved about it.

Every mesh that the cluster and the pins allow is a *candidate* with a lower bound on the step time of all its plans,
with any amount of recomputation. The candidate of least bound is looked at next, always more closely, until its plan
is found or its bound reaches the best plan known; then every other bound does too, and nothing better can exist.
Looks, each dearer and sharper:

1. ``work``: every decision at its own cheapest, all communication free;
2. ``relaxation``: the whole problem without the memory limit, by a few eliminations (:func:`lower_bounds`);
3. ``search``: the whole problem, as far as it can beat the best plan known.

A look covers some steps of the ladder of recomputation (:class:`planner.recompute.Ladder`): with the time of the first
and the memory of the last it bounds them all. Where that leaves a better plan possible it is split, first at the bends
of the ladder. Between two of them costs change evenly, and the bounds of both ends at one price of memory hold for all.

What does not depend on the mesh is found once (:mod:`planner.skeleton`). Ctrl-C ends a search with
:class:`KeyboardInterrupt` and leaves nothing behind; to get the best plan so far instead, give a time limit.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.certificate import Decided
from planner.cluster import ClusterSpec
from planner.cost import CostModel
from planner.division import Arithmetic, Division, in_one_turn, in_turns, schedules, seeds, stages_wanted
from planner.errors import ClusterError, InfeasibleError, InputError, PinError
from planner.fold import Block, Folded, fold, fold_off, relabel
from planner.formulate import Assignment, Role, Space, Training, rules_of
from planner.graph import Graph, Ref
from planner.layout import Layout, Mesh
from planner.memory import Timeline, timeline
from planner.pins import Labels, Pins, filters, label_dims
from planner.pipeline.stages import Pipeline
from planner.problem import Evaluation, Problem, evaluate
from planner.recompute import Ladder, Recompute, ladder, together
from planner.rules import Rule
from planner.seams import finer
from planner.skeleton import Skeleton
from planner.solve import Bounds, lightest, lower_bound_between, lower_bounds, solve
from planner.strategy import Choice
from planner.turns import THOROUGH, Staged, links_of, pipelines_of, stage

Progress = Callable[[str], None]
PROVED = 1e-6
APART_OPERATORS = 200
"""Up to so many operators a model is also decided node by node, without one decision for equal blocks."""
LEANEST_S = 3.0
"""How long the leanest plan of all is looked for when nothing fits; the leanest found is told."""
FEW = 8
"""So many amounts of recomputation are bounded together by a whole search, before each is searched by itself."""
NEAR = 2.0
"""Shapes at most so many doublings from the best plan's are looked at before others; see :meth:`Division.distance`."""
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

    def facts(self) -> dict[str, Any]:
        """What a plan says of it: see :class:`planner.document.Search`."""
        return {
            "mesh": self.division.sizes,
            "status": self.status,
            "step_time_s": self.objective_s,
            "bound_s": self.bound_s,
            "peak_bytes": self.peak_bytes,
            "proof": self.proof,
        }


@dataclass(frozen=True)
class Searched:
    """The result of a search.

    Attributes:
        assignment: the best plan's decisions.
        staged: how they run on a pipeline, or in turns; its cut says what is made again, not the assignment.
        evaluation: what they cost, by the one definition of cost.
        candidates: every mesh, best first; what is only bounded stands at its bound.
        status, gap: ``optimal`` with gap 0 when every candidate was solved or bounded away, among plans that
            decide equal blocks alike where the model has more than :data:`APART_OPERATORS` operators.
        seconds: by step: ``fold``, ``build``, ``solve``.
        memory: of the plan followed statement by statement; ``None`` in turns.
    """

    assignment: Assignment
    staged: Staged | None
    evaluation: Evaluation
    candidates: tuple[Candidate, ...]
    status: str
    gap: float
    seconds: Mapping[str, float]
    memory: Timeline | None = None

    def with_memory(self, memory: Timeline) -> Searched:
        """The same with the plan followed: its own peak in the row of its division, where the search has only a sum."""
        division, peak_bytes = Division(1, self.assignment.space.mesh), memory.peak_bytes
        rows = [replace(row, peak_bytes=peak_bytes) if row.division == division else row for row in self.candidates]
        return replace(self, candidates=tuple(rows), memory=memory)


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
        return Division(self.space.stages, self.space.mesh)


@dataclass(frozen=True)
class Setting:
    """What all candidates of a search share.

    ``seconds`` adds up where time goes; ``posed`` holds the last space of each division.
    """

    cost: CostModel
    training: Training
    rules: Mapping[str, Rule]
    pins: Pins
    deadline: float
    progress: Progress | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    spare_bytes: int = 0
    known: dict[str, Labels] = field(default_factory=dict)
    posed: dict[Division, Space] = field(default_factory=dict)

    @property
    def limit_bytes(self) -> int:
        """Memory that a plan may fill by the search's own reckoning, ``spare_bytes`` less than a device has."""
        return self.cost.cluster.device.usable_bytes - self.spare_bytes

    def labels(self, graph: Graph, label: str) -> Labels:
        """:func:`planner.pins.label_dims`, found once."""
        if label not in self.known:
            self.known[label] = label_dims(graph, self.rules, label)
        return self.known[label]

    def pose(self, skeleton: Skeleton, division: Division) -> Space:
        """Every decision to take on one division."""
        mesh, graph = division.mesh, skeleton.graph
        kept = filters(self.pins, graph, self.rules, mesh, lambda label: self.labels(graph, label))
        schedule = self.pins.schedule
        least = division.rounds(schedule), division.waits(schedule)
        space = Space(
            skeleton.folded,
            mesh,
            self.cost,
            self.training,
            self.rules,
            *kept,
            skeleton,
            division.stages,
            *least,
            like=self.posed.get(division),
        )
        self.posed[division] = space
        empty = [role for role, options in space.options.items() if not options]
        if empty:
            raise PinError(
                f"the pins leave no way to run {space.describe(empty[0])} on mesh {mesh.sizes}; relax one of them"
            )
        return space

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


def search(
    graph: Graph,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    *,
    folding: bool = True,
    max_axes: int = 2,
    time_limit_s: float = 60.0,
    pipelines: bool = False,
    progress: Progress | None = None,
) -> Searched:
    """The fastest plan that fits the cluster's memory, over all meshes that the pins allow.

    With ``pipelines``, or where the pins ask for it, also over stages and micro-batches, see :mod:`planner.division`.

    A mesh that is not pinned has up to ``max_axes`` axes, at most three, along the levels of the cluster. With three
    an operator has up to a thousand ways to run, and to bound a mesh takes about ten times as long as with two.
    The same graph, cluster and pins give the same plan in every process, unless the time limit cuts the search short.

    Raises:
        InputError: the time limit is not positive.
        PinError: the pins do not fit the model or the cluster.
        ClusterError: the model cannot be divided among so many devices at all.
        InfeasibleError: nothing fits in memory; says by how much, and what would.
    """
    check_time_limit(time_limit_s)
    start = time.monotonic()
    plain = in_one_turn(cluster, pins, max_axes)
    if not pipelines and plain and (pins.schedule or pins.virtual_stages):
        raise PinError("pins 'schedule' and 'virtual_stages' are a pipeline's: pin 'pipeline' too, or search pipelines")
    if not folding and (pipelines or not plain):
        raise InputError(
            "folding is off, and pipelines and micro-batches are cut between folded blocks: plan without one"
        )
    folded = fold(graph) if folding else fold_off(graph)
    rules = rules_of(graph, folded)
    turned: tuple[Division, ...] = ()
    if pipelines or not plain:
        folded = finer(folded, rules, stages_wanted(pins))
        turned = in_turns(cluster, pins, graph, len(folded.instances), max_axes)
    skeleton = Skeleton(folded, rules)
    skeleton.survey()
    setting = Setting(CostModel(cluster), training, rules, pins, start + time_limit_s, progress)
    setting.seconds.update(fold=time.monotonic() - start, build=0.0, solve=0.0)
    while True:
        found = _search(setting, skeleton, graph, plain, turned)
        if found.staged is not None:
            return found
        # The search adds up bytes that are not all alive at once; what it misses shows when the plan is followed.
        memory = timeline(found.assignment)
        excess = memory.peak_bytes - cluster.device.usable_bytes
        if excess <= 0:
            return found.with_memory(memory)
        setting = replace(setting, spare_bytes=setting.spare_bytes + excess)


def check_time_limit(seconds: float) -> None:
    """Raises :class:`InputError` unless ``seconds`` is a number above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InputError(f"time_limit_s is {seconds!r}; give seconds, more than 0")


def _search(
    setting: Setting, skeleton: Skeleton, graph: Graph, plain: tuple[Division, ...], turned: tuple[Division, ...]
) -> Searched:
    """The fastest plan within the setting's memory, over divisions of one turn and others."""
    folded, rules, pins = skeleton.folded, setting.rules, setting.pins
    rungs = ladder(folded, pins.recompute)
    best, looks = _explore(setting, skeleton, (*plain, *turned), rungs, None)
    candidates, proofs = _candidates(looks), looks
    if plain and _may_differ(folded):
        alike = best
        split = Skeleton(relabel(folded, range(len(folded.instances))), rules, like=skeleton)
        best, proofs = _explore(setting, split, plain, rungs.apart(skeleton.numbers), alike)
        if best is not None and best is not alike:
            before = time.monotonic()
            best = _together(setting, folded, best)
            bound_s = next(look.candidate.bound_s for look in proofs if look.candidate.division == best.division)
            found = best.evaluation
            status = "optimal" if found.time_s - bound_s <= PROVED * found.time_s else "feasible"
            candidates = [each for each in candidates if each.division != best.division]
            candidates.append(Candidate(best.division, status, found.time_s, bound_s, found.peak_bytes))
            setting.took("solve", before)
        proofs = [*proofs, *(look for look in looks if look.candidate.division.in_turns)]
    if best is not None and best.staged is not None:
        best = _cut_well(setting, best)
        found = best.evaluation
        row = next(row for row in candidates if row.division == best.division)
        cut_well = replace(row, objective_s=found.time_s, peak_bytes=found.peak_bytes)
        candidates = [cut_well if each is row else each for each in candidates]
    if best is None:
        raise _nothing_fits(setting, graph, proofs)
    time_s = best.evaluation.time_s
    bound_s = min(time_s, *(look.candidate.bound_s for look in proofs))
    gap = (time_s - bound_s) / time_s if time_s else 0.0
    candidates.sort(key=lambda c: (c.status == "infeasible", min(c.objective_s, max(c.bound_s, time_s)), c.objective_s))
    return Searched(
        best.space.assignment(best.choices, best.recompute),
        best.staged,
        best.evaluation,
        tuple(candidates),
        "optimal" if gap <= PROVED else "feasible",
        gap if gap > PROVED else 0.0,
        setting.seconds,
    )


@dataclass(frozen=True)
class Look:
    """How closely a candidate was looked at, over the steps ``low`` to ``high`` of the ladder of recomputation.

    ``is_priced`` once its relaxation was, ``is_sought`` once a pipeline was looked for; ``choices`` and ``step`` are
    the best plan found there, ``evaluation`` what it costs, and ``staged`` how it runs in turns.
    """

    candidate: Candidate
    posed: Space | None
    ladder: Ladder
    low: int
    high: int
    is_priced: bool = False
    is_sought: bool = False
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
    def amounts(self) -> tuple[Recompute, list[Recompute]]:
        """The least recomputation, and more of it in growing amounts."""
        least, *more = self.ladder.between(self.low, self.high)
        return least, more


def _explore(
    setting: Setting, skeleton: Skeleton, all_: tuple[Division, ...], rungs: Ladder, best: Best | None
) -> tuple[Best | None, list[Look]]:
    """Best first over the divisions, starting from the best plan known; what became of each, in their order."""
    arithmetic, top = Arithmetic(skeleton, setting.cost), len(rungs.steps) - 1
    bounds = [arithmetic.bound_s(division, setting.pins.schedule) for division in all_]
    waiting = [
        Look(Candidate(division, "not tried", math.inf, bound_s, 0, "arithmetic"), None, rungs, 0, top)
        for division, bound_s in zip(all_, bounds, strict=True)
    ]
    turned = tuple(division for division in all_ if division.in_turns)
    first = seeds(turned, setting.cost.cluster, skeleton.graph) if turned else []
    closed: list[Look] = []
    while waiting:
        if best is not None and setting.is_late():
            closed += [_close(look, best) for look in waiting]
            break
        look = min(waiting, key=lambda look: _turn(look, first, best))
        waiting.remove(look)
        is_begun = look.posed is None or (look.is_priced and look.low < look.high)
        is_late = setting.is_late() and is_begun and len(closed) + 1 < len(all_)
        if is_late or _is_reached(look.candidate.bound_s, best):
            closed.append(_close(look, best))
        elif look.posed is None:
            waiting.append(_look_at_work(setting, skeleton, look))
        elif look.candidate.division.in_turns:
            look = (_look_at_average if look.is_sought else _look_for_pipeline)(setting, look, best)
            best = _better(best, look)
            if look.is_priced:
                closed.append(_close(look, best))
            else:
                waiting.append(look)
        elif not look.is_priced:
            look = (_look_between if look.is_even else _look_relaxed)(setting, look, best)
            best = _better(best, look)
            waiting.append(look)
        elif look.high - look.low >= FEW or look.candidate.proof == "search":
            waiting += _split(look)
        else:
            look = _look_whole(setting, look, best)
            best = _better(best, look)
            (closed if look.low == look.high else waiting).append(look)
    _check_divisible(setting, skeleton.graph, closed)
    order = {division: number for number, division in enumerate(all_)}
    return best, sorted(closed, key=lambda look: (order[look.candidate.division], look.low))


def _turn(look: Look, first: Sequence[Division], best: Best | None) -> tuple[float, float]:
    """Which look is next, the least: plans of ``first``, then of divisions like the best plan's, then by bound."""
    division, bound_s = look.candidate.division, look.candidate.bound_s
    if division in first and not look.is_sought:
        return -1, first.index(division)
    if look.is_sought or best is None or best.staged is None:
        return NEAR + 1, bound_s
    return min(division.distance(best.division), NEAR + 1), bound_s


def _candidates(looks: list[Look]) -> list[Candidate]:
    """What became of every division, whatever its recomputation."""
    found: dict[Division, list[Candidate]] = {}
    for look in looks:
        found.setdefault(look.candidate.division, []).append(look.candidate)
    return [_joined(each) for each in found.values()]


def _joined(looks: list[Candidate]) -> Candidate:
    """One candidate of the looks at parts of it."""
    best, open_ = min(looks, key=lambda each: each.objective_s), min(looks, key=lambda each: each.bound_s)
    peak_bytes = best.peak_bytes if math.isfinite(best.objective_s) else min(each.peak_bytes for each in looks)
    status = best.status if math.isfinite(best.objective_s) else open_.status
    if status == "optimal" and open_.bound_s < best.objective_s * (1 - PROVED) and open_.status != "bounded away":
        status = "feasible"
    return Candidate(best.division, status, best.objective_s, open_.bound_s, peak_bytes, open_.proof)


def _look_at_work(setting: Setting, skeleton: Skeleton, look: Look) -> Look:
    """Every decision at its own cheapest and leanest, as if neighbours always agreed."""
    setting.say(f"mesh {look.candidate.division}")
    before = time.monotonic()
    space = setting.pose(skeleton, look.candidate.division)
    least, more = look.amounts
    vertices = space.vertices(setting.limit_bytes, least, more)
    bound_s = math.fsum(float(vertex.time_s.min()) for vertex in vertices)
    held = sum(int(vertex.held_bytes.min()) for vertex in vertices)
    peak_bytes = held + max((int(vertex.transient_bytes.min()) for vertex in vertices), default=0)
    if peak_bytes > setting.limit_bytes:
        bound_s = math.inf
    status = "infeasible" if math.isinf(bound_s) else "not tried"
    bound_s = max(bound_s, look.candidate.bound_s)
    candidate = replace(look.candidate, status=status, bound_s=bound_s, peak_bytes=peak_bytes, proof="work")
    setting.took("build", before)
    return replace(look, candidate=candidate, posed=space)


def _relaxed(setting: Setting, look: Look, best: Best | None) -> tuple[Look, Bounds]:
    """The look with the bound of the whole problem, memory aside; what it needs of memory, by itself."""
    before = time.monotonic()
    problem = look.space.problem(setting.limit_bytes, *look.amounts)
    before = setting.took("build", before)
    bounds = lower_bounds(problem, math.inf if best is None else _target_s(best))
    setting.took("solve", before)
    fits = bounds.peak_bytes <= setting.limit_bytes
    bound_s = max(look.candidate.bound_s, bounds.time_s) if fits else math.inf
    return replace(look, candidate=replace(look.candidate, bound_s=bound_s, proof="relaxation"), is_priced=True), bounds


def _look_relaxed(setting: Setting, look: Look, best: Best | None) -> Look:
    """The whole problem, memory aside, and plans of what solves it."""
    known = look.candidate.peak_bytes
    look, bounds = _relaxed(setting, look, best)
    fits = math.isfinite(look.candidate.bound_s)
    peak_bytes = math.ceil(bounds.peak_bytes) if math.isfinite(bounds.peak_bytes) else known
    status = "not tried" if fits else "infeasible"
    look = replace(look, candidate=replace(look.candidate, status=status, peak_bytes=peak_bytes))
    look = _with_plan(setting, look, bounds.choices)
    if look.choices or not fits:
        return look
    light = bounds.lightest or lightest(look.space.problem(setting.limit_bytes, *look.amounts))
    return _with_plan(setting, look, light)


def _look_for_pipeline(setting: Setting, look: Look, best: Best | None) -> Look:
    """Pipelines of what solves the problem of a typical rank, with a price on what all micro-batches in flight hold."""
    before, space = time.monotonic(), look.space.holding(look.candidate.division.in_flight)
    ends = (look.ladder.steps[0], look.ladder.steps[-1])
    first, last = (space.problem(setting.limit_bytes, end) for end in ends)
    before = setting.took("build", before)
    for choices in lower_bound_between(first, last).choices:
        look = _with_pipeline(setting, look, choices, best)
    if look.staged is None and best is None:
        look = _with_pipeline(setting, look, lightest(last), best)
    setting.took("solve", before)
    return replace(look, is_sought=True)


def _look_at_average(setting: Setting, look: Look, best: Best | None) -> Look:
    """The whole problem of the average rank, and pipelines of what solves it."""
    look, bounds = _relaxed(setting, look, best)
    before = time.monotonic()
    if math.isinf(look.candidate.bound_s):
        look = replace(look, candidate=replace(look.candidate, status="infeasible"))
    if not _is_reached(look.candidate.bound_s, best):
        look = _with_pipeline(setting, look, bounds.choices, best)
    setting.took("solve", before)
    return look


def _with_pipeline(setting: Setting, look: Look, choices: tuple[int, ...] | None, best: Best | None) -> Look:
    """The look with a pipeline of these choices as its plan, if one is found that fits and is faster."""
    if choices is None:
        return look
    links = links_of(look.space.assignment(choices), setting.pins.recompute, setting.pins.schedule)
    if not all(math.isfinite(link.block.work_s) for link in links):
        return look
    wanted = _pipelines(setting, look.space, len(links))
    target_s = math.inf if best is None else _target_s(best)
    found = stage(links, wanted, setting.limit_bytes, min(target_s, look.candidate.objective_s))
    if found is None:
        return look
    candidate = replace(look.candidate, status="feasible", objective_s=found.step_s, peak_bytes=found.peak_bytes)
    return replace(look, candidate=candidate, choices=choices, evaluation=found.evaluation, staged=found)


def _pipelines(setting: Setting, space: Space, blocks: int) -> list[Pipeline]:
    names = schedules(setting.pins)
    return pipelines_of(space.stages, space.mesh.micro_batches, blocks, names, setting.pins.virtual_stages)


def _cut_well(setting: Setting, best: Best) -> Best:
    """The same decisions, cut with more effort."""
    assert best.staged is not None
    before = time.monotonic()
    found = stage(best.staged.links, [best.staged.pipeline], setting.limit_bytes, best.staged.step_s, THOROUGH)
    setting.took("solve", before)
    if found is None:
        return best
    return replace(best, staged=found, evaluation=found.evaluation)


def _look_between(setting: Setting, look: Look, best: Best | None) -> Look:
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


def _look_whole(setting: Setting, look: Look, best: Best | None) -> Look:
    """The whole problem, solved as far as it can beat the best plan."""
    before = time.monotonic()
    problem = look.space.problem(setting.limit_bytes, *look.amounts)
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
    if answer.status == "optimal" and look.low == look.high:
        status = "optimal"
    elif math.isinf(bound_s):
        status = "infeasible"
    else:
        status = "bounded away" if _is_reached(bound_s, best) else "feasible" if look.choices else "not tried"
    return replace(look, candidate=replace(look.candidate, status=status, bound_s=bound_s, proof="search"))


def _split(look: Look) -> list[Look]:
    """The same steps in parts.

    Where a plan fits without more recomputation, its step and all others; else at the bends, or before, at and after
    the plan that is known, or in halves.
    """
    step = look.step if look.choices is not None else -1
    if step == look.low:
        cuts = [step, step + 1]
    elif look.bends:
        cuts = [look.low, *(cut for bend in look.bends for cut in (bend, bend + 1))]
    else:
        middle = step if look.low < step < look.high else (look.low + look.high) // 2
        cuts = [look.low, *([middle] if middle == step else []), middle + 1]
    known = replace(look.candidate, proof="relaxation")
    nothing = replace(known, status="not tried", objective_s=math.inf)
    found = []
    for low, end in itertools.pairwise(sorted({*cuts, look.high + 1})):
        part = replace(look, low=low, high=end - 1, is_priced=low == step == look.low)
        if low <= step < end:
            found.append(replace(part, candidate=known))
        else:
            found.append(replace(part, candidate=nothing, choices=None, evaluation=None))
    return found


def _with_plan(setting: Setting, look: Look, choices: tuple[int, ...] | None) -> Look:
    """The look with these choices as its plan, if they fit with some of its recomputation and are faster."""
    if choices is None:
        return look
    decided = Decided(look.space.assignment(choices), look.space.skeleton)
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
    candidate = replace(look.candidate, objective_s=found.time_s, peak_bytes=found.peak_bytes)
    return replace(look, candidate=candidate, choices=choices, step=step, evaluation=found)


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


def _better(best: Best | None, look: Look) -> Best | None:
    if look.choices is None or look.evaluation is None:
        return best
    if best is not None and look.evaluation.time_s >= best.evaluation.time_s * (1 - 1e-9):
        return best
    return Best(look.space, look.choices, look.ladder.steps[look.step], look.evaluation, look.staged)


def _close(look: Look, best: Best | None) -> Look:
    """A candidate that is looked at no further."""
    candidate = look.candidate
    if math.isinf(candidate.bound_s):
        status = "infeasible"
    elif look.choices and candidate.objective_s - candidate.bound_s <= PROVED * candidate.objective_s:
        status = "optimal"
    elif _is_reached(candidate.bound_s, best):
        status = "bounded away"
    else:
        status = "feasible" if look.choices else "none found" if look.is_priced else "not tried"
    return replace(look, candidate=replace(candidate, status=status))


def _target_s(best: Best) -> float:
    """Only plans below this are worth looking for: half of what counts as proved, so that reaching it proves."""
    return best.evaluation.time_s * (1 - PROVED / 2)


def _is_reached(bound_s: float, best: Best | None) -> bool:
    """Whether a bound leaves nothing that would beat the best plan."""
    return math.isinf(bound_s) or (best is not None and bound_s >= _target_s(best))


def _check_divisible(setting: Setting, graph: Graph, looks: list[Look]) -> None:
    """Refuse a number of devices among which nothing of the model can be divided: each would do all the work."""
    cluster = setting.cost.cluster
    if cluster.world_size == 1 or setting.pins.sizes:
        return
    if any(look.posed is None or look.space.stages > 1 for look in looks):  # stages divide the blocks among them
        return
    for look in looks:
        for options in look.posed.options.values() if look.posed is not None else ():
            if any(isinstance(option, Choice) and any(s.factor for s in option.axes) for option in options):
                return
    sizes = sorted({size for node in graph.nodes for t in node.results for size in t.shape if size > 1})
    raise ClusterError(
        f"{cluster.world_size} devices of {cluster.name!r} cannot share this model: no axis of them divides any size "
        f"in it ({', '.join(map(str, sizes[:12]))}{', ...' if len(sizes) > 12 else ''}), so each would do all the "
        "work. Use a number of devices with a divisor in common with the batch or the widths, or change the batch"
    )


# ---- equal blocks that decide apart ----------------------------------------------------------------------------------


def _may_differ(folded: Folded) -> bool:
    """Whether the instances of a block are also tried apart: where there are some, and the whole model is small.

    A chain of equal layers may want to alternate (column, row, column, ...), which one decision for all
    of them cannot say. Instances that end up alike are one kind again.
    """
    operators = sum(len(instance.block.nodes) for instance in folded.instances)
    return len(folded.instances) > len(folded.kinds) and operators <= APART_OPERATORS


def _together(setting: Setting, folded: Folded, best: Best) -> Best:
    """The same decisions with instances that decide alike folded into one kind."""
    space = best.space
    chosen = space.assignment(best.choices)
    levels = [best.recompute.level(kind, 0) for kind in range(len(space.folded.kinds))]
    labels = [
        (
            levels[instance.kind],
            *(
                (chosen.chosen[space.role_of[name]], *(chosen.delivered(Ref(name, i)) for i in range(results)))
                for name, results in _decided(instance.block, space)
            ),
        )
        for instance in space.folded.instances
    ]
    skeleton = Skeleton(relabel(folded, labels), setting.rules, like=space.skeleton)
    merged = setting.pose(skeleton, Division(1, space.mesh))
    picks = []
    for role in merged.roles:
        decision = chosen.chosen.get(role) if role[0] == "output" else _decision(merged, role, chosen)
        picks.append(list(merged.options[role]).index(decision))
    recompute = together(best.recompute, [kind for kind, _ in merged.skeleton.numbers])
    problem = merged.problem(setting.limit_bytes, recompute)
    return Best(merged, tuple(picks), recompute, evaluate(problem, tuple(picks)))


def _decided(block: Block, space: Space) -> list[tuple[str, int]]:
    """Nodes whose decisions belong to a block: its own, and the leaves that only it reads."""
    own = space.skeleton.own
    leaves = [ref.node for ref in block.inputs if space.role_of[ref.node][0] == "leaf" and ref.node in own]
    return [(node.name, len(node.results)) for node in block.nodes] + [(name, 1) for name in leaves]


def _decision(space: Space, role: Role, chosen: Assignment) -> Choice | Layout:
    """What the unfolded decisions say for a role of the folded space."""
    if role[0] == "relay":
        producer = role[1]
        assert isinstance(producer, tuple)
        assert isinstance(role[2], int)
        return chosen.delivered(Ref(space.members[producer][0], role[2]))
    name = space.members[role][0]
    return chosen.chosen[chosen.space.role_of[name]]


# ---- nothing fits ----------------------------------------------------------------------------------------------------


def _nothing_fits(setting: Setting, graph: Graph, looks: list[Look]) -> InfeasibleError:
    """The error that says by how much the leanest plan exceeds the limit, and what would fit.

    Raises:
        PinError: there are no plans at all, whatever they need.
    """
    cluster, limit = setting.cost.cluster, setting.limit_bytes
    begun = [look for look in looks if look.posed is not None]
    if all(math.isinf(lower_bounds(look.space.problem(None)).time_s) for look in begun):
        raise PinError(
            "no micro-batches can be cut from this model's batch: an operator mixes its samples (batch norm, a mean "
            "over the batch), or an input has another dim 0 than the others; pin 'micro_batches' 1"
        )
    open_ = [look for look in looks if math.isfinite(look.candidate.bound_s)]
    least, division = _leanest(setting, looks)
    if open_:
        return InfeasibleError(
            f"no plan that fits {cluster.name!r} was found before the time limit, but none was ruled out either: "
            f"the leanest one seen ({division}) needs {least:,} bytes of {limit:,}. Give a longer "
            "time_limit_s, or pin decisions to narrow the search.",
            least - limit,
        )
    params = sum(t.size_bytes for node in graph.leaves if node.op == "param" for t in node.results)
    needed = math.ceil(least / (1 - cluster.device.reserve_fraction))
    pinned = " Relaxing the pins may also help." if setting.pins.to_dict() else ""
    return InfeasibleError(
        f"no plan fits {cluster.name!r}: each of its {cluster.world_size} devices can use {limit:,} bytes, and the "
        f"leanest plan found ({division}) needs {least:,}, {least - limit:,} too many "
        f"(the parameters alone are {params:,} bytes in all, {setting.training.optimizer_bytes_per_element} more per "
        f"element for the optimizer). What would fit: devices with memory_bytes of at least {needed:,}, "
        f"about {math.ceil(cluster.world_size * least / limit)} devices like these, or a smaller global "
        f"batch.{pinned}",
        least - limit,
    )


def _leanest(setting: Setting, looks: list[Look]) -> tuple[int, Division]:
    """The least peak of any plan and its division: candidates in the order of what they need at least.

    A light plan of each comes first, then the leanest is looked for while there is time.
    """
    found: list[tuple[int, Division]] = []
    until = min(setting.deadline, time.monotonic() + LEANEST_S)

    def leanest(problem: Problem) -> tuple[int, ...]:
        return solve(problem, time_limit_s=max(GRACE_S, until - time.monotonic())).choices

    for pick in (lightest, leanest):
        begun = [look for look in looks if look.posed is not None]
        for look in sorted(begun, key=lambda look: look.candidate.peak_bytes):
            least = min((peak_bytes for peak_bytes, _ in found), default=math.inf)
            if found and (look.candidate.peak_bytes >= least or time.monotonic() > until):
                break
            for step in dict.fromkeys((look.high, look.low)):
                division = look.candidate.division
                space = look.space.holding(division.in_flight) if division.in_turns else look.space
                problem = space.problem(setting.limit_bytes, look.ladder.steps[step])
                choices = pick(problem)
                if choices is not None:
                    found.append((_peak_bytes(setting, look, problem, choices), look.candidate.division))
    return min(found, key=lambda each: each[0])


def _peak_bytes(setting: Setting, look: Look, problem: Problem, choices: tuple[int, ...]) -> int:
    """What choices need; in turns, with all that can be made again."""
    if not look.candidate.division.in_turns:
        return evaluate(problem, choices).peak_bytes
    chain = links_of(look.space.assignment(choices), setting.pins.recompute, setting.pins.schedule)
    links = [link.leanest for link in chain]
    found = stage(links, _pipelines(setting, look.space, len(links)), None)
    assert found is not None
    return found.peak_bytes
