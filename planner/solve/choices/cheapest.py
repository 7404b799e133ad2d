"""Turn a model and one weight per cost column into a lower bound and an assignment, by small tables where they do.

Elimination with small tables is no longer exact, but its bound often is: then an assignment reaches it. Where none
does, choices that cost more than the assignment found cannot be part of a cheapest one, and what is left is eliminated
with tables as large as they need to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.solve.choices.eliminate import Elimination, choice_bounds, decode, eliminate
from planner.solve.choices.model import ChoiceModel, Totals, Weights, drop_forbidden, restrict, total
from planner.solve.choices.tree import build_tree
from planner.solve.choices.window import MAX_ENTRIES
from planner.solve.problem import Ints

_FEW_ENTRIES = 100_000  # of a small table
_REACHED = 1e-9  # relative distance at which a bound counts as reached


@dataclass(frozen=True, eq=False)
class LeastWeighted:
    """No assignment's weighted cost is below ``bound``; ``assignment``, of this part of the model, comes near it."""

    bound: float
    model: ChoiceModel
    assignment: Ints

    @property
    def totals(self) -> Totals:
        """What the assignment costs."""
        return total(self.model, self.assignment)

    @property
    def choices(self) -> tuple[int, ...]:
        """The assignment in the problem's choices."""
        return self.model.choices(self.assignment)


class Cheapest:
    """Cheapest assignments of a model, under one set of weights after another."""

    def __init__(self, model: ChoiceModel):
        self._model = model
        self._tree = build_tree(model, _FEW_ENTRIES)

    def under(self, weights: Weights) -> LeastWeighted:
        """The least weighted sum."""
        done = eliminate(self._model, self._tree, weights)
        assignment = decode(done)
        cost = _cost(done, assignment)
        if self._tree.exact or (cost < math.inf and cost - done.bound <= _REACHED * abs(cost)):
            return LeastWeighted(done.bound, self._model, assignment)
        left = self._model if math.isinf(cost) else self._below(done, cost)
        exact = eliminate(left, build_tree(left, MAX_ENTRIES), weights)
        return LeastWeighted(exact.bound, left, decode(exact))

    @cached_property
    def least_memory(self) -> LeastWeighted:
        """The assignment that holds least."""
        return self.under(Weights(np.array([0.0, 0.0, 1.0, 1.0]), 0.0, np.zeros(len(self._model.rooms))))

    def _below(self, done: Elimination, cost: float) -> ChoiceModel:
        """The model without choices that cost more, by more than rounding."""
        tables = (*done.singles, *done.pairs.values())
        largest = max(
            float(np.abs(table, where=np.isfinite(table), out=np.zeros(table.shape)).max()) for table in tables
        )
        most = cost + _REACHED * max(abs(cost), largest)
        left = restrict(self._model, [bounds <= most for bounds in choice_bounds(done)])
        assert left is not None, "the assignment that was found costs no more than itself"
        return left


def low_peak(model: ChoiceModel, least_memory: Callable[[ChoiceModel], LeastWeighted]) -> LeastWeighted | None:
    """An assignment of low peak, of least peak where ``least_memory`` finds what holds least; ``None`` if none is
    allowed.

    The least held bytes under a cap on the transients bound every peak under that cap: a few caps suffice.
    """
    found: LeastWeighted | None = None
    least_bytes = math.inf
    capped: ChoiceModel | None = model
    while capped is not None:
        least = least_memory(capped)
        totals = least.totals
        if not totals.allowed:
            break
        if totals.peak_bytes < least_bytes:
            found, least_bytes = least, totals.peak_bytes
        # Only smaller transients than these can still give a smaller peak.
        cap = min(totals.transient_bytes, least_bytes - least.bound)
        kept = restrict(capped, [values < cap for values in capped.transient])
        capped = None if kept is None else drop_forbidden(kept)
    return found


def _cost(done: Elimination, assignment: Ints) -> float:
    """The weighted cost of an assignment."""
    singles = [costs[c] for costs, c in zip(done.singles, assignment, strict=True)]
    pairs = [costs[assignment[tail], assignment[head]] for (tail, head), costs in done.pairs.items()]
    return math.fsum(map(float, (*singles, *pairs)))
