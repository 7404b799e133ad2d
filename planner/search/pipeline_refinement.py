"""Filling: a micro-batched plan that uses the memory that the best plan found leaves.

While divisions are compared, few pipelines of each are cut, of what solves the problem of a typical rank at one price
of a byte. Between two prices what is held falls at once, often by half. So of the best division more are cut at
the end: of what is fastest at any price, and of what is fastest within the limit, solved exactly.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from planner.analysis.pipeline.staged import THOROUGH, stage
from planner.formulation.remat.levels import NOTHING, ladder
from planner.formulation.search_space import Space
from planner.search.candidate_bounds import Best, Setting
from planner.search.parallel_config import Division
from planner.solve.choices import corners, solve
from planner.solve.problem import evaluate, most_bytes

STEP = 1.02
"""Limits that are tried are its powers, so that more memory tries what less did."""
LOWER = (0, 1, 2, 4, 8, 16)
"""So many powers below the limit are tried, until one fits, since a rank may hold more than the typical one."""


def filled(setting: Setting, best: Best, bound_s: float) -> Best:
    """The plan cut with more effort, or a faster one of its division, whenever parameters are gathered.

    None is looked for where no plan is faster than ``bound_s`` by more than the gap, or where everything fits.
    """
    before, division = time.monotonic(), best.division
    best = _cut_well(setting, best)
    for each in (replace(division, gathers="once"), replace(division, gathers="each")):
        space = setting.posed.get(each)
        if space is not None and best.evaluation.time_s * (1 - setting.gap) > bound_s:
            best = _fuller(setting, space, each, best)
    setting.took("solve", before)
    return best


def _fuller(setting: Setting, space: Space, division: Division, best: Best) -> Best:
    """The best plan, or a faster one of a space."""
    rungs, held = ladder(space.folded, setting.levels), space.holding(division.in_flight)
    problem = held.problem(None, rungs.steps[0])
    if most_bytes(problem) <= setting.limit_bytes:
        return best
    for choices in corners(problem):
        if evaluate(problem, choices).time_s < best.evaluation.time_s and not setting.is_late():
            best = _faster(best, _cut(setting, space, division, choices))
    highest = math.floor(math.log(max(1, setting.limit_bytes), STEP))
    for step in dict.fromkeys((rungs.steps[0], rungs.steps[-1])):
        problem, tried = held.problem(None, step), set[tuple[int, ...]]()
        for lower in LOWER:
            left_s = setting.deadline - time.monotonic()
            limited = replace(problem, limit_bytes=math.floor(STEP ** (highest - lower)))
            if left_s <= 0:
                return best
            choices = solve(limited, time_limit_s=left_s, cutoff_s=best.evaluation.time_s, leanest=False).choices
            cut = None if choices in tried else _cut(setting, space, division, choices)
            best = _faster(best, cut)
            if cut is not None or not choices:
                break
            tried.add(choices)
    return best


def _cut(setting: Setting, space: Space, division: Division, choices: tuple[int, ...]) -> Best | None:
    """The fastest pipeline of some choices, if one fits."""
    if not choices:
        return None
    links = setting.links(space, choices)
    found = stage(links, setting.pipelines(division, len(links)), setting.limit_bytes)
    return None if found is None else Best(space, choices, NOTHING, found.evaluation, found)


def _faster(best: Best, other: Best | None) -> Best:
    return best if other is None or other.evaluation.time_s >= best.evaluation.time_s else other


def _cut_well(setting: Setting, best: Best) -> Best:
    """The same decisions, cut with more effort."""
    assert best.staged is not None
    found = stage(best.staged.links, [best.staged.pipeline], setting.limit_bytes, best.staged.step_s, THOROUGH)
    return best if found is None else replace(best, staged=found, evaluation=found.evaluation)
