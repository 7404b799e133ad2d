"""Batch norm over the batch of every rank."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch
import torch.distributed._functional_collectives as funcol
from spmd_types import I, V
from torch import Tensor

from autopar.runtime.spmd.rank_index import Groups, ranks


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
    *,
    batch_groups: Groups = (),
) -> Tensor:
    """``aten.batch_norm``, which updates its running statistics in place.

    Args:
        input: ``[n / ranks, c, spatial..]``, ``S(0)`` on ``batch_groups``; as many rows on every rank.
        weight, bias: ``[c]``, ``R`` on ``batch_groups``.
        running_mean, running_var: ``[c]``, ``I`` on ``batch_groups``.
        training, momentum, eps, cudnn_enabled: as in the operator.
        batch_groups: the mesh axes that shard the batch, in any order.

    Returns:
        ``[n / ranks, c, spatial..]``, ``S(0)`` on ``batch_groups``.
    """
    if not training or not batch_groups:
        return torch.ops.aten.batch_norm.default(
            input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
        )
    y, mean, var = _SyncedBatchNorm.apply(input, weight, bias, eps, batch_groups)
    _update(running_mean, running_var, mean, var, momentum, _samples(input, batch_groups))
    return y


def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *,
    batch_groups: Groups = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten._native_batch_norm_legit``: as :func:`batch_norm`, and the batch's mean and inverse deviation.

    Returns:
        ``[n / ranks, c, spatial..]``, and two of ``[c]``, ``I`` on ``batch_groups``.
    """
    if not training or not batch_groups:
        op = torch.ops.aten._native_batch_norm_legit.default
        return op(input, weight, bias, running_mean, running_var, training, momentum, eps)
    y, mean, var = _SyncedBatchNorm.apply(input, weight, bias, eps, batch_groups)
    _update(running_mean, running_var, mean, var, momentum, _samples(input, batch_groups))
    return y, mean, (var + eps).rsqrt()


def native_batch_norm_no_stats(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    batch_groups: Groups = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten._native_batch_norm_legit.no_stats``: as :func:`native_batch_norm`, of a norm that keeps no running
    statistics, and so normalises by the batch in evaluation, too.
    """
    if not batch_groups:
        op = torch.ops.aten._native_batch_norm_legit.no_stats
        return op(input, weight, bias, training, momentum, eps)
    y, mean, var = _SyncedBatchNorm.apply(input, weight, bias, eps, batch_groups)
    return y, mean, (var + eps).rsqrt()


def native_batch_norm_functional(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *,
    batch_groups: Groups = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``aten._native_batch_norm_legit_functional``: as :func:`native_batch_norm`, and new running statistics.

    Returns:
        ``[n / ranks, c, spatial..]``, and four of ``[c]``, ``I`` on ``batch_groups``.
    """
    if not training or not batch_groups:
        op = torch.ops.aten._native_batch_norm_legit_functional.default
        return op(input, weight, bias, running_mean, running_var, training, momentum, eps)
    new_mean, new_var = running_mean.clone(), running_var.clone()
    y, mean, inverse = native_batch_norm(
        input, weight, bias, new_mean, new_var, training, momentum, eps, batch_groups=batch_groups
    )
    return y, mean, inverse, new_mean, new_var


def _samples(input: Tensor, groups: Groups) -> int:
    """How many values of each channel all ranks have."""
    return input.numel() // input.shape[1] * ranks(groups)


def _update(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, momentum: float, samples: int
) -> None:
    """Move the running statistics towards the batch's mean and unbiased variance, in place."""
    with torch.no_grad():
        if running_mean is not None:
            running_mean.mul_(1 - momentum).add_(momentum * mean.to(running_mean.dtype))
        if running_var is not None:
            unbiased = var * (samples / (samples - 1))
            running_var.mul_(1 - momentum).add_(momentum * unbiased.to(running_var.dtype))


class _SyncedBatchNorm(torch.autograd.Function):
    """``x[n, c, ..], weight[c], bias[c] -> y[n, c, ..], mean[c], var[c]`` with the statistics of all ranks.

    Ranks share means first and variances around the common mean then, which does not cancel; backward
    shares the sums of ``dy`` and ``dy * x_hat`` (Ioffe and Szegedy 2015, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: Groups
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [0, *range(2, x.dim())]
        local_var, local_mean = torch.var_mean(wide, dims, correction=0)
        mean = _mean_over_ranks(local_mean, groups)
        var = _mean_over_ranks(local_var + (local_mean - mean).square(), groups)
        ctx.groups, ctx.dims = groups, dims
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt())
        ctx.mark_non_differentiable(mean, var)
        # The kernel takes narrow samples with float32 statistics, and then with float32 weights alone.
        scale, shift = (None if affine is None else affine.to(mean.dtype) for affine in (weight, bias))
        y, _, _ = torch.ops.aten._native_batch_norm_legit_no_training.default(x, scale, shift, mean, var, 0.0, eps)
        return y, mean, var

    @staticmethod
    def spmd_typecheck(*, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: Groups) -> Any:
        y = spmd.rules.einsum("nc...->nc...", x)
        for affine in (weight, bias):
            if affine is not None:
                y = spmd.rules.einsum("nc...,c->nc...", y, affine)
        statistic = spmd.rules.einsum("nc...->c", x)
        for group in groups:
            statistic = spmd.rules.all_reduce(statistic, group, src=V, dst=I)
        return y, statistic, statistic

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors

        def spread(per_channel: Tensor) -> Tensor:
            return per_channel.view(-1, *(1,) * (x.dim() - 2))

        grad = dy.to(mean.dtype)
        x_hat = (x.to(mean.dtype) - spread(mean)) * spread(inverse)
        d_bias, d_weight = grad.sum(ctx.dims), (grad * x_hat).sum(ctx.dims)
        sum_dy, sum_dy_x_hat = _mean_over_ranks(torch.stack([d_bias, d_weight]), ctx.groups) / (x.numel() // x.shape[1])
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        dx = (grad - spread(sum_dy) - x_hat * spread(sum_dy_x_hat)) * spread(scale)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return (
            dx.to(x.dtype),
            d_weight.to(weight.dtype) if needs_weight else None,
            d_bias.to(weight.dtype if weight is not None else dy.dtype) if needs_bias else None,
            None,
            None,
        )


def _mean_over_ranks(tensor: Tensor, groups: Groups) -> Tensor:
    total = tensor.contiguous()
    for group in groups:
        total = funcol.wait_tensor(funcol.all_reduce(total, "sum", group))
    return total / ranks(groups)
