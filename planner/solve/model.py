"""Turn a :class:`Problem` into stacked cost arrays that every solving step shares.

The objective ``time + max(0, background - cover)`` is the larger of two plain sums, ``time`` and
``exposed = time + background - cover``; so every factor carries the columns time, exposed, held, and a
wall that is 0 where a pair is allowed and infinite where it is not. A weighted relaxation of the problem
is then one matrix-vector product per factor. Bytes are kept as floats: whole numbers up to 2**53 are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import AutoparError
from planner.problem import Floats, Ints, Problem

TIME, EXPOSED, HELD, WALL = range(4)
HALF_BYTE = 0.5  # bytes are whole, so a bound may miss them by rounding up to this
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Model:
    """Per vertex ``(choices, 4)`` costs and ``(choices,)`` transient bytes; per pair ``(tail, head, 4)`` costs.

    ``original[v][c]`` is the problem's number of choice ``c`` of vertex ``v``. Bytes that every choice holds are taken
    off both sides of the limit; without a limit all bytes and the limit are zero.
    """

    singles: tuple[Floats, ...]
    transient: tuple[Floats, ...]
    pairs: dict[tuple[int, int], Floats]
    original: tuple[Ints, ...]
    limit_bytes: float

    @property
    def sizes(self) -> tuple[int, ...]:
        """Choices left per vertex."""
        return tuple(len(single) for single in self.singles)

    def choices(self, assignment: Ints) -> tuple[int, ...]:
        """The problem's choice numbers of an assignment of this model."""
        return tuple(int(self.original[v][c]) for v, c in enumerate(assignment))


def build_model(problem: Problem) -> Model:
    """Stack the costs, merge parallel edges, and fold self-edges into their vertex."""
    counted = 0 if problem.limit_bytes is None else 1
    singles = []
    for vertex in problem.vertices:
        if not np.isfinite(vertex.cover_s).all() or (vertex.background_s == -math.inf).any():
            raise AutoparError(f"vertex {vertex.name}: cover_s must be finite, background_s above -inf")
        singles.append(_stack(vertex.time_s, vertex.background_s, counted * vertex.held_bytes, vertex.cover_s))
    pairs: dict[tuple[int, int], Floats] = {}
    for edge in problem.edges:
        costs = _stack(edge.time_s, edge.background_s, counted * edge.held_bytes)
        if edge.tail == edge.head:
            singles[edge.tail] = singles[edge.tail] + np.einsum("cck->ck", costs)
            continue
        key = (min(edge.tail, edge.head), max(edge.tail, edge.head))
        costs = costs if edge.tail < edge.head else costs.transpose(1, 0, 2)
        pairs[key] = pairs[key] + costs if key in pairs else costs
    limit = float(problem.limit_bytes or 0)
    for costs in (*singles, *pairs.values()):
        least = float(costs[..., HELD].min())
        costs[..., HELD] -= least
        limit -= least
    return Model(
        singles=tuple(singles),
        transient=tuple(counted * np.maximum(v.transient_bytes, 0).astype(np.float64) for v in problem.vertices),
        pairs=pairs,
        original=tuple(np.arange(vertex.choices) for vertex in problem.vertices),
        limit_bytes=limit,
    )


def _stack(time: Floats, background: Floats, held: Ints, cover: Floats | float = 0.0) -> Floats:
    """Columns time, exposed, held, wall; a forbidden entry is all zeros behind an infinite wall."""
    allowed = np.isfinite(time) & np.isfinite(background)
    columns = (time, time + background - cover, held)
    finite = [np.where(allowed, column, 0.0) for column in columns]
    return np.stack([*finite, np.where(allowed, 0.0, math.inf)], axis=-1)


def drop_forbidden(model: Model) -> Model | None:
    """Drop choices that no choice of some neighbour allows (arc consistency); None when a vertex has none left."""
    keep = [np.isfinite(single[:, WALL]) for single in model.singles]
    allowed = {pair: np.isfinite(costs[..., WALL]) for pair, costs in model.pairs.items()}
    changed = True
    while changed:
        changed = False
        for (tail, head), table in allowed.items():
            tail_keep = keep[tail] & table[:, keep[head]].any(axis=1)
            head_keep = keep[head] & table[tail_keep].any(axis=0)
            changed |= bool((tail_keep != keep[tail]).any() or (head_keep != keep[head]).any())
            keep[tail], keep[head] = tail_keep, head_keep
    return restrict(model, keep)


def restrict(model: Model, keep: list[Mask]) -> Model | None:
    """The model with only the kept choices; None when a vertex has none left."""
    if not all(mask.any() for mask in keep):
        return None
    if all(mask.all() for mask in keep):
        return model
    return Model(
        singles=tuple(single[mask] for single, mask in zip(model.singles, keep, strict=True)),
        transient=tuple(values[mask] for values, mask in zip(model.transient, keep, strict=True)),
        pairs={(t, h): costs[np.ix_(keep[t], keep[h])] for (t, h), costs in model.pairs.items()},
        original=tuple(numbers[mask] for numbers, mask in zip(model.original, keep, strict=True)),
        limit_bytes=model.limit_bytes,
    )


@dataclass(frozen=True)
class Totals:
    """Column sums of an assignment, and its largest transient."""

    time_s: float
    exposed_s: float
    held_bytes: float
    transient_bytes: float
    allowed: bool

    @property
    def objective_s(self) -> float:
        """Step time, infinite when a choice or pair is forbidden."""
        return max(self.time_s, self.exposed_s) if self.allowed else math.inf

    @property
    def peak_bytes(self) -> float:
        """Held bytes and the largest transient together."""
        return self.held_bytes + self.transient_bytes


def total(model: Model, assignment: Ints) -> Totals:
    """Add up an assignment's costs."""
    rows = [single[c] for single, c in zip(model.singles, assignment, strict=True)]
    rows += [costs[assignment[tail], assignment[head]] for (tail, head), costs in model.pairs.items()]
    time, exposed, held, wall = np.sum(rows, axis=0) if rows else np.zeros(4)
    transient = max((float(t[c]) for t, c in zip(model.transient, assignment, strict=True)), default=0.0)
    return Totals(float(time), float(exposed), float(held), transient, bool(wall == 0.0))
