"""Turn a :class:`Problem` into stacked cost arrays that every solving step shares.

The objective ``time + max(0, background - cover)`` is the larger of two plain sums, ``time`` and
``exposed = time + background - cover``; so every factor carries the columns time, exposed, held, and a
wall that is 0 where a pair is allowed and infinite where it is not. A weighted relaxation of the problem
is then one matrix-vector product per factor. Bytes are kept as floats: whole numbers up to 2**53 are exact.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.base.errors import AutoparError
from planner.solve.choices.moments import FlatSpans, LiveSpan, Spans, essential
from planner.solve.problem import Edge, Floats, Ints, Problem

TIME, EXPOSED, HELD, WALL = range(4)
HALF_BYTE = 0.5  # bytes are whole, so a bound may miss them by rounding up to this
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Settled:
    """A vertex of the problem whose choice follows from others': ``choice[choices of given]``, in its numbers."""

    vertex: int
    given: tuple[int, ...]
    choice: Ints


@dataclass(frozen=True, eq=False)
class ChoiceModel:
    """Per vertex ``(choices, 4)`` costs and ``(choices,)`` transient bytes; per pair ``(tail, head, 4)`` costs.

    An assignment fits if what it holds and its largest transient are within ``limit_bytes``, and what it holds and
    its spans at every moment within that moment's room. Bytes that every choice takes are taken off both sides;
    without a limit there are no bytes, no moments, and the limit is zero.

    ``moments`` are the numbers that the moments had at first. Vertex ``v`` is the problem's ``numbers[v]``, its choice
    ``c`` there ``original[v][c]``. The problem's other vertices are ``settled``, an earlier one possibly given later
    ones.
    """

    singles: tuple[Floats, ...]
    transient: tuple[Floats, ...]
    spans: Spans
    pairs: dict[tuple[int, int], Floats]
    original: tuple[Ints, ...]
    limit_bytes: float
    rooms: Floats
    moments: Ints
    numbers: Ints
    settled: tuple[Settled, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Choices left per vertex."""
        return tuple(len(single) for single in self.singles)

    @property
    def pairs_allowed(self) -> int:
        """Entries of all pairs that nothing forbids."""
        return sum(int(np.isfinite(costs[..., WALL]).sum()) for costs in self.pairs.values())

    @cached_property
    def flat(self) -> FlatSpans:
        """The spans, to add up."""
        return FlatSpans(self.spans, self.sizes, len(self.rooms))

    def choices(self, assignment: Ints) -> tuple[int, ...]:
        """The problem's choice numbers of an assignment of this model."""
        whole = [0] * (len(self.numbers) + len(self.settled))
        for number, original, c in zip(self.numbers, self.original, assignment, strict=True):
            whole[number] = int(original[c])
        for settled in reversed(self.settled):
            whole[settled.vertex] = int(settled.choice[tuple(whole[u] for u in settled.given)])
        return tuple(whole)

    def assignment(self, choices: Sequence[int]) -> Ints:
        """The assignment nearest to the problem's choices, some of which this model may have dropped."""
        found = [np.searchsorted(o, choices[n]) for n, o in zip(self.numbers, self.original, strict=True)]
        return np.minimum(np.array(found, dtype=np.int64), np.array(self.sizes, dtype=np.int64) - 1)


def build_model(problem: Problem) -> ChoiceModel:
    """Stack the costs, merge parallel edges, fold self-edges into their vertex, and keep the moments that matter."""
    counted = 0 if problem.limit_bytes is None else 1
    singles = []
    for vertex in problem.vertices:
        if not np.isfinite(vertex.cover_s).all() or (vertex.background_s == -math.inf).any():
            raise AutoparError(f"vertex {vertex.name}: cover_s must be finite, background_s above -inf")
        singles.append(_stack(vertex.time_s, vertex.background_s, counted * vertex.held_bytes, vertex.cover_s))
    pairs: dict[tuple[int, int], Floats] = {}
    stacked: dict[int, tuple[Edge, Floats]] = {}  # edges that share their times share all they cost
    for edge in problem.edges:
        if id(edge.time_s) in stacked and _same(stacked[id(edge.time_s)][0], edge):
            costs = stacked[id(edge.time_s)][1]
        else:
            costs = _stack(edge.time_s, edge.background_s, counted * edge.held_bytes)
            stacked[id(edge.time_s)] = edge, costs
        if edge.tail == edge.head:
            singles[edge.tail] = singles[edge.tail] + np.einsum("cck->ck", costs)
            continue
        key = (min(edge.tail, edge.head), max(edge.tail, edge.head))
        costs = costs if edge.tail < edge.head else costs.transpose(1, 0, 2)
        pairs[key] = pairs[key] + costs if key in pairs else costs
    limit = float(problem.limit_bytes or 0)
    taken = 0.0
    for v, costs in enumerate(singles):
        least = float(costs[:, HELD].min())
        if least:
            singles[v] = costs - np.eye(4)[HELD] * least
            taken += least
    for pair, costs in pairs.items():
        least = float(costs[..., HELD].min())
        if least:
            pairs[pair] = costs - np.eye(4)[HELD] * least
            taken += least
    limit -= taken
    spans, rooms = _moments(problem, limit) if counted else (((),) * len(singles), np.zeros(0))
    return ChoiceModel(
        singles=tuple(singles),
        transient=tuple(counted * np.maximum(v.transient_bytes, 0).astype(np.float64) for v in problem.vertices),
        spans=spans,
        pairs=pairs,
        original=tuple(np.arange(vertex.choices) for vertex in problem.vertices),
        limit_bytes=limit,
        rooms=rooms,
        moments=np.arange(len(rooms)),
        numbers=np.arange(len(singles)),
    )


def _moments(problem: Problem, limit_bytes: float) -> tuple[Spans, Floats]:
    """The problem's spans over moments after which some end and at which some start, and the moments' rooms.

    What is alive at any other moment is alive at one of these.
    """
    spans = [span for vertex in problem.vertices for span in vertex.spans if span.first < span.last]
    firsts = np.array([span.first for span in spans], dtype=np.int64)
    lasts = np.array([span.last for span in spans], dtype=np.int64)
    bounds = np.unique(np.concatenate([firsts, lasts]))
    kept = np.isin(bounds[:-1], firsts) & np.isin(bounds[1:], lasts)
    number = dict(zip(bounds.tolist(), np.concatenate([[0], np.cumsum(kept)]).tolist(), strict=False))
    moved = tuple(
        tuple(
            LiveSpan(number[s.first], number[s.last], s.held_bytes.astype(np.float64))
            for s in v.spans
            if s.first < s.last
        )
        for v in problem.vertices
    )
    return moved, np.full(np.count_nonzero(kept), limit_bytes)


def _same(edge: Edge, other: Edge) -> bool:
    return edge.background_s is other.background_s and edge.held_bytes is other.held_bytes


def _stack(time: Floats, background: Floats, held: Ints, cover: Floats | float = 0.0) -> Floats:
    """Columns time, exposed, held, wall; a forbidden entry is all zeros behind an infinite wall."""
    allowed = np.isfinite(time) & np.isfinite(background)
    columns = (time, time + background - cover, held)
    finite = [np.where(allowed, column, 0.0) for column in columns]
    return np.stack([*finite, np.where(allowed, 0.0, math.inf)], axis=-1)


def drop_forbidden(model: ChoiceModel) -> ChoiceModel | None:
    """Drop choices that no choice of some neighbour allows (arc consistency); None when a vertex has none left."""
    singles = [np.isfinite(single[:, WALL]) for single in model.singles]
    pairs = {pair: np.isfinite(costs[..., WALL]) for pair, costs in model.pairs.items()}
    return restrict(model, arc_consistent(singles, pairs))


def arc_consistent(singles: Sequence[Mask], pairs: Mapping[tuple[int, int], Mask]) -> list[Mask]:
    """Which choices some choice of every neighbour allows that is itself allowed so (arc consistency).

    Args:
        singles: of every vertex, the choices that are allowed by themselves.
        pairs: of every pair of different vertices, the choices that are allowed together.
    """
    keep = [*singles]
    near: list[list[tuple[int, int]]] = [[] for _ in keep]
    for pair in pairs:
        for end in pair:
            near[end].append(pair)
    waiting = dict.fromkeys(pairs)
    while waiting:
        tail, head = pair = next(iter(waiting))
        del waiting[pair]
        table = pairs[pair]
        tail_keep = keep[tail] & table[:, keep[head]].any(axis=1)
        head_keep = keep[head] & table[tail_keep].any(axis=0)
        for end, kept in ((tail, tail_keep), (head, head_keep)):
            if (kept != keep[end]).any():
                keep[end] = kept
                waiting.update(dict.fromkeys(each for each in near[end] if each != pair))
    return keep


def restrict(model: ChoiceModel, keep: list[Mask]) -> ChoiceModel | None:
    """The model with only the kept choices; None when a vertex has none left."""
    if not all(mask.any() for mask in keep):
        return None
    if all(mask.all() for mask in keep):
        return model
    spans = tuple(
        each if mask.all() else tuple(LiveSpan(span.first, span.last, span.bytes[mask]) for span in each)
        for each, mask in zip(model.spans, keep, strict=True)
    )
    pairs = {}
    smaller: dict[tuple[int, bytes, bytes], Floats] = {}  # pairs that share their costs go on sharing them
    for (tail, head), costs in model.pairs.items():
        key = id(costs), keep[tail].tobytes(), keep[head].tobytes()
        if key not in smaller:
            smaller[key] = costs[np.ix_(keep[tail], keep[head])]
        pairs[tail, head] = smaller[key]
    return replace(
        model,
        singles=tuple(single[mask] for single, mask in zip(model.singles, keep, strict=True)),
        transient=tuple(values[mask] for values, mask in zip(model.transient, keep, strict=True)),
        spans=spans,
        pairs=pairs,
        original=tuple(numbers[mask] for numbers, mask in zip(model.original, keep, strict=True)),
    )


def drop_moments(model: ChoiceModel) -> ChoiceModel:
    """The model with only the moments that can decide whether an assignment fits."""
    if not len(model.rooms):
        return model
    tables = (*model.singles, *model.pairs.values())
    most = min(sum(float(table[..., HELD].max()) for table in tables), model.limit_bytes)
    spans, rooms, kept = essential(model.spans, model.rooms, most)
    return replace(model, spans=spans, rooms=rooms, moments=model.moments[kept])


def at(model: ChoiceModel, moments: Collection[int]) -> ChoiceModel:
    """The model with only these moments."""
    kept = np.array(sorted(moments), dtype=np.int64)
    number = np.searchsorted(kept, np.arange(len(model.rooms) + 1))
    spans = tuple(
        tuple(
            LiveSpan(int(number[span.first]), int(number[span.last]), span.bytes)
            for span in each
            if number[span.first] < number[span.last]
        )
        for each in model.spans
    )
    return replace(model, spans=spans, rooms=model.rooms[kept], moments=model.moments[kept])


@dataclass(frozen=True, eq=False)
class Weights:
    """Micro-batches the columns of a model into one sum that bounds the step time, if the assignment fits.

    ``price`` is seconds per byte of what is held and the largest transient, beyond the limit; ``prices`` is seconds per
    byte of what is held and alive beyond its room, by moment. ``columns`` (one per cost column) include both for what
    is held; the wall's is one.
    """

    columns: Floats
    price: float
    prices: Floats

    def scaled(self, part: float) -> Weights:
        """With all prices this much higher."""
        held = (self.price + self.prices.sum()) * part
        columns = np.concatenate([self.columns[:HELD], [held], self.columns[WALL:]])
        return Weights(columns, self.price * part, self.prices * part)

    def raised(self, moment: int, by: float) -> Weights:
        """With a higher price at one moment, or of what is held and the largest transient if it is -1."""
        prices = self.prices.copy()
        if moment >= 0:
            prices[moment] += by
        raised = Weights(self.columns, self.price + (by if moment < 0 else 0.0), prices)
        return raised.scaled(1.0)

    def singles(self, model: ChoiceModel) -> list[Floats]:
        """Weighted costs per vertex and choice."""
        singles = [single @ self.columns for single in model.singles]
        if not self.prices.any():
            return singles
        return [single + charge for single, charge in zip(singles, model.flat.charges(self.prices), strict=True)]


@dataclass(frozen=True)
class Totals:
    """Column sums of an assignment, its largest transient, and the bytes of its spans at each moment."""

    time_s: float
    exposed_s: float
    held_bytes: float
    transient_bytes: float
    span_bytes: Floats
    allowed: bool

    @property
    def objective_s(self) -> float:
        """Step time, infinite when a choice or pair is forbidden."""
        return max(self.time_s, self.exposed_s) if self.allowed else math.inf

    @property
    def peak_bytes(self) -> float:
        """Held bytes and the largest transient together."""
        return self.held_bytes + self.transient_bytes

    def excess_bytes(self, model: ChoiceModel) -> float:
        """By how much the assignment is over the limit, or over the room of its worst moment; at most 0 if it fits."""
        over_rooms = float((self.held_bytes + self.span_bytes - model.rooms).max(initial=-math.inf))
        return max(self.peak_bytes - model.limit_bytes, over_rooms)


def total(model: ChoiceModel, assignment: Ints) -> Totals:
    """Add up an assignment's costs."""
    rows = [single[c] for single, c in zip(model.singles, assignment, strict=True)]
    rows += [costs[assignment[tail], assignment[head]] for (tail, head), costs in model.pairs.items()]
    time, exposed, held, wall = np.sum(rows, axis=0) if rows else np.zeros(4)
    transient = max((float(t[c]) for t, c in zip(model.transient, assignment, strict=True)), default=0.0)
    return Totals(float(time), float(exposed), float(held), transient, model.flat.alive(assignment), bool(wall == 0.0))
