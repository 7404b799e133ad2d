"""Turn an assignment into a better one: free the vertices of a region, and solve it exactly around the others' choices.

A region grows from a vertex along pairs. It is solved by elimination with bytes at their prices; where a table would
grow too large, the vertex with most neighbours keeps its choice instead (large neighbourhood search: Shaw, "Using
constraint programming and local search methods to solve vehicle routing problems", 1998).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np

from planner.solve.choices.messages import Near
from planner.solve.problem import Floats, Ints

_MAX_ENTRIES = 60_000  # of a region's table: larger ones cost more time than they improve
_MAX_FANOUT = 12  # neighbours by which a region grows from one vertex, so that hubs do not fill it


def grow(near: Near, seed: int, size: int, chance: random.Random) -> list[int]:
    """Up to ``size`` connected vertices, from ``seed`` outwards."""
    region, inside = [seed], {seed}
    for v in region:
        neighbours = list(near[v])
        for u in chance.sample(neighbours, min(len(neighbours), _MAX_FANOUT)):
            if len(region) >= size:
                return region
            if u not in inside:
                inside.add(u)
                region.append(u)
    return region


def solve_region(near: Near, singles: Sequence[Floats], region: list[int], assignment: Ints) -> dict[int, int]:
    """Choices of the region's vertices that cost least around the others' choices in ``assignment``."""
    return _Region(near, singles, region, assignment).solve()


class _Region:
    def __init__(self, near: Near, singles: Sequence[Floats], region: list[int], assignment: Ints) -> None:
        inside = set(region)
        self._assignment = assignment
        self._single: dict[int, Floats] = {}
        self._tables: dict[int, list[tuple[tuple[int, ...], Floats]]] = {v: [] for v in region}
        self._around: dict[int, set[int]] = {}
        for v in region:
            single = singles[v]
            for u, costs in near[v].items():
                if u not in inside:
                    single = single + costs[:, assignment[u]]
                elif v < u:
                    self._tables[v].append(((v, u), costs))
                    self._tables[u].append(((v, u), costs))
            self._single[v] = single
            self._around[v] = near[v].keys() & inside
        self._log_size = {v: math.log(len(singles[v])) for v in region}
        self._weight = {v: self._weigh(v) for v in region}

    def solve(self) -> dict[int, int]:
        chosen: dict[int, int] = {}
        steps = []
        while self._weight:
            v = min(self._weight, key=self._weight.__getitem__)
            if self._weight[v] > math.log(_MAX_ENTRIES):
                v = max(self._weight, key=lambda u: len(self._around[u]))
                chosen[v] = int(self._assignment[v])
                self._keep(v)
            else:
                steps.append((v, *self._eliminate(v)))
        for v, separator, table in reversed(steps):
            entry: tuple[slice | int, ...] = (slice(None), *(chosen[u] for u in separator))
            chosen[v] = int(table[entry].argmin())
        return chosen

    def _weigh(self, v: int) -> float:
        return self._log_size[v] + sum(self._log_size[u] for u in self._around[v])

    def _remove(self, v: int, separator: Sequence[int]) -> None:
        for u in separator:
            self._weight[u] = self._weigh(u)
        del self._weight[v], self._tables[v], self._around[v]

    def _eliminate(self, v: int) -> tuple[tuple[int, ...], Floats]:
        """The table over the vertex and its neighbours; its minimum becomes a table of theirs."""
        separator = tuple(sorted(self._around[v]))
        table = self._single[v].reshape(-1, *(1 for _ in separator))
        for scope, costs in self._tables[v]:
            order = [scope.index(u) for u in (v, *separator) if u in scope]
            shape = [len(self._single[u]) if u in scope else 1 for u in (v, *separator)]
            table = table + costs.transpose(order).reshape(shape)
        least: Floats = np.asarray(table.min(axis=0))
        for u in separator:
            self._tables[u] = [part for part in self._tables[u] if v not in part[0]]
            self._around[u] = (self._around[u] | set(separator)) - {u, v}
            if len(separator) > 1:
                self._tables[u].append((separator, least))
        if len(separator) == 1:
            self._single[separator[0]] = self._single[separator[0]] + least
        self._remove(v, separator)
        return separator, table

    def _keep(self, v: int) -> None:
        """Take the choice of ``v`` as it is."""
        choice = int(self._assignment[v])
        separator = sorted(self._around[v])
        for scope, costs in self._tables[v]:
            rest = tuple(u for u in scope if u != v)
            part: Floats = np.asarray(costs.take(choice, axis=scope.index(v)))
            for u in rest:
                self._tables[u] = [other for other in self._tables[u] if other[1] is not costs or other[0] != scope]
                if len(rest) > 1:
                    self._tables[u].append((rest, part))
            if len(rest) == 1:
                self._single[rest[0]] = self._single[rest[0]] + part
        for u in separator:
            self._around[u].discard(v)
        self._remove(v, separator)
