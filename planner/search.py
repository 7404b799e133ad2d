"""Search: from a graph and a cluster to the best plan, with what is proved about it.

Every division of the cluster that the pins allow (:mod:`planner.division`) is a candidate with a lower bound on the
step time of all its plans, with any amount of recomputation. The candidate of least bound is looked at next, always
more closely (:mod:`planner.looks`), until its plan is found or its bound reaches the best plan known; then every other
bound does too, and nothing better can exist. Where there are many, usual shapes and those near the best plan's come
first, and a look at a candidate that was begun takes turns with a look at any: there may not be time for all.

What does not depend on the mesh is found once (:mod:`planner.skeleton`). Ctrl-C ends a search with
:class:`KeyboardInterrupt` and leaves nothing behind; to get the best plan so far instead, give a time limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.amounts import fastest_amount
from planner.apart import apart, may_differ, together_again
from planner.cluster import ClusterSpec
from planner.cost import CostModel
from planner.division import OUT_OF_TURN, Arithmetic, Division, dividing, in_one_turn, in_turns, seeds, stages_wanted
from planner.errors import InfeasibleError, InputError, PinError
from planner.fold import fold, fold_off
from planner.formulate import Assignment, Training, rules_of
from planner.graph import Graph
from planner.keep import keeping, with_levels_between
from planner.lean import bounds_s, fastest_that_fits, lean_plans
from planner.looks import (
    PROVED,
    Best,
    Candidate,
    Look,
    Progress,
    Setting,
    begin,
    better,
    close,
    cut_well,
    is_near,
    is_reached,
    look_closer,
)
from planner.memory import Usage, usage
from planner.offload import WorkingSet, largest_working_set, offloaded_s
from planner.pins import Pins
from planner.problem import Evaluation, evaluate, most_bytes
from planner.recompute import Ladder, ladder, named
from planner.refusal import check_divisible, check_turns, nothing_fits
from planner.seams import finer
from planner.skeleton import Skeleton
from planner.solve import lower_bounds
from planner.turns import Staged
from planner.words import in_seconds

GAP = 0.001
"""Part of a step that a plan's proof leaves open where nobody asks for another: to close it takes most of the time."""
NEAR = 2.0
"""Shapes at most so many doublings from the best plan's are looked at before others; see :meth:`Division.distance`."""
ROOM = (0.75, 0.5, 0.25, 0.0)
"""Parts of what a plan takes beside model data to which it is brought down, so that more of that stays."""
FIRST = 0.5
"""Part of the time after which proofs give way to a search for a plan that takes the room of the one found."""
LEAST_ROOM = 0.02
"""Part of a device's memory that a plan may leave empty without another search for one that takes it."""
ENDLESS = 2**50
"""More bytes than any model takes."""
TRIES = 2
"""So many limits are tried between one at which a plan was found that does not fit and one at which none was."""


@dataclass(frozen=True)
class Searched:
    """The result of a search.

    Attributes:
        best: the best plan.
        candidates: every mesh, best first; what is only bounded stands at its bound.
        status, gap: ``optimal`` with gap 0 when every candidate was solved or bounded away, among plans that
            decide equal blocks alike where the model has more than :data:`APART_OPERATORS` operators.
        seconds: by step: ``fold``, ``build``, ``solve``.
        memory: of the plan followed statement by statement; ``None`` in turns.
    """

    best: Best
    candidates: tuple[Candidate, ...]
    status: str
    gap: float
    seconds: Mapping[str, float]
    memory: Usage | None = None

    @cached_property
    def assignment(self) -> Assignment:
        """The best plan's decisions."""
        return self.best.space.assignment(self.best.choices, self.best.recompute)

    @property
    def staged(self) -> Staged | None:
        """How they run on a pipeline, or in turns; its cut says what is made again, not the assignment."""
        return self.best.staged

    @property
    def evaluation(self) -> Evaluation:
        """What they cost, by the one definition of cost."""
        return self.best.evaluation

    @property
    def recomputing(self) -> Assignment:
        """The decisions, with what the cut says is made again."""
        if self.staged is None:
            return self.assignment
        return replace(self.assignment, recompute=self.staged.recompute(self.assignment.space.folded))

    @property
    def peak_bytes(self) -> int:
        """Of the plan, as predicted."""
        return self.evaluation.peak_bytes if self.memory is None else self.memory.peak_bytes

    @property
    def bound_s(self) -> float:
        """No plan is faster, by the search's reckoning of memory."""
        return self.evaluation.time_s * (1 - self.gap)

    def above(self, bound_s: float) -> Searched:
        """The same where what is proved is that no plan is faster than this."""
        gap = 1 - bound_s / self.evaluation.time_s if self.evaluation.time_s else 0.0
        return replace(self, status="feasible", gap=gap) if gap > PROVED else self

    def working_set(self) -> WorkingSet:
        """The largest of the plan; see :func:`planner.offload.largest_working_set`."""
        return largest_working_set(self.recomputing, self.memory, self.staged)

    def followed(self, memory: Usage | None = None) -> Searched:
        """The same with the plan followed: its own peak in the row of its division, where the search has only a sum."""
        if self.staged is not None:  # stage by stage, by whoever asks
            return self
        memory = memory or usage(self.assignment)
        division, peak_bytes = Division(1, self.assignment.space.mesh), memory.peak_bytes
        rows = [replace(row, peak_bytes=peak_bytes) if row.division == division else row for row in self.candidates]
        return replace(self, candidates=tuple(rows), memory=memory)


def search(
    graph: Graph,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    *,
    folding: bool = True,
    max_axes: int = 2,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    pipelines: bool = False,
    progress: Progress | None = None,
) -> Searched:
    """The fastest plan that fits the cluster's memory, over all meshes that the pins allow.

    With ``pipelines``, or where the pins ask for it, also over stages and micro-batches, see :mod:`planner.division`.

    A mesh that is not pinned has up to ``max_axes`` axes, at most three, along the levels of the cluster. With three
    an operator has up to a thousand ways to run, and to bound a mesh takes about ten times as long as with two.
    The same graph, cluster and pins give the same plan in every process, unless the time limit cuts the search short.

    Args:
        gap: what is bounded is not searched where no plan can be faster by more than this part of the best plan's time.

    Raises:
        InputError: the time limit is not positive, or the gap is no part.
        PinError: the pins do not fit the model or the cluster.
        ClusterError: the model cannot be divided among so many devices at all.
        InfeasibleError: nothing fits in memory; says by how much, and what would.
    """
    check_time_limit(time_limit_s)
    check_gap(gap)
    start = time.monotonic()
    training = replace(training, tier=pins.tier, update=pins.update, activations=pins.activations or 0)
    if training.tier != "device":
        _check_offloads(cluster, pins, pipelines)
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
        turned = in_turns(cluster, pins, graph, len(folded.instances), max_axes, pipelines)
        plain = dividing(plain, graph) if turned else plain
    skeleton = Skeleton(folded, rules)
    skeleton.survey()
    cost, levels = CostModel(cluster), named(folded, *pins.levels)
    if pins.recompute is None:
        levels = with_levels_between(levels, skeleton, cost)
    elif pins.keep:
        levels = keeping(levels, skeleton, pins.keep)
    setting = Setting(cost, training, rules, pins, levels, start + time_limit_s, progress, gap=gap)
    setting.seconds.update(fold=time.monotonic() - start, build=0.0, solve=0.0)
    if training.tier != "device":
        return _elsewhere(setting, skeleton, graph, plain, turned)
    first = setting
    if not turned and pins.recompute is None:
        first = replace(first, deadline=start + FIRST * time_limit_s)
    found = _followed(first, skeleton, graph, plain, turned)
    return _taking_room(setting, skeleton, graph, plain, turned, found)


def _elsewhere(
    setting: Setting, skeleton: Skeleton, graph: Graph, plain: tuple[Division, ...], turned: tuple[Division, ...]
) -> Searched:
    """The fastest plan with model data elsewhere, whether what blocks save leaves or stays."""
    if not turned and setting.pins.activations is None:
        return _staying_or_leaving(setting, skeleton, graph, plain)
    found = _planned(setting, skeleton, graph, plain, turned)
    _check_leaving(found, setting.pins)
    return found


def _planned(
    setting: Setting, skeleton: Skeleton, graph: Graph, plain: tuple[Division, ...], turned: tuple[Division, ...]
) -> Searched:
    """The fastest plan that fits with model data elsewhere, by what the timetable says of a few."""
    found = _followed(_with_room(setting), skeleton, graph, plain, turned)
    if setting.training.activations:
        return _with_amount(setting, skeleton, found)
    return found if setting.training.tier != "either" else _leaving_room(setting, skeleton, graph, plain, turned, found)


def _staying_or_leaving(setting: Setting, skeleton: Skeleton, graph: Graph, plain: tuple[Division, ...]) -> Searched:
    """The faster plan of that in which what blocks save stays on the device and that in which it may leave.

    Where all of it fits that is not looked for, unless model data may take its room.
    """
    stays: Searched | None = None
    try:
        stays = _planned(setting, skeleton, graph, plain, ())
    except InfeasibleError:
        if setting.is_late():
            raise
    if stays is not None and (setting.is_late() or not _is_short_of_room(setting, stays)):
        return stays
    setting = replace(setting, training=replace(setting.training, activations="all"))
    try:
        leaves = _planned(setting, skeleton, graph, plain, ())
    except InfeasibleError:
        if stays is None:
            raise
        return stays
    if stays is None or offloaded_s(leaves.assignment, leaves.memory) < offloaded_s(stays.assignment, stays.memory):
        return leaves
    return stays.above(min(stays.bound_s, leaves.bound_s))


def _is_short_of_room(setting: Setting, found: Searched) -> bool:
    """Whether a plan makes anything again, or may have model data on the device."""
    return bool(found.assignment.recompute.without_gathering()) or setting.training.tier == "either"


def _with_amount(setting: Setting, skeleton: Skeleton, found: Searched) -> Searched:
    """The same layouts with the amount of recomputation of the shortest step, as timetables say."""
    space, choices = found.best.space, found.best.choices
    kinds = {instance.kind: kind for instance, (kind, _) in zip(space.folded.instances, skeleton.numbers, strict=True)}
    tried = fastest_amount(space, choices, ladder(space.folded, setting.levels.of_kinds(kinds)).steps)
    if tried is None:
        return found
    recompute, memory = tried
    best = Best(space, choices, recompute, evaluate(space.problem(None, recompute), choices))
    rows = [row.costing(best.evaluation) if row.division == best.division else row for row in found.candidates]
    plan = replace(found, best=best, candidates=tuple(rows), status="optimal", gap=0.0)
    return plan.followed(memory).above(found.bound_s)


def _with_room(setting: Setting) -> Setting:
    """The setting; with all the memory there is where what is saved may leave, since to the search it stays."""
    if not setting.training.activations:
        return setting
    return replace(setting, spare_bytes=setting.cost.cluster.device.usable_bytes - ENDLESS)


def _check_leaving(found: Searched, pins: Pins) -> None:
    """Refuse a count of more blocks than save anything that may leave."""
    if not isinstance(pins.activations, int):
        return
    blocks = 0 if found.memory is None else len({each.left for each in found.memory.saved})
    if blocks < pins.activations:
        raise PinError(
            f"pin 'activations' is {pins.activations}, but {blocks} blocks save for backward what may leave the "
            "device: pin that many, or 'all'"
        )


def _followed(
    setting: Setting, skeleton: Skeleton, graph: Graph, plain: tuple[Division, ...], turned: tuple[Division, ...]
) -> Searched:
    """The fastest plan within the setting's memory that fits when it is followed.

    The search adds up bytes that are not all alive at once; what it misses shows when the plan is followed. Then it
    searches again with a lower limit. What that excludes may fit, so that only what the first search proved is proved.
    Where it leaves nothing, the leanest plans are followed.
    """
    usable, tries, bound_s = setting.cost.cluster.device.usable_bytes, TRIES, math.inf
    nothing: _Nothing | None = None
    below, above = -math.inf, math.inf  # limits at which nothing was found, and from which on all that was does not fit
    while True:
        found = _search(setting, skeleton, graph, plain, turned)
        if isinstance(found, _Nothing):
            nothing, below = found, setting.limit_bytes
        elif found.staged is not None and setting.training.tier == "device":
            return found if math.isinf(bound_s) else found.above(bound_s)
        else:
            followed = found.followed()
            excess = followed.working_set().bytes - usable
            bound_s = found.bound_s if math.isinf(bound_s) else bound_s
            if excess <= 0:
                return followed.above(bound_s)
            above = found.evaluation.peak_bytes
            # In steps of the excess, past the limits at which the search would find the same plan again.
            limit = setting.limit_bytes - (1 + (setting.limit_bytes - above) // excess) * excess
        if nothing is not None:  # the step was too long
            if math.isinf(above) or not tries or above - below <= 1 or setting.is_late():
                return _leanest(setting, skeleton, graph, nothing)
            tries, limit = tries - 1, math.floor((below + above) / 2)
        setting = replace(setting, spare_bytes=usable - limit)


def _wants_no_more(setting: Setting, found: Searched) -> bool:
    """Whether a plan is proved, and no faster on its mesh if there were no limit to memory."""
    if found.gap > setting.gap:
        return False
    problem = found.best.space.problem(None)
    if most_bytes(problem) <= setting.limit_bytes:
        return True
    return found.evaluation.time_s * (1 - max(setting.gap, PROVED)) <= lower_bounds(problem).time_s


def _taking_room(
    setting: Setting,
    skeleton: Skeleton,
    graph: Graph,
    plain: tuple[Division, ...],
    turned: tuple[Division, ...],
    found: Searched,
) -> Searched:
    """The plan found, or a faster one that fits only when it is followed.

    The search adds up bytes that are not all alive at once. Where memory is short, the plan followed leaves
    room, and the search goes on with so much more memory: a sum and what it is off by change little from plan to plan.
    So it does where the first part of the time did not do for the proof.
    """
    usable = setting.cost.cluster.device.usable_bytes
    if found.staged is not None or setting.pins.recompute is not None or _wants_no_more(setting, found):
        return found
    room = usable - found.peak_bytes
    for _ in range(TRIES):
        if room < LEAST_ROOM * usable or setting.is_late():
            break
        limit = found.evaluation.peak_bytes + room
        more = _search(replace(setting, spare_bytes=usable - limit), skeleton, graph, plain, turned, found.best)
        if isinstance(more, _Nothing):
            break
        if more.best is found.best:  # none is faster, with more memory even
            proves_more = limit >= usable and more.gap < found.gap
            return replace(found, status=more.status, gap=more.gap) if proves_more else found
        more = more.followed() if limit >= usable else more.followed().above(found.bound_s)
        fits = more.peak_bytes <= usable
        found, room = (more, usable - more.peak_bytes) if fits else (found, room // 2)
    return found


def _leaving_room(
    setting: Setting,
    skeleton: Skeleton,
    graph: Graph,
    plain: tuple[Division, ...],
    turned: tuple[Division, ...],
    found: Searched,
) -> Searched:
    """Of plans that leave ever more memory to model data the one of the shortest step, with what then stays.

    The search reckons as if nothing stayed, so that it makes nothing again that fits. What it makes again leaves room,
    and what stays there is updated on the device.
    """
    tried = [(offloaded_s(found.recomputing, found.memory, found.staged), found)]
    usable = setting.cost.cluster.device.usable_bytes
    most_bytes = found.working_set().beside_bytes if found.memory is None else found.memory.peak_bytes
    for share in ROOM:
        if setting.is_late():
            break
        leaner = _search(replace(setting, spare_bytes=usable - int(share * most_bytes)), skeleton, graph, plain, turned)
        if isinstance(leaner, _Nothing):
            break
        leaner = leaner.followed()
        if leaner.working_set().bytes <= usable:
            seconds = offloaded_s(leaner.recomputing, leaner.memory, leaner.staged)
            tried.append((seconds, leaner.above(found.bound_s)))
    return min(tried, key=lambda each: each[0])[1]


def _check_offloads(cluster: ClusterSpec, pins: Pins, pipelines: bool) -> None:
    """Refuse what plans that offload cannot be yet, and clusters that do not say where to."""
    if pins.schedule in OUT_OF_TURN:
        raise PinError(
            f"pin 'offload' is {pins.offload!r}, and pin 'schedule' {pins.schedule!r}, which leaves gradients of "
            "weights to a later action or step than their block's backward, where they could not leave the device: pin "
            "'schedule' '1f1b', 'interleaved_1f1b' or 'gpipe', or 'offload' 'none'"
        )
    if (pipelines or pins.in_turns) and pins.update == "backward":
        raise PinError(
            "pin 'update' is 'backward', but a step in turns has its gradients before the loss's backward says by how "
            "much they are scaled, so that none can be used earlier: pin 'update' 'after', or leave out pipelines, "
            "'pipeline' and 'micro_batches'"
        )
    if (pipelines or pins.in_turns) and pins.activations:
        raise PinError(
            f"pin 'activations' is {pins.activations!r}, but in turns what is saved for backward does not leave the "
            "device: leave it out, or pipelines, 'pipeline' and 'micro_batches'"
        )
    cluster.home(pins.tier == "disk")


def check_time_limit(seconds: float) -> None:
    """Raises :class:`InputError` unless ``seconds`` is a number above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InputError(f"time_limit_s is {seconds!r}; give seconds, more than 0")


def check_gap(gap: float) -> None:
    """Raises :class:`InputError` unless ``gap`` is a number from 0 to below 1."""
    if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap < 1:
        raise InputError(f"gap is {gap!r}; give the part of a step that need not be proved, at least 0 and below 1")


def _search(
    setting: Setting,
    skeleton: Skeleton,
    graph: Graph,
    plain: tuple[Division, ...],
    turned: tuple[Division, ...],
    known: Best | None = None,
) -> Searched | _Nothing:
    """The fastest plan within the setting's memory, over all divisions; ``known`` if none is faster."""
    rungs = ladder(skeleton.folded, setting.levels)
    best, looks = _explore(setting, skeleton, (*plain, *turned), rungs, known)
    rows, proofs = _rows(looks), looks
    if plain and may_differ(skeleton.folded):
        best, row, closer = _explore_apart(setting, skeleton, plain, rungs, best)
        if row is not None:
            rows = [*(each for each in rows if each.division != row.division), row]
        proofs = [*closer, *(look for look in looks if look.candidate.division.in_turns)]
    if best is None:
        return _Nothing(rows, proofs)
    return _searched(setting, best, rows, [look.candidate.bound_s for look in proofs])


def _searched(setting: Setting, best: Best, rows: list[Candidate], bounds: Iterable[float]) -> Searched:
    """The result, with a bound for the plans of every candidate."""
    if best.staged is not None:
        best = cut_well(setting, best)
        rows = [row.costing(best.evaluation) if row.division == best.division else row for row in rows]
    time_s = best.evaluation.time_s
    bound_s = min(time_s, *bounds)
    gap = (time_s - bound_s) / time_s if time_s else 0.0
    rows.sort(key=lambda c: (c.status == "infeasible", min(c.objective_s, max(c.bound_s, time_s)), c.objective_s))
    return Searched(
        best,
        tuple(rows),
        "optimal" if gap <= PROVED else "feasible",
        gap if gap > PROVED else 0.0,
        setting.seconds,
    )


@dataclass(frozen=True)
class _Nothing:
    """No plan within the setting's memory: what became of every division, and the looks that prove it."""

    rows: list[Candidate]
    looks: list[Look]


def _leanest(setting: Setting, skeleton: Skeleton, graph: Graph, nothing: _Nothing) -> Searched:
    """Of the leanest plans the fastest that fits when it is followed.

    Raises:
        PinError: there are no plans at all, whatever they need.
        InfeasibleError: none fits.
    """
    bounds = bounds_s(nothing.looks)
    check_turns(nothing.looks, bounds)
    leans = lean_plans(setting, nothing.looks)
    best = fastest_that_fits(leans, setting.cost.cluster.device.usable_bytes)
    if best is None:
        raise nothing_fits(setting, graph, nothing.looks, leans)
    if best.staged is None and may_differ(skeleton.folded):
        best = together_again(setting, skeleton.folded, best)
    row = Candidate(best.division, "feasible", math.inf, bounds[best.division], 0, "relaxation")
    others = (each for each in nothing.rows if each.division != best.division)
    found = _searched(setting, best, [row.costing(best.evaluation), *others], bounds.values())
    return found.followed()


def _explore_apart(
    setting: Setting, skeleton: Skeleton, plain: tuple[Division, ...], rungs: Ladder, alike: Best | None
) -> tuple[Best | None, Candidate | None, list[Look]]:
    """The best plan where equal blocks may differ, what became of its division if it is better than the best known,
    and what became of all.
    """
    best, looks = _explore(setting, apart(skeleton), plain, rungs.apart(skeleton.numbers), alike)
    if best is None or best is alike:
        return best, None, looks
    before = time.monotonic()
    best = together_again(setting, skeleton.folded, best)
    found, division = best.evaluation, best.division
    bound_s = next(look.candidate.bound_s for look in looks if look.candidate.division == division)
    status = "optimal" if found.time_s - bound_s <= PROVED * found.time_s else "feasible"
    setting.took("solve", before)
    return best, Candidate(division, status, found.time_s, bound_s, found.peak_bytes), looks


def _explore(
    setting: Setting, skeleton: Skeleton, divisions: tuple[Division, ...], rungs: Ladder, best: Best | None
) -> tuple[Best | None, list[Look]]:
    """Best first over the divisions, starting from the best plan known; what became of each, in their order."""
    arithmetic, schedule = Arithmetic(skeleton, setting.cost), setting.pins.schedule
    waiting = [begin(division, arithmetic.bound_s(division, schedule), rungs) for division in divisions]
    is_turned = any(division.in_turns for division in divisions)
    first = seeds(divisions, setting.cost.cluster, skeleton.graph) if is_turned else []
    closed, is_deeper = list[Look](), False
    while waiting:
        is_late = setting.is_late()
        if best is not None and is_late:
            closed += [close(look, best) for look in waiting]
            break
        # To look for plans where it is promising, or to prove bounds: where there are many divisions, in turn.
        is_deeper = is_turned and not is_deeper
        begun = [look for look in waiting if look.is_priced and not look.is_tried] if is_deeper else []
        look = min(begun or waiting, key=lambda look: _turn(look, first, best))
        waiting.remove(look)
        is_left_out = is_late and look.is_dear and len(closed) + 1 < len(divisions)
        if is_left_out or is_near(setting, look, best) or is_reached(look.candidate.bound_s, best):
            closed.append(close(look, best))
            continue
        for each in look_closer(setting, skeleton, look, best):
            known, best = best, better(best, each)
            if best is not None and best is not known:
                setting.say(f"  {in_seconds(best.evaluation.time_s)} a step on {best.division}, the best so far")
            (closed if each.is_done else waiting).append(each)
    check_divisible(setting, skeleton.graph, closed)
    order = {division: number for number, division in enumerate(divisions)}
    return best, sorted(closed, key=lambda look: (order[look.candidate.division], look.low))


def _turn(look: Look, first: Sequence[Division], best: Best | None) -> tuple[float, float]:
    """Which look is next, the least: plans of ``first``, then of divisions like the best plan's, then by bound."""
    division, bound_s = look.candidate.division, look.candidate.bound_s
    if division in first and not look.is_tried:
        return -1, first.index(division)
    if look.is_tried or best is None:
        return NEAR + 1, bound_s
    return min(division.distance(best.division), NEAR + 1), bound_s


def _rows(looks: list[Look]) -> list[Candidate]:
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
