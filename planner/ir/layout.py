"""Local types and layouts: what each rank of a mesh holds of a tensor, and what its gradient is.

On one mesh axis a tensor has one local type:

=========  ==========================  =======================================
type       each rank holds             its gradient on that axis
=========  ==========================  =======================================
``S(d)``   a slice along dim ``d``     ``S(d)``
``R``      the same values             partial: still to be summed
``I``      the same values             the same values, already complete
``P``      a term of a sum             the same values
=========  ==========================  =======================================

``S(d, o)`` slices dim ``d`` seen as ``(o, size / o)`` along its second part: each rank holds ``o``
strips. That is how a sharded factor survives being merged behind another one: the sequence inside a
flattened ``batch*sequence``, the heads inside a fused ``3*heads*head_dim``.

A :data:`Layout` is one local type per mesh axis. Where several axes shard the same part of a dim, the
earlier axis is the major one.

Micro-batches are an axis too, :data:`MICRO`, always the first: its "ranks" are the same devices one after the other.
The batch is sharded over it, parameters are not, and a partial sum over it is one that is added up from micro-batch
to micro-batch.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from planner.base.errors import PlanError


class Shard(NamedTuple):
    """A slice along ``dim``, of each of the ``outer`` equal strips of that dim."""

    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim},{self.outer})"

    def __repr__(self) -> str:
        return str(self)


class Mark(NamedTuple):
    """A local type without a dim: ``R``, ``I`` or ``P``."""

    letter: str

    def __str__(self) -> str:
        return self.letter

    def __repr__(self) -> str:
        return str(self)


R, I, P = Mark("R"), Mark("I"), Mark("P")  # noqa: E741
LocalType = Shard | Mark
Layout = tuple[LocalType, ...]


MICRO = "micro"
"""The axis of micro-batches: micro-batches of the same devices instead of devices."""
PIPELINE = "pipeline"
"""The axis of stages; no mesh of the planner has it, since each stage has a mesh."""


@dataclass(frozen=True)
class Axis:
    """A mesh axis: ``size`` ranks, each ``stride`` apart in the cluster's rank order.

    The axis :data:`MICRO` has micro-batches instead of ranks.
    """

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class Mesh:
    """Axes, major first; rank = sum of coordinate * stride."""

    axes: tuple[Axis, ...]

    @staticmethod
    def of(**sizes: int) -> Mesh:
        """``Mesh.of(data=2, tensor=4)``: axes in order, the last one contiguous."""
        stride, axes = 1, []
        for name, size in reversed(sizes.items()):
            axes.append(Axis(name, size, stride))
            stride *= size
        return Mesh(tuple(reversed(axes)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return math.prod(axis.size for axis in self.axes if axis.name != MICRO)

    @cached_property
    def micro_batches(self) -> int:
        """Into how many micro-batches a step is cut."""
        return math.prod(axis.size for axis in self.axes if axis.name == MICRO)

    def micro_batched(self, micro_batches: int) -> Mesh:
        """The same ranks with the batch cut into micro-batches."""
        cut = (Axis(MICRO, micro_batches, self.size),) if micro_batches > 1 else ()
        return Mesh((*cut, *(axis for axis in self.axes if axis.name != MICRO)))


@functools.lru_cache(maxsize=2**16)
def local_shape(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of one rank's part of a tensor; ``None`` when the layout does not divide ``shape`` evenly.

    Args:
        shape: global shape, in elements.
        layout: one local type per mesh axis.
        sizes: mesh axis sizes, aligned with ``layout``.
    """
    local = list(shape)
    strips: dict[int, dict[int, int]] = {}
    for local_type, size in zip(layout, sizes, strict=True):
        if isinstance(local_type, Shard):
            by_outer = strips.setdefault(local_type.dim, {})
            by_outer[local_type.outer] = by_outer.get(local_type.outer, 1) * size
    for dim, by_outer in strips.items():
        if dim >= len(shape):
            return None
        outers = sorted(by_outer)
        for outer, following in zip(outers, [*outers[1:], shape[dim]], strict=True):
            if following % outer or (following // outer) % by_outer[outer]:
                return None
            local[dim] //= by_outer[outer]
    return tuple(local)


def local_outer(layout: Layout, axis: int, sizes: tuple[int, ...]) -> int:
    """How many strips rank-local data has for the shard on ``axis``: ``outer`` less what other axes cut from it."""
    shard = layout[axis]
    assert isinstance(shard, Shard)
    outer = shard.outer
    for other, size in zip(layout, sizes, strict=True):
        if isinstance(other, Shard) and other.dim == shard.dim and other.outer < shard.outer:
            outer //= size
    return outer


def over_micro_batches(layout: Layout, mesh: Mesh) -> Layout:
    """On the ranks alone, the layout of a tensor whose micro-batches lie behind one another on every rank.

    Args:
        layout: one local type per axis of ``mesh``.
        mesh: with or without an axis :data:`MICRO`.

    Raises:
        PlanError: micro-batches are cut from strips, so that behind one another they are in no layout.
    """
    if mesh.micro_batches == 1:
        return layout
    micro_batches, *ranks = layout
    if not isinstance(micro_batches, Shard):
        return tuple(ranks)
    if micro_batches.outer > 1:
        raise PlanError(
            f"micro-batches are cut from {micro_batches.outer} strips of dim {micro_batches.dim}; they can only be "
            "cut whole"
        )
    within = Shard(micro_batches.dim), Shard(micro_batches.dim, mesh.micro_batches)
    return tuple(within[1] if each == within[0] else each for each in ranks)


def format_layout(layout: Layout) -> str:
    """``"S(0) R"``: one local type per axis, separated by spaces."""
    return " ".join(str(local_type) for local_type in layout)


_SHARD = re.compile(r"S\((\d+)(?:,(\d+))?\)")


def parse_layout(text: str, axes: int) -> Layout:
    """The inverse of :func:`format_layout`; raises :class:`PlanError` on anything else."""
    layout: list[LocalType] = []
    for word in text.split():
        match = _SHARD.fullmatch(word)
        if match:
            layout.append(Shard(int(match[1]), int(match[2] or 1)))
        elif word in ("R", "I", "P"):
            layout.append({"R": R, "I": I, "P": P}[word])
        else:
            raise PlanError(f"layout {text!r}: {word!r} is not a local type; use S(dim), S(dim,outer), R, I or P")
    if len(layout) != axes:
        raise PlanError(f"layout {text!r} has {len(layout)} local types for {axes} mesh axes; give one per axis")
    return tuple(layout)
