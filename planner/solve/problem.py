"""The solver's front door: a problem of pairwise choices, an answer, and the one definition of cost.

Every node picks one choice. The step time of an assignment is::

    sum(node.time_s) + sum(edge.time_s) + max(0, sum(background_s) - sum(cover_s))

where ``background_s`` is communication that can hide behind work and ``cover_s`` the work that can
hide it. The peak must not exceed ``limit_bytes``; it is::

    sum(held_bytes) + max over moments(sum(bytes of the spans alive then))

Held bytes are there always. A span is alive from its first moment up to, not including, its last; moments are
numbered from 0 and mean nothing but their order. ``transient_bytes`` are a span at a moment of the vertex's own.
A forbidden choice or pair has ``time_s = inf``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.base.errors import AutoparError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Span:
    """Bytes, one entry per choice of its vertex, that are alive at the moments ``first`` to ``last - 1``."""

    first: int
    last: int
    held_bytes: Ints


@dataclass(frozen=True, eq=False)
class Vertex:
    """A decision: one entry per choice in every array (seconds, bytes)."""

    name: str
    time_s: Floats
    background_s: Floats
    cover_s: Floats
    held_bytes: Ints
    transient_bytes: Ints
    spans: tuple[Span, ...] = ()

    @property
    def choices(self) -> int:
        return len(self.time_s)


@dataclass(frozen=True, eq=False)
class Edge:
    """A pairwise cost: matrices of shape (choices of ``tail``, choices of ``head``)."""

    tail: int
    head: int
    time_s: Floats
    background_s: Floats
    held_bytes: Ints


@dataclass(frozen=True, eq=False)
class Problem:
    """Vertices, edges between them, and the memory limit in bytes (``None``: unlimited)."""

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    limit_bytes: int | None = None

    def check(self) -> None:
        """Raise :class:`AutoparError` on shapes that do not fit or costs that are not numbers."""
        for vertex in self.vertices:
            arrays = (vertex.time_s, vertex.background_s, vertex.cover_s, vertex.held_bytes, vertex.transient_bytes)
            if vertex.choices == 0 or any(len(a) != vertex.choices for a in arrays):
                raise AutoparError(f"vertex {vertex.name}: every array needs one entry per choice, at least one")
            if any(np.isnan(a).any() for a in arrays[:3]):
                raise AutoparError(f"vertex {vertex.name}: a cost is NaN; check the cluster's rates and latencies")
            for span in vertex.spans:
                if len(span.held_bytes) != vertex.choices:
                    raise AutoparError(f"vertex {vertex.name}: a span needs one entry per choice")
                if span.first < 0 or span.last < span.first or (span.held_bytes < 0).any():
                    raise AutoparError(
                        f"vertex {vertex.name}: a span of moments [{span.first}, {span.last}) must not start before 0, "
                        "end before it starts, or hold less than nothing"
                    )
        for edge in self.edges:
            tail, head = self.vertices[edge.tail], self.vertices[edge.head]
            for array in (edge.time_s, edge.background_s, edge.held_bytes):
                if array.shape != (tail.choices, head.choices):
                    raise AutoparError(f"edge {tail.name} -> {head.name}: shape {array.shape} does not fit its ends")
            if np.isnan(edge.time_s).any() or np.isnan(edge.background_s).any():
                raise AutoparError(f"edge {tail.name} -> {head.name}: a cost is NaN; check the cluster's rates")


@dataclass(frozen=True)
class Evaluation:
    """What an assignment costs."""

    time_s: float
    exposed_background_s: float
    peak_bytes: int
    feasible: bool


def evaluate(problem: Problem, choices: tuple[int, ...]) -> Evaluation:
    """Cost of one assignment, independent of any solver: the single definition of cost."""
    time, background, cover, held, transient = 0.0, 0.0, 0.0, 0, 0
    changes: dict[int, int] = {}
    for vertex, choice in zip(problem.vertices, choices, strict=True):
        time += float(vertex.time_s[choice])
        background += float(vertex.background_s[choice])
        cover += float(vertex.cover_s[choice])
        held += int(vertex.held_bytes[choice])
        transient = max(transient, int(vertex.transient_bytes[choice]))
        for span in vertex.spans:
            changes[span.first] = changes.get(span.first, 0) + int(span.held_bytes[choice])
            changes[span.last] = changes.get(span.last, 0) - int(span.held_bytes[choice])
    for edge in problem.edges:
        pair = choices[edge.tail], choices[edge.head]
        time += float(edge.time_s[pair])
        background += float(edge.background_s[pair])
        held += int(edge.held_bytes[pair])
    alive = accumulate(changes[moment] for moment in sorted(changes))
    exposed = max(0.0, background - cover)
    peak = held + max(transient, *alive, 0)
    fits = problem.limit_bytes is None or peak <= problem.limit_bytes
    return Evaluation(time + exposed, exposed, peak, fits and np.isfinite(time))


def most_bytes(problem: Problem) -> int:
    """No assignment's peak is above this: everything at its own largest, all spans alive at once."""
    held = sum(int(vertex.held_bytes.max()) for vertex in problem.vertices)
    held += sum(int(span.held_bytes.max()) for vertex in problem.vertices for span in vertex.spans)
    held += sum(int(edge.held_bytes.max()) for edge in problem.edges)
    return held + max((int(vertex.transient_bytes.max()) for vertex in problem.vertices), default=0)


def least_bytes(problem: Problem) -> int:
    """No assignment's peak is below this: everything at its own least."""
    held = sum(int(vertex.held_bytes.min()) for vertex in problem.vertices)
    held += sum(int(edge.held_bytes.min()) for edge in problem.edges)
    return held + max((int(vertex.transient_bytes.min()) for vertex in problem.vertices), default=0)


Status = Literal["optimal", "feasible", "infeasible"]


@dataclass(frozen=True)
class Answer:
    """An assignment, what it costs, and what is proved about it.

    ``status`` is ``optimal`` when ``objective_s`` equals the proven lower ``bound_s`` (to 1e-6 relative),
    ``feasible`` when the time limit came first, ``infeasible`` when no assignment satisfies the limits;
    then ``choices`` is the assignment of least peak memory, for the explanation.
    """

    choices: tuple[int, ...]
    objective_s: float
    bound_s: float
    status: Status
    seconds: float

    @property
    def gap(self) -> float:
        """(objective - bound) / objective; 0 is proven optimal."""
        return 0.0 if self.objective_s <= 0 else max(0.0, (self.objective_s - self.bound_s) / self.objective_s)
