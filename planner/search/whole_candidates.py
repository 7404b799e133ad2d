"""Bounds and evaluates a candidate of one forward and one backward, more closely each time.

A configuration begins as a :class:`Candidate` of which only arithmetic is known. Each evaluation of it is more
expensive and sharper:

1. ``work``: every decision at its own cheapest, all communication free;
2. ``relaxation``: the whole problem without the memory limit, by a few eliminations (:func:`lower_bounds`);
3. ``search``: the whole problem, as far as it can beat the best plan known.

A branch covers some steps of the Pareto frontier of recomputation
(:class:`planner.formulation.remat.levels.ParetoFrontier`): with the time of the first and the memory of the last it
bounds them all. Where that leaves a better plan possible it is split, first at the breakpoints of the frontier. Between
two of them costs change evenly, and the bounds of both ends at one price of memory hold for all. Where everything fits
at the first step, no other is evaluated: more recomputation would only take more time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace

from planner.formulation.assignment import assignment_of
from planner.formulation.certificate import Decided
from planner.formulation.decisions import DecisionGraph
from planner.search.candidates import Branch, Incumbent, is_reached, target_s
from planner.search.search_context import SearchContext
from planner.solve.choices import Bounds, lightest, lower_bound_between, lower_bounds, solve
from planner.solve.problem import Evaluation, Problem, evaluate, least_bytes, most_bytes

GRACE_S = 1.0
"""What a problem gets of time after the limit, while no plan is known at all."""


def evaluate_whole(
    context: SearchContext, decision_graph: DecisionGraph, branch: Branch, best: Incumbent | None
) -> list[Branch]:
    """Evaluate a branch once more, all that it covers or its parts."""
    if branch.formulated is None:
        return [_at_work(context, decision_graph, branch)]
    if not branch.is_priced:
        branch = _where_memory_counts(context, branch)
        return [(_between if branch.is_even else _relaxed)(context, branch, best)]
    if branch.low < branch.high:
        return _split(branch)
    return [_whole(context, branch, best)]


def _at_work(context: SearchContext, decision_graph: DecisionGraph, branch: Branch) -> Branch:
    """Every decision at its own cheapest, in seconds and in bytes, as if neighbours always agreed."""
    context.say(f"mesh {branch.candidate.config}")
    before = time.monotonic()
    space = context.formulate(decision_graph, branch.candidate.config)
    least, more = branch.amounts
    vertices = space.vertices(context.limit_bytes, least, more)
    bound_s = math.fsum(float(vertex.time_s.min()) for vertex in vertices)
    peak_bytes = least_bytes(Problem(vertices, ()))
    if peak_bytes > context.limit_bytes:
        bound_s = math.inf
    status = "infeasible" if math.isinf(bound_s) else "not tried"
    bound_s = max(bound_s, branch.candidate.bound_s)
    candidate = replace(branch.candidate, status=status, bound_s=bound_s, peak_bytes=peak_bytes, proof="work")
    context.took("build", before)
    return replace(branch, candidate=candidate, formulated=space)


def _where_memory_counts(context: SearchContext, branch: Branch) -> Branch:
    """The branch at its first step alone if everything fits there: more recomputation only takes more time."""
    if branch.low == branch.high:
        return branch
    before = time.monotonic()
    problem = branch.space.problem(context.limit_bytes, branch.pareto_frontier.steps[branch.low])
    context.took("build", before)
    return replace(branch, high=branch.low) if most_bytes(problem) <= context.limit_bytes else branch


def _bounded(context: SearchContext, branch: Branch, best: Incumbent | None) -> tuple[Branch, Bounds]:
    """The branch with the bound of the whole problem, bytes over the limit at a price; what it needs of memory."""
    before = time.monotonic()
    problem = branch.space.problem(context.limit_bytes, *branch.amounts)
    before = context.took("build", before)
    bounds = lower_bounds(problem, math.inf if best is None else target_s(best))
    context.took("solve", before)
    fits = bounds.peak_bytes <= context.limit_bytes
    bound_s = max(branch.candidate.bound_s, bounds.time_s) if fits else math.inf
    return replace(
        branch, candidate=replace(branch.candidate, bound_s=bound_s, proof="relaxation"), is_priced=True
    ), bounds


def _relaxed(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """The whole problem, memory aside, and plans of what solves it."""
    known = branch.candidate.peak_bytes
    branch, bounds = _bounded(context, branch, best)
    fits = math.isfinite(branch.candidate.bound_s)
    peak_bytes = math.ceil(bounds.peak_bytes) if math.isfinite(bounds.peak_bytes) else known
    status = "not tried" if fits else "infeasible"
    branch = replace(branch, candidate=replace(branch.candidate, status=status, peak_bytes=peak_bytes))
    branch = _with_plan(context, branch, bounds.choices)
    if branch.choices or not fits:
        return branch
    light = bounds.lightest or lightest(branch.space.problem(context.limit_bytes, *branch.amounts))
    return _with_plan(context, branch, light)


def _between(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """The whole problem, with memory at a price, at both ends of steps between which costs change evenly."""
    before = time.monotonic()
    first, last = (
        branch.space.problem(context.limit_bytes, branch.pareto_frontier.steps[step])
        for step in (branch.low, branch.high)
    )
    before = context.took("build", before)
    found = lower_bound_between(first, last, math.inf if best is None else target_s(best))
    context.took("solve", before)
    bound_s = max(branch.candidate.bound_s, found.time_s)
    status = "infeasible" if math.isinf(bound_s) else "not tried"
    candidate = replace(branch.candidate, status=status, bound_s=bound_s, proof="relaxation")
    branch = replace(branch, candidate=candidate, is_priced=True)
    for choices in found.choices:
        branch = _with_plan(context, branch, choices)
    return branch


def _whole(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """The problem of one amount, solved as far as it can beat the best plan."""
    before = time.monotonic()
    problem = branch.space.problem(context.limit_bytes, branch.pareto_frontier.steps[branch.low])
    answer = solve(
        problem,
        time_limit_s=max(GRACE_S if best is None else 0.0, context.deadline - before),
        incumbent=branch.choices,
        cutoff_s=math.inf if best is None else target_s(best),
        least_memory=False,
    )
    context.took("solve", before)
    bound_s = max(branch.candidate.bound_s, answer.bound_s)
    branch = _with_plan(context, branch, answer.choices or None)
    if answer.status == "optimal":
        status = "optimal"
    elif math.isinf(bound_s):
        status = "infeasible"
    else:
        status = "pruned" if is_reached(bound_s, best) else "feasible" if branch.choices else "not tried"
    return replace(branch, candidate=replace(branch.candidate, status=status, bound_s=bound_s, proof="search"))


def _split(branch: Branch) -> list[Branch]:
    """The same steps in parts.

    Where a plan fits without more recomputation, its step and all others; else at the breakpoints around the plan that
    is known, or in the middle, since what is far from the best plan is often pruned together; between breakpoints
    before, at and after the plan, or in halves.
    """
    step = branch.step if branch.choices is not None else -1
    if step == branch.low:
        cuts = [step, step + 1]
    elif branch.breakpoints:
        near = _around(branch.breakpoints, step) if step >= 0 else [branch.breakpoints[len(branch.breakpoints) // 2]]
        cuts = [branch.low, *(cut for end in near for cut in (end, end + 1))]
    else:
        middle = step if branch.low < step < branch.high else (branch.low + branch.high) // 2
        cuts = [branch.low, *([middle] if middle == step else []), middle + 1]
    nothing = replace(branch.candidate, status="not tried", objective_s=math.inf)
    found = []
    for low, end in itertools.pairwise(sorted({*cuts, branch.high + 1})):
        part = replace(branch, low=low, high=end - 1, is_priced=False)
        if low <= step < end:
            found.append(part)
        else:
            found.append(replace(part, candidate=nothing, choices=None, evaluation=None))
    return found


def _around(breakpoints: list[int], step: int) -> list[int]:
    """The last breakpoint up to a step, and the first from it on."""
    return [*[each for each in breakpoints if each <= step][-1:], *[each for each in breakpoints if each >= step][:1]]


def _with_plan(context: SearchContext, branch: Branch, choices: tuple[int, ...] | None) -> Branch:
    """The branch with these choices as its plan, if they fit with some of its recomputation and are faster."""
    if choices is None:
        return branch
    decided = Decided(assignment_of(branch.space, choices), branch.space.decision_graph)
    known: dict[int, Evaluation] = {}

    def priced(step: int) -> Evaluation:
        if step not in known:
            problem = decided.problem(context.limit_bytes, branch.pareto_frontier.steps[step])
            known[step] = evaluate(problem, (0,) * len(choices))
        return known[step]

    step = _first_that_fits(priced, [branch.low, *branch.breakpoints, branch.high], context.limit_bytes)
    if step is None or priced(step).time_s >= branch.candidate.objective_s:
        return branch
    found = priced(step)
    return replace(branch, candidate=branch.candidate.costing(found), choices=choices, step=step, evaluation=found)


def _first_that_fits(priced: Callable[[int], Evaluation], breakpoints: list[int], limit_bytes: int) -> int | None:
    """The first step at which an assignment fits; between breakpoints its peak changes evenly."""
    for low, high in itertools.pairwise((breakpoints[0], *breakpoints)):
        before, after = priced(low), priced(high)
        if before.feasible:
            return low
        if after.feasible:
            share = (before.peak_bytes - limit_bytes) / (before.peak_bytes - after.peak_bytes)
            step = min(high, low + math.ceil(share * (high - low)))
            return step if priced(step).feasible else high
    return None
