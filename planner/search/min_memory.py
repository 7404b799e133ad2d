"""The plans that need least memory, simulated, for when none fits by the search's own sum.

The search adds up bytes that are not all alive at once, so that a plan may fit although its sum does not.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.analysis.memory import usage
from planner.analysis.offload.step_timing import WorkingSet, largest_working_set
from planner.analysis.pipeline.staged import QUICK, THOROUGH, Staged, stage, waiting
from planner.formulation.assignment import assignment_of
from planner.formulation.resharding import local_bytes
from planner.formulation.search_space import Space
from planner.search.candidates import Branch, Incumbent
from planner.search.parallel_config import ParallelConfig
from planner.search.search_context import SearchContext
from planner.solve.choices import almost_lightest, lower_bounds, solve
from planner.solve.problem import Problem, evaluate

MIN_MEMORY_S = 10.0
"""How long plans that need little are sought when nothing fits; the least found is told."""
SLACKS = (1.02, 1.05, 1.15)
"""What counts at most so many times the least sum of bytes is almost as light."""
EXACT_S = 5.0
"""How long the fastest that is almost as light is sought, where it may need less memory than all that were met."""
LEAST_SHARE = 0.75
"""A plan, followed, seldom needs less than this part of what the search adds up."""


@dataclass(frozen=True)
class MinMemoryPlan:
    """A plan that needs little memory.

    Attributes:
        best: the plan, and what it costs by the search's reckoning.
        needed: what a device must hold at the least, as followed; with micro-batches, as its cut has it.
    """

    best: Incumbent
    needed: WorkingSet

    @property
    def bytes(self) -> int:
        """That a device must hold."""
        return self.needed.bytes


def begun(branches: list[Branch]) -> list[Branch]:
    """A branch of each configuration that was begun, in the order of what they need at least."""
    found: dict[ParallelConfig, Branch] = {}
    for branch in sorted(branches, key=lambda branch: branch.candidate.peak_bytes):
        if branch.formulated is not None:
            found.setdefault(branch.candidate.config, branch)
    return list(found.values())


def min_memory_plans(
    context: SearchContext, branches: list[Branch], known: Sequence[MinMemoryPlan] = (), until: float = math.inf
) -> list[MinMemoryPlan]:
    """Minimum-memory plans of branches of different configurations, the same whatever the memory limit unless time runs
    short.

    Of each amount of recomputation that is the lightest by the sum, and the fastest of those almost as light: what the
    lightest save, they may lose in reshardings, which the sum leaves out. Most recomputation comes first, and what can
    hardly need as little as the least that is ``known`` or found is left out. Of a step without micro-batches with
    the most recomputation the fastest is solved exactly where none was found yet that needs as little as its sum.
    """
    by_branch = ([(branch, branch.pareto_frontier.steps[step]) for step in _breakpoints(branch)] for branch in branches)
    steps = [each for together in itertools.zip_longest(*by_branch) for each in together if each is not None]
    minimal, seen = [*known], set[object]()
    for branch, recompute in steps:
        if minimal and time.monotonic() > until:
            break
        if not is_worth(context, branch, minimal):
            continue
        config, worth = branch.candidate.config, _worth_bytes(context, minimal)
        space = branch.space.holding(config.in_flight) if config.micro_batched else branch.space
        problem = space.problem(None, recompute)
        is_exact = recompute is branch.pareto_frontier.steps[-1] and not config.micro_batched
        slacks = () if _cannot_fit(context, branch) else SLACKS
        for choices in _light(space, problem, worth, slacks, minimal if is_exact else ()):
            key = config, recompute, choices
            best = Incumbent(branch.space, choices, recompute, evaluate(problem, choices))
            if key not in seen and best.evaluation.peak_bytes <= worth:
                seen.add(key)
                found = _micro_batched(context, branch, best) if config.micro_batched else _without_micro_batches(best)
                minimal += [] if found is None else [found]
    return minimal[len(known) :]


def is_worth(context: SearchContext, branch: Branch, minimal: Sequence[MinMemoryPlan]) -> bool:
    """Whether a plan of a branch may need less memory than all these, or fit.

    With micro-batches nothing is simulated, so that none needs less than what all of the branch's do by the sum.
    """
    worth = _worth_bytes(context, minimal)
    return branch.candidate.peak_bytes <= (worth * LEAST_SHARE if _is_summed(context, branch) else worth)


def _is_summed(context: SearchContext, branch: Branch) -> bool:
    """Whether what plans of a branch need is their sum: with micro-batches, with model data on the device, none is
    followed.
    """
    return branch.candidate.config.micro_batched and context.training.tier == "device"


def _cannot_fit(context: SearchContext, branch: Branch) -> bool:
    """Whether no plan of a branch fits, without following any."""
    return _is_summed(context, branch) and branch.candidate.peak_bytes > context.usable_bytes


def _worth_bytes(context: SearchContext, minimal: Sequence[MinMemoryPlan]) -> float:
    """What needs more than this by the search's sum hardly needs as little as the minimum-memory plan, nor fits."""
    least = min((plan.bytes for plan in minimal), default=math.inf)
    return max(least, context.usable_bytes) / LEAST_SHARE


def _breakpoints(branch: Branch) -> Iterable[int]:
    """Amounts of recomputation, most first; of a micro-batched step the most, since its cut says what is recomputed."""
    return reversed(
        branch.pareto_frontier.breakpoints[-1:]
        if branch.candidate.config.micro_batched
        else branch.pareto_frontier.breakpoints
    )


def _light(
    space: Space, problem: Problem, worth: float, slacks: Sequence[float], minimal: Sequence[MinMemoryPlan]
) -> Iterator[tuple[int, ...]]:
    """Light assignments, if one needs no more than ``worth`` bytes by the sum, and those nearly as light.

    Args:
        minimal: plans found so far, those of earlier assignments too, of which one may need more than the fastest that
            is nearly as light.
    """
    for counting in dict.fromkeys((problem, _with_chunks(space, problem))):
        light = almost_lightest(counting, slacks, worth if counting is problem else math.inf)
        if not light:
            return
        yield from light
        limit_bytes = math.ceil(SLACKS[0] * evaluate(counting, light[0]).peak_bytes)
        if minimal and limit_bytes < min(plan.bytes for plan in minimal):
            choices = solve(replace(counting, limit_bytes=limit_bytes), time_limit_s=EXACT_S).choices
            yield from [choices] if choices else []


def _with_chunks(space: Space, problem: Problem) -> Problem:
    """The problem that counts parameters and gradients that are at home elsewhere as if they stayed.

    The search counts of them what one operator needs; a moment needs those of a block.
    """
    if space.training.tier == "device":
        return problem
    vertices = list(problem.vertices)
    for number, variable in enumerate(space.variables):
        node = space.graph.by_name[space.members[variable][0]] if variable in space.members else None
        if node is not None and node.op == "param":
            layouts = (layout for layout in space.options[variable] if isinstance(layout, tuple))
            sizes = [2 * local_bytes(node.results[0], layout, space.mesh) for layout in layouts]
            vertices[number] = replace(vertices[number], held_bytes=vertices[number].held_bytes + np.array(sizes))
    return replace(problem, vertices=tuple(vertices))


def _without_micro_batches(best: Incumbent) -> MinMemoryPlan:
    assignment = assignment_of(best.space, best.choices, best.recompute)
    return MinMemoryPlan(best, largest_working_set(assignment, usage(assignment)))


def _micro_batched(context: SearchContext, branch: Branch, best: Incumbent) -> MinMemoryPlan | None:
    """The pipeline of the choices that fits, or else the one that recomputes all that can be and waits for what it
    gathers, if there is any.
    """
    links = context.links(best.space, best.choices)
    wanted, usable_bytes = context.pipelines(best.config, len(links)), context.usable_bytes
    found, ways = None, ((links, usable_bytes, THOROUGH), ([link.least_memory for link in links], None, QUICK))
    for chain, limit_bytes, effort in ways[_cannot_fit(context, branch) :]:
        staged = stage(chain, wanted, limit_bytes, effort=effort)
        if staged is not None:
            found = _staged(best, staged if limit_bytes is not None else waiting(staged))
            if found.bytes <= usable_bytes:
                break
    return found


def _staged(best: Incumbent, staged: Staged) -> MinMemoryPlan:
    """The choices as they run micro-batched, and what a device must hold of that."""
    best, space = replace(best, staged=staged, evaluation=staged.evaluation), best.space
    if space.training.tier == "device":
        return MinMemoryPlan(best, WorkingSet("a micro-batched step", 0, staged.peak_bytes))
    decided = assignment_of(space, best.choices, staged.recompute(space.folded))
    return MinMemoryPlan(best, largest_working_set(decided, None, staged))


def fastest_that_fits(minimal: list[MinMemoryPlan], usable_bytes: int) -> Incumbent | None:
    """The fastest of the plans that a device has room for, as simulated."""
    fitting = [
        plan.best for plan in minimal if plan.bytes <= usable_bytes and math.isfinite(plan.best.evaluation.time_s)
    ]
    return min(fitting, key=lambda best: best.evaluation.time_s, default=None)


def bounds_s(branches: list[Branch]) -> dict[ParallelConfig, float]:
    """Seconds that plans of each configuration take at least, however much memory there is."""
    found: dict[ParallelConfig, float] = {}
    for branch in branches:
        config = branch.candidate.config
        if branch.formulated is None:
            found.setdefault(config, branch.candidate.bound_s)
        elif config not in found:
            found[config] = free_s(branch)
    return found


def free_s(branch: Branch) -> float:
    """Seconds that plans of a branch that was begun take at least, whatever memory there is; infinite: none runs."""
    return lower_bounds(branch.space.problem(None, branch.pareto_frontier.steps[0])).time_s
