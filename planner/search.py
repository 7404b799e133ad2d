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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner.certificate import Decided
from planner.cluster import ClusterSpec
from planner.cost import CostModel
from planner.errors import ClusterError, InfeasibleError, InputError, PinError
from planner.fold import Block, Folded, fold, fold_off, relabel
from planner.formulate import Assignment, Role, Space, Training, rules_of
from planner.graph import Graph, Ref
from planner.layout import Layout, Mesh
from planner.memory import timeline
from planner.mesh import candidate_meshes, pinned_mesh
from planner.pins import Pins, filters
from planner.problem import Answer, Evaluation, Problem, evaluate
from planner.recompute import Ladder, Recompute, ladder, together
from planner.rules import Rule
from planner.skeleton import Skeleton
from planner.solve import lower_bound_between, lower_bounds, solve
from planner.strategy import Choice

Progress = Callable[[str], None]
PROVED = 1e-6
APART_OPERATORS = 200
"""Up to so many operators a model is also decided node by node, without one decision for equal blocks."""
LEANEST_S = 3.0
"""How long the leanest plan of all is looked for when nothing fits; the leanest found is told."""
FEW = 8
"""So many amounts of recomputation are bounded together by a whole search, before each is searched by itself."""
GRACE_S = 1.0
"""What a problem gets of time after the limit, while no plan is known at all."""


@dataclass(frozen=True)
class Candidate:
    """One mesh, and what is known of its plans.

    Attributes:
        status: ``optimal`` (its best plan was found), ``feasible`` (a plan was found before the time limit),
            ``bounded away`` (none can beat the best plan), ``infeasible`` (none fits), ``not tried`` (time limit).
        objective_s: seconds of its best plan found; infinite where none was looked for, or none fits.
        bound_s: no plan of it is faster; infinite: none fits.
        peak_bytes: of that plan; without one, what every plan of it needs at least.
        proof: the look that proved the bound: ``work``, ``relaxation`` or ``search``.
    """

    mesh: Mesh
    status: str
    objective_s: float
    bound_s: float
    peak_bytes: int
    proof: str = "search"

    def facts(self) -> dict[str, Any]:
        """What a plan says of it: see :class:`planner.document.Search`."""
        return {
            "mesh": dict(zip(self.mesh.names, self.mesh.sizes, strict=True)),
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
        evaluation: what they cost, by the one definition of cost.
        candidates: every mesh, best first; what is only bounded stands at its bound.
        status, gap: ``optimal`` with gap 0 when every candidate was solved or bounded away, among plans that
            decide equal blocks alike where the model has more than :data:`APART_OPERATORS` operators.
        seconds: by step: ``fold``, ``build``, ``solve``.
    """

    assignment: Assignment
    evaluation: Evaluation
    candidates: tuple[Candidate, ...]
    status: str
    gap: float
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Best:
    """The best plan known: an assignment of the problem of a space, with what it costs."""

    space: Space
    choices: tuple[int, ...]
    recompute: Recompute
    evaluation: Evaluation


@dataclass(frozen=True)
class Setting:
    """What all candidates of a search share; ``seconds`` adds up where time goes."""

    cost: CostModel
    training: Training
    rules: Mapping[str, Rule]
    pins: Pins
    deadline: float
    progress: Progress | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    spare_bytes: int = 0

    @property
    def limit_bytes(self) -> int:
        """Memory that a plan may fill by the search's own reckoning, ``spare_bytes`` less than a device has."""
        return self.cost.cluster.device.usable_bytes - self.spare_bytes

    def pose(self, skeleton: Skeleton, mesh: Mesh) -> Space:
        """Every decision to take on one mesh."""
        allow, allow_leaf = filters(self.pins, skeleton.graph, self.rules, mesh)
        space = Space(skeleton.folded, mesh, self.cost, self.training, self.rules, allow, allow_leaf, skeleton)
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
    progress: Progress | None = None,
) -> Searched:
    """The fastest plan that fits the cluster's memory, over all meshes that the pins allow.

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
    folded = fold(graph) if folding else fold_off(graph)
    rules = rules_of(graph, folded)
    skeleton = Skeleton(folded, rules)
    skeleton.survey()
    setting = Setting(CostModel(cluster), training, rules, pins, start + time_limit_s, progress)
    setting.seconds.update(fold=time.monotonic() - start, build=0.0, solve=0.0)
    while True:
        found = _search(setting, skeleton, graph, max_axes)
        # The search adds up bytes that are not all alive at once; what it misses shows when the plan is followed.
        excess = timeline(found.assignment).peak_bytes - cluster.device.usable_bytes
        if excess <= 0:
            return found
        setting = replace(setting, spare_bytes=setting.spare_bytes + excess)


def check_time_limit(seconds: float) -> None:
    """Raises :class:`InputError` unless ``seconds`` is a number above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InputError(f"time_limit_s is {seconds!r}; give seconds, more than 0")


def _search(setting: Setting, skeleton: Skeleton, graph: Graph, max_axes: int) -> Searched:
    """The fastest plan within the setting's memory."""
    folded, rules, pins, cluster = skeleton.folded, setting.rules, setting.pins, setting.cost.cluster
    meshes = (pinned_mesh(cluster, pins.sizes),) if pins.sizes else candidate_meshes(cluster, max_axes)
    rungs = ladder(folded, pins.recompute)
    best, looks = _explore(setting, skeleton, meshes, rungs, None)
    candidates, proofs = _candidates(looks), looks
    if _may_differ(folded):
        alike = best
        split = Skeleton(relabel(folded, range(len(folded.instances))), rules)
        best, proofs = _explore(setting, split, meshes, rungs.apart(skeleton.numbers), alike)
        if best is not None and best is not alike:
            before = time.monotonic()
            best = _together(setting, folded, best)
            bound_s = next(look.candidate.bound_s for look in proofs if look.candidate.mesh == best.space.mesh)
            status = "optimal" if _is_reached(bound_s, best) else "feasible"
            found = best.evaluation
            candidates.append(Candidate(best.space.mesh, status, found.time_s, bound_s, found.peak_bytes))
            setting.took("solve", before)
    if best is None:
        raise _nothing_fits(setting, graph, proofs)
    time_s = best.evaluation.time_s
    bound_s = min(time_s, *(look.candidate.bound_s for look in proofs))
    gap = (time_s - bound_s) / time_s if time_s else 0.0
    candidates.sort(key=lambda c: (c.status == "infeasible", min(c.objective_s, max(c.bound_s, time_s))))
    return Searched(
        best.space.assignment(Answer(best.choices, time_s, bound_s, "optimal", 0.0), best.recompute),
        best.evaluation,
        tuple(candidates),
        "optimal" if gap <= PROVED else "feasible",
        gap if gap > PROVED else 0.0,
        setting.seconds,
    )


@dataclass(frozen=True)
class Look:
    """How closely a candidate was looked at, over the steps ``low`` to ``high`` of the ladder of recomputation.

    ``is_priced`` once its relaxation was; ``choices`` and ``step`` are the best plan found there, and ``evaluation``
    what it costs.
    """

    candidate: Candidate
    space: Space
    ladder: Ladder
    low: int
    high: int
    is_priced: bool = False
    choices: tuple[int, ...] | None = None
    step: int = 0
    evaluation: Evaluation | None = None

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
    setting: Setting, skeleton: Skeleton, meshes: tuple[Mesh, ...], rungs: Ladder, best: Best | None
) -> tuple[Best | None, list[Look]]:
    """Best first over the meshes, starting from the best plan known; what became of each, in the order of meshes."""
    waiting: list[Look] = []
    for mesh in meshes:
        setting.say(f"mesh {' x '.join(map(str, mesh.sizes))}")
        before = time.monotonic()
        waiting.append(_look_at_work(setting, setting.pose(skeleton, mesh), rungs))
        setting.took("build", before)
    _check_divisible(setting, skeleton.graph, waiting)
    closed: list[Look] = []
    while waiting:
        look = min(waiting, key=lambda look: look.candidate.bound_s)
        waiting.remove(look)
        is_late = setting.is_late() and (best is not None or (look.is_priced and look.low < look.high))
        if is_late or _is_reached(look.candidate.bound_s, best):
            closed.append(_close(look, best))
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
    order = {mesh: number for number, mesh in enumerate(meshes)}
    return best, sorted(closed, key=lambda look: (order[look.candidate.mesh], look.low))


def _candidates(looks: list[Look]) -> list[Candidate]:
    """What became of every mesh, whatever its recomputation."""
    found: dict[Mesh, list[Candidate]] = {}
    for look in looks:
        found.setdefault(look.candidate.mesh, []).append(look.candidate)
    return [_joined(each) for each in found.values()]


def _joined(looks: list[Candidate]) -> Candidate:
    """One candidate of the looks at parts of it."""
    best, open_ = min(looks, key=lambda each: each.objective_s), min(looks, key=lambda each: each.bound_s)
    peak_bytes = best.peak_bytes if math.isfinite(best.objective_s) else min(each.peak_bytes for each in looks)
    status = best.status if math.isfinite(best.objective_s) else open_.status
    if status == "optimal" and open_.bound_s < best.objective_s * (1 - PROVED) and open_.status != "bounded away":
        status = "feasible"
    return Candidate(best.mesh, status, best.objective_s, open_.bound_s, peak_bytes, open_.proof)


def _look_at_work(setting: Setting, space: Space, rungs: Ladder) -> Look:
    """Every decision at its own cheapest and leanest, as if neighbours always agreed."""
    top = len(rungs.steps) - 1
    least, *more = rungs.between(0, top)
    vertices = space.vertices(least, more)
    bound_s = math.fsum(float(vertex.time_s.min()) for vertex in vertices)
    held = sum(int(vertex.held_bytes.min()) for vertex in vertices)
    peak_bytes = held + max((int(vertex.transient_bytes.min()) for vertex in vertices), default=0)
    if peak_bytes > setting.limit_bytes:
        bound_s = math.inf
    status = "infeasible" if math.isinf(bound_s) else "not tried"
    return Look(Candidate(space.mesh, status, math.inf, bound_s, peak_bytes, "work"), space, rungs, 0, top)


def _look_relaxed(setting: Setting, look: Look, best: Best | None) -> Look:
    """The whole problem, memory aside; what it needs of memory, by itself."""
    before = time.monotonic()
    problem = look.space.problem(setting.limit_bytes, *look.amounts)
    before = setting.took("build", before)
    bounds = lower_bounds(problem, math.inf if best is None else _target_s(best))
    setting.took("solve", before)
    fits = bounds.peak_bytes <= setting.limit_bytes
    bound_s = max(look.candidate.bound_s, bounds.time_s) if fits else math.inf
    peak_bytes = math.ceil(bounds.peak_bytes) if math.isfinite(bounds.peak_bytes) else look.candidate.peak_bytes
    status = "not tried" if fits else "infeasible"
    candidate = replace(look.candidate, status=status, bound_s=bound_s, peak_bytes=peak_bytes, proof="relaxation")
    look = replace(look, candidate=candidate, is_priced=True)
    return _with_plan(setting, _with_plan(setting, look, bounds.choices), bounds.lightest if fits else None)


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
    decided = Decided(look.space.assignment(Answer(choices, 0.0, 0.0, "feasible", 0.0)), look.space.skeleton)
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
    return Best(look.space, look.choices, look.ladder.steps[look.step], look.evaluation)


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
        status = "feasible" if look.choices else "not tried"
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
    for look in looks:
        for options in look.space.options.values():
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
    chosen = space.assignment(Answer(best.choices, best.evaluation.time_s, 0.0, "feasible", 0.0))
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
    merged = setting.pose(Skeleton(relabel(folded, labels), setting.rules), space.mesh)
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
    """The error that says by how much the leanest plan exceeds the limit, and what would fit."""
    cluster, limit = setting.cost.cluster, setting.limit_bytes
    open_ = [look for look in looks if math.isfinite(look.candidate.bound_s)]
    least, mesh = _leanest(setting, looks)
    shown = " x ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))
    if open_:
        return InfeasibleError(
            f"no plan that fits {cluster.name!r} was found before the time limit, but none was ruled out either: "
            f"the leanest one seen (mesh {shown}) needs {least:,} bytes of {limit:,}. Give a longer "
            "time_limit_s, or pin decisions to narrow the search.",
            least - limit,
        )
    params = sum(t.size_bytes for node in graph.leaves if node.op == "param" for t in node.results)
    needed = math.ceil(least / (1 - cluster.device.reserve_fraction))
    pinned = " Relaxing the pins may also help." if setting.pins.to_dict() else ""
    return InfeasibleError(
        f"no plan fits {cluster.name!r}: each of its {cluster.world_size} devices can use {limit:,} bytes, and the "
        f"leanest plan found (mesh {shown}) needs {least:,}, {least - limit:,} too many "
        f"(the parameters alone are {params:,} bytes in all, {setting.training.optimizer_bytes_per_element} more per "
        f"element for the optimizer). What would fit: devices with memory_bytes of at least {needed:,}, "
        f"about {math.ceil(cluster.world_size * least / limit)} devices like these, or a smaller global "
        f"batch.{pinned}",
        least - limit,
    )


def _leanest(setting: Setting, looks: list[Look]) -> tuple[int, Mesh]:
    """The least peak of any plan and its mesh: candidates in the order of what they need at least.

    A light plan of each comes first, then the leanest is looked for while there is time.
    """
    found: list[tuple[int, Mesh]] = []
    until = min(setting.deadline, time.monotonic() + LEANEST_S)

    def leanest(problem: Problem) -> tuple[int, ...]:
        return solve(problem, time_limit_s=max(GRACE_S, until - time.monotonic())).choices

    for pick in (lambda problem: lower_bounds(problem).lightest, leanest):
        for look in sorted(looks, key=lambda look: look.candidate.peak_bytes):
            least = min((peak_bytes for peak_bytes, _ in found), default=math.inf)
            if found and (look.candidate.peak_bytes >= least or time.monotonic() > until):
                break
            for step in dict.fromkeys((look.high, look.low)):
                problem = look.space.problem(setting.limit_bytes, look.ladder.steps[step])
                choices = pick(problem)
                if choices is not None:
                    found.append((evaluate(problem, choices).peak_bytes, look.candidate.mesh))
    return min(found, key=lambda each: each[0])
