"""The order of the solving steps: from a problem to an answer with a proven bound."""

from __future__ import annotations

import math
import time

from planner.problem import Answer, Problem, Status, evaluate
from planner.solve.best import Best
from planner.solve.model import build_model, drop_forbidden
from planner.solve.peak import least_peak
from planner.solve.window import search

_PROVED = 1e-6  # relative gap at which an answer counts as optimal


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    incumbent: tuple[int, ...] | None = None,
    cutoff_s: float = math.inf,
    leanest: bool = True,
) -> Answer:
    """The assignment of least ``evaluate(...).time_s`` whose peak fits ``limit_bytes``, with a proven lower bound.

    ``incumbent`` is an assignment to start from. The search ends as soon as nothing faster than ``cutoff_s`` can
    exist: then ``bound_s`` reaches ``cutoff_s`` and the choices are merely feasible. The answer is the same in every
    process unless the time limit cuts the search short. ``infeasible`` is proven when ``bound_s`` is infinite; with
    a finite bound the time limit or the cutoff came before any feasible assignment. The assignment of least peak is
    looked for then, which may take longer than the search, unless ``leanest`` is false: ``choices`` are empty then.
    Raises :class:`AutoparError` on malformed
    problems.
    """
    start = time.monotonic()
    deadline = start + time_limit_s
    problem.check()
    best = Best(problem, cutoff_s)
    if incumbent is not None:
        best.offer(incumbent)
    model = drop_forbidden(build_model(problem))
    bound = math.inf if model is None else search(model, best, deadline)
    if best.choices is None and not leanest:
        return Answer((), math.inf, bound, "infeasible", time.monotonic() - start)
    if best.choices is None:
        choices = least_peak(problem, deadline)
        best.offer(choices)
    if best.choices is None:
        objective = evaluate(problem, choices).time_s
        return Answer(choices, objective, bound, "infeasible", time.monotonic() - start)
    bound = min(bound, best.objective_s)
    proved = best.objective_s - bound <= _PROVED * abs(best.objective_s)
    status: Status = "optimal" if proved else "feasible"
    return Answer(best.choices, best.objective_s, bound, status, time.monotonic() - start)
