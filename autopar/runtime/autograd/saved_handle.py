"""A tensor saved for backward: itself, or a handle on its memory while that is off the device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """Storages that leave the device together and come back."""

    def flat(self, number: int) -> Tensor:
        """All bytes of one of them on the device."""


class Holder(Protocol):
    """What knows of what is held, and may have it leave."""

    def hold(self, tensor: Tensor) -> SavedHandle:
        """Hold a tensor for backward."""


class SavedHandle:
    """A tensor that is held for backward.

    Attributes:
        tensor: itself, while nothing else has its memory.
    """

    __slots__ = ("__weakref__", "_bits", "_geometry", "_memory", "_number", "_version", "tensor")

    def __init__(self, tensor: Tensor):
        self.tensor: Tensor | None = tensor.detach()  # a result would hold its node of backward, and that this
        self._version = tensor._version

    def leave(self, memory: Memory, number: int) -> None:
        """Let go of the tensor: its elements are in a storage of ``memory``."""
        assert self.tensor is not None
        tensor = self._unwritten(self.tensor)
        self._geometry = tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        self._bits = tensor.is_conj(), tensor.is_neg()
        self._memory, self._number, self.tensor = memory, number, None

    def read(self) -> Tensor:
        """The tensor, on the device."""
        if self.tensor is not None:
            return self._unwritten(self.tensor)
        flat, (dtype, size, stride, offset) = self._memory.flat(self._number), self._geometry
        found = torch.empty(0, dtype=dtype, device=flat.device)
        found.set_(flat.untyped_storage(), offset, size, stride)
        is_conj, is_neg = self._bits
        found = torch._conj(found) if is_conj else found
        return torch._neg_view(found) if is_neg else found

    def _unwritten(self, tensor: Tensor) -> Tensor:
        """The tensor, if nobody has written to it; autograd looks only where nothing holds for it."""
        if tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place between forward and "
                f"backward, {tensor._version - self._version} times: call loss.backward() before optimizer.step(), and "
                "write to a copy (clone) of what the model returned"
            )
        return tensor
