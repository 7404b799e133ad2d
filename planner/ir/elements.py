"""Which elements of a tensor a rank holds, as runs of indices in every dim, and how many two ranks have in common.

A part of a tensor is the product of its runs in each dim. ``autopar.checkpoint.parts`` has the same as boxes.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator

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


class DisjointParts:
    """Parts of a tensor that have nothing in common, to be found by what they have in common with others.

    They are those of a layout: every combination of what it leaves of each dim.
    """

    def __init__(self, parts: Iterable[Elements]):
        of_dims = [dict.fromkeys(runs) for runs in zip(*parts, strict=True)]
        self._runs = [sorted((run, runs) for runs in every for run in runs) for every in of_dims]
        self._known: list[dict[tuple[Run, ...], dict[tuple[Run, ...], int]]] = [{} for _ in of_dims]

    def overlapping(self, elements: Elements) -> Iterator[tuple[Elements, int]]:
        """Those that have elements in common with others, and how many."""
        for each in itertools.product(*(self._common(dim, runs).items() for dim, runs in enumerate(elements))):
            yield tuple(runs for runs, _ in each), math.prod(common for _, common in each)

    def _common(self, dim: int, wanted: tuple[Run, ...]) -> dict[tuple[Run, ...], int]:
        """In one dim, what parts have of it -> how many indices they have in common with others."""
        known = self._known[dim]
        if wanted not in known:
            found: dict[tuple[Run, ...], int] = {}
            every = self._runs[dim]
            for start, stop in wanted:
                at = bisect.bisect_right(every, start, key=lambda each: each[0][1])
                while at < len(every) and every[at][0][0] < stop:
                    (first, last), runs = every[at]
                    found[runs] = found.get(runs, 0) + min(stop, last) - max(start, first)
                    at += 1
            known[wanted] = found
        return known[wanted]


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
