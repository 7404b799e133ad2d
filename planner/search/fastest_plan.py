"""The fastest plan that fits, or where a search met none, the minimum-memory plans: one of these may.

A search looks for the fastest; where memory is so short that it met nothing that fits, what needs least is looked for
itself, and tells what is lacking if it does not fit either.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from planner.analysis.memory import usage
from planner.analysis.offload.step_timing import WorkingSet, largest_working_set
from planner.analysis.pipeline.staged import THOROUGH, stage, waiting
from planner.formulation.assignment import assignment_of
from planner.formulation.decisions import DecisionGraph
from planner.formulation.search_space import Space
from planner.search.branch_and_bound import NothingFits, ParallelConfigs, Searched, branch_and_bound, completed
from planner.search.candidates import Branch, Candidate, Incumbent
from planner.search.infeasibility import MinMemoryPlan, check_micro_batches, free_s, nothing_fits
from planner.search.parallel_config import ParallelConfig
from planner.search.pipeline_refinement import refined
from planner.search.search_context import SearchContext
from planner.solve.choices import almost_lightest, corners

LONGEST_S = 10.0
"""How long plans that need little are sought when nothing fits; the least found is told."""
SLACKS = (1.02, 1.05, 1.15)
"""What counts at most so many times the least sum of bytes is almost as light."""


def fastest(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, known: Incumbent | None = None
) -> Searched:
    """The fastest plan that fits; ``known`` if none is faster.

    Raises:
        PinError: there are no plans at all, whatever they need.
        InfeasibleError: none fits.
    """
    found = branch_and_bound(context, decision_graph, configs, known)
    return found.followed() if isinstance(found, Searched) else _of_minimum_memory(context, decision_graph, found)


def _of_minimum_memory(context: SearchContext, decision_graph: DecisionGraph, nothing: NothingFits) -> Searched:
    """Of the minimum-memory plans the fastest that fits."""
    begun = _begun(nothing.folded)
    check_micro_batches(context.formulate(decision_graph, each.config) for each in begun)
    least = min_memory_plans(context, decision_graph, begun)
    fitting = [plan.best for plan in least if plan.bytes <= context.usable_bytes]
    if not fitting:
        raise nothing_fits(context, decision_graph.graph, nothing.branches, least)
    best = refined(context, min(fitting, key=lambda each: each.evaluation.time_s), {})
    bounds = {each.config: each.bound_s for each in nothing.rows}
    bounds |= {each.config: free_s(context.formulate(decision_graph, each.config)) for each in begun}
    row = Candidate(best.config, "feasible", math.inf, bounds[best.config], 0)
    others = (each for each in nothing.rows if each.config != best.config)
    return completed(context, best, [row.costing(best.evaluation), *others], bounds.values()).followed()


def _begun(branches: list[Branch]) -> list[Candidate]:
    """Each configuration that was bounded by itself, in the order of what they need at least."""
    found: dict[ParallelConfig, Candidate] = {}
    for branch in sorted(branches, key=lambda branch: branch.candidate.peak_bytes):
        if branch.is_by_itself:
            found.setdefault(branch.candidate.config, branch.candidate)
    return list(found.values())


def min_memory_plans(
    context: SearchContext, decision_graph: DecisionGraph, candidates: list[Candidate]
) -> list[MinMemoryPlan]:
    """Plans that need little memory, of different configurations, as far as there is time; those that cannot need as
    little as one found, nor fit, are left out.
    """
    until = min(context.deadline, time.monotonic() + LONGEST_S)
    found: list[MinMemoryPlan] = []
    for each in candidates:
        if found and time.monotonic() > until:
            break
        worth = max(min((plan.bytes for plan in found), default=2**63), context.usable_bytes)
        if each.peak_bytes <= worth:
            found += _plans_of(context, each.config, context.formulate(decision_graph, each.config))
    return found


def _plans_of(context: SearchContext, config: ParallelConfig, whole: Space) -> Iterator[MinMemoryPlan]:
    """Of one configuration: with the least sum of bytes, and nearly so, since what such choices save they may lose in
    reshardings; saving what fits, or else as little as can be.
    """
    limit_bytes, space = context.limit_bytes, whole.holding(config.in_flight)
    problem = space.problem(None, context.levels.ends(space.folded)[1])
    for choices in dict.fromkeys((*almost_lightest(problem, SLACKS, math.inf), *corners(problem))):
        links = context.links(whole, choices)
        wanted = context.pipelines(config, len(links))
        staged = stage(links, wanted, limit_bytes, effort=THOROUGH)
        if staged is None:
            staged = stage([link.least_memory for link in links], wanted, None)
            staged = waiting(staged) if staged is not None and config.micro_batched else staged
        if staged is not None:
            yield _needing(context, Incumbent(whole, choices, staged))


def _needing(context: SearchContext, best: Incumbent) -> MinMemoryPlan:
    """A plan with what a device must hold of it."""
    space, staged = best.space, best.staged
    if context.training.tier == "device":
        return MinMemoryPlan(best, WorkingSet("a step", 0, staged.peak_bytes))
    decided = assignment_of(space, best.choices, staged.recompute(space.folded))
    if best.config.micro_batched:
        return MinMemoryPlan(best, largest_working_set(decided, None, staged))
    return MinMemoryPlan(best, largest_working_set(decided, usage(decided)))
