"""Conversions between layouts: which collectives turn one layout into another, and what they cost.

A *step* changes the local type on one mesh axis; each legal step has a fixed collective forward and a
fixed one backward (the table :data:`STEPS`). A conversion between two layouts is the cheapest route of
legal steps, found once for all pairs of layouts of a tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from planner.graph import TensorType
from planner.layout import Axis, I, Layout, LocalType, Mesh, P, R, Shard, local_shape
from planner.problem import Floats

# (from, to) -> (collective forward, collective backward). "S>S" is a shard moving to another dim.
STEPS: dict[str, tuple[str, str]] = {
    "I>R": ("", "all_reduce"),
    "R>I": ("", ""),
    "P>I": ("all_reduce", ""),
    "P>R": ("all_reduce", "all_reduce"),
    "P>S": ("reduce_scatter", "all_gather"),
    "S>R": ("all_gather", "reduce_scatter"),
    "S>I": ("all_gather", ""),
    "I>S": ("", "all_gather"),
    "R>S": ("", ""),
    "S>S": ("all_to_all", "all_to_all"),
    "I>P": ("", ""),
    "R>P": ("", ""),
}


@dataclass(frozen=True)
class Collective:
    """One call of a collective: ``bytes_in`` is the size of the tensor each rank passes in."""

    kind: str
    axis: str
    bytes_in: int
    phase: str


@dataclass(frozen=True)
class Step:
    """One axis of a layout changes from ``src`` to ``dst``; ``before`` is the whole layout it acts on."""

    axis: int
    src: LocalType
    dst: LocalType
    before: Layout

    @property
    def rule(self) -> str:
        return f"{_letter(self.src)}>{_letter(self.dst)}"

    @property
    def after(self) -> Layout:
        return (*self.before[: self.axis], self.dst, *self.before[self.axis + 1 :])

    def collectives(self, tensor: TensorType, mesh: Mesh) -> tuple[Collective, ...]:
        """The calls this step makes for a tensor, backward only where a gradient flows."""
        axis = mesh.axes[self.axis]
        before, after = (local_bytes(tensor, layout, mesh) for layout in (self.before, self.after))
        return _collectives(self.rule, axis, before, after, tensor.grad)


def _collectives(rule: str, axis: Axis, before: int, after: int, grad: bool) -> tuple[Collective, ...]:
    """The calls of a step on ``axis`` from ``before`` bytes to ``after`` bytes per rank."""
    if axis.size == 1:
        return ()
    forward, backward = STEPS[rule]
    calls = []
    if forward:
        calls.append(Collective(forward, axis.name, before, "forward"))
    if backward and grad:
        calls.append(Collective(backward, axis.name, after, "backward"))
    return tuple(calls)


Route = tuple[Step, ...]
PriceOf = Callable[[str, Axis, int], float]


def _letter(local_type: LocalType) -> str:
    return "S" if isinstance(local_type, Shard) else local_type.letter


def local_bytes(tensor: TensorType, layout: Layout, mesh: Mesh) -> int:
    """Bytes that one rank holds of ``tensor``."""
    shape = local_shape(tensor.shape, layout, mesh.sizes)
    assert shape is not None, f"{layout} does not divide {tensor.shape} on {mesh.sizes}"
    return math.prod(shape) * tensor.item_bytes


def resting(layout: Layout, grad: bool) -> Layout:
    """The layout as the planner sees it: without a gradient, I and R are the same and written R."""
    return layout if grad else tuple(R if local_type == I else local_type for local_type in layout)


def _legal(before: Layout, axis: int, dst: LocalType, grad: bool) -> bool:
    """Whether one step may change ``axis`` to ``dst``: in the table, and no minor axis cuts the same strips."""
    src = before[axis]
    if src == dst or f"{_letter(src)}>{_letter(dst)}" not in STEPS:
        return False
    if not grad and I in (src, dst):
        return False
    if isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim:
        return False
    minor = before[axis + 1 :]
    return not any(isinstance(t, Shard) and t in minor for t in (src, dst))


class ConversionTable:
    """All conversions of one tensor type on one mesh.

    Attributes:
        layouts: every layout considered, valid for the shape.
        forward_s, backward_s: matrices [from, to] of seconds along the chosen route; ``inf`` when there is none.
    """

    def __init__(
        self,
        tensor: TensorType,
        mesh: Mesh,
        shards: Iterable[Shard],
        price: PriceOf,
        touch_s_per_byte: float,
        launch_s: float,
    ):
        self.tensor, self.mesh = tensor, mesh
        types: list[LocalType] = [R, P, *sorted(shards)] if not tensor.grad else [R, I, P, *sorted(shards)]
        self.layouts = tuple(
            layout
            for layout in itertools.product(types, repeat=len(mesh.axes))
            if local_shape(tensor.shape, layout, mesh.sizes) is not None
        )
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        count = len(self.layouts)
        forward = np.full((count, count), np.inf)
        backward = np.full((count, count), np.inf)
        np.fill_diagonal(forward, 0.0)
        np.fill_diagonal(backward, 0.0)
        held = [local_bytes(tensor, layout, mesh) for layout in self.layouts]
        for i, before in enumerate(self.layouts):
            for axis in range(len(mesh.axes)):
                for dst in types:
                    if not _legal(before, axis, dst, tensor.grad):
                        continue
                    step = Step(axis, before[axis], dst, before)
                    j = self.index.get(step.after)
                    if j is None:
                        continue
                    seconds = {"forward": 0.0, "backward": 0.0}
                    for call in _collectives(step.rule, mesh.axes[axis], held[i], held[j], tensor.grad):
                        seconds[call.phase] += price(call.kind, mesh.axes[axis], call.bytes_in)
                    moved = 0.0 if step.rule in ("I>R", "R>I") else launch_s + touch_s_per_byte * (held[i] + held[j])
                    forward[i, j] = seconds["forward"] + moved
                    backward[i, j] = (seconds["backward"] + moved) if tensor.grad else 0.0
        self._via = np.full((count, count), -1)
        _close(forward, backward, self._via)
        self.forward_s: Floats = forward
        self.backward_s: Floats = backward

    def route(self, src: Layout, dst: Layout) -> Route:
        """The steps from ``src`` to ``dst``; empty when they are equal."""
        steps: list[Step] = []
        for i, j in self._hops(self.index[src], self.index[dst]):
            before, after = self.layouts[i], self.layouts[j]
            axis = next(k for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
            steps.append(Step(axis, before[axis], after[axis], before))
        return tuple(steps)

    def _hops(self, i: int, j: int) -> list[tuple[int, int]]:
        if i == j:
            return []
        middle = int(self._via[i, j])
        assert np.isfinite(self.forward_s[i, j]), f"no conversion {self.layouts[i]} -> {self.layouts[j]}"
        return [(i, j)] if middle < 0 else self._hops(i, middle) + self._hops(middle, j)


def _close(forward: Floats, backward: Floats, via: np.ndarray) -> None:
    """All-pairs cheapest routes by total seconds (Floyd–Warshall), in place; ``via`` records a middle layout."""
    total = forward + backward
    for k in range(len(total)):
        through = total[:, k, None] + total[None, k, :]
        better = through < total * (1 - 1e-12) - 1e-18
        total[better] = through[better]
        forward[better] = (forward[:, k, None] + forward[None, k, :])[better]
        backward[better] = (backward[:, k, None] + backward[None, k, :])[better]
        via[better] = k
