"""Which elements of a tensor a rank holds, as runs of indices in every dim, and how many two ranks have in common.

A part of a tensor is the product of its runs in each dim. ``autopar.checkpoint.parts`` has the same as boxes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from planner.ir.layout import Layout, Mesh, Shard, local_outer

Run = tuple[int, int]
"""The first index, and the first that is no more of it."""
Elements = tuple[tuple[Run, ...], ...]
"""Of every dim the runs, in order."""


def elements_of(shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int) -> Elements:
    """What a rank holds of a tensor.

    Args:
        shape: of the whole tensor, which the layout divides evenly.
        layout: one local type per axis of the mesh.
    """
    places = tuple(rank // axis.stride % axis.size for axis in mesh.axes)
    return _elements(shape, layout, mesh.sizes, places)


@functools.lru_cache(maxsize=2**14)
def _elements(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...], places: tuple[int, ...]) -> Elements:
    found: list[tuple[Run, ...]] = [((0, size),) for size in shape]
    for axis, local_type in enumerate(layout):
        if isinstance(local_type, Shard):
            # Earlier axes may have cut what lies outside this axis's strips.
            strips = local_outer(layout[: axis + 1], axis, sizes[: axis + 1])
            strip = _length(found[local_type.dim]) // strips
            piece = strip // sizes[axis]
            starts = (number * strip + places[axis] * piece for number in range(strips))
            found[local_type.dim] = _joined(run for at in starts for run in _slice(found[local_type.dim], at, piece))
    return tuple(found)


def overlap(one: Elements, other: Elements) -> int:
    """How many elements two parts of a tensor have in common."""
    return math.prod(map(_common, one, other))


def count(elements: Elements) -> int:
    """How many there are."""
    return math.prod(map(_length, elements))


def _length(runs: tuple[Run, ...]) -> int:
    return sum(stop - start for start, stop in runs)


def _slice(runs: tuple[Run, ...], first: int, length: int) -> Iterator[Run]:
    """The runs of so many indices, from the ``first`` of them on."""
    for start, stop in runs:
        low, high = max(start, start + first), min(stop, start + first + length)
        if low < high:
            yield low, high
        first -= stop - start


def _joined(runs: Iterator[Run]) -> tuple[Run, ...]:
    """Runs with those together that follow one another."""
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)


def _common(one: tuple[Run, ...], other: tuple[Run, ...]) -> int:
    """How many indices are in both; runs are in order."""
    total, at = 0, 0
    for start, stop in one:
        while at < len(other) and other[at][1] <= start:
            at += 1
        total += sum(max(0, min(stop, last) - max(start, first)) for first, last in _until(other, at, stop))
    return total


def _until(runs: tuple[Run, ...], at: int, stop: int) -> Iterator[Run]:
    """Those from number ``at`` on that begin before ``stop``."""
    while at < len(runs) and runs[at][0] < stop:
        yield runs[at]
        at += 1
