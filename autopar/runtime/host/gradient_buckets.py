"""Buckets in which gradients are summed, kept on the host from one step to the next.

Torch keeps what is freed on an accelerator; on the host, large memory goes back to the system and comes again as zeroed
pages, which costs about as much as filling it. So a sum's memory is kept there and filled again, but only where nothing
else holds it any more: not a parameter's ``.grad``, and not the user.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor


class Buckets:
    """One-dimensional tensors by key, at most one of each."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def __reduce__(self) -> tuple[type[Buckets], tuple[()]]:
        """A copy begins with nothing."""
        return Buckets, ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is kept, some of it perhaps held elsewhere too."""
        return tuple(kept.detach() for kept in self._kept.values())

    def joined(self, key: Hashable, terms: Sequence[Tensor]) -> Tensor:
        """The terms behind one another, copied: into this key's bucket, or into new memory where that is still held."""
        flat = [term.reshape(-1) for term in terms]
        like, size = flat[0], sum(term.numel() for term in flat)
        if like.device.type != "cpu" or isinstance(like, LocalTensor):
            return torch.cat(flat)
        kept = self._kept.get(key)
        if kept is None or (kept.dtype, kept.numel()) != (like.dtype, size):
            kept = self._kept[key] = torch.cat(flat)
        elif not is_held_elsewhere(kept):
            torch.cat(flat, out=kept)
        else:
            return torch.cat(flat)
        return kept.detach()  # another tensor of the same storage, so that who holds it is counted


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether anything but this tensor, held once, holds its storage."""
    return _holders(tensor) != _NOBODY_ELSE


def _holders(tensor: Tensor) -> tuple[int, int]:
    """How many tensors share this one's storage, and how often the storage itself is held, each with what asks here."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_NOBODY_ELSE = _holders(torch.empty(0))
