"""The best assignment so far, judged by :func:`planner.solve.problem.evaluate` and nothing else."""

from __future__ import annotations

import math

from planner.solve.choices.model import ChoiceModel, total
from planner.solve.problem import Ints, Problem, evaluate

_TIE = 1e-9  # relative; an assignment must be better by this much to be looked for


class BestFound:
    """Keeps the cheapest feasible assignment that it is offered; nothing above ``cutoff_s`` is worth looking for.

    ``lightest`` is what came nearest to fitting, while nothing fitted; ``bound_s`` is proven so far.
    """

    def __init__(self, problem: Problem, cutoff_s: float) -> None:
        self._problem = problem
        self._cutoff_s = cutoff_s
        self._least_excess = math.inf
        self.aim_s = math.inf
        self.lightest: tuple[int, ...] | None = None
        self.bound_s = -math.inf
        self._found: tuple[tuple[int, ...] | None, float] = None, math.inf  # one value: an interrupt parts nothing

    @property
    def choices(self) -> tuple[int, ...] | None:
        """The problem's assignment, if one was found."""
        return self._found[0]

    @property
    def objective_s(self) -> float:
        """What it takes."""
        return self._found[1]

    @property
    def target_s(self) -> float:
        """Only assignments below this time are looked for: better than the best, and within the search's own aim."""
        return min(self.useful_s, self.aim_s)

    @property
    def useful_s(self) -> float:
        """Only assignments below this time are of any use."""
        least = min(self.objective_s, self._cutoff_s)
        return least - _TIE * abs(least) if math.isfinite(least) else least

    def prove(self, bound_s: float) -> None:
        """No useful assignment is faster than this."""
        self.bound_s = max(self.bound_s, bound_s)

    def offer(self, choices: tuple[int, ...]) -> None:
        """Keep the problem's assignment if it is feasible and better."""
        found = evaluate(self._problem, choices)
        if found.feasible and found.time_s < self.objective_s:
            self._found = choices, found.time_s

    def offer_assignment(self, model: ChoiceModel, assignment: Ints) -> None:
        """Keep a model's assignment if it is feasible and better."""
        totals = total(model, assignment)
        excess = totals.excess_bytes(model) if totals.allowed else math.inf
        if excess <= 0.0 and totals.objective_s < self.objective_s:
            self.offer(model.choices(assignment))
        elif self.choices is None and excess < self._least_excess:
            self.lightest, self._least_excess = model.choices(assignment), excess
