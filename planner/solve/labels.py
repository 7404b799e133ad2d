"""Turn a relaxed model into its best assignment: a beam of partial assignments that is exact unless it overflows.

Vertices are assigned with separators first, so that the messages of an elimination tell, for every partial assignment
(a label), the least that its completion costs. A label goes when that reaches the best objective, when its least peak
exceeds the limit, or when another label that leaves the same decisions open is no worse in every sum. What remains is
usually small; where it is not, only the most promising labels stay, and the least bound among those that were dropped
is reported (labels for resource-constrained paths: Dumitrescu and Boland, 2003).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.problem import Floats, Ints
from planner.solve.eliminate import Elimination
from planner.solve.model import EXPOSED, HELD, Model
from planner.solve.tree import Tree

_MAX_BATCH = 1_000_000  # labels times choices looked at together
_NEIGHBOURS = 24  # labels that each label is compared with for dominance


@dataclass(frozen=True, eq=False)
class Searched:
    """The best assignment below the cutoff, if any, and the least bound among labels that did not fit the beam."""

    assignment: Ints | None
    dropped_bound: float


@dataclass(frozen=True, eq=False)
class _Guides:
    """Eliminations of one model along one tree, seconds first and held bytes last, stacked along the last axis."""

    model: Model
    tree: Tree
    messages: tuple[Floats, ...]
    weights: Floats
    bounds: Floats


@dataclass(frozen=True, eq=False)
class _Labels:
    """Partial assignments: column sums, largest transient, and per guide the least cost of what is still open.

    ``seen`` holds the choices of the vertices that open ones depend on, ``parent`` each label's number one step
    before, ``choice`` what the last vertex took.
    """

    costs: Floats
    transient: Floats
    open: Floats
    seen: Ints
    parent: Ints
    choice: Ints

    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.costs, self.transient, self.open, self.seen, self.parent, self.choice

    def take(self, index: Ints | slice) -> _Labels:
        return _Labels(*(array[index] for array in self.arrays()))


def search_labels(
    seconds: Sequence[Elimination], held: Elimination, floor_bytes: float, cutoff_s: float, width: int, deadline: float
) -> Searched:
    """Look for assignments that fit the limit and take less than ``cutoff_s``, with at most ``width`` labels.

    ``seconds`` are eliminations under different multipliers, the sharpest first; all are of one model along one
    tree. Transient bytes count as at least ``floor_bytes``. At ``deadline`` (``time.monotonic``) labels are dropped.
    """
    guides = _stack(seconds, held)
    order = _order(guides.tree, guides.model.sizes)
    alike = _alike(guides.model)
    unassigned = set(range(len(order)))
    none = np.zeros(1, dtype=np.int64)
    labels = _Labels(np.zeros((1, 4)), np.array([floor_bytes]), guides.bounds[None], none[None, :0], none, none)
    seen: list[int] = []
    history: list[tuple[int, Ints, Ints]] = []
    dropped = math.inf
    for group in order:
        vertex = guides.tree.clusters[group[0]].vertex
        labels = _extend(labels, seen, guides, group, cutoff_s)
        unassigned.remove(vertex)
        seen, labels = _forget([*seen, vertex], labels, alike, unassigned)
        labels = labels.take(_undominated(labels, _keys(seen, labels, alike, unassigned), _bounds(labels, guides)))
        late = time.monotonic() > deadline
        if late or len(labels.choice) > width:
            bounds = _bounds(labels, guides)
            first = np.argsort(bounds, kind="stable")
            fitting = 0 if late else width
            dropped = min(dropped, float(bounds[first[fitting:]].min()))
            labels = labels.take(first[:fitting])
        if len(labels.choice) == 0:
            return Searched(None, dropped)
        history.append((vertex, labels.parent, labels.choice))
    at = int(np.argmin(labels.costs[:, : EXPOSED + 1].max(axis=1)))
    return Searched(_trace(history, at), dropped)


def _stack(seconds: Sequence[Elimination], held: Elimination) -> _Guides:
    every = [*seconds, held]
    messages = zip(*(elimination.messages for elimination in every), strict=True)
    return _Guides(
        held.model,
        held.tree,
        tuple(np.stack(message, axis=-1) for message in messages),
        np.stack([elimination.weights for elimination in every], axis=-1),
        np.array([elimination.bound for elimination in every]),
    )


def _order(tree: Tree, sizes: tuple[int, ...]) -> list[list[int]]:
    """The clusters of each vertex: separators before vertices, and as few choices open at a time as possible."""
    groups = {tree.clusters[group[0]].vertex: group for group in tree.by_vertex()}
    needs = {v: {u for n in group for u in tree.clusters[n].separator} for v, group in groups.items()}
    users: dict[int, set[int]] = {v: set() for v in groups}
    for v, above in needs.items():
        for u in above:
            users[u].add(v)
    order: list[list[int]] = []
    ready = {v for v, above in needs.items() if not above}
    while ready:

        def opened(v: int) -> float:
            closed = sum(math.log(sizes[u]) for u in needs[v] if users[u] == {v})
            return (math.log(sizes[v]) if users[v] else 0.0) - closed

        v = min(ready, key=lambda u: (opened(u), u))
        ready.remove(v)
        order.append(groups.pop(v))
        for u in needs[v]:
            users[u].remove(v)
        ready |= {w for w in users[v] if not needs[w] & groups.keys()}
    return order


def _alike(model: Model) -> dict[int, dict[int, Ints]]:
    """Per vertex and neighbour, one number per choice: equal for choices that the neighbour cannot tell apart."""
    alike: dict[int, dict[int, Ints]] = {v: {} for v in range(len(model.singles))}
    for (tail, head), costs in model.pairs.items():
        for u, w, rows in ((tail, head, costs), (head, tail, costs.transpose(1, 0, 2))):
            numbers: dict[bytes, int] = {}
            alike[u][w] = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows])
    return alike


def _extend(labels: _Labels, seen: list[int], guides: _Guides, group: list[int], cutoff_s: float) -> _Labels:
    """Every label with every choice of the group's vertex, without those that cannot lead below the limits."""
    vertex = guides.tree.clusters[group[0]].vertex
    batch = max(1, _MAX_BATCH // guides.model.sizes[vertex])
    begins = range(0, len(labels.choice), batch)
    parts = [_extend_batch(labels, begin, batch, seen, guides, group, cutoff_s) for begin in begins]
    return _Labels(*(np.concatenate(arrays) for arrays in zip(*(part.arrays() for part in parts), strict=True)))


def _extend_batch(
    labels: _Labels, begin: int, batch: int, seen: list[int], guides: _Guides, group: list[int], cutoff_s: float
) -> _Labels:
    model, tree = guides.model, guides.tree
    vertex = tree.clusters[group[0]].vertex
    part = labels.take(slice(begin, begin + batch))
    at = dict(zip(seen, part.seen.T, strict=True))
    # What the vertex closes and opens, as (table, entries) with the vertex's own axis next to last.
    costs = part.costs[:, None] + model.singles[vertex]
    closed = np.zeros((1, len(guides.bounds)))
    opened: list[tuple[Floats, tuple[Ints, ...]]] = []
    for number in group:
        cluster = tree.clusters[number]
        for tail, head in cluster.pairs:
            table = model.pairs[tail, head]
            costs = costs + (table[at[tail]] if head == vertex else table.transpose(1, 0, 2)[at[head]])
        closed = closed + guides.messages[number][tuple(at[u] for u in cluster.separator)]
        for child in cluster.children:
            scope = tree.clusters[child].separator
            message = np.moveaxis(guides.messages[child], scope.index(vertex), -2)
            opened.append((message, tuple(at[u] for u in scope if u != vertex)))
    transient = np.maximum(part.transient[:, None], model.transient[vertex])
    remaining = part.open - closed
    # The sharpest guide and the bytes sift all extensions, the other guides what is left.
    keep = np.ones(transient.shape, dtype=bool)
    for guide in (0, -1):
        least = remaining[:, guide, None] + sum((message[..., guide][entry] for message, entry in opened), np.zeros(()))
        least = least + costs @ guides.weights[:, guide]
        if guide == -1:
            keep &= least + transient <= model.limit_bytes
        else:
            keep &= least + guides.weights[HELD, guide] * (transient - model.limit_bytes) < cutoff_s
    rows, choice = np.nonzero(keep)
    open_ = remaining[rows]
    for message, entry in opened:
        open_ = open_ + message[(*(column[rows] for column in entry), choice)]
    seen_now = np.concatenate([part.seen[rows], choice[:, None]], axis=1)
    sifted = _Labels(costs[rows, choice], transient[rows, choice], open_, seen_now, rows + begin, choice)
    return sifted.take(np.flatnonzero(_bounds(sifted, guides) < cutoff_s))


def _bounds(labels: _Labels, guides: _Guides) -> Floats:
    """The largest of the guides' bounds on completions: costs so far and to come, bytes over the limit priced."""
    over = labels.transient - guides.model.limit_bytes
    each = labels.costs @ guides.weights + labels.open + over[:, None] * guides.weights[HELD]
    bounds: Floats = each[:, :-1].max(axis=1)
    return bounds


def _forget(
    seen: list[int], labels: _Labels, alike: dict[int, dict[int, Ints]], unassigned: set[int]
) -> tuple[list[int], _Labels]:
    """Without the choices that no unassigned vertex depends on."""
    matter = [i for i, u in enumerate(seen) if alike[u].keys() & unassigned]
    return [seen[i] for i in matter], replace(labels, seen=labels.seen[:, matter])


def _keys(seen: list[int], labels: _Labels, alike: dict[int, dict[int, Ints]], unassigned: set[int]) -> Ints:
    """One number per label, equal where the unassigned vertices cannot tell labels apart."""
    keys, span = np.zeros(len(labels.choice), dtype=np.int64), 1
    for u, column in zip(seen, labels.seen.T, strict=True):
        for w in sorted(alike[u].keys() & unassigned):
            numbers = alike[u][w]
            size = int(numbers.max()) + 1
            if span * size >= 2**62:
                distinct, keys = np.unique(keys, return_inverse=True)
                span = len(distinct)
            keys, span = keys * size + numbers[column], span * size
    return keys


def _undominated(labels: _Labels, keys: Ints, bounds: Floats) -> Ints:
    """Labels that none with the same key, among those just before in order of bounds, equals or beats in every sum."""
    order = np.lexsort((bounds, keys))
    keys = keys[order]
    # The step time is the larger of two sums, and so is the peak: held bytes and the largest transient so far, or
    # held bytes and one to come.
    peak = labels.costs[:, HELD] + labels.transient
    sums = [column[order] for column in (*labels.costs[:, : HELD + 1].T, peak)]
    beaten = np.zeros(len(order), dtype=bool)
    for away in range(1, min(_NEIGHBOURS + 1, len(order))):
        no_worse = keys[:-away] == keys[away:]
        if not no_worse.any():
            break
        for values in sums:
            no_worse &= values[:-away] <= values[away:]
        beaten[away:] |= no_worse
    kept: Ints = order[~beaten]
    return kept


def _trace(history: list[tuple[int, Ints, Ints]], at: int) -> Ints:
    """The assignment of a last label, followed back through its parents."""
    assignment = np.zeros(len(history), dtype=np.int64)
    for vertex, parent, choice in reversed(history):
        assignment[vertex] = choice[at]
        at = int(parent[at])
    return assignment
