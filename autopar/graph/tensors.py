"""What operators can tell of tensors without their values: kind, memory, and which of several are the same."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor


def first_with(keys: Sequence[Hashable]) -> tuple[int, ...]:
    """For each key, where it occurs first: two lists that repeat themselves alike give the same."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(key, at) for at, key in enumerate(keys))


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in; equal for views of one."""
    return int(tensor.untyped_storage()._cdata)


def tensor_kind(tensor: Tensor) -> object:
    """What operators can tell of a tensor without its values."""
    return (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )
