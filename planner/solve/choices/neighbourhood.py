"""Turn an assignment of a model into a better one that fits, region by region.

Two ways take turns. Freely: every region takes what is best under the prices of bytes, and a moment that stays over
its room becomes dearer, until the whole fits. Strictly: from an assignment that fits, a region's new choices are taken
only if the whole still fits and is faster; prices then merely guide what is tried.
"""

from __future__ import annotations

import math
import random
import time

import numpy as np

from planner.solve.choices.messages import Near, weigh_pairs
from planner.solve.choices.model import EXPOSED, HALF_BYTE, HELD, TIME, WALL, ChoiceModel, Weights
from planner.solve.choices.regions import grow, solve_region
from planner.solve.problem import Floats, Ints

_LOOKS = 40  # at what is over its room, in one round over all vertices
_DEARER = 0.02  # part of all prices by which the worst moment's rises then; more overshoots
_GUIDES = (0.0, 0.5, 1.0, 2.0)  # times the prices, tried in turn: spare room is worth less than the prices say


class Neighbourhood:
    """An assignment under improvement: ``assignment``, its cost columns' sums, and the bytes over the limits."""

    def __init__(self, model: ChoiceModel, assignment: Ints) -> None:
        self._model = model
        self._chance = random.Random(0)
        self._columns: list[dict[int, Floats]] = [{} for _ in model.sizes]
        for (tail, head), costs in model.pairs.items():
            self._columns[tail][head], self._columns[head][tail] = costs, costs.transpose(1, 0, 2)
        tables = {id(costs): costs for costs in model.pairs.values()}.values()
        self._alike = all((t[..., TIME] == t[..., EXPOSED]).all() and not t[..., HELD].any() for t in tables)
        self._weighed: tuple[Floats, Near] | None = None
        self.assignment = assignment.copy()
        self._transient = np.array([values[c] for values, c in zip(model.transient, assignment, strict=True)])
        self._alive = model.flat.alive(assignment)
        self._sums = np.zeros(3)
        self._walls = 0
        for v, c in enumerate(assignment):
            self._count(model.singles[v][c], 1)
        for (tail, head), costs in model.pairs.items():
            self._count(costs[assignment[tail], assignment[head]], 1)

    @property
    def objective_s(self) -> float:
        """Step time; infinite while something forbidden is chosen."""
        return math.inf if self._walls else float(max(self._sums[TIME], self._sums[EXPOSED]))

    @property
    def excess_bytes(self) -> Floats:
        """Bytes over the limit, and over each moment's room."""
        return self._excess(float(self._sums[HELD]), self._transient, self._alive)

    @property
    def fits(self) -> bool:
        """Whether the assignment is allowed and within all limits."""
        return self._walls == 0 and bool((self.excess_bytes <= HALF_BYTE).all())

    def near(self, columns: Floats) -> Near:
        """The pairs, weighted."""
        if self._weighed is None or not (self._alike or np.array_equal(self._weighed[0], columns)):
            self._weighed = columns, weigh_pairs(self._model, columns)
        return self._weighed[1]

    def improve_freely(self, weights: Weights, size: int, rounds: int, deadline: float) -> None:
        """Go over all vertices, at most ``rounds`` times, until the assignment fits and a round is complete."""
        for _ in range(rounds):
            singles, near = weights.singles(self._model), self.near(weights.columns)
            regions = self._regions(near, size)
            patience = max(1, len(regions) // _LOOKS)
            for number, region in enumerate(regions, 1):
                if time.monotonic() > deadline:
                    return
                self._take(solve_region(near, singles, region, self.assignment))
                if number % patience == 0 and not self.fits:
                    weights = self._dearer(weights)
                    singles, near = weights.singles(self._model), self.near(weights.columns)
            if self.fits:
                return

    def improve_strictly(self, weights: Weights, size: int, deadline: float) -> None:
        """Go over all vertices once, taking only what fits and is faster; the assignment must fit."""
        guides = [weights.scaled(part) for part in _GUIDES]
        singles = [guide.singles(self._model) for guide in guides]
        for number, region in enumerate(self._regions(self.near(weights.columns), size)):
            if time.monotonic() > deadline:
                return
            micro_batch = number % len(guides)
            near = self.near(guides[micro_batch].columns)
            self._take(solve_region(near, singles[micro_batch], region, self.assignment), strictly=True)

    def _regions(self, near: Near, size: int) -> list[list[int]]:
        """Regions that cover all vertices."""
        seeds = list(range(len(near)))
        self._chance.shuffle(seeds)
        covered: set[int] = set()
        regions = []
        for seed in seeds:
            if seed not in covered:
                regions.append(grow(near, seed, size, self._chance))
                covered.update(regions[-1])
        return regions

    def _dearer(self, weights: Weights) -> Weights:
        """The weights with a higher price where the most bytes are over."""
        excess = self.excess_bytes
        worst = int(excess.argmax())
        if excess[worst] <= HALF_BYTE:
            return weights
        whole = weights.columns[HELD] or abs(self._sums[TIME]) / max(1.0, float(np.abs(excess).max()))
        return weights.raised(worst - 1, _DEARER * whole)

    def _excess(self, held: float, transient: Floats, alive: Floats) -> Floats:
        over = held + transient.max(initial=0.0) - self._model.limit_bytes
        return np.concatenate([[over], held + alive - self._model.rooms])

    def _count(self, row: Floats, times: int) -> None:
        if math.isinf(row[WALL]):
            self._walls += times
        else:
            self._sums += times * row[:WALL]

    def _take(self, chosen: dict[int, int], strictly: bool = False) -> None:
        """Take new choices; strictly: only if the assignment then fits and is faster."""
        model, before = self._model, self.assignment
        changed = {v: c for v, c in chosen.items() if c != before[v]}
        if not changed:
            return
        kept = self._sums.copy(), self._walls, self.objective_s
        alive, transient = np.zeros(len(model.rooms) + 1), self._transient.copy()
        for v, c in changed.items():
            self._count(model.singles[v][before[v]], -1)
            self._count(model.singles[v][c], 1)
            transient[v] = model.transient[v][c]
            for span in model.spans[v]:
                more = span.bytes[c] - span.bytes[before[v]]
                alive[span.first] += more
                alive[span.last] -= more
            for u, costs in self._columns[v].items():
                if u not in changed or v < u:
                    self._count(costs[before[v], before[u]], -1)
                    self._count(costs[c, changed.get(u, before[u])], 1)
        alive = self._alive + np.cumsum(alive)[:-1]
        if strictly:
            fits = (self._excess(float(self._sums[HELD]), transient, alive) <= HALF_BYTE).all()
            if not fits or self.objective_s >= kept[2]:
                self._sums, self._walls = kept[0], kept[1]
                return
        self._alive, self._transient = alive, transient
        for v, c in changed.items():
            before[v] = c
