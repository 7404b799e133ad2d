"""Recompute: run a block without keeping for backward what can be made again.

The block's program returns, beside its outputs, the values to give up and those to make them from. While it runs,
autograd hands over every tensor that it saves; when it returns, those that lie in the memory of a value to give up are
let go. The first of them that backward asks for makes all of them again, in one run of a second program that holds
just the statements which that takes. Nothing else about autograd changes: gradients are the same to the last bit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._local_tensor import LocalTensor
from torch.fx import GraphModule

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]


def recompute(program: GraphModule, again: GraphModule, *inputs: Tensor) -> Any:
    """Run ``program`` and return its outputs.

    Args:
        program: returns (outputs, values to give up, values to keep).
        again: takes the values to keep, returns the values to give up.
        inputs: what ``program`` takes.
    """
    if not torch.is_grad_enabled():
        return program(*inputs)[0]
    cells: list[_Cell] = []

    def pack(tensor: Tensor) -> _Cell:
        cells.append(_Cell(tensor))
        return cells[-1]

    with saved_tensors_hooks(pack, _Cell.unpack):
        outputs, given_up, kept = program(*inputs)
    frame = _Frame(again, [value.detach() for value in kept])
    places = {_memory(value): place for place, value in reversed([*enumerate(given_up)])}
    for value in kept:
        places.pop(_memory(value), None)
    for cell in cells:
        place = places.get(_memory(cell.tensor))
        if place is not None:
            cell.give_up(frame, place)
    return outputs


class _Cell:
    """A tensor that autograd saved: itself, or where it will be found."""

    __slots__ = ("frame", "geometry", "place", "saved")

    def __init__(self, tensor: Tensor):
        self.saved: Tensor | None = tensor
        self.frame: _Frame | None = None
        self.place = -1
        self.geometry: Geometry = ((), (), 0)

    @property
    def tensor(self) -> Tensor:
        assert self.saved is not None
        return self.saved

    def give_up(self, frame: _Frame, place: int) -> None:
        """Let go of the tensor; it will be a view of value number ``place`` of the frame."""
        tensor = self.tensor
        self.geometry = (tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))
        self.frame, self.place, self.saved = frame, place, None
        frame.uses[place] += 1

    def unpack(self) -> Tensor:
        """The tensor, made again if need be."""
        if self.frame is None:
            return self.tensor
        size, stride, offset = self.geometry
        return self.frame.value(self.place).as_strided(size, stride, offset)


class _Frame:
    """What one run of a block keeps: values to make others from, and while backward needs them, these.

    Attributes:
        uses: how many saved tensors are views of each value.
    """

    def __init__(self, again: GraphModule, kept: list[Tensor]):
        self.uses: Counter[int] = Counter()
        self._again, self._kept, self._versions = again, kept, [value._version for value in kept]
        self._autocast = _autocast_now()
        self._made: dict[int, Tensor] = {}
        self._left: Counter[int] = Counter()

    def value(self, place: int) -> Tensor:
        """A value that was given up. It is dropped with its last use, and made again if it is used once more."""
        if place not in self._made:
            self._make()
        made = self._made[place]
        self._left[place] -= 1
        if not self._left[place]:
            del self._made[place]
        return made

    def _make(self) -> None:
        if [value._version for value in self._kept] != self._versions:
            raise RuntimeError(
                "a tensor from which a block recomputes was changed in place between forward and backward: "
                "call loss.backward() before optimizer.step(), or plan with pin={'recompute': 'none'}"
            )
        with torch.no_grad(), self._autocast():
            made = self._again(*self._kept)
        self._left = self.uses.copy()
        self._made = {place: made[place] for place in self.uses}


def _memory(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    if isinstance(tensor, LocalTensor):
        return _memory(next(iter(tensor._local_tensors.values())))
    return tensor.untyped_storage()._cdata


def _autocast_now() -> Any:
    """A context factory that restores the autocast state of this moment, of every device type."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    states = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    caches = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in states:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=caches))
            yield

    return restored
