"""The order of the solving steps: from a problem to an answer with a proven bound."""

from __future__ import annotations

import math
import time

from planner.errors import AutoparError
from planner.problem import Answer, Problem, Status, evaluate
from planner.solve.exact import minimise_exactly
from planner.solve.model import build_model, drop_forbidden

_PROVED = 1e-6  # relative gap at which an answer counts as optimal


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    incumbent: tuple[int, ...] | None = None,
    cutoff_s: float = math.inf,
) -> Answer:
    """The assignment of least ``evaluate(...).time_s`` whose peak fits ``limit_bytes``."""
    start = time.monotonic()
    problem.check()
    model = drop_forbidden(build_model(problem))
    if model is None:
        raise AutoparError("every assignment contains a forbidden choice or pair; look for infinite costs")
    outcome = minimise_exactly(model, "time", None, time_limit_s)
    if outcome.assignment is None:
        outcome = minimise_exactly(model, "peak", None, time_limit_s)
        if outcome.assignment is None:
            raise AutoparError("every assignment contains a forbidden pair; look for infinite costs")
        choices = model.choices(outcome.assignment)
        return Answer(choices, evaluate(problem, choices).time_s, math.inf, "infeasible", time.monotonic() - start)
    choices = model.choices(outcome.assignment)
    objective = evaluate(problem, choices).time_s
    bound = min(outcome.bound, objective)
    status: Status = "optimal" if objective - bound <= _PROVED * abs(objective) else "feasible"
    return Answer(choices, objective, bound, status, time.monotonic() - start)
