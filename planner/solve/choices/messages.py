"""Turn a model whose elimination would be too large into a lower bound and an assignment, by passing messages.

Along a fixed order every vertex hands an equal share of its cost to its later neighbours, and on the way back to its
earlier ones, each as the least that a pair costs per choice of the neighbour: sequential tree-reweighted message
passing (Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006). The bound never
falls from one sweep to the next while the costs stay; where the graph is a tree two sweeps make it exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.solve.choices.model import ChoiceModel
from planner.solve.problem import Floats, Ints

Near = Sequence[dict[int, Floats]]


def weigh_pairs(model: ChoiceModel, columns: Floats) -> Near:
    """Per vertex and neighbour the pair's weighted costs, axes (choices of the vertex, choices of the neighbour)."""
    weighted: dict[int, Floats] = {}  # pairs often share their costs
    near: list[dict[int, Floats]] = [{} for _ in model.sizes]
    for (tail, head), costs in model.pairs.items():
        if id(costs) not in weighted:
            weighted[id(costs)] = costs @ columns
        near[tail][head], near[head][tail] = weighted[id(costs)], weighted[id(costs)].T
    return near


@dataclass(frozen=True, eq=False)
class _Side:
    """One vertex's pairs with its earlier, or its later, neighbours.

    ``costs`` puts the pairs' costs side by side: (choices, sum of the neighbours' choices). ``to`` is where each
    message entry goes, ``pair`` which pair a column is of, ``starts`` where a pair's columns start.
    """

    neighbours: Ints
    costs: Floats
    to: Ints
    pair: Ints
    starts: Ints


@dataclass(frozen=True, eq=False)
class _Stop:
    """A vertex on the way: what it receives, one row per neighbour, earlier ones first, and its pairs."""

    received: Floats
    share: float
    before: _Side
    after: _Side


class Messages:
    """The messages along weighted pairs between vertices of ``sizes``; they stay good when single costs change."""

    def __init__(self, sizes: Sequence[int], near: Near) -> None:
        self._near = near
        ordered = [sorted(of) for of in near]
        begin, place = 0, {}
        for v, neighbours in enumerate(ordered):
            for u in neighbours:
                place[u, v] = begin
                begin += sizes[v]
        self._flat = np.zeros(begin)

        def side(v: int, neighbours: list[int]) -> _Side:
            lengths = [sizes[u] for u in neighbours]
            return _Side(
                neighbours=np.array(neighbours, dtype=np.int64),
                costs=np.concatenate([np.zeros((sizes[v], 0)), *(near[v][u] for u in neighbours)], axis=1),
                to=np.concatenate(
                    [np.arange(0), *(np.arange(place[v, u], place[v, u] + sizes[u]) for u in neighbours)]
                ),
                pair=np.repeat(np.arange(len(neighbours)), lengths),
                starts=np.cumsum([0, *lengths[:-1]]),
            )

        self._stops = []
        for v, neighbours in enumerate(ordered):
            first = place[neighbours[0], v] if neighbours else 0
            received = self._flat[first : first + len(neighbours) * sizes[v]].reshape(len(neighbours), sizes[v])
            before = [u for u in neighbours if u < v]
            after = neighbours[len(before) :]
            share = 1.0 / max(len(before), len(after), 1)
            self._stops.append(_Stop(received, share, side(v, before), side(v, after)))

    def sweep(self, singles: Sequence[Floats]) -> float:
        """Pass messages forth and back; a lower bound on the cost of any assignment."""
        for single, stop in zip(singles, self._stops, strict=True):
            if len(stop.after.neighbours):
                whole = single + stop.received.sum(axis=0)
                self._send(stop, whole - whole.min(), stop.after, stop.received[len(stop.before.neighbours) :])
        bound = 0.0
        for single, stop in zip(reversed(singles), reversed(self._stops), strict=True):
            whole = single + stop.received.sum(axis=0)
            least = whole.min()
            bound += float(least)
            if len(stop.before.neighbours):
                bound += self._send(stop, whole - least, stop.before, stop.received[: len(stop.before.neighbours)])
        return bound

    def _send(self, stop: _Stop, whole: Floats, side: _Side, returned: Floats) -> float:
        """Send messages to one side, each with least entry zero; the sum of what was taken off."""
        kept = (stop.share * whole - returned).T
        messages = (side.costs + kept[:, side.pair]).min(axis=0)
        least = np.minimum.reduceat(messages, side.starts)
        self._flat[side.to] = messages - least[side.pair]
        return float(least.sum())

    def decode(self, singles: Sequence[Floats]) -> Ints:
        """An assignment: each vertex in turn takes what is best with earlier neighbours' choices and later messages."""
        assignment = np.zeros(len(self._stops), dtype=np.int64)
        for v, (single, stop) in enumerate(zip(singles, self._stops, strict=True)):
            chosen = stop.before.starts[: len(stop.before.neighbours)] + assignment[stop.before.neighbours]
            costs = single + stop.received[len(stop.before.neighbours) :].sum(axis=0)
            assignment[v] = int((costs + stop.before.costs[:, chosen].sum(axis=1)).argmin())
        return assignment

    def choice_excess(self, singles: Sequence[Floats]) -> list[Floats]:
        """Per vertex and choice, by how much it lifts the bound of the last sweep under the same ``singles``.

        The messages micro-batch all costs into sums that are nowhere negative, and zero at best; an assignment with a
        choice costs at least what the sums that the choice takes part in cost with it.
        """
        excess, shares = [], []
        for single, stop in zip(singles, self._stops, strict=True):
            whole = single + stop.received.sum(axis=0)
            whole -= whole.min()
            shares.append(stop.share * whole)
            excess.append(whole - len(stop.before.neighbours) * shares[-1])
        for v, stop in enumerate(self._stops):
            for at, u in enumerate(stop.before.neighbours):
                back = self._flat[stop.before.to[stop.before.pair == at]]
                rest = (shares[v] - stop.received[at])[:, None] + self._near[v][u] - back
                rest = rest - rest.min()
                excess[v] = excess[v] + rest.min(axis=1)
                excess[u] = excess[u] + rest.min(axis=0)
        return excess
