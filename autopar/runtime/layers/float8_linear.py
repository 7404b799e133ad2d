"""Linear layers whose products, of forward and of backward, multiply in float8 (``torch._scaled_mm``).

An operand is scaled by a power of two, which rounds nothing, so that its largest magnitude lies in (224, 448], up to
the largest of ``float8_e4m3fn``; then each element is rounded to three bits of mantissa. Sums are in float32. Scales
are found anew for each product, of all that this rank has of an operand, or of each row along what is summed over.
"""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.operators.autocast import as_autocast
from planner.cost.kernels import Scaling

FLOAT8 = torch.float8_e4m3fn
MOST = torch.finfo(FLOAT8).max
LEAST = 2.0**-100
"""Smaller magnitudes have the scale of this one, so that zeros have a scale."""


def float8_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, scaling: Scaling) -> Tensor:
    """``aten.linear`` on local tensors in bfloat16, whose sizes are multiples of 16.

    Args:
        scaling: ``tensorwise``: one scale of each operand, ``rowwise``: one of each row of the left, and column of the
            right one.
    """
    if spmd.is_type_checking():
        return torch.ops.aten.linear.default(input, weight, bias)
    x, w = as_autocast(input), as_autocast(weight)
    made = _Linear.apply(x.flatten(0, -2), w, None if bias is None else as_autocast(bias), scaling == "rowwise")
    return made.view(*x.shape[:-1], w.shape[0])


def scale_of(matrix: Tensor, by_row: bool) -> Tensor:
    """The power of two by which a matrix, or each of its rows, is multiplied."""
    dims = {"dim": 1, "keepdim": True} if by_row else {}
    largest = torch.linalg.vector_norm(matrix, torch.inf, dtype=torch.float32, **dims)
    return (MOST / largest.clamp(min=LEAST)).log2().floor().exp2()


def product(left: Tensor, right: Tensor, by_row: bool, scales: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """``left[m, k] @ right[n, k].T``, in the dtype of ``left``.

    Args:
        scales: of both, where they are known.
    """
    scale_left, scale_right = scales or (scale_of(left, by_row), scale_of(right, by_row))
    return torch._scaled_mm(
        _scaled(left, scale_left),
        _scaled(right, scale_right).t(),
        scale_left.reciprocal(),
        scale_right.reciprocal().t(),
        out_dtype=left.dtype,
    )


def _scaled(matrix: Tensor, scale: Tensor) -> Tensor:
    """Times the scale in float8, row by row in memory, in one kernel."""
    return torch.mul(matrix, scale, out=torch.empty(matrix.shape, dtype=FLOAT8, device=matrix.device))


class _Linear(torch.autograd.Function):
    """``x[m, k], w[n, k], bias[n] -> y[m, n]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, by_row: bool) -> Tensor:
        scales = scale_of(x, by_row), scale_of(w, by_row)
        ctx.by_row = by_row
        ctx.save_for_backward(x, w, *(() if by_row else scales))
        y = product(x, w, by_row, scales)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, w, *scales), by_row = ctx.saved_tensors, ctx.by_row
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        of_x = of_w = None  # by rows, scales are of other rows than in forward
        if not by_row:
            scale_dy = scale_of(dy, by_row)
            of_x, of_w = (scale_dy, scales[1]), (scale_dy, scales[0])
        dx = product(dy, w.t(), by_row, of_x) if needs_x else None
        dw = product(dy.t(), x.t(), by_row, of_w) if needs_w else None
        return dx, dw, dy.sum(0) if needs_bias else None, None
