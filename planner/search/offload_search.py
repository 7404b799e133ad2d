"""Searches plans whose model data has its home on the host or on disk.

The search decides as if devices held none of them; what stays, and what blocks save and let leave, is taken from the
transfer schedules of a few.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from planner.analysis.offload.step_timing import holds_all, stages_followed
from planner.analysis.pipeline.chain import Link, links_of
from planner.analysis.pipeline.staged import Staged, stage
from planner.base.errors import InfeasibleError, PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import assignment_of
from planner.formulation.constraints.pins import Pins
from planner.formulation.decisions import DecisionGraph
from planner.search.branch_and_bound import NothingFits, ParallelConfigs, Searched, branch_and_bound, completed
from planner.search.candidates import Incumbent, cutoff_s
from planner.search.fastest_plan import fastest
from planner.search.offload_bound import least_step_s
from planner.search.search_context import SearchContext
from planner.solve.pipeline.schedule import OUT_OF_ORDER

AMOUNTS = ((0.5, 0.0), (1.0, 0.0), (1.0, 0.5), (1.0, 0.75), (1.0, 1.0))
"""What plans that are tried hold: parts of a device's room, and of what the link takes away in a forward, together."""
ROOM = (0.75, 0.5, 0.25, 0.0)
"""Parts of what a plan takes beside model data to which it is reduced, so that more of that stays."""
ENDLESS = 2**50
"""More bytes than any model takes."""


def check_offloads(cluster: ClusterSpec, pins: Pins) -> None:
    """Refuse what plans that offload cannot be yet, and clusters that do not say where to."""
    if pins.schedule in OUT_OF_ORDER:
        raise PinError(
            f"pin 'offload' is {pins.offload!r}, and pin 'schedule' {pins.schedule!r}, which leaves gradients of "
            "weights to a later action or step than their block's backward, where they could not leave the device: pin "
            "'schedule' '1f1b', 'interleaved_1f1b' or 'gpipe', or 'offload' 'none'"
        )
    cluster.home(pins.tier == "disk")


def search_offload(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, known: Incumbent | None = None
) -> Searched:
    """The fastest plan with model data elsewhere, whether what blocks save leaves or stays.

    What is proved is of steps as they are predicted.

    Args:
        known: a plan on the device; it is the answer if none can be, or none is found, that is faster by more than the
            gap.
    """
    if known is None:
        found = _search(context, decision_graph, configs, math.inf)
        assert found is not None
        return found.of_planned_step(least_step_s(context, decision_graph, configs))
    wanted_s = cutoff_s(context, known)
    bound_s = least_step_s(context, decision_graph, configs, wanted_s)
    if bound_s < wanted_s:
        with contextlib.suppress(InfeasibleError):
            found = _search(context, decision_graph, configs, wanted_s)
            if found is not None and found.planned_step_s < wanted_s:
                return found.of_planned_step(least_step_s(context, decision_graph, configs))
    return completed(context, known, [], [bound_s])


def _search(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, wanted_s: float
) -> Searched | None:
    """The same where nothing is known, and nothing is proved of steps as they are predicted.

    Args:
        wanted_s: what may be faster is followed; ``None``: nothing was met that may.
    """
    if context.pins.activations is None:
        return _staying_or_leaving(context, decision_graph, configs, wanted_s)
    _check_blocks(context.pins, len(decision_graph.folded.instances))
    found = _planned(context, decision_graph, configs, wanted_s)
    if found is not None:
        _check_leaving(found, context.pins)
    return found


def _planned(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, wanted_s: float
) -> Searched | None:
    """The fastest plan that fits with model data elsewhere, by what the transfer schedule says of a few; ``None`` if
    what it computes and communicates takes ``wanted_s`` or more, whatever moves when, or where something is wanted and
    nothing was met.
    """
    found = _fitting(_with_room(context), decision_graph, configs, wanted_s)
    if found is None:
        return None
    if context.training.activations:
        return _with_amount(context, decision_graph, found)
    if context.training.tier != "either":
        return found
    return _leaving_room(context, decision_graph, configs, found)


def _staying_or_leaving(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, wanted_s: float
) -> Searched | None:
    """The faster plan of that in which what blocks save stays on the device and that in which it may leave.

    Where all of it fits that is not looked for, unless model data may take its room.
    """
    stays: Searched | None = None
    try:
        stays = _planned(context, decision_graph, configs, wanted_s)
    except InfeasibleError:
        if context.is_late():
            raise
    else:
        if context.is_late() or (stays is not None and not _is_short_of_room(context, stays)):
            return stays
    context = replace(context, training=replace(context.training, activations="all"))
    try:
        leaves = _planned(context, decision_graph, configs, wanted_s)
    except InfeasibleError:
        if stays is None:
            raise
        return stays
    if stays is None or (leaves is not None and leaves.planned_step_s < stays.planned_step_s):
        return leaves
    return stays


def _is_short_of_room(context: SearchContext, found: Searched) -> bool:
    """Whether a plan makes anything again, or may have model data on the device; with micro-batches also whether what
    moves may do so for several micro-batches.
    """
    if found.recomputing.recompute.without_gathered() or context.training.tier == "either":
        return True
    return found.staged is not None and not holds_all(found.recomputing, found.staged)


def _fitting(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, wanted_s: float
) -> Searched | None:
    """The fastest plan the working set of which fits, see :func:`_planned`.

    To the search model data takes no room; what of it is there with the rest shows when the step is traced. Then it
    searches again with so much less memory, into which it cuts what was found, so that a plan is known if time is up.
    """
    usable, known = context.usable_bytes, None
    while True:
        if math.isinf(wanted_s):
            found = fastest(context, decision_graph, configs, known)
        else:  # those that need least memory take long to find, and are rarely faster than what is known
            met = branch_and_bound(context, decision_graph, configs, known)
            if isinstance(met, NothingFits) or met.best.staged.cut.step_s >= wanted_s:
                return None
            found = met.followed()
        excess = found.working_set().bytes - usable
        if excess <= 0:
            return found
        limit = context.limit_bytes - (1 + (context.limit_bytes - found.evaluation.peak_bytes) // excess) * excess
        context = replace(context, spare_bytes=usable - limit)
        staged = stage(_links(context, decision_graph, found.best), [found.best.staged.pipeline], limit)
        known = None if staged is None else replace(found.best, staged=staged)


def _with_amount(context: SearchContext, decision_graph: DecisionGraph, found: Searched) -> Searched:
    """The same layouts with the amount of recomputation of the shortest step, as transfer schedules say.

    Recomputing and leaving take the same bytes off the device: one takes its seconds, and the other the link's. The
    search prices the first alone; so a few amounts are tried about that which the link carries while the forward of a
    micro-batch computes, from much recomputation to less while steps get shorter.

    Raises:
        InfeasibleError: the host has no room for what leaves, however little is saved.
    """
    best, usable, links = found.best, context.usable_bytes, _links(context, decision_graph, found.best)
    forward_s = math.fsum(link.block.forward_s + link.gather_s for link in links)
    leaving_bytes = forward_s * context.cost.cluster.home(context.training.on_disk).evict_bytes_per_s
    tried, cuts = list[tuple[float, Searched]](), {_recomputing(best.staged)}
    for room, leaving in AMOUNTS:
        if context.is_late():
            break
        staged = stage(links, [best.staged.pipeline], int(room * usable + leaving * leaving_bytes))
        if staged is None or _recomputing(staged) in cuts:
            continue
        cuts.add(_recomputing(staged))
        other = _cut_as(found, staged)
        if other.working_set().bytes > usable:
            continue
        with contextlib.suppress(InfeasibleError):  # the host has no room for what leaves; with less it may
            tried.append((other.planned_step_s, other))
            if tried[-1][0] > tried[-2:][0][0]:  # nor is the one with the least recomputation shorter
                return min(tried, key=lambda each: each[0])[1]
    try:
        tried.append((found.planned_step_s, found))
    except InfeasibleError:
        if not tried:
            raise
    return min(tried, key=lambda each: each[0])[1]


def _links(context: SearchContext, decision_graph: DecisionGraph, best: Incumbent) -> tuple[Link, ...]:
    """The chain of a plan, where equal blocks may differ."""
    numbered = zip(best.space.folded.instances, decision_graph.blocks.numbers, strict=True)
    levels = context.levels.of_kinds({instance.kind: kind for instance, (kind, _) in numbered})
    return links_of(assignment_of(best.space, best.choices), levels, context.pins.schedule)


def _recomputing(staged: Staged) -> tuple[tuple[int, ...], ...]:
    """What tells amounts of recomputation apart."""
    return staged.cut.bounds, staged.cut.savings


def _cut_as(found: Searched, staged: Staged) -> Searched:
    """The same layouts with another amount of recomputation."""
    best = found.best
    rows = [row.costing(staged.evaluation) if row.config == best.config else row for row in found.candidates]
    return replace(found, best=replace(best, staged=staged), candidates=tuple(rows), memory=None).followed()


def _with_room(context: SearchContext) -> SearchContext:
    """The search context; with all the memory there is where what is saved may leave, since to the search it stays."""
    if not context.training.activations:
        return context
    return replace(context, spare_bytes=context.usable_bytes - ENDLESS)


def _leaving_room(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, found: Searched
) -> Searched:
    """Of plans that leave ever more memory to model data the one of the shortest step, with what then stays.

    The search reckons as if nothing stayed, so that it makes nothing again that fits. What it recomputes leaves room,
    and what stays there is updated on the device.
    """
    best, usable = found, context.usable_bytes
    most_bytes = found.working_set().beside_bytes if found.memory is None else found.memory.peak_bytes
    for share in ROOM:
        if context.is_late():
            break
        smaller = branch_and_bound(
            replace(context, spare_bytes=usable - int(share * most_bytes)), decision_graph, configs
        )
        if isinstance(smaller, NothingFits):
            break
        if smaller.best.staged.cut.step_s >= best.planned_step_s:  # what moves aside; following many would take long
            continue
        smaller = smaller.followed()
        if smaller.working_set().bytes <= usable and smaller.planned_step_s < best.planned_step_s:
            best = smaller
    return best


def _check_blocks(pins: Pins, blocks: int) -> None:
    """Refuse a count of more blocks than there are, before anything is searched."""
    if isinstance(pins.activations, int) and pins.activations > blocks:
        raise PinError(
            f"pin 'activations' is {pins.activations}, but the model has {blocks} blocks: pin that many at most, or "
            "'all'"
        )


def _check_leaving(found: Searched, pins: Pins) -> None:
    """Refuse a count of more blocks than save anything that may leave, of every stage."""
    if not isinstance(pins.activations, int):
        return
    stages = stages_followed(found.recomputing, found.memory, found.staged)
    blocks = max(len({each.left for each in stage.saved}) for stage in stages)
    if blocks < pins.activations:
        where = " of a stage" if len(stages) > 1 else ""
        raise PinError(
            f"pin 'activations' is {pins.activations}, but {blocks} blocks{where} save for backward what may leave the "
            "device: pin that many, or 'all'"
        )
