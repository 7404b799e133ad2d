"""Boxes: which slices of a whole tensor a rank holds.

Files hold boxes and know nothing of plans: what one plan wrote as boxes another reads as its own. A rank that holds
strips of a dim (a fused query-key-value weight) has several boxes of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.graph.rows import Rows
from autopar.graph.slabs import Slabs
from autopar.runtime.spmd.mesh import coordinates, rows_of
from planner.ir.layout import Layout, Mesh, Shard

PIECE_BYTES = 64 * 2**20
"""So much is read or written at once; a file's pieces are no larger, unless one element is."""


@dataclass(frozen=True)
class Part:
    """What this rank holds of a tensor.

    Attributes:
        local: the values, on any device.
        shape: of the whole tensor.
        rows: where ``local`` lies in it.
        copy, copies: so many ranks hold the same; this is one of them.
        own: the boxes, where ``rows`` are not of the tensor itself.
    """

    local: Tensor
    shape: tuple[int, ...]
    rows: Rows
    copy: int = 0
    copies: int = 1
    own: tuple[Box, ...] | None = None

    @property
    def boxes(self) -> list[Box]:
        """What it consists of."""
        return boxes(self.rows) if self.own is None else [*self.own]

    def tables(self, slabs: Slabs) -> dict[str, Part]:
        """Of slabs the tables in them; ``local`` stays that of the slabs."""
        found: dict[str, list[Box]] = {name: [] for name in slabs.tables}
        for part, box in itertools.product(slabs.parts, boxes(self.rows)):
            (slab, top, column), (count, rows, columns), (at, row, feature) = box.offsets, box.sizes, box.within
            first, last = max(top, part.top), min(top + rows, part.top + part.rows)
            if slab <= part.slab < slab + count and first < last:
                offsets, within = (first - part.top, part.column + column), (row + first - top, feature)
                inside = (at + part.slab - slab,)
                found[part.table].append(Box(offsets, (last - first, columns), within, inside))
        return {name: replace(self, shape=slabs.tables[name], own=tuple(own)) for name, own in found.items()}

    @staticmethod
    def whole(local: Tensor, copy: int = 0, copies: int = 1) -> Part:
        """A tensor that every holder holds whole."""
        return Part(local, tuple(local.shape), tuple(slice(0, size) for size in local.shape), copy, copies)

    @staticmethod
    def stored(local: Tensor, shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int) -> Part:
        """A tensor stored in a layout; ``rank`` is one of the mesh."""
        copy, copies = 0, 1
        for axis, place, local_type in zip(mesh.axes, coordinates(mesh, rank), layout, strict=True):
            if not isinstance(local_type, Shard):
                copy, copies = copy * axis.size + place, copies * axis.size
        return Part(local, shape, rows_of(shape, layout, mesh, rank), copy, copies)


@dataclass(frozen=True)
class Box:
    """A box of a tensor: where it begins in the whole, its sizes, and where it begins in a rank's part.

    ``inside``: the part is what has these indices in the leading dims of a larger one.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    within: tuple[int, ...]
    inside: tuple[int, ...] = ()

    def of(self, local: Tensor) -> Tensor:
        """The box as a view of a rank's part."""
        for index in self.inside:
            local = local[index]
        for dim, (start, size) in enumerate(zip(self.within, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local

    def cut(self, most: int) -> Iterator[Box]:
        """Boxes of at most so many elements, cut along the outermost dims."""
        if math.prod(self.sizes) <= most:
            yield self
            return
        dim = next(d for d, size in enumerate(self.sizes) if size > 1)
        step = max(1, most // math.prod(self.sizes[dim + 1 :]))
        for start in range(0, self.sizes[dim], step):
            size = min(step, self.sizes[dim] - start)
            yield from Box(
                _plus(self.offsets, dim, start),
                (*self.sizes[:dim], size, *self.sizes[dim + 1 :]),
                _plus(self.within, dim, start),
                self.inside,
            ).cut(most)


def _plus(offsets: tuple[int, ...], dim: int, start: int) -> tuple[int, ...]:
    return (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])


def boxes(rows: Rows) -> list[Box]:
    """The boxes that a part consists of, one for each combination of contiguous runs."""
    found = []
    for chosen in itertools.product(*(_runs(indices) for indices in rows)):
        offsets, sizes, within = zip(*chosen, strict=True) if chosen else ((), (), ())
        found.append(Box(offsets, sizes, within))
    return found


def _runs(indices: slice | Tensor) -> list[tuple[int, int, int]]:
    """(first, size, first within the part) of every contiguous run."""
    if isinstance(indices, slice):
        return [(indices.start, indices.stop - indices.start, 0)]
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    edges = [0, *breaks, len(indices)]
    return [(int(indices[start]), stop - start, start) for start, stop in itertools.pairwise(edges)]


def pieces(parts: Mapping[str, Part], piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[str, Box, Tensor]]:
    """What this rank writes, so that ranks that hold the same write about equally much of it.

    All of them go through their tensors in one order, the largest first, and take turns with the pieces.

    Returns:
        (name, box, values of the box) of every piece.
    """
    ordered = sorted(parts.items(), key=lambda item: (-math.prod(item[1].shape), item[0]))
    for number, (name, part) in enumerate(ordered):
        most = max(1, piece_bytes // part.local.element_size())
        cut = itertools.chain.from_iterable(box.cut(most) for box in part.boxes)
        for place, box in enumerate(cut, start=number):
            if place % part.copies == part.copy:
                yield name, box, box.of(part.local)
