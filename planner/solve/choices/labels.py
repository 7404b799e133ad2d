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

from planner.solve.choices.eliminate import Elimination
from planner.solve.choices.model import EXPOSED, HALF_BYTE, HELD, ChoiceModel, Mask
from planner.solve.choices.tree import Scope, Tree
from planner.solve.problem import Floats, Ints

_MAX_BATCH = 1_000_000  # labels times choices looked at together
_NEIGHBOURS = 24  # labels that each label is compared with for dominance


@dataclass(frozen=True, eq=False)
class BeamResult:
    """The best assignment below the cutoff, if any, and the least bound among labels that did not fit the beam."""

    assignment: Ints | None
    dropped_bound: float


@dataclass(frozen=True, eq=False)
class _Labels:
    """Partial assignments: column sums, largest transient, bytes alive at each moment, and per guide the least
    weighted cost when completed.

    ``seen`` holds the choices of the vertices that open ones depend on, ``parent`` each label's number one step
    before, ``choice`` what the last vertex took.
    """

    costs: Floats
    transient: Floats
    alive: Floats
    least: Floats
    seen: Ints
    parent: Ints
    choice: Ints

    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.costs, self.transient, self.alive, self.least, self.seen, self.parent, self.choice

    def take(self, index: Ints | slice) -> _Labels:
        return _Labels(*(array[index] for array in self.arrays()))


def search_labels(
    model: ChoiceModel,
    seconds: Sequence[Elimination],
    held: Elimination,
    floor_bytes: float,
    cutoff_s: float,
    width: int,
    deadline: float,
) -> BeamResult:
    """Look for assignments that fit the limit and take less than ``cutoff_s``, with at most ``width`` labels.

    ``seconds`` are eliminations under different multipliers, the sharpest first; all are of the model along one
    tree. Transient bytes count as at least ``floor_bytes``. At ``deadline`` (``time.monotonic``) labels are dropped.
    """
    guides = (*seconds, held)
    order = _order(held.tree, model.sizes)
    alike = _alike(model)
    unassigned = set(range(len(order)))
    labels = _Labels(
        costs=np.zeros((1, 4)),
        transient=np.array([floor_bytes]),
        alive=np.zeros((1, len(model.rooms))),
        least=np.array([[guide.bound for guide in guides]]),
        seen=np.zeros((1, 0), dtype=np.int64),
        parent=np.zeros(1, dtype=np.int64),
        choice=np.zeros(1, dtype=np.int64),
    )
    seen: list[int] = []
    history: list[tuple[int, Ints, Ints]] = []
    dropped = math.inf
    for group in order:
        vertex = held.tree.clusters[group[0]].vertex
        labels = _extend(model, labels, seen, guides, group, cutoff_s)
        unassigned.remove(vertex)
        seen, labels = _forget([*seen, vertex], labels, alike, unassigned)
        bounds = _bounds(model, labels, guides)
        kept = _undominated(labels, _keys(seen, labels, alike, unassigned), bounds)
        late = time.monotonic() > deadline
        if late or len(kept) > width:
            kept = kept[np.argsort(bounds[kept], kind="stable")]
            fitting = 0 if late else width
            dropped = min(dropped, float(bounds[kept[fitting:]].min(initial=math.inf)))
            kept = kept[:fitting]
        if len(kept) == 0:
            return BeamResult(None, dropped)
        labels = labels.take(kept)
        history.append((vertex, labels.parent, labels.choice))
    at = int(np.argmin(labels.costs[:, : EXPOSED + 1].max(axis=1)))
    return BeamResult(_trace(history, at), dropped)


def _order(tree: Tree, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The clusters of each vertex: separators before vertices, and as few choices open at a time as possible."""
    groups = {tree.clusters[group[0]].vertex: group for group in tree.by_vertex}
    needs = {v: {u for n in group for u in tree.clusters[n].separator} for v, group in groups.items()}
    users: dict[int, set[int]] = {v: set() for v in groups}
    for v, above in needs.items():
        for u in above:
            users[u].add(v)
    order: list[tuple[int, ...]] = []
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


def _alike(model: ChoiceModel) -> dict[int, dict[int, Ints]]:
    """Per vertex and neighbour, one number per choice: equal for choices that the neighbour cannot tell apart."""
    alike: dict[int, dict[int, Ints]] = {v: {} for v in range(len(model.singles))}
    for (tail, head), costs in model.pairs.items():
        for u, w, rows in ((tail, head, costs), (head, tail, costs.transpose(1, 0, 2))):
            numbers: dict[bytes, int] = {}
            alike[u][w] = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows])
    return alike


def _extend(
    model: ChoiceModel,
    labels: _Labels,
    seen: list[int],
    guides: Sequence[Elimination],
    group: Sequence[int],
    cutoff_s: float,
) -> _Labels:
    """Every label with every choice of the group's vertex, without those that cannot lead below the limits."""
    vertex = guides[0].tree.clusters[group[0]].vertex
    batch = max(1, _MAX_BATCH // model.sizes[vertex])
    parts = []
    for begin in range(0, len(labels.choice), batch):
        extended = _extend_batch(model, labels.take(slice(begin, begin + batch)), seen, guides, group, cutoff_s)
        parts.append(replace(extended, parent=extended.parent + begin))
    return _Labels(*(np.concatenate(arrays) for arrays in zip(*(part.arrays() for part in parts), strict=True)))


def _extend_batch(
    model: ChoiceModel,
    labels: _Labels,
    seen: list[int],
    guides: Sequence[Elimination],
    group: Sequence[int],
    cutoff_s: float,
) -> _Labels:
    clusters = guides[0].tree.clusters
    vertex = clusters[group[0]].vertex
    column = dict(zip(seen, labels.seen.T, strict=True))

    def entry(scope: Scope, rows: Ints, last: Ints) -> tuple[Ints, ...]:
        return tuple(last if u == vertex else column[u][rows] for u in scope)

    def extend_least(number: int, rows: Ints, last: Ints) -> Floats:
        """A guide's least cost: the vertex's messages close, its costs and the messages below it open."""
        guide = guides[number]
        least: Floats = labels.least[rows, number] + guide.singles[vertex][last]
        for n in group:
            least = least - guide.messages[n][entry(clusters[n].separator, rows, last)]
            for pair in clusters[n].pairs:
                least = least + guide.pairs[pair][entry(pair, rows, last)]
            for child in clusters[n].children:
                least = least + guide.messages[child][entry(clusters[child].separator, rows, last)]
        return least

    # The sharpest guide and the bytes sift all extensions, the other guides what is left.
    every = np.arange(len(labels.choice))[:, None]
    choices = np.arange(model.sizes[vertex])[None]
    transient = np.maximum(labels.transient[:, None], model.transient[vertex])
    over = transient - model.limit_bytes
    keep = extend_least(-1, every, choices) + over <= HALF_BYTE
    keep &= extend_least(0, every, choices) + guides[0].weights.price * over < cutoff_s
    rows, last = np.nonzero(keep)
    alive = labels.alive[rows] + _alive(model, vertex)[last]
    fits = (extend_least(-1, rows, last)[:, None] + alive <= model.rooms + HALF_BYTE).all(axis=1)
    rows, last, alive = rows[fits], last[fits], alive[fits]
    costs = labels.costs[rows] + model.singles[vertex][last]
    for n in group:
        for pair in clusters[n].pairs:
            costs += model.pairs[pair][entry(pair, rows, last)]
    extended = _Labels(
        costs=costs,
        transient=transient[rows, last],
        alive=alive,
        least=np.stack([extend_least(number, rows, last) for number in range(len(guides))], axis=-1),
        seen=np.concatenate([labels.seen[rows], last[:, None]], axis=1),
        parent=rows,
        choice=last,
    )
    return extended.take(np.flatnonzero(_bounds(model, extended, guides) < cutoff_s))


def _alive(model: ChoiceModel, vertex: int) -> Floats:
    """Bytes alive per choice of a vertex and moment."""
    alive = np.zeros((model.sizes[vertex], len(model.rooms)))
    for span in model.spans[vertex]:
        alive[:, span.first : span.last] += span.bytes[:, None]
    return alive


def _bounds(model: ChoiceModel, labels: _Labels, guides: Sequence[Elimination]) -> Floats:
    """The largest of the guides' bounds on completed labels, bytes over the limit charged at the guide's price."""
    prices = np.array([guide.weights.price for guide in guides])
    each = labels.least + (labels.transient - model.limit_bytes)[:, None] * prices
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
    """Labels without those that another with the same key equals or beats in every sum; a few of these may stay.

    Every label is compared with the fastest of those that hold no more, and with its neighbours in order of bounds.
    """
    time_s, exposed_s, held = labels.costs[:, : HELD + 1].T
    # The step time is the larger of two sums, and so is the peak: held bytes and the largest transient so far, or
    # held bytes and one to come.
    sums = (time_s, exposed_s, held, held + labels.transient, *labels.alive.T)
    if len(keys) == 0:
        return np.arange(0)
    groups = np.unique(keys, return_inverse=True)[1]
    kept = np.arange(len(keys))
    for size in _distinct(held, held + labels.transient):
        for speed in _distinct(time_s, exposed_s, time_s + exposed_s):
            kept = kept[np.lexsort((speed[kept], size[kept], groups[kept]))]
            kept = kept[~_beaten(sums, kept, _fastest_before(speed[kept], groups[kept]))]
    kept = kept[np.lexsort((bounds[kept], groups[kept]))]
    columns = [values[kept] for values in sums]
    beaten = np.zeros(len(kept), dtype=bool)
    for away in range(1, min(_NEIGHBOURS + 1, len(kept))):
        no_worse = groups[kept[:-away]] == groups[kept[away:]]
        for values in columns:
            no_worse &= values[:-away] <= values[away:]
        beaten[away:] |= no_worse
    return kept[~beaten]


def _distinct(*columns: Floats) -> list[Floats]:
    """The columns without those that differ from an earlier one by a constant only."""
    distinct: list[Floats] = []
    for column in columns:
        if all(np.ptp(column - other) > 0.0 for other in distinct):
            distinct.append(column)
    return distinct


def _fastest_before(speed: Floats, groups: Ints) -> Ints:
    """For each place the place, up to it in its group, of the least ``speed``; groups are ascending."""
    by_speed = np.argsort(speed, kind="stable")
    rank = np.empty(len(speed), dtype=np.int64)
    rank[by_speed] = np.arange(len(speed))
    # Every group ranks below the one before, so that the running minimum starts anew.
    offset = groups * len(speed)
    fastest: Ints = by_speed[np.minimum.accumulate(rank - offset) + offset]
    return fastest


def _beaten(sums: tuple[Floats, ...], kept: Ints, by: Ints) -> Mask:
    """Where the label in place ``by``, another one, is no worse in any sum."""
    beaten: Mask = by != np.arange(len(kept))
    for values in sums:
        beaten &= values[kept[by]] <= values[kept]
    return beaten


def _trace(history: list[tuple[int, Ints, Ints]], at: int) -> Ints:
    """The assignment of a last label, followed back through its parents."""
    assignment = np.zeros(len(history), dtype=np.int64)
    for vertex, parent, choice in reversed(history):
        assignment[vertex] = choice[at]
        at = int(parent[at])
    return assignment
