"""Repairs plans that exceed memory when they are simulated though the search's sum fits.

A search adds up bytes that are not all alive at once, and misses some; what a plan needs shows when it is simulated.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from planner.formulation.decisions import DecisionGraph
from planner.search.branch_and_bound import NothingFits, ParallelConfigs, Searched, branch_and_bound, completed
from planner.search.candidates import PROVED, Candidate, Incumbent
from planner.search.infeasibility import check_micro_batches, nothing_fits
from planner.search.min_memory import MIN_MEMORY_S, begun, bounds_s, fastest_that_fits, is_worth, min_memory_plans
from planner.search.recipes import by_recipe, freed
from planner.search.search_context import SearchContext
from planner.search.unfolding import may_differ, refolded
from planner.solve.choices import lower_bounds
from planner.solve.problem import most_bytes

LEAST_HEADROOM = 0.02
"""Part of a device's memory that a plan may leave empty without another search for one that takes it."""
TRIES = 2
"""So many limits are tried between one at which a plan was found that does not fit and one at which none was."""


def memory_feasible(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, known: Incumbent | None = None
) -> Searched:
    """The fastest plan within the memory limit that fits when it is simulated; ``known`` if none is faster.

    The search adds up bytes that are not all alive at once; what it misses shows when the plan is simulated. Then it
    searches again with a lower limit. What that excludes may fit, so that only what the first search proved is proved.
    Where it leaves nothing, the minimum-memory plans are simulated.
    """
    usable, tries, bound_s = context.usable_bytes, TRIES, math.inf
    nothing: NothingFits | None = None
    below, above = -math.inf, math.inf  # limits at which nothing was found, and from which on all that was does not fit
    while True:
        found = branch_and_bound(context, decision_graph, configs, known)
        if isinstance(found, NothingFits):
            nothing, below = found, context.limit_bytes
        elif found.staged is not None and context.training.tier == "device":
            return found if math.isinf(bound_s) else found.above(bound_s)
        else:
            followed = found.followed()
            excess = followed.working_set().bytes - usable
            bound_s = found.bound_s if math.isinf(bound_s) else bound_s
            if excess <= 0:
                return followed.above(bound_s)
            above = found.evaluation.peak_bytes
            # In steps of the excess, past the limits at which the search would find the same plan again.
            limit = context.limit_bytes - (1 + (context.limit_bytes - above) // excess) * excess
        if nothing is not None:  # the step was too long
            if math.isinf(above) or not tries or above - below <= 1 or context.is_late():
                return _min_memory(context, decision_graph, nothing)
            tries, limit = tries - 1, math.floor((below + above) / 2)
        context = replace(context, spare_bytes=usable - limit)


def _min_memory(context: SearchContext, decision_graph: DecisionGraph, nothing: NothingFits) -> Searched:
    """Of the minimum-memory plans the fastest that fits when it is simulated; where none does, of those of recipes.

    Raises:
        PinError: there are no plans at all, whatever they need.
        InfeasibleError: none fits.
    """
    branches, usable = begun(nothing.branches), context.usable_bytes
    check_micro_batches(branches)
    until = min(context.deadline, time.monotonic() + MIN_MEMORY_S)
    minimal = min_memory_plans(context, branches, until=until)
    best = fastest_that_fits(minimal, usable)
    if best is None:
        worth = [branch for branch in branches if is_worth(context, branch, minimal)]
        minimal += min_memory_plans(context, by_recipe(context, worth, until), minimal, until)
        best = fastest_that_fits(minimal, usable)
        best = None if best is None else freed(best, branches)
    if best is None:
        raise nothing_fits(context, decision_graph.graph, nothing.branches, minimal)
    if best.staged is None and may_differ(decision_graph.folded):
        best = refolded(context, decision_graph.folded, best)
    bounds = bounds_s(nothing.branches)
    row = Candidate(best.config, "feasible", math.inf, bounds[best.config], 0, "relaxation")
    others = (each for each in nothing.rows if each.config != best.config)
    found = completed(context, best, [row.costing(best.evaluation), *others], bounds.values())
    return found.followed()


def _wants_no_more(context: SearchContext, found: Searched) -> bool:
    """Whether a plan is proved, and no faster on its mesh if there were no limit to memory."""
    if found.gap > context.gap:
        return False
    problem = found.best.space.problem(None)
    if most_bytes(problem) <= context.limit_bytes:
        return True
    return found.evaluation.time_s * (1 - max(context.gap, PROVED)) <= lower_bounds(problem).time_s


def using_headroom(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, found: Searched
) -> Searched:
    """The plan found, or a faster one that fits only when it is simulated.

    The search adds up bytes that are not all alive at once. Where memory is short, the plan followed leaves
    room, and the search goes on with so much more memory: a sum and what it is off by change little from plan to plan.
    So it does where the first part of the time did not do for the proof.
    """
    usable = context.usable_bytes
    if found.staged is not None or _wants_no_more(context, found):
        return found
    room = usable - found.peak_bytes
    for _ in range(TRIES):
        if room < LEAST_HEADROOM * usable or context.is_late():
            break
        limit = found.evaluation.peak_bytes + room
        more = branch_and_bound(replace(context, spare_bytes=usable - limit), decision_graph, configs, found.best)
        if isinstance(more, NothingFits):
            break
        if more.best is found.best:  # none is faster, with more memory even
            proves_more = limit >= usable and more.gap < found.gap
            return replace(found, status=more.status, gap=more.gap) if proves_more else found
        more = more.followed() if limit >= usable else more.followed().above(found.bound_s)
        fits = more.peak_bytes <= usable
        found, room = (more, usable - more.peak_bytes) if fits else (found, room // 2)
    return found
