"""Which part of a tensor a rank holds, as indices of each dim."""

from __future__ import annotations

import torch

Rows = tuple[slice | torch.Tensor, ...]
"""Which indices of each dim a rank holds; a slice where they are contiguous."""


def as_slice(indices: torch.Tensor) -> slice | torch.Tensor:
    """Indices, as a slice where they are contiguous."""
    if not len(indices):
        return slice(0, 0)
    first, last = int(indices[0]), int(indices[-1])
    return slice(first, last + 1) if last - first + 1 == len(indices) else indices


def take(full: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The part of ``full`` in ``rows``; a view where all of them are slices."""
    for dim, indices in enumerate(rows):
        if isinstance(indices, slice):
            full = full.narrow(dim, indices.start, indices.stop - indices.start)
        else:
            full = full.index_select(dim, indices.to(full.device))
    return full
