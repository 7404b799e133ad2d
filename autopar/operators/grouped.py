"""The product of rows in groups, each with a matrix of its own, in every dtype.

torch's ``grouped_mm`` computes it where it is sound: in bfloat16 on a GPU, where rows of all operands are multiples of
16 bytes. Elsewhere (it knows no float64, and leaves rows beyond the last group as they were) each group is a product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED_BYTES = 16
"""What ``grouped_mm`` takes strides to be multiples of."""


def grouped_linear(rows: Tensor, weight: Tensor, counts: Sequence[int], bias: Tensor | None = None) -> Tensor:
    """``rows[s, n], weight[g, n, m], bias[g, m] -> [s, m]``: each group of rows, one after the other, by its matrix.

    Args:
        rows: as many as all counts together, perhaps none.
        weight: of the same dtype; its groups may be transposed.
        counts: rows of every group.
        bias: added to the rows of its group.
    """
    return _GroupedLinear.apply(rows, weight, bias, tuple(counts))


class _GroupedLinear(torch.autograd.Function):
    """Saves its operands but for the bias."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: tuple[int, ...]) -> Tensor:
        ctx.counts = counts
        ctx.save_for_backward(rows, weight)
        found = products(rows, weight, counts)
        if bias is not None:
            for group, part in _groups(found, counts):
                part += bias[group]
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias, _ = ctx.needs_input_grad
        gradient = gradient.contiguous()
        return (
            products(gradient, weight.mT, ctx.counts) if of_rows else None,
            _outer_products(rows, gradient, ctx.counts, like=weight) if of_weight else None,
            torch.stack([part.sum(0) for _, part in _groups(gradient, ctx.counts)]) if of_bias else None,
            None,
        )


def products(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """``rows[s, n], weight[g, n, m] -> [s, m]``, each group of rows times its matrix."""
    if _is_sound(rows, weight):
        return torch.nn.functional.grouped_mm(rows, weight, offs=_ends(counts, rows.device))
    found = rows.new_empty(len(rows), weight.shape[-1])
    for group, (into, part) in enumerate(zip(found.split(counts), rows.split(counts), strict=True)):
        if len(part):
            torch.mm(part, weight[group], out=into)
    return found


def _outer_products(rows: Tensor, gradient: Tensor, counts: Sequence[int], like: Tensor) -> Tensor:
    """``rows[s, n], gradient[s, m] -> [g, n, m]``, for each group, summed over its rows; laid out ``like`` a tensor."""
    if _is_sound(rows, gradient):
        found = torch.nn.functional.grouped_mm(rows.mT, gradient, offs=_ends(counts, rows.device))
        if 0 in counts:
            found[[group for group, count in enumerate(counts) if not count]] = 0
        return found
    found = torch.empty_like(like)
    for into, x, g in zip(found, rows.split(counts), gradient.split(counts), strict=True):
        if not len(x):
            into.zero_()
        elif into.is_contiguous():
            torch.mm(x.mT, g, out=into)
        else:  # written as what it is the transpose of, since out= takes no other strides
            torch.mm(g.mT, x, out=into.mT)
    return found


def _groups(rows: Tensor, counts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    return enumerate(rows.split(counts))


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    """Where each group ends, as ``grouped_mm`` takes it."""
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


def _is_sound(rows: Tensor, other: Tensor) -> bool:
    """Whether torch's kernel computes this product on this device, as it is laid out."""
    if (
        not hasattr(torch.nn.functional, "grouped_mm")
        or not rows.is_cuda
        or rows.dtype != torch.bfloat16
        or not len(rows)
    ):
        return False
    if torch.cuda.get_device_capability(rows.device) < (8, 0):
        return False
    sizes = {rows.shape[-1], *other.shape[1:]}
    is_dense = rows.is_contiguous() and (other.is_contiguous() or other.mT.is_contiguous())
    return is_dense and all(size * rows.element_size() % ALIGNED_BYTES == 0 for size in sizes)
