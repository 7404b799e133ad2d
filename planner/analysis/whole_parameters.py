"""Optimizers that go by whole parameters of which ranks hold parts: who steps which, and what that costs on paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.base.formatting import in_bytes, in_seconds
from planner.cost.model import CostModel
from planner.ir.layout import Axis, Layout, Mesh, Shard, local_shape

NORM_BYTES = 4
"""A norm is summed in float32; LAMB and LARS take two of every parameter."""
FACTOR_BYTES = 4
"""Of each row and each column of a matrix, Adafactor keeps a mean in float32."""


def shard_axes(layout: Layout) -> tuple[int, ...]:
    """The axes along which ranks hold different parts."""
    return tuple(axis for axis, local_type in enumerate(layout) if isinstance(local_type, Shard))


def owners(parameters: Sequence[tuple[int, Layout]], mesh: Mesh) -> list[int]:
    """The owner of each parameter among the ranks that hold parts of it, so that no rank owns much more than others.

    The largest come first, each to who owns least so far (Graham 1969: at most 4/3 of the best division). What ranks
    hold copies of, each group of them steps for itself.

    Args:
        parameters: elements, and stored layout, of each.
        mesh: of the ranks that hold them.

    Returns:
        Places in the order of ranks along the axes that cut the parameter; 0 where none does.
    """
    owned = np.zeros(mesh.sizes, dtype=np.int64)
    places = [0] * len(parameters)
    for number in sorted(range(len(parameters)), key=lambda each: -parameters[each][0]):
        elements, layout = parameters[number]
        cut = shard_axes(layout)
        whole = tuple(axis for axis in range(len(mesh.axes)) if axis not in cut)
        fullest = owned.max(axis=whole)
        places[number] = int(fullest.argmin())
        owned[_ranks_at(places[number], cut, mesh)] += elements
    return places


def _ranks_at(place: int, cut: tuple[int, ...], mesh: Mesh) -> tuple[int | slice, ...]:
    """The ranks at a place along these axes, as an index into an array of all ranks."""
    at = iter(np.unravel_index(place, [mesh.sizes[axis] for axis in cut]))
    return tuple(int(next(at)) if axis in cut else slice(None) for axis in range(len(mesh.axes)))


# ---- on paper --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredParameter:
    """A trained parameter as ranks hold it: whole shape, bytes of an element, layout."""

    shape: tuple[int, ...]
    item_bytes: int
    layout: Layout


@dataclass(frozen=True)
class WholeParameterBill:
    """What an update that goes by whole parameters takes beside one that is elementwise, once a step.

    What owners compute is not in it, which only the optimizer knows. Stages are taken to hold equally much.

    Attributes:
        ranks: of a stage.
        norms: that are summed over ranks, two of each parameter that is cut; ``norms_s``: seconds of that.
        moved_bytes: that the fullest rank receives from others and returns; ``moved_s``: seconds of the all-to-alls.
        owned, even: elements that the fullest rank steps, and that each would if all stepped equally many.
        state_bytes: that the plan counts for the fullest rank, were state sharded; ``owned_state_bytes``: with owners.
        factored_bytes: of Adafactor's means of rows and columns, on the fullest rank.
    """

    ranks: int
    norms: int
    norms_s: float
    moved_bytes: int
    moved_s: float
    owned: int
    even: int
    state_bytes: int
    owned_state_bytes: int
    factored_bytes: int

    def __str__(self) -> str:
        rows = [
            ("", "communication", "time", "state"),
            (
                "by norms (LAMB, LARS)",
                f"{self.norms:,} norms summed" if self.norms else "none",
                in_seconds(self.norms_s),
                in_bytes(self.state_bytes),
            ),
            (
                "whole (Muon)",
                f"{in_bytes(self.moved_bytes)} to owners and back" if self.moved_bytes else "none",
                in_seconds(self.moved_s),
                in_bytes(self.owned_state_bytes),
            ),
            ("whole (Adafactor)", "the same", in_seconds(self.moved_s), in_bytes(self.factored_bytes)),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        owned = f"the fullest of {self.ranks:,} ranks steps {self.owned:,} elements, {self.even:,} if all did as many"
        return "\n".join(["a step's update, beside one that is elementwise; of the fullest rank", *lines, f"  {owned}"])


def bill(
    parameters: Sequence[StoredParameter], mesh: Mesh, cost: CostModel, state_bytes: int, stages: int = 1
) -> WholeParameterBill:
    """What whole parameters take on one stage's ranks.

    Args:
        parameters: of all stages.
        state_bytes: of optimizer state, per element.
    """
    sizes = [math.prod(each.shape) for each in parameters]
    places = owners([(size, each.layout) for size, each in zip(sizes, parameters, strict=True)], mesh)
    owned, factored = np.zeros(mesh.sizes, dtype=np.int64), np.zeros(mesh.sizes, dtype=np.int64)
    together: dict[tuple[int, ...], list[int]] = {}
    held = 0
    for number, (each, place) in enumerate(zip(parameters, places, strict=True)):
        cut = shard_axes(each.layout)
        owned[_ranks_at(place, cut, mesh)] += sizes[number]
        factored[_ranks_at(place, cut, mesh)] += _factors(each.shape) * FACTOR_BYTES
        part = local_shape(each.shape, each.layout, mesh.sizes)
        assert part is not None
        held += math.prod(part)
        if cut:
            together.setdefault(cut, []).append(number)
    norms_s = moved_s = 0.0
    moved = 0
    for cut, numbers in together.items():
        ranks = math.prod(mesh.sizes[axis] for axis in cut)
        at = np.zeros(ranks)
        for number in numbers:
            at[places[number]] += sizes[number] * parameters[number].item_bytes / stages
        fullest = float(at.max())
        moved += round(3 * fullest * (ranks - 1) / ranks)
        for axis in _joined(cut, mesh):
            norms_s += cost.collective_s("all_reduce", axis, 2 * NORM_BYTES * math.ceil(len(numbers) / stages))
            moved_s += cost.collective_s("all_to_all", axis, 2 * fullest)
            moved_s += cost.collective_s("all_to_all", axis, fullest)
    return WholeParameterBill(
        mesh.size,
        2 * math.ceil(sum(map(len, together.values())) / stages),
        norms_s,
        moved,
        moved_s,
        round(int(owned.max()) / stages),
        round(held / stages),
        round(held * state_bytes / stages),
        round(int(owned.max()) * state_bytes / stages),
        round(int(factored.max()) / stages),
    )


def _factors(shape: tuple[int, ...]) -> int:
    """Means that Adafactor keeps: of rows and columns, or of every element of a vector."""
    size = math.prod(shape)
    return size // shape[-1] + size // shape[-2] if len(shape) > 1 and size else size


def _joined(cut: tuple[int, ...], mesh: Mesh) -> list[Axis]:
    """Axes that ranks are summed over at once, those that lie inside of one another as one; others one by one."""
    found: list[Axis] = []
    for axis in (mesh.axes[number] for number in cut):
        if found and found[-1].stride == axis.stride * axis.size:
            outer = found.pop()
            axis = Axis(f"{outer.name}+{axis.name}", outer.size * axis.size, axis.stride)
        found.append(axis)
    return found
