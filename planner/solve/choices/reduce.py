"""Turn a model into a smaller one with the same optimum: every step here is exact, whatever the limit.

* A choice goes for which some neighbour has no partner (arc consistency).
* A pair whose costs are a sum of its ends' goes into them.
* A vertex whose choice follows from a neighbour's is fused with it, costs, bytes and all.
* A choice goes that another one of its vertex equals or beats in every sum, whatever the neighbours choose.
* A vertex of at most two neighbours goes if for all their choices one of its own is best in every sum (elimination
  of degree one, and series). Where it has one neighbour, a pair goes that another pair with the same choice of the
  neighbour equals or beats.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.solve.choices.dominance import Sum, dominated
from planner.solve.choices.model import TIME, WALL, ChoiceModel, Mask, Settled, drop_moments
from planner.solve.choices.moments import LiveSpan
from planner.solve.problem import Floats, Ints

_COMPARED = 64  # choices of a vertex, and neighbours, up to which choices are compared for dominance
_LARGEST = 1_000_000  # entries of a table to compare or eliminate over


def reduce(model: ChoiceModel, deadline: float = math.inf) -> ChoiceModel | None:
    """The smaller model, as far as ``deadline`` (``time.monotonic``) allows; None when no assignment is allowed."""
    work = _Reduction(model)
    try:
        work.run(deadline)
    except _NothingLeft:
        return None
    return drop_moments(work.model())


class _NothingLeft(Exception):
    """A vertex has no choice left."""


@dataclass(frozen=True, eq=False)
class _Shape:
    """What matters of a pair's costs: whose choices have a partner, and whether one end decides or both add up."""

    tail_keep: Mask
    head_keep: Mask
    of_tail: Ints | None  # the head's choice that each of the tail's forces
    of_head: Ints | None
    sums: bool


class _Reduction:
    """A model under reduction. ``near[v][u]`` are the costs of a pair, axes (choices of v, choices of u, columns)."""

    def __init__(self, model: ChoiceModel) -> None:
        self._source = model
        self._single = list(model.singles)
        self._transient = list(model.transient)
        self._spans = [_by_moments(each) for each in model.spans]
        self._original = list(model.original)
        self._rooms = model.rooms.copy()
        self._shapes: dict[int, tuple[Floats, _Shape]] = {}  # pairs often share their costs
        self._transposed: dict[int, tuple[Floats, Floats]] = {}
        self._moved: dict[tuple[int, bytes], tuple[Floats, Floats]] = {}
        self._near: list[dict[int, Floats]] = [{} for _ in model.singles]
        for (tail, head), costs in model.pairs.items():
            self._near[tail][head], self._near[head][tail] = costs, self._transpose(costs)
        self._alive = dict.fromkeys(range(len(model.singles)))
        self._settled: list[Settled] = []
        self._pairs_to_see = dict.fromkeys(reversed(model.pairs))
        self._to_see = dict.fromkeys(reversed(range(len(model.singles))))

    def run(self, deadline: float) -> None:
        """Apply every rule until none applies, or until ``deadline``."""
        for v in list(self._alive):
            self._restrict(v, np.isfinite(self._single[v][:, WALL]))
        while (self._pairs_to_see or self._to_see) and time.monotonic() < deadline:
            if self._pairs_to_see:
                (tail, head), _ = self._pairs_to_see.popitem()
                if head in self._near[tail]:
                    self._see_pair(tail, head)
            else:
                v, _ = self._to_see.popitem()
                if v in self._alive:
                    self._see(v)

    def model(self) -> ChoiceModel:
        """What is left."""
        new = {v: number for number, v in enumerate(self._alive)}
        return ChoiceModel(
            singles=tuple(self._single[v] for v in new),
            transient=tuple(self._transient[v] for v in new),
            spans=tuple(tuple(LiveSpan(*key, values) for key, values in self._spans[v].items()) for v in new),
            pairs={(new[v], new[u]): costs for v in new for u, costs in self._near[v].items() if v < u},
            original=tuple(self._original[v] for v in new),
            limit_bytes=self._source.limit_bytes,
            rooms=self._rooms,
            moments=self._source.moments,
            numbers=self._source.numbers[list(new)],
            settled=(*self._source.settled, *self._settled),
        )

    def _see_pair(self, tail: int, head: int) -> None:
        shape = self._shape(self._near[tail][head])
        if not shape.tail_keep.all() or not shape.head_keep.all():
            self._restrict(tail, shape.tail_keep)
            self._restrict(head, shape.head_keep)
        elif shape.sums:
            costs = self._unlink(tail, head)
            self._single[tail] = self._single[tail] + costs[:, 0]
            self._single[head] = self._single[head] + (costs[0] - costs[0, 0])
            self._touch(tail, head)
        elif shape.of_tail is not None and (shape.of_head is None or len(self._near[head]) <= len(self._near[tail])):
            self._fuse(tail, head, shape.of_tail)
        elif shape.of_head is not None:
            self._fuse(head, tail, shape.of_head)

    def _see(self, v: int) -> None:
        mask = np.isfinite(self._single[v][:, WALL])
        if not mask.all():
            self._restrict(v, mask)
        elif len(self._near[v]) <= 2 and self._settle(v):
            pass
        elif len(self._single[v]) <= _COMPARED:
            if len(self._near[v]) == 1:
                self._drop_dominated_pairs(v)
            elif len(self._near[v]) <= _COMPARED:
                self._restrict(v, ~self._dominated(v))

    def _shape(self, costs: Floats) -> _Shape:
        found = self._shapes.get(id(costs))
        if found is None:
            found = self._shapes[id(costs)] = costs, _shape(costs)
        return found[1]

    def _transpose(self, costs: Floats) -> Floats:
        """The costs seen from the other end."""
        if id(costs) not in self._transposed:
            transposed = costs.transpose(1, 0, 2)
            self._transposed[id(costs)], self._transposed[id(transposed)] = (costs, transposed), (transposed, costs)
        return self._transposed[id(costs)][1]

    def _rows(self, costs: Floats, rows: Ints | Mask) -> Floats:
        """Costs of these choices only, or in this order."""
        if len(rows) == len(costs) and (rows.all() if rows.dtype == np.bool_ else (rows == np.arange(len(rows))).all()):
            return costs
        key = id(costs), rows.tobytes()
        if key not in self._moved:
            self._moved[key] = costs, costs[rows]
        return self._moved[key][1]

    def _touch(self, *vertices: int) -> None:
        self._to_see.update(dict.fromkeys(vertices))

    def _link(self, v: int, u: int, costs: Floats) -> None:
        """Set the costs of a pair."""
        if v > u:
            v, u, costs = u, v, self._transpose(costs)
        self._near[v][u], self._near[u][v] = costs, self._transpose(costs)
        self._pairs_to_see[v, u] = None
        self._touch(v, u)

    def _unlink(self, v: int, u: int) -> Floats:
        del self._near[u][v]
        return self._near[v].pop(u)

    def _restrict(self, v: int, mask: Mask) -> None:
        if mask.all():
            return
        if not mask.any():
            raise _NothingLeft
        self._single[v] = self._single[v][mask]
        self._transient[v] = self._transient[v][mask]
        self._original[v] = self._original[v][mask]
        self._spans[v] = {key: values[mask] for key, values in self._spans[v].items()}
        for u, costs in self._near[v].items():
            self._link(v, u, self._rows(costs, mask))
        self._touch(v)

    def _fuse(self, v: int, u: int, forced: Ints) -> None:
        """Make the choice of ``u`` follow from that of ``v``."""
        costs = self._unlink(v, u)
        self._follow(u, (v,), forced)
        self._single[v] = self._single[v] + costs[np.arange(len(forced)), forced] + self._single[u][forced]
        self._transient[v] = np.maximum(self._transient[v], self._transient[u][forced])
        spans = self._spans[v]
        for key, values in self._spans[u].items():
            spans[key] = spans[key] + values[forced] if key in spans else values[forced]
        for w in list(self._near[u]):
            moved = self._rows(self._unlink(u, w), forced)
            self._link(v, w, self._near[v][w] + moved if w in self._near[v] else moved)
        self._touch(v)

    def _follow(self, v: int, given: tuple[int, ...], choice: Ints) -> None:
        """Take ``v`` out, whose choice is ``choice[choices of given]``."""
        originals = [self._original[u] for u in given]
        whole = np.zeros([int(numbers.max()) + 1 for numbers in originals], dtype=np.int64)
        whole[np.ix_(*originals) if len(given) > 1 else tuple(originals)] = self._original[v][choice]
        numbers = self._source.numbers
        self._settled.append(Settled(int(numbers[v]), tuple(int(numbers[u]) for u in given), whole))
        del self._alive[v]

    def _settle(self, v: int) -> bool:
        """Take out a vertex of which one choice is best in every sum, for every choice of its neighbours."""
        given = tuple(sorted(self._near[v]))
        if len(self._alive) == 1 or len(self._single[v]) * math.prod(len(self._single[u]) for u in given) > _LARGEST:
            return False
        # Where times are equal the choice of fewest bytes comes first.
        order = np.argsort(sum(self._spans[v].values(), self._transient[v]), kind="stable")
        costs = self._given(v, given)[order]
        best = (costs[..., TIME] + costs[..., WALL]).argmin(axis=0)
        least = np.take_along_axis(costs, best[None, ..., None], axis=0)[0]
        if not (least <= np.where(np.isfinite(costs[..., WALL:]), costs, math.inf)).all():
            return False
        choice = order[best]
        bytes_of = [self._transient[v], *self._spans[v].values()]
        if any((values[choice] > values.min()).any() for values in bytes_of):
            return False
        for (first, last), values in self._spans[v].items():
            self._rooms[first:last] -= values.min()
        for u in given:
            self._unlink(v, u)
        self._follow(v, given, choice)
        # The largest transient is at least this one's.
        u = given[0] if given else next(iter(self._alive))
        self._transient[u] = np.maximum(self._transient[u], self._transient[v].min())
        if len(given) == 2:
            known = self._near[given[0]].get(given[1])
            self._link(*given, least if known is None else known + least)
        else:
            self._single[u] = self._single[u] + least
            self._touch(*given)
        return True

    def _given(self, v: int, given: tuple[int, ...]) -> Floats:
        """Costs of a vertex and its pairs: axes (choices of v, choices of each of given, columns)."""
        parts = [
            np.expand_dims(self._near[v][u], tuple(1 + other for other in range(len(given)) if other != at))
            for at, u in enumerate(given)
        ]
        single = self._single[v].reshape(len(self._single[v]), *(1 for _ in given), -1)
        return functools.reduce(np.add, parts, single)

    def _no_more_bytes(self, v: int) -> NDArray[np.bool_]:
        """Whether the first choice takes no more bytes than the second, at any moment; not so of a choice itself."""
        no_more = ~np.eye(len(self._single[v]), dtype=np.bool_)
        for values in (self._transient[v], *self._spans[v].values()):
            no_more &= values[:, None] <= values
        return no_more

    def _dominated(self, v: int) -> Mask:
        """Choices that another one equals or beats in every sum, whatever the neighbours choose."""
        near = [(costs, np.isfinite(costs[..., WALL])) for costs in self._near[v].values()]
        sums = (
            Sum(self._single[v][:, column], [(costs[..., column], allowed) for costs, allowed in near])
            for column in range(WALL)
        )
        return dominated(self._no_more_bytes(v), [allowed for _, allowed in near], sums)

    def _drop_dominated_pairs(self, v: int) -> None:
        """Wall off pairs with the only neighbour that another choice of ``v`` equals or beats in every sum."""
        ((u, costs),) = self._near[v].items()
        if len(self._single[v]) * costs.size > _LARGEST:
            return
        whole = self._given(v, (u,))
        beats = (whole[:, None] <= whole[None]).all(axis=-1) & self._no_more_bytes(v)[..., None]
        ties = beats & beats.transpose(1, 0, 2)
        beats &= ~(ties & np.tri(len(costs), dtype=np.bool_)[..., None])
        beaten = beats.any(axis=0) & np.isfinite(costs[..., WALL])
        if beaten.any():
            costs = costs.copy()
            costs[beaten] = 0.0
            costs[beaten, WALL] = math.inf
            self._link(v, u, costs)


def _by_moments(spans: Iterable[LiveSpan]) -> dict[tuple[int, int], Floats]:
    """The bytes alive over each stretch of moments, summed: spans that differ may keep the same of the moments."""
    found: dict[tuple[int, int], Floats] = {}
    for span in spans:
        key = span.first, span.last
        found[key] = found[key] + span.bytes if key in found else span.bytes
    return found


def _shape(costs: Floats) -> _Shape:
    allowed = np.isfinite(costs[..., WALL])
    partners, tail_partners = allowed.sum(axis=1), allowed.sum(axis=0)
    sums = bool(allowed.all()) and bool((costs == costs[:1] + (costs[:, :1] - costs[0, 0])).all())
    return _Shape(
        tail_keep=partners > 0,
        head_keep=tail_partners > 0,
        of_tail=allowed.argmax(axis=1) if (partners == 1).all() else None,
        of_head=allowed.argmax(axis=0) if (tail_partners == 1).all() else None,
        sums=sums,
    )
