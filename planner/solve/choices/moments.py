"""Turn spans over many moments into spans over the few that can decide whether an assignment fits.

A moment does not matter where its bytes cannot exceed its room, nor where every assignment that fits at a
neighbouring moment fits there too. What remains is numbered anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.solve.problem import Floats, Ints


@dataclass(frozen=True, eq=False)
class LiveSpan:
    """Bytes per choice of one vertex that are alive at the moments ``first`` to ``last - 1``."""

    first: int
    last: int
    bytes: Floats


Spans = tuple[tuple[LiveSpan, ...], ...]


def essential(spans: Spans, rooms: Floats, held_bytes: float) -> tuple[Spans, Floats, Ints]:
    """Equivalent spans over fewer moments, ``rooms``: what may be alive at each of them, and their numbers so far.

    At most ``held_bytes`` are held at all moments, and take of every room. Bytes that every choice of a vertex holds
    are taken off the rooms; spans of one vertex over the same moments are merged.
    """
    spans, rooms = _normalised(spans, rooms)
    numbers = np.arange(len(rooms))
    while True:
        keep = _decisive(spans, rooms, held_bytes)
        if keep.all():
            return spans, rooms, numbers
        numbers = numbers[keep]
        number = np.concatenate([[0], np.cumsum(keep)])
        moved = tuple(
            tuple(LiveSpan(int(number[span.first]), int(number[span.last]), span.bytes) for span in each)
            for each in spans
        )
        spans, rooms = _normalised(moved, rooms[keep])


def _normalised(spans: Spans, rooms: Floats) -> tuple[Spans, Floats]:
    """Without constant bytes, empty spans and spans of one vertex over the same moments."""
    taken = np.zeros(len(rooms) + 1)
    result = []
    for each in spans:
        merged: dict[tuple[int, int], Floats] = {}
        for span in each:
            if span.first == span.last:
                continue
            key = span.first, span.last
            merged[key] = merged[key] + span.bytes if key in merged else span.bytes
        kept = []
        for (first, last), values in merged.items():
            least = float(values.min())
            taken[first] += least
            taken[last] -= least
            if values.max() > least:
                kept.append(LiveSpan(first, last, values - least if least else values))
        result.append(tuple(kept))
    return tuple(result), rooms - np.cumsum(taken)[:-1]


class _Change:
    """What each vertex adds from one moment to a later one, per choice, and the most it all can rise and fall."""

    def __init__(self) -> None:
        self.of: dict[int, Floats] = {}
        self.rise = self.fall = 0.0

    def add(self, vertex: int, change: Floats) -> None:
        before = self.of.get(vertex)
        if before is not None:
            self.rise -= before.max()
            self.fall += before.min()
            change = before + change
        self.of[vertex] = change
        self.rise += change.max()
        self.fall -= change.min()

    def joined(self, other: _Change) -> _Change:
        """Both, one after the other; uses up the larger."""
        large, small = (self, other) if len(self.of) >= len(other.of) else (other, self)
        for vertex, change in small.of.items():
            large.add(vertex, change)
        return large


def _decisive(spans: Spans, rooms: Floats, held_bytes: float) -> NDArray[np.bool_]:
    """Which moments may be exceeded, and are not implied by the room of a neighbour among them."""
    most = np.zeros(len(rooms) + 1)
    changes = [_Change() for _ in most]
    for vertex, each in enumerate(spans):
        for span in each:
            most[span.first] += span.bytes.max()
            most[span.last] -= span.bytes.max()
            changes[span.first].add(vertex, span.bytes)
            changes[span.last].add(vertex, -span.bytes)
    exceedable = np.cumsum(most)[:-1] + held_bytes > rooms
    kept: list[int] = []
    until: list[_Change] = []  # from each kept moment's predecessor to it
    since = _Change()  # from the last kept moment to this one
    for moment, change in enumerate(changes[:-1]):
        since = since.joined(change)
        while kept and exceedable[moment]:
            spare = rooms[moment] - rooms[kept[-1]]
            if since.rise <= spare or since.fall > -spare:
                break
            kept.pop()
            since = since.joined(until.pop())
        if exceedable[moment] and not (kept and since.rise <= rooms[moment] - rooms[kept[-1]]):
            kept.append(moment)
            until.append(since)
            since = _Change()
    keep = np.zeros(len(rooms), dtype=np.bool_)
    keep[kept] = True
    return keep


class FlatSpans:
    """The spans of all vertices laid out flat, to add up bytes by moment, or prices by choice, in one go."""

    def __init__(self, spans: Spans, sizes: Sequence[int], moments: int) -> None:
        each = [(vertex, span) for vertex, spans_of in enumerate(spans) for span in spans_of]
        lengths = np.array([len(span.bytes) for _, span in each], dtype=np.int64)
        begin = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._moments, self._cuts, self._choices = moments, begin[1:-1], int(begin[-1])
        self._vertex = np.array([vertex for vertex, _ in each], dtype=np.int64)
        self._first = np.array([span.first for _, span in each], dtype=np.int64)
        self._last = np.array([span.last for _, span in each], dtype=np.int64)
        self._start = np.cumsum(lengths) - lengths
        self._bytes = np.concatenate([np.zeros(0), *(span.bytes for _, span in each)])
        self._span = np.repeat(np.arange(len(each)), lengths)
        self._choice = np.arange(len(self._bytes)) + (begin[self._vertex] - self._start)[self._span]

    def alive(self, assignment: Ints) -> Floats:
        """Bytes alive at each moment under an assignment."""
        held = self._bytes[self._start + assignment[self._vertex]]
        starts = np.bincount(self._first, held, self._moments + 1)
        ends = np.bincount(self._last, held, self._moments + 1)
        alive: Floats = np.cumsum(starts - ends)[:-1]
        return alive

    def charges(self, prices: Floats) -> list[Floats]:
        """Per vertex and choice, its bytes at every moment times the moment's price."""
        until = np.concatenate([[0.0], np.cumsum(prices)])
        of_span = until[self._last] - until[self._first]
        return np.split(np.bincount(self._choice, self._bytes * of_span[self._span], self._choices), self._cuts)
