"""Turn a model that elimination cannot take whole into a good assignment and a proven bound, and shrink it on the way.

Cycles of: better prices of bytes, with bounds by message passing; a better assignment, region by region; and fewer
choices, as those go that the bound shows to be of no use. What is small enough in the end is solved exactly.
"""

from __future__ import annotations

import math
import time

import numpy as np

from planner.solve.choices.best import BestFound
from planner.solve.choices.messages import Messages, Near
from planner.solve.choices.model import HALF_BYTE, ChoiceModel, Mask, Weights, at, restrict, total
from planner.solve.choices.neighbourhood import Neighbourhood
from planner.solve.choices.reduce import reduce
from planner.solve.choices.relax import Multipliers, TrustRegion, plane
from planner.solve.problem import Floats, Ints

_STEPS = 40  # of the prices in one cycle: regions are worth solving only under good ones
_SWEEPS = 3  # of messages at each step
_MORE = 10  # times as many sweeps at the best prices, before choices are dropped
_CLOSED = 1e-3  # part of the gap that these must close each time if more are worth while
_ROUNDS = 10  # over all vertices in one cycle, at most, to find what fits
_REGION = 100  # vertices
_PROGRESS = 0.01  # part of the gap that a cycle must close if another is worth while
_SHRUNK = 0.9  # start again once at most this part of the choices is left
_MAX_PAIRS = 200_000  # allowed in a mixed-integer program
_SHARE = 0.4  # of the time left that a cycle's prices may take


def search_large(model: ChoiceModel, best: BestFound, deadline: float) -> float:
    """Improve ``best`` until nothing useful is left, cycles stop helping, or ``deadline``; the lower bound proven."""
    start = np.zeros(len(model.sizes), dtype=np.int64) if best.choices is None else model.assignment(best.choices)
    stage = _Stage(model, best, Multipliers(), start)
    while True:
        gap = best.target_s - stage.bound
        stage.price(deadline)
        stage.improve(deadline)
        keep = stage.useful(deadline)
        if keep is None:
            return best.target_s
        if time.monotonic() > deadline:
            return stage.bound
        if sum(int(mask.sum()) for mask in keep) <= _SHRUNK * sum(stage.model.sizes):
            kept = restrict(stage.model, keep)
            smaller = None if kept is None else reduce(kept, deadline)
            if smaller is None:
                return best.target_s
            stage = stage.on(smaller)
            continue
        after = best.target_s - stage.bound
        if after < math.inf and after <= (1.0 - _PROGRESS) * gap:
            continue
        if stage.small(keep):
            proven = stage.close(keep, deadline)
            if proven >= best.target_s or best.target_s - proven >= after:
                return proven
        elif best.choices is not None:
            return stage.bound


class _Stage:
    """A model with its best prices so far, messages, and an assignment under improvement."""

    def __init__(self, model: ChoiceModel, best: BestFound, multipliers: Multipliers, assignment: Ints) -> None:
        self.model, self.bound = model, -math.inf
        self._best, self._multipliers = best, multipliers
        self._box = TrustRegion(model, [], model.limit_bytes)
        self._neighbourhood = Neighbourhood(model, assignment)
        self._passing: tuple[Near, Messages] | None = None

    def on(self, smaller: ChoiceModel) -> _Stage:
        """The same for a smaller model."""
        known = self._best.choices or self.model.choices(self._neighbourhood.assignment)
        multipliers = self._multipliers.moved(self.model, smaller)
        stage = _Stage(smaller, self._best, multipliers, smaller.assignment(known))
        stage.bound, stage._box = self.bound, self._box.moved(self.model, smaller)
        return stage

    def price(self, deadline: float) -> None:
        """Look for better multipliers, at most for a part of the time left."""
        now = time.monotonic()
        late = now + _SHARE * max(0.0, deadline - now)
        trial = self._multipliers
        self._box.renew()
        for _ in range(_STEPS):
            bound, singles = self._evaluate(trial, _SWEEPS)
            self._box.judge(trial, bound)
            if bound >= self._best.target_s or time.monotonic() > late:
                return
            assignment = self._messages(trial.weights(self.model)).decode(singles)
            self._learn(assignment)
            if not self._box.planes:
                continue
            trial, _ = self._box.highest()

    def improve(self, deadline: float) -> None:
        """Look for a better assignment: freely from what good prices say, then strictly from the better.

        Good prices are those of the best bound, and then those that the assignment found under them suggests.
        """
        for multipliers in (self._multipliers, None):
            chosen = multipliers or self._box.highest()[0]
            weights = chosen.weights(self.model)
            _, singles = self._evaluate(chosen, _SWEEPS)
            trial = Neighbourhood(self.model, self._messages(weights).decode(singles))
            trial.improve_freely(weights, _REGION, 1, deadline)
            self._learn(trial.assignment)
        trial.improve_freely(weights, _REGION, _ROUNDS, deadline)
        self._learn(trial.assignment)
        known = self._neighbourhood
        if not known.fits or (trial.fits and trial.objective_s < known.objective_s):
            self._neighbourhood = trial
        if self._neighbourhood.fits:
            self._neighbourhood.improve_strictly(weights, _REGION, deadline)
            self._learn(self._neighbourhood.assignment)

    def useful(self, deadline: float) -> list[Mask] | None:
        """Choices that some assignment below the target may have; None when there is no such assignment."""
        bound, singles = self._evaluate(self._multipliers, _SWEEPS)
        for _ in range(_MORE):
            before = self.bound
            bound, singles = self._evaluate(self._multipliers, _SWEEPS)
            gap = self._best.target_s - self.bound
            if self.bound - before <= _CLOSED * gap or gap <= 0.0 or time.monotonic() > deadline:
                break
        excess = self._messages(self._multipliers.weights(self.model)).choice_excess(singles)
        keep = [bound + more < self._best.target_s for more in excess]
        return keep if self.bound < self._best.target_s and all(mask.any() for mask in keep) else None

    def small(self, keep: list[Mask]) -> bool:
        """Whether what is left is small enough for a mixed-integer program."""
        model = restrict(self.model, keep)
        return model is None or model.pairs_allowed <= _MAX_PAIRS

    def close(self, keep: list[Mask], deadline: float) -> float:
        """Solve what is left exactly; the lower bound proven."""
        from planner.solve.choices.mip import solve_mip  # imports a solver, which most problems do not need

        model = restrict(self.model, keep)
        if model is None:
            return self._best.target_s
        # Few moments matter in the end: begin with those that did so far, and add what is missed.
        moments = set(self._box.moments)
        while time.monotonic() < deadline:
            outcome = solve_mip(at(model, moments), 0.0, self._best.target_s, deadline - time.monotonic())
            self.bound = max(self.bound, outcome.bound)
            self._best.prove(self.bound)
            if outcome.assignment is None:
                break
            totals = total(model, outcome.assignment)
            over = totals.held_bytes + totals.span_bytes - model.rooms
            self._best.offer_assignment(model, outcome.assignment)
            if not len(over) or over.max() <= HALF_BYTE:
                break
            moments.add(int(over.argmax()))
        return self.bound

    def _evaluate(self, trial: Multipliers, sweeps: int) -> tuple[float, list[Floats]]:
        """The bound after a few sweeps under these multipliers, and the weighted single costs."""
        weights = trial.weights(self.model)
        singles = weights.singles(self.model)
        messages = self._messages(weights)
        for _ in range(sweeps):
            least = messages.sweep(singles)
        bound = least - float(weights.prices @ self.model.rooms) - weights.price * self.model.limit_bytes
        if bound > self.bound:
            self.bound, self._multipliers = bound, trial
            self._best.prove(bound)
        return bound, singles

    def _messages(self, weights: Weights) -> Messages:
        near = self._neighbourhood.near(weights.columns)
        if self._passing is None or self._passing[0] is not near:
            self._passing = near, Messages(self.model.sizes, near)
        return self._passing[1]

    def _learn(self, assignment: Ints) -> None:
        """Offer an assignment as an answer, and bound the prices by it."""
        totals = total(self.model, assignment)
        if totals.allowed:
            self._box.add(plane(self.model, totals, self.model.limit_bytes))
            self._best.offer_assignment(self.model, assignment)
