"""Cheapest assignments of pairwise choices under many weights at once.

A relaxation asks the same problem again and again with other weights: of every stage of a pipeline, with every level of
recomputation. Their tables differ by numbers alone, so they are eliminated together, as one array with an axis more;
with tables of a few thousand entries that takes about as long as a few of them would take one by one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planner.solve.choices.tree import Scope, Tree, build_tree_of
from planner.solve.problem import Floats, Ints

ENTRIES = 200_000
"""Entries of a table at most, unless it is said; a larger one is split, which leaves a lower bound."""


@dataclass(frozen=True, eq=False)
class LeastOfEach:
    """No assignment costs less than ``bounds[k]`` under the weights ``k``; ``assignment(k)`` comes near it.

    Attributes:
        bounds: infinite where everything is forbidden.
    """

    bounds: Floats
    tree: Tree
    tables: list[Floats]
    sizes: Sequence[int]

    def assignment(self, k: int) -> Ints:
        """The choices that follow every table's minimum: a cheapest assignment where no table was split."""
        found = np.zeros(len(self.sizes), dtype=np.int64)
        for group in reversed(self.tree.by_vertex()):
            vertex = self.tree.clusters[group[0]].vertex
            costs = sum(
                self.tables[number][(k, slice(None), *(found[u] for u in self.tree.clusters[number].separator))]
                for number in group
            )
            found[vertex] = int(np.argmin(costs))
        return found


def least_of_each(
    singles: Sequence[Floats],
    pairs: Mapping[tuple[int, int], Floats],
    tree: Tree | None = None,
    entries: int = ENTRIES,
) -> LeastOfEach:
    """Minimise the sum of single and pairwise costs under each of several weights.

    Args:
        singles: of every vertex ``(weights, choices)``; infinite where a choice is forbidden.
        pairs: of pairs of vertices, the smaller number first, ``(weights, choices, choices)``.
        tree: that of a problem of the same shape.
        entries: of a table at most, where there is no tree.
    """
    sizes = [single.shape[1] for single in singles]
    tree = tree or build_tree_of(sizes, pairs, entries)
    tables: list[Floats] = []
    messages: list[Floats] = []
    for group in tree.by_vertex():
        found = [_table(tree, number, singles, pairs, messages) for number in group]
        if len(group) > 1:
            _agree(found)
        tables += found
        messages += [table.min(axis=1) for table in found]
    roots = [message for message in messages if message.ndim == 1]
    return LeastOfEach(sum(roots, np.zeros(len(singles[0]))), tree, tables, sizes)


def in_order(least: LeastOfEach, k: int) -> Iterator[tuple[float, Ints]]:
    """All assignments with what they cost under the weights ``k``, cheapest first, found as they are asked for.

    Each that waits is a choice for the first vertices, by what it costs with the best of what is left; of those that
    cost the same the one of most vertices comes first. What is next best at its last vertex waits once it was taken.

    Args:
        least: of which no table was split.
    """
    assert least.tree.exact
    order, numbers = list(reversed(least.tree.clusters)), itertools.count()

    def ways(at: int, chosen: Ints) -> Iterator[tuple[float, int]]:
        """Choices at the next vertex, cheapest first, and what they cost more than the best."""
        cluster, number = order[at], len(order) - 1 - at
        costs = least.tables[number][(k, slice(None), *(chosen[u] for u in cluster.separator))]
        more = costs - costs.min()
        return ((float(more[choice]), int(choice)) for choice in np.argsort(more, kind="stable"))

    start = np.zeros(len(least.sizes), dtype=np.int64)
    waiting = [_Waiting(float(least.bounds[k]), 0, next(numbers), start, iter(()), 0.0)]
    while waiting:
        cost, depth, _, chosen, others, parent_cost = heapq.heappop(waiting)
        at = -depth
        if math.isinf(cost):
            return
        if (beside := next(others, None)) is not None:
            more, choice = beside
            other = chosen.copy()
            other[order[at - 1].vertex] = choice
            heapq.heappush(waiting, _Waiting(parent_cost + more, depth, next(numbers), other, others, parent_cost))
        if at == len(order):
            yield cost, chosen
            continue
        inner = ways(at, chosen)
        more, choice = next(inner)
        other = chosen.copy()
        other[order[at].vertex] = choice
        heapq.heappush(waiting, _Waiting(cost + more, depth - 1, next(numbers), other, inner, cost))


class _Waiting(NamedTuple):
    """Choices for the first vertices: what they cost, how many vertices (less than none), in which order they came; the
    choices, others for the last of the vertices, and what those before it cost.
    """

    cost: float
    depth: int
    number: int
    chosen: Ints
    others: Iterator[tuple[float, int]]
    parent_cost: float


def least_with_choices(least: LeastOfEach) -> list[Floats]:
    """What an assignment with each choice costs at least, ``(weights, choices)`` per vertex."""
    clusters = least.tree.clusters
    found = [np.full((len(least.bounds), size), -math.inf) for size in least.sizes]
    through: dict[int, Floats] = {}  # of every cluster, over its separator: the best whole assignment with such choices
    for number in reversed(range(len(clusters))):
        cluster, table = clusters[number], least.tables[number]
        message = table.min(axis=1)
        within = through.pop(number, least.bounds) - np.where(np.isinf(message), 0.0, message)
        whole = table + within[:, None]
        scope = (cluster.vertex, *cluster.separator)
        for child in cluster.children:
            wanted = clusters[child].separator
            beside = tuple(axis for axis, u in enumerate(scope, 1) if u not in wanted)
            through[child] = _aligned(whole.min(axis=beside), tuple(u for u in scope if u in wanted), wanted)
        lowest = whole.min(axis=tuple(range(2, whole.ndim)))
        found[cluster.vertex] = np.maximum(found[cluster.vertex], lowest)
    return found


def _table(
    tree: Tree,
    number: int,
    singles: Sequence[Floats],
    pairs: Mapping[tuple[int, int], Floats],
    messages: Sequence[Floats],
) -> Floats:
    """A cluster's table, axes ``(weights, vertex, *separator)``."""
    cluster = tree.clusters[number]
    scope = (cluster.vertex, *cluster.separator)
    parts: list[tuple[Scope, Floats]] = [(pair, pairs[pair]) for pair in cluster.pairs]
    parts += [(tree.clusters[child].separator, messages[child]) for child in cluster.children]
    if cluster.takes_single:
        parts.append(((cluster.vertex,), singles[cluster.vertex]))
    parts.sort(key=lambda part: len(part[0]))
    shape = (len(parts[0][1]), *(singles[u].shape[1] for u in scope))
    found, is_own = _aligned(parts[0][1], parts[0][0], scope), False
    for part, table in parts[1:]:
        found = np.add(found, _aligned(table, part, scope), out=found if is_own else None)
        is_own = found.shape == shape
    return found if found.shape == shape else np.broadcast_to(found, shape)


def _aligned(table: Floats, scope: Scope, target: Scope) -> Floats:
    """``table`` over weights and ``scope`` with its axes moved to where ``target`` has them, ones elsewhere."""
    order, index = _alignment(scope, target)
    return table.transpose(order)[index]


@lru_cache(maxsize=2**16)
def _alignment(scope: Scope, target: Scope) -> tuple[tuple[int, ...], tuple[slice | None, ...]]:
    """In which order the axes are taken, and between which of them one of length one is."""
    axes = {u: axis for axis, u in enumerate(scope, 1)}
    order = (0, *(axes[u] for u in target if u in axes))
    return order, (slice(None), *(slice(None) if u in axes else None for u in target))


def _agree(tables: list[Floats]) -> None:
    """Shift costs between the parts of a split bucket so that they agree on what each choice costs at least."""
    minima = np.stack([table.reshape(*table.shape[:2], -1).min(axis=2) for table in tables])
    minima[:, np.isinf(minima).any(axis=0)] = math.inf
    finite = np.where(np.isinf(minima), 0.0, minima)
    shifts = np.where(np.isinf(minima), math.inf, finite.mean(axis=0) - finite)
    for at, table in enumerate(tables):
        tables[at] = table + shifts[at].reshape(*table.shape[:2], *(1,) * (table.ndim - 2))
