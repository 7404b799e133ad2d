"""Layer norm, RMS norm and group norm over dims that ranks share."""

from __future__ import annotations

import math
from string import ascii_lowercase
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from spmd_types import I, V
from torch import Tensor

from autopar.operators.autocast import autocasts
from autopar.runtime.layers.collectives import all_reduce
from autopar.runtime.spmd.rank_index import Groups, ranks


def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
    *,
    hidden_groups: Groups = (),
) -> Tensor:
    """``aten.layer_norm`` over the hidden dims of every rank.

    Args:
        input: ``[lead.., h..]``; some of the dims ``h..`` are ``S`` on ``hidden_groups``, equally many on every rank.
        normalized_shape: the rank's own ``h..``.
        weight, bias: ``[h..]``, sharded alike.
        eps, cudnn_enable: as in the operator.
        hidden_groups: the mesh axes that shard the dims ``h..``, in any order.

    Returns:
        ``[lead.., h..]``, sharded as ``input``.
    """
    if not hidden_groups:
        return torch.ops.aten.layer_norm.default(input, normalized_shape, weight, bias, eps, cudnn_enable)
    return _norm(input, normalized_shape, weight, bias, eps, hidden_groups, centers=True)[0]


def native_layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    hidden_groups: Groups = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten.native_layer_norm``: as :func:`layer_norm`, and mean and inverse deviation.

    Returns:
        ``[lead.., h..]``, and two of ``[lead.., 1..]``, ``I`` on ``hidden_groups``.
    """
    if not hidden_groups:
        return torch.ops.aten.native_layer_norm.default(input, normalized_shape, weight, bias, eps)
    y, mean, inverse = _norm(input, normalized_shape, weight, bias, eps, hidden_groups, centers=True)
    return y, mean, inverse


def rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    hidden_groups: Groups = (),
) -> Tensor:
    """``aten.rms_norm``: as :func:`layer_norm`, around zero and without a bias."""
    if not hidden_groups:
        return torch.ops.aten.rms_norm.default(input, normalized_shape, weight, eps)
    if eps is None:
        eps = torch.finfo(_wide(input.dtype)).eps
    return _norm(input, normalized_shape, weight, None, eps, hidden_groups, centers=False)[0]


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    *,
    channel_groups: Groups = (),
    hidden_groups: Groups = (),
) -> Tensor:
    """``aten.group_norm``: of each group of channels, as :func:`layer_norm`, with a weight for each channel.

    Args:
        input: ``[n, g c, h..]``, ``S`` on all groups.
        num_groups: ``g``, on all ranks.
        weight, bias: ``[g c]``, sharded alike.
        channel_groups: the mesh axes that shard the groups of channels.
        hidden_groups: those that shard channels inside groups, or ``h..``, in any order.
    """
    own = num_groups // ranks(channel_groups)
    if not hidden_groups:
        return torch.ops.aten.group_norm.default(input, own, weight, bias, eps, cudnn_enabled)
    apart = input.unflatten(1, (own, -1))
    y = _norm(apart, list(apart.shape[2:]), None, None, eps, hidden_groups, centers=True)[0].flatten(1, 2)
    each = -1, *(1,) * (y.dim() - 2)
    y = y if weight is None else y * weight.view(each)
    return y if bias is None else y + bias.view(each)


def _norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    groups: Groups,
    centers: bool,
) -> tuple[Tensor, ...]:
    """The norm, and of ``[lead.., 1..]`` the mean, if it centers, and the inverse deviation."""
    dims = len(normalized_shape)
    if autocasts(input):
        probe = input.new_empty(0, 1)  # says in which dtype autocast has norms
        input = input.to((F.layer_norm(probe, (1,)) if centers else F.rms_norm(probe, (1,))).dtype)
    y, *statistics = _HiddenNorm.apply(input, weight, bias, dims, eps, groups, centers)
    return y, *(each.view(*each.shape, *(1,) * dims) for each in statistics)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _scaled(x: Tensor, mean: Tensor | None, inverse: Tensor) -> Tensor:
    """``x``, centered and scaled, as a tensor of its own."""
    wide = x.to(inverse.dtype)
    return wide * inverse if mean is None else (wide - mean).mul_(inverse)


class _HiddenNorm(torch.autograd.Function):
    """``x[lead.., h..], weight[h..], bias[h..] -> y[lead.., h..]``, mean and inverse deviation ``[lead..]``.

    Ranks share means first and variances around the common mean then, which does not cancel; backward shares the
    averages of ``dy`` and ``dy * x_hat`` in one call (Ba et al. 2016, section 3; Xu et al. 2021). What does not center
    has no means.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        dims: int,
        eps: float,
        groups: Groups,
        centers: bool,
    ) -> tuple[Tensor, ...]:
        lead, hidden, mean = x.shape[: x.dim() - dims], [*range(x.dim() - dims, x.dim())], None
        wide = x.to(_wide(x.dtype))
        if centers:
            square, local_mean = torch.var_mean(wide, hidden, correction=0, keepdim=True)
            mean = all_reduce(local_mean, "sum", groups) / ranks(groups)
            square += (local_mean - mean).square()
        else:
            count = math.prod(x.shape[x.dim() - dims :])
            square = torch.linalg.vector_norm(wide, dim=hidden, keepdim=True).square() / count
        inverse = (all_reduce(square, "sum", groups) / ranks(groups) + eps).rsqrt()
        y = _scaled(wide, mean, inverse)
        if weight is not None:
            y.mul_(weight)
        if bias is not None:
            y.add_(bias)
        ctx.groups, ctx.hidden = groups, hidden
        ctx.save_for_backward(x, weight, mean, inverse)
        statistics = tuple(each.view(lead) for each in (mean, inverse) if each is not None)
        ctx.mark_non_differentiable(*statistics)
        return y.to(x.dtype), *statistics

    @staticmethod
    def spmd_typecheck(
        *, x: Tensor, weight: Tensor | None, bias: Tensor | None, dims: int, groups: Groups, centers: bool
    ) -> Any:
        hidden = ascii_lowercase[:dims]
        y = spmd.rules.einsum(f"...{hidden}->...{hidden}", x)
        for affine in (weight, bias):
            if affine is not None:
                y = spmd.rules.einsum(f"...{hidden},{hidden}->...{hidden}", y, affine)
        statistic = spmd.rules.einsum(f"...{hidden}->...", x)
        for group in groups:
            statistic = spmd.rules.all_reduce(statistic, group, src=V, dst=I)
        return y, *(statistic,) * (1 + centers)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        d_weight = d_bias = None
        grad, x_hat = dy.to(inverse.dtype), _scaled(x, mean, inverse)
        if needs_bias:
            d_bias = grad.sum_to_size(x.shape[ctx.hidden[0] :])
        if needs_weight:
            d_weight = (grad * x_hat).sum_to_size(weight.shape)
        dx = grad.clone() if weight is None else grad * weight
        sums = [(dx * x_hat).sum(ctx.hidden, keepdim=True)]
        if mean is not None:
            sums.append(dx.sum(ctx.hidden, keepdim=True))
        count = math.prod(x.shape[ctx.hidden[0] :]) * ranks(ctx.groups)
        averages = all_reduce(torch.stack(sums), "sum", ctx.groups) / count
        dx.addcmul_(x_hat, averages[0], value=-1)
        if mean is not None:
            dx.sub_(averages[1])
        return dx.mul_(inverse).to(x.dtype), d_weight, d_bias, None, None, None, None
