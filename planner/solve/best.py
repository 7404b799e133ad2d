"""The best assignment so far, judged by :func:`planner.problem.evaluate` and nothing else."""

from __future__ import annotations

import math

from planner.problem import Ints, Problem, evaluate
from planner.solve.model import Model, total

_TIE = 1e-9  # relative; an assignment must be better by this much to be looked for


class Best:
    """Keeps the cheapest feasible assignment that it is offered; nothing above ``cutoff_s`` is worth looking for."""

    def __init__(self, problem: Problem, cutoff_s: float) -> None:
        self._problem = problem
        self._cutoff_s = cutoff_s
        self.aim_s = math.inf
        self.choices: tuple[int, ...] | None = None
        self.objective_s = math.inf

    @property
    def target_s(self) -> float:
        """Only assignments below this time are looked for: better than the best, and within the search's own aim."""
        return min(self.useful_s, self.aim_s)

    @property
    def useful_s(self) -> float:
        """Only assignments below this time are of any use."""
        least = min(self.objective_s, self._cutoff_s)
        return least - _TIE * abs(least) if math.isfinite(least) else least

    def offer(self, choices: tuple[int, ...]) -> None:
        """Keep the problem's assignment if it is feasible and better."""
        found = evaluate(self._problem, choices)
        if found.feasible and found.time_s < self.objective_s:
            self.choices, self.objective_s = choices, found.time_s

    def offer_assignment(self, model: Model, assignment: Ints) -> None:
        """Keep a model's assignment if it is feasible and better."""
        if total(model, assignment).objective_s < self.objective_s:
            self.offer(model.choices(assignment))
