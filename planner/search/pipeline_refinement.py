"""Refines the best plan with the memory that it leaves.

While configurations are compared, few pipelines of each are cut, of what solves the problem of a typical rank at one
price of a byte. Between two prices what is held falls at once, often by half. So of the best configuration more are cut
at the end: of what is fastest at any price, and of what is fastest within the limit, solved exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

from planner.analysis.pipeline.staged import THOROUGH, saving_more, stage
from planner.formulation.search_space import Space
from planner.formulation.unsharding import PER_MICRO_BATCH, PER_STEP
from planner.search.candidates import Incumbent, cutoff_s
from planner.search.parallel_config import ParallelConfig
from planner.search.search_context import SearchContext
from planner.solve.choices import corners, solve
from planner.solve.problem import evaluate, most_bytes

STEP = 1.02
"""Limits that are tried are its powers, so that more memory tries what less did."""
LOWER = (0, 1, 2, 4, 8, 16)
"""So many powers below the limit are tried, until one fits, since a rank may hold more than the typical one."""
LEAST_S, PART = 2.0, 0.1
"""Seconds that solving them may take for a space, or this part of those that the search took, if that is more."""


def refined(context: SearchContext, best: Incumbent, bounds_s: Mapping[ParallelConfig, float]) -> Incumbent:
    """The plan cut with more effort, or a faster one of its configuration, whenever parameters are gathered.

    None is sought where everything fits, or where none is faster by more than the gap.

    Args:
        bounds_s: no plan of a configuration is faster, where that is known.
    """
    before, config = time.monotonic(), best.config
    best = _cut_well(context, best)
    for each in (replace(config, unsharding=unsharding) for unsharding in (PER_STEP, PER_MICRO_BATCH)):
        least_s = bounds_s.get(each, 0.0 if each == config else math.inf)
        if least_s < cutoff_s(context, best) and not context.is_late():
            best = _refine(context, context.formulate(best.space.decision_graph, each), each, best)
    context.took("solve", before)
    return best


def _refine(context: SearchContext, space: Space, config: ParallelConfig, best: Incumbent) -> Incumbent:
    """The best plan, or a faster one of a space."""
    ends, held = context.levels.ends(space.folded), space.holding(config.in_flight)
    problem = held.problem(None, ends[0])
    if most_bytes(problem) <= context.limit_bytes:
        return best
    for choices in corners(problem):
        if not context.is_late() and evaluate(problem, choices).time_s < best.evaluation.time_s:
            best = _faster(best, _cut(context, space, config, choices))
    highest = math.floor(math.log(max(1, context.limit_bytes), STEP))
    until = min(context.deadline, time.monotonic() + max(LEAST_S, PART * sum(context.seconds.values())))
    for amount in dict.fromkeys(ends):
        problem, tried = held.problem(None, amount), set[tuple[int, ...]]()
        for lower in LOWER:
            left_s = until - time.monotonic()
            limited = replace(problem, limit_bytes=math.floor(STEP ** (highest - lower)))
            if left_s <= 0:
                return best
            choices = solve(limited, time_limit_s=left_s, cutoff_s=best.evaluation.time_s, least_memory=False).choices
            cut = None if choices in tried else _cut(context, space, config, choices)
            best = _faster(best, cut)
            if cut is not None or not choices:
                break
            tried.add(choices)
    return best


def _cut(context: SearchContext, space: Space, config: ParallelConfig, choices: tuple[int, ...]) -> Incumbent | None:
    """The fastest pipeline of some choices, if one fits."""
    if not choices:
        return None
    links = context.links(space, choices)
    found = stage(links, context.pipelines(config, len(links)), context.limit_bytes)
    return None if found is None else Incumbent(space, choices, found)


def _faster(best: Incumbent, other: Incumbent | None) -> Incumbent:
    return best if other is None or other.evaluation.time_s >= best.evaluation.time_s else other


def _cut_well(context: SearchContext, best: Incumbent) -> Incumbent:
    """The same decisions, cut with more effort."""
    found = stage(best.staged.links, [best.staged.pipeline], context.limit_bytes, best.staged.step_s, THOROUGH)
    staged = best.staged if found is None else found
    return replace(best, staged=saving_more(staged, context.limit_bytes, THOROUGH // len(staged.links)))
