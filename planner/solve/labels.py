"""Turn a relaxed model into its best assignment: a beam of partial assignments that is exact unless it overflows.

Vertices are assigned in reverse elimination order, so the relaxation's messages tell, for every partial assignment
(a label), the least that its completion costs. A label goes when that reaches the best objective, when its least
memory exceeds the limit, or when another label that leaves the same decisions open is no worse in every sum. What
remains is usually small; where it is not, only the most promising labels stay and the least bound among those that
were dropped is reported (labels for resource-constrained paths: Dumitrescu and Boland, 2003).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.problem import Floats, Ints
from planner.solve.eliminate import Elimination
from planner.solve.model import EXPOSED, HELD

_MAX_BATCH = 1_000_000  # labels times choices looked at together
_NEIGHBOURS = 24  # labels that each label is compared with for dominance


@dataclass(frozen=True, eq=False)
class Searched:
    """The best assignment below the cutoff, if any, and the least bound among labels that did not fit the beam."""

    assignment: Ints | None
    dropped_bound: float


@dataclass(frozen=True, eq=False)
class _Labels:
    """Partial assignments: column sums, transient peak, least cost and memory of what is open, last choices made.

    ``parent`` is each label's number among the labels one step before.
    """

    costs: Floats
    transient: Floats
    open_s: Floats
    open_bytes: Floats
    parent: Ints
    choice: Ints

    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.costs, self.transient, self.open_s, self.open_bytes, self.parent, self.choice

    def take(self, index: Ints) -> _Labels:
        return _Labels(*(array[index] for array in self.arrays()))


def search_labels(
    seconds: Elimination, held: Elimination, floor_bytes: float, cutoff_s: float, width: int, deadline: float
) -> Searched:
    """Look for assignments that fit the limit and take less than ``cutoff_s``, with at most ``width`` labels.

    ``seconds`` and ``held`` are eliminations of one model along one tree; transient bytes count as at least
    ``floor_bytes``. At ``deadline`` (``time.monotonic``) every label is dropped.
    """
    model, tree = seconds.model, seconds.tree
    order = tree.by_vertex()[::-1]
    last_use = {u: step for step, group in enumerate(order) for n in group for u in tree.clusters[n].separator}
    root = np.zeros(1, dtype=np.int64)
    labels = _Labels(
        np.zeros((1, 4)), np.array([floor_bytes]), np.array([seconds.bound]), np.array([held.bound]), root, root
    )
    columns: dict[int, Ints] = {}
    history: list[tuple[int, Ints, Ints]] = []
    dropped = math.inf
    for step, group in enumerate(order):
        vertex = tree.clusters[group[0]].vertex
        labels = _extend(labels, columns, seconds, held, group, cutoff_s)
        columns = {u: column[labels.parent] for u, column in columns.items()} | {vertex: labels.choice}
        columns = {u: column for u, column in columns.items() if last_use.get(u, -1) > step}
        keep = _undominated(labels, _keys(columns, model.sizes), _bounds(labels, seconds))
        bounds = _bounds(labels, seconds)[keep]
        if len(keep) > width or time.monotonic() > deadline:
            width = width if time.monotonic() <= deadline else 0
            best_first = np.argsort(bounds, kind="stable")
            dropped = min(dropped, float(bounds[best_first[width:]].min(initial=math.inf)))
            keep = keep[best_first[:width]]
        labels = labels.take(keep)
        columns = {u: column[keep] for u, column in columns.items()}
        history.append((vertex, labels.parent, labels.choice))
        if len(keep) == 0:
            return Searched(None, dropped)
    objective = labels.costs[:, : EXPOSED + 1].max(axis=1)
    at = int(np.argmin(objective))
    if objective[at] >= cutoff_s:
        return Searched(None, dropped)
    return Searched(_trace(history, at, len(order)), dropped)


def _extend(
    labels: _Labels,
    columns: dict[int, Ints],
    seconds: Elimination,
    held: Elimination,
    group: list[int],
    cutoff_s: float,
) -> _Labels:
    """Every label with every choice of the group's vertex, without those that cannot lead below the limits."""
    model, tree = seconds.model, seconds.tree
    vertex = tree.clusters[group[0]].vertex
    size = model.sizes[vertex]
    batch = max(1, _MAX_BATCH // size)
    extended: list[_Labels] = []
    for begin in range(0, len(labels.choice), batch):
        part = slice(begin, begin + batch)
        at = {u: column[part] for u, column in columns.items()}
        costs = labels.costs[part, None] + model.singles[vertex]
        open_s, open_bytes = labels.open_s[part, None], labels.open_bytes[part, None]
        for number in group:
            cluster = tree.clusters[number]
            for tail, head in cluster.pairs:
                table = model.pairs[tail, head]
                costs = costs + (table[at[tail]] if head == vertex else table.transpose(1, 0, 2)[at[head]])
            own = tuple(at[u] for u in cluster.separator)
            open_s = open_s - seconds.messages[number][own].reshape(-1, 1)
            open_bytes = open_bytes - held.messages[number][own].reshape(-1, 1)
            for child in cluster.children:
                scope = tree.clusters[child].separator
                axis = scope.index(vertex)
                entry = tuple(at[u] for u in scope if u != vertex)
                open_s = open_s + np.moveaxis(seconds.messages[child], axis, -1)[entry]
                open_bytes = open_bytes + np.moveaxis(held.messages[child], axis, -1)[entry]
        transient = np.maximum(labels.transient[part, None], model.transient[vertex])
        fits = costs[..., HELD] + open_bytes + transient <= model.limit_bytes
        rows, choice = np.nonzero(fits & (_least(costs, open_s, transient, seconds) < cutoff_s))
        pick = rows, choice
        full = np.broadcast_to(open_s, fits.shape), np.broadcast_to(open_bytes, fits.shape)
        extended.append(
            _Labels(costs[pick], transient[pick], full[0][pick], full[1][pick], rows + begin, choice.astype(np.int64))
        )
    return _Labels(*(np.concatenate(arrays) for arrays in zip(*(part.arrays() for part in extended), strict=True)))


def _least(costs: Floats, open_s: Floats, transient: Floats, seconds: Elimination) -> Floats:
    """The relaxation's bound on completions: weighted costs so far and to come, bytes over the limit at their price."""
    price = float(seconds.weights[HELD])
    least: Floats = costs @ seconds.weights + open_s + price * (transient - seconds.model.limit_bytes)
    return least


def _bounds(labels: _Labels, seconds: Elimination) -> Floats:
    return _least(labels.costs, labels.open_s, labels.transient, seconds)


def _keys(columns: dict[int, Ints], sizes: tuple[int, ...]) -> Ints:
    """One number per label, equal where the open vertices meet the same choices."""
    keys, span = np.zeros(1, dtype=np.int64), 1
    for u, column in columns.items():
        if span * sizes[u] >= 2**62:
            distinct, keys = np.unique(keys, return_inverse=True)
            span = len(distinct)
        keys, span = keys * sizes[u] + column, span * sizes[u]
    return keys


def _undominated(labels: _Labels, keys: Ints, bounds: Floats) -> Ints:
    """Labels without those that an earlier one with the same key, nearby in order of bounds, beats in every sum."""
    count = len(labels.choice)
    order = np.lexsort((bounds, np.broadcast_to(keys, count)))
    keys = np.broadcast_to(keys, count)[order]
    # The step time is the larger of two sums and so is the peak: held and transient so far, or held and later ones.
    peak = labels.costs[:, HELD] + labels.transient
    sums = [column[order] for column in (*labels.costs[:, : HELD + 1].T, peak)]
    beaten = np.zeros(count, dtype=bool)
    for away in range(1, min(_NEIGHBOURS, count - 1) + 1):
        no_worse = keys[:-away] == keys[away:]
        if not no_worse.any():
            break
        for values in sums:
            no_worse &= values[:-away] <= values[away:]
        beaten[away:] |= no_worse
    return np.sort(order[~beaten])


def _trace(history: list[tuple[int, Ints, Ints]], at: int, vertices: int) -> Ints:
    """The assignment of a last label, followed back through its parents."""
    assignment = np.zeros(vertices, dtype=np.int64)
    for vertex, parent, choice in reversed(history):
        assignment[vertex] = choice[at]
        at = int(parent[at])
    return assignment
