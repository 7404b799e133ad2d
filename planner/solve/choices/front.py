"""The order of the solving steps: from a problem to an answer with a proven bound."""

from __future__ import annotations

import math
import time

from planner.solve.choices.best import BestFound
from planner.solve.choices.large import search_large
from planner.solve.choices.model import ChoiceModel, build_model, drop_forbidden
from planner.solve.choices.peak import least_peak
from planner.solve.choices.reduce import reduce
from planner.solve.choices.tree import build_tree
from planner.solve.choices.window import MAX_ENTRIES, search
from planner.solve.problem import Answer, Problem, Status, evaluate

_PROVED = 1e-6  # relative gap at which an answer counts as optimal
_MANY = 2_000  # vertices from which on nothing is eliminated whole


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    incumbent: tuple[int, ...] | None = None,
    cutoff_s: float = math.inf,
    interruptible: bool = False,
    least_memory: bool = True,
) -> Answer:
    """The assignment of least ``evaluate(...).time_s`` whose peak fits ``limit_bytes``, with a proven lower bound.

    ``incumbent`` is an assignment to start from. The search ends as soon as nothing faster than ``cutoff_s`` can exist:
    then ``bound_s`` reaches ``cutoff_s`` and the choices are merely feasible. The answer is the same in every process
    unless the time limit cuts the search short. ``infeasible`` is proven when ``bound_s`` is infinite; with a finite
    bound the time limit or the cutoff came before any feasible assignment. The assignment of least peak is looked for
    then, which may take longer than the search, unless ``least_memory`` is false: ``choices`` are empty then.
    ``interruptible`` ends the search at a keyboard interrupt, and looks for nothing more. Raises :class:`AutoparError`
    on malformed problems.
    """
    start = time.monotonic()
    deadline = start + time_limit_s
    problem.check()
    best = BestFound(problem, cutoff_s)
    if incumbent is not None:
        best.offer(incumbent)
    try:
        bound = _search(problem, best, deadline)
    except KeyboardInterrupt:
        if not interruptible:
            raise
        bound, least_memory = best.bound_s, False
    if best.choices is None and not least_memory:
        return Answer((), math.inf, bound, "infeasible", time.monotonic() - start)
    if best.choices is None:
        choices = _least_peak(problem, best, deadline)
        best.offer(choices)
    if best.choices is None:
        objective = evaluate(problem, choices).time_s
        return Answer(choices, objective, bound, "infeasible", time.monotonic() - start)
    bound = min(bound, best.objective_s)
    proved = best.objective_s - bound <= _PROVED * abs(best.objective_s)
    status: Status = "optimal" if proved else "feasible"
    return Answer(best.choices, best.objective_s, bound, status, time.monotonic() - start)


def _search(problem: Problem, best: BestFound, deadline: float) -> float:
    """Improve ``best``; the lower bound proven."""
    model = build_model(problem)
    if _easy(model):
        allowed = drop_forbidden(model)
        return math.inf if allowed is None else search(allowed, best, deadline)
    smaller = reduce(model, deadline)
    if smaller is None:
        return math.inf
    return search(smaller, best, deadline) if _exact(smaller) else search_large(smaller, best, deadline)


def _easy(model: ChoiceModel) -> bool:
    """Whether elimination takes the model as it is, and no moments need to be dropped."""
    return not len(model.rooms) and _exact(model)


def _exact(model: ChoiceModel) -> bool:
    return len(model.sizes) <= _MANY and build_tree(model, MAX_ENTRIES).exact


def _least_peak(problem: Problem, best: BestFound, deadline: float) -> tuple[int, ...]:
    """The choices of least peak, or what came nearest to fitting if the time is up."""
    if best.lightest is not None and time.monotonic() > deadline:
        return best.lightest
    return least_peak(problem, deadline)
