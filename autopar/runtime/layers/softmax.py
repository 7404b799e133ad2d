"""Softmax, and its logarithm, over a dim that ranks share."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torch._ops import OpOverload

from autopar.operators.autocast import autocasts
from autopar.runtime.layers.collectives import all_reduce
from autopar.runtime.spmd.rank_index import Groups


def softmax(op: OpOverload[..., Any], input: Tensor, dim: int, *given: Any, shared_groups: Groups = ()) -> Tensor:
    """``op``, of the family of softmax, over ``dim`` of every rank.

    Args:
        op: the operator that this replaces.
        input: ``S`` along ``dim`` on ``shared_groups``.
        dim: that is computed as a whole.
        given: its further argument: the dtype to compute in, or whether half precision becomes float32.
        shared_groups: the mesh axes that shard ``dim``, in any order.

    Returns:
        What ``op`` returns, sharded as ``input``.
    """
    if not shared_groups:
        return op(input, dim, *given)
    dtype = op(input.new_empty(0), 0, *given).dtype
    wide = torch.float32 if autocasts(input) else torch.promote_types(dtype, torch.float32)
    return _SharedSoftmax.apply(input, dim, torch.promote_types(wide, dtype), dtype, "log" in str(op), shared_groups)


class _SharedSoftmax(torch.autograd.Function):
    """Ranks agree on the largest element first, so that no exponential is too large."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, wide: torch.dtype, dtype: torch.dtype, is_log: bool, groups: Groups
    ) -> Tensor:
        least = x.to(wide)
        y = least - all_reduce(least.amax(dim, keepdim=True), "max", groups)
        if is_log:
            y.sub_(all_reduce(y.exp().sum(dim, keepdim=True), "sum", groups).log_())
        else:
            y.exp_()
            y.div_(all_reduce(y.sum(dim, keepdim=True), "sum", groups))
        y = y.to(dtype)
        ctx.dim, ctx.wide, ctx.of, ctx.is_log, ctx.groups = dim, wide, x.dtype, is_log, groups
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def spmd_typecheck(*, x: Tensor, groups: Groups) -> Any:
        names = ascii_lowercase[: x.dim()]
        return spmd.rules.einsum(f"{names}->{names}", x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        y, gradient = y.to(ctx.wide), dy.to(ctx.wide)
        dx = gradient if ctx.is_log else y * gradient
        total = all_reduce(dx.sum(ctx.dim, keepdim=True), "sum", ctx.groups)
        dx = gradient - y.exp().mul_(total) if ctx.is_log else dx.sub_(y * total)
        return dx.to(ctx.of), None, None, None, None, None
