"""Cheapest assignments of pairwise choices under many weights at once.

A relaxation asks the same problem again and again with other weights: of every stage of a pipeline, with every level of
recomputation. Their tables differ by numbers alone, so they are eliminated together, as one array with an axis more;
with tables of a few thousand entries that takes about as long as a few of them would take one by one.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from planner.solve.choices.eliminate import agreeing
from planner.solve.choices.tree import Scope, Tree, build_tree_of
from planner.solve.problem import Floats, Ints

ENTRIES = 200_000
"""Entries of a table at most, unless it is said; a larger one is split, which leaves a lower bound."""

KEPT = 1_000_000
"""Entries of a table, of all weights, at most for which memory is kept; the minima of a larger one are found part by
part, since a system takes longer to give so much memory than the sums take.
"""


@dataclass(frozen=True, eq=False)
class LeastOfEach:
    """No assignment costs less than ``bounds[k]`` under the weights ``k``; ``assignment(k)`` comes near it.

    Only the minima of tables are kept: all of them would take a hundred times as much memory, and most of the time.

    Attributes:
        bounds: infinite where everything is forbidden.
        singles, pairs: the costs.
        messages: of every cluster, its table's minima over its vertex.
        shifts: of every part of a split bucket, what is added to its table for each choice.
    """

    bounds: Floats
    tree: Tree
    singles: Sequence[Floats]
    pairs: Mapping[tuple[int, int], Floats]
    messages: Sequence[Floats]
    shifts: Mapping[int, Floats]

    @property
    def sizes(self) -> list[int]:
        """How many choices each vertex has."""
        return [single.shape[1] for single in self.singles]

    def assignment(self, k: int) -> Ints:
        """The choices that follow every table's minimum: a cheapest assignment where no table was split."""
        found = np.zeros(len(self.singles), dtype=np.int64)
        for group in reversed(self.tree.by_vertex):
            found[self.tree.clusters[group[0]].vertex] = int(np.argmin(sum(self._row(n, k, found) for n in group)))
        return found

    def _row(self, number: int, k: int, chosen: Ints) -> Floats:
        """What the choices at a cluster's vertex cost in its table, with those that were chosen at the others."""
        vertex, costs = self.tree.clusters[number].vertex, np.zeros(1)
        for summand in self.tree.summands[number]:
            at = (k, *(slice(None) if u == vertex else chosen[u] for u in summand.scope))
            costs = costs + summand.of(self.singles, self.pairs, self.messages)[at]
        return costs + self.shifts[number][k] if number in self.shifts else costs

    @cached_property
    def tables(self) -> list[Floats]:
        """Those of all clusters, where they are so small that they may be kept."""
        return [self.table(number).copy() for number in range(len(self.tree.clusters))]

    def table(self, number: int) -> Floats:
        """A cluster's, made once more: axes ``(weights, vertex, *separator)``; the next one may overwrite it."""
        table = _table(self.tree, number, self.singles, self.pairs, self.messages, 0)
        return _shifted(table, self.shifts[number]) if number in self.shifts else table


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
    tree = tree or build_tree_of([single.shape[1] for single in singles], pairs, entries)
    messages: list[Floats] = []
    shifts: dict[int, Floats] = {}
    for group in tree.by_vertex:
        if len(group) == 1 and math.prod(shape := _shape(tree, group[0], singles)) > KEPT:
            messages.append(_minima(tree, group[0], singles, pairs, messages, shape))
            continue
        found = [_table(tree, n, singles, pairs, messages, slot) for slot, n in enumerate(group)]
        if len(group) > 1:
            agreed = _agreed(found)
            shifts.update(zip(group, agreed, strict=True))
            found = [_shifted(table, shift) for table, shift in zip(found, agreed, strict=True)]
        messages += [table.min(axis=1) for table in found]
    roots = [message for message in messages if message.ndim == 1]
    return LeastOfEach(sum(roots, np.zeros(len(singles[0]))), tree, singles, pairs, messages, shifts)


def in_order(least: LeastOfEach, k: int) -> Iterator[tuple[float, Ints]]:
    """All assignments with what they cost under the weights ``k``, cheapest first, found as they are asked for.

    Each that waits is a choice for the first vertices, by what it costs with the best of what is left; of those that
    cost the same the one of most vertices comes first. What is next best at its last vertex waits once it was taken.

    Args:
        least: of which no table was split.
    """
    assert least.tree.exact
    order, numbers = list(reversed(least.tree.clusters)), itertools.count()
    tables = least.tables[::-1]

    def ways(at: int, chosen: Ints) -> Iterator[tuple[float, int]]:
        """Choices at the next vertex, cheapest first, and what they cost more than the best."""
        costs = tables[at][(k, slice(None), *(chosen[u] for u in order[at].separator))]
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
        cluster, table, message = clusters[number], least.table(number), least.messages[number]
        within = through.pop(number, least.bounds) - np.where(np.isinf(message), 0.0, message)
        whole = np.add(table, within[:, None], out=table)
        scope = (cluster.vertex, *cluster.separator)
        for child in cluster.children:
            wanted = clusters[child].separator
            beside = tuple(axis for axis, u in enumerate(scope, 1) if u not in wanted)
            through[child] = _aligned(whole.min(axis=beside), tuple(u for u in scope if u in wanted), wanted)
        lowest = whole.min(axis=tuple(range(2, whole.ndim)))
        found[cluster.vertex] = np.maximum(found[cluster.vertex], lowest)
    return found


class _Buffers(threading.local):
    """Memory for tables that are made one after another: a system takes longer to give new memory than sums take."""

    def __init__(self) -> None:
        self._arrays: dict[int, Floats] = {}

    def of(self, slot: int, shape: tuple[int, ...]) -> Floats:
        """An array of such a shape, which overwrites what was in that slot, unless it is too large to be kept."""
        size = math.prod(shape)
        if size > KEPT:
            return np.empty(shape)
        if slot not in self._arrays or len(self._arrays[slot]) < size:
            self._arrays[slot] = np.empty(min(KEPT, 2 * size))
        return self._arrays[slot][:size].reshape(shape)


_BUFFERS = _Buffers()


def _table(
    tree: Tree,
    number: int,
    singles: Sequence[Floats],
    pairs: Mapping[tuple[int, int], Floats],
    messages: Sequence[Floats],
    slot: int,
) -> Floats:
    """A cluster's table, axes ``(weights, vertex, *separator)``, in a slot of :data:`_BUFFERS`."""
    into = _BUFFERS.of(slot, _shape(tree, number, singles))
    return _added(_summands(tree, number, singles, pairs, messages), into)


def _minima(
    tree: Tree,
    number: int,
    singles: Sequence[Floats],
    pairs: Mapping[tuple[int, int], Floats],
    messages: Sequence[Floats],
    shape: tuple[int, ...],
) -> Floats:
    """Those of a cluster's table over its vertex, axes ``(weights, *separator)``, part by part."""
    summands = [*_summands(tree, number, singles, pairs, messages)]
    found = np.empty((shape[0], *shape[2:]))
    for part in _parts(shape):
        within = [
            each[tuple(np.s_[:] if size == 1 else at for size, at in zip(each.shape, part, strict=True))]
            for each in summands
        ]
        least = found[(part[0], *part[2:])]
        _added(within, _BUFFERS.of(0, (len(least), shape[1], *least.shape[1:]))).min(axis=1, out=least)
    return found


def _parts(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Parts of a table that are whole along its second axis, of :data:`KEPT` entries at most where that may be."""
    steps, left = [*shape], math.prod(shape)
    for axis in (0, *range(2, len(shape))):
        left //= shape[axis]
        steps[axis] = min(shape[axis], max(1, KEPT // left))
    starts = (range(0, size, step) for size, step in zip(shape, steps, strict=True))
    for at in itertools.product(*starts):
        yield tuple(slice(start, start + step) for start, step in zip(at, steps, strict=True))


def _shape(tree: Tree, number: int, singles: Sequence[Floats]) -> tuple[int, ...]:
    """That of a cluster's table."""
    cluster = tree.clusters[number]
    return len(singles[0]), singles[cluster.vertex].shape[1], *(singles[u].shape[1] for u in cluster.separator)


def _summands(
    tree: Tree,
    number: int,
    singles: Sequence[Floats],
    pairs: Mapping[tuple[int, int], Floats],
    messages: Sequence[Floats],
) -> Iterator[Floats]:
    """What a cluster's table adds up, with an axis of length one for each vertex on which that does not depend."""
    cluster = tree.clusters[number]
    scope = (cluster.vertex, *cluster.separator)
    return (_aligned(each.of(singles, pairs, messages), each.scope, scope) for each in tree.summands[number])


def _added(summands: Iterable[Floats], into: Floats) -> Floats:
    """Their sum."""
    found, size = np.zeros((1,) * into.ndim), into.size
    for summand in summands:
        is_whole = found.size == size or math.prod(map(max, found.shape, summand.shape)) == size
        found = np.add(found, summand, out=into if is_whole else None)
    return found


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


def _agreed(tables: Sequence[Floats]) -> list[Floats]:
    """What to add to the parts of a split bucket so that they agree on what each choice costs at least."""
    return [*agreeing(np.stack([table.reshape(*table.shape[:2], -1).min(axis=2) for table in tables]))]


def _shifted(table: Floats, shift: Floats) -> Floats:
    """A table, changed in its place, with so much more for each choice at its vertex."""
    table += shift.reshape(*table.shape[:2], *(1,) * (table.ndim - 2))
    return table
