"""Losses over sharded tokens, and cross entropy over a sharded vocabulary.

``reduction`` is torch's: 0 none, 1 mean, 2 sum.
"""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, R, V
from torch import Tensor
from torch._ops import OpOverload

from autopar.operators.autocast import autocasts
from autopar.runtime.layers.collectives import all_reduce
from autopar.runtime.spmd.rank_index import (
    Groups,
    GroupsOrMicroBatches,
    among_ranks,
    as_invariant,
    as_partial,
    first,
    ranks,
)
from autopar.runtime.spmd.run_state import RunState

NONE, MEAN = 0, 1


def cross_entropy_loss(
    state: RunState,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    token_groups: GroupsOrMicroBatches = (),
    vocab_groups: Groups = (),
    count: Tensor | None = None,
) -> Tensor:
    """``aten.cross_entropy_loss`` over the tokens and the vocabulary of every rank.

    Args:
        state: that it is a region of: the logarithms of probabilities that it keeps are made anew where it runs again.
        logits: ``[t, v, d1..]`` or ``[v]``; tokens ``S`` on ``token_groups``, classes ``S`` on ``vocab_groups``.
        target: global class indices ``[t, d1..]``, ``R`` on ``vocab_groups``; or probabilities like ``logits``
            (then ``vocab_groups`` is empty).
        weight: per class ``[v]``, ``R`` on ``token_groups``; ``None`` where the vocabulary is sharded.
        reduction, ignore_index, label_smoothing: as in the operator.
        token_groups: the mesh axes that shard ``t`` or ``d1..``, in any order.
        vocab_groups: the mesh axes that shard ``v``, major first.
        count: :func:`token_count` of this rank's tokens of all micro-batches, where ``token_groups`` has them.

    Returns:
        The loss ``[]``, ``P`` on ``token_groups``, ``I`` on ``vocab_groups``; ``[t, d1..]`` without a reduction.
    """
    op = torch.ops.aten.cross_entropy_loss.default
    with state.random.region():
        if target.is_floating_point() or not (token_groups or vocab_groups):
            loss = op(logits, target, weight, reduction, ignore_index, label_smoothing)
            return _share_of_mean(loss, reduction, token_groups)
        if vocab_groups:
            assert weight is None, "class weights keep the vocabulary whole"
            scores = logits.movedim(min(1, logits.dim() - 1), -1)
            start = first(scores.shape[-1] * ranks(vocab_groups), vocab_groups, logits.device)
            losses = _VocabCrossEntropy.apply(scores, target, start, ignore_index, label_smoothing, vocab_groups)
            dtype = torch.float32 if autocasts(logits) else logits.dtype  # as autocast has the operator itself
        else:
            losses = op(logits, target, weight, NONE, ignore_index, label_smoothing)
            dtype = losses.dtype
    return _reduce(losses, target, weight, reduction, ignore_index, dtype, token_groups, vocab_groups, count)


def nll_loss(
    op: OpOverload[..., Any],
    log_probs: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    *,
    token_groups: GroupsOrMicroBatches = (),
    count: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``op``, one of the ``aten.nll_loss*`` family, over the tokens of every rank.

    Args:
        op: the operator that this replaces.
        log_probs: ``[t, v, d1..]`` or ``[v]``, ``S`` on ``token_groups``.
        target: class indices ``[t, d1..]``.
        weight: per class ``[v]``, ``R`` on ``token_groups``.
        reduction, ignore_index: as in the operator.
        token_groups: the mesh axes that shard ``t`` or ``d1..``, in any order.
        count: as in :func:`cross_entropy_loss`.

    Returns:
        What ``op`` returns: the loss, and for ``*_forward`` the total weight; ``P`` on ``token_groups`` when reduced.
    """
    losses, *totals = _as_tuple(op(log_probs, target, weight, NONE, ignore_index))
    loss = _reduce(losses, target, weight, reduction, ignore_index, losses.dtype, token_groups, (), count)
    if not totals:
        return loss
    total = totals[0] if reduction == NONE else token_count(target, weight, ignore_index).to(log_probs.dtype)
    return loss, as_partial(total, token_groups)


def partial_mean(
    op: OpOverload[..., Any], *args: Any, contracted_groups: GroupsOrMicroBatches = (), **kwargs: Any
) -> Tensor:
    """``op``, a mean (or a loss with a ``reduction``), over slices of equal size: this rank's term of the global mean.

    Args:
        op: the operator.
        *args: its positional arguments.
        contracted_groups: the mesh axes that shard dims which the result lacks.
        **kwargs: its keyword arguments.

    Returns:
        What ``op`` returns, ``P`` on ``contracted_groups``.
    """
    bound = {argument.name: argument.default_value for argument in op._schema.arguments}
    bound |= dict(zip(bound, args, strict=False)) | kwargs
    return _share_of_mean(op(*args, **kwargs), bound.get("reduction", MEAN), contracted_groups)


def _share_of_mean(loss: Tensor, reduction: Any, groups: GroupsOrMicroBatches) -> Tensor:
    if reduction == NONE or not groups:
        return loss
    return as_partial(loss / ranks(groups) if reduction == MEAN else loss, groups)


def _reduce(
    losses: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
    token_groups: GroupsOrMicroBatches,
    vocab_groups: Groups,
    count: Tensor | None,
) -> Tensor:
    """The sum of ``losses[t, d1..]``, over the global count or class weight of tokens for a mean, as ``dtype``."""
    if reduction == NONE:
        return losses.to(dtype)
    total = losses.sum(dtype=_wide(losses.dtype))
    if reduction == MEAN:
        if count is None:
            count = token_count(target, weight, ignore_index)
        for group in among_ranks(token_groups):
            count = spmd.all_reduce(count, group, src=V, dst=R)
        total = total / as_invariant(count, vocab_groups)
    return as_partial(total.to(dtype), token_groups)


def token_count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """How many tokens count here, or the sum of their class weights: ``[]``."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    per_token = weight.detach().to(_wide(weight.dtype))[target.masked_fill(~counted, 0)]
    return per_token.masked_fill(~counted, 0).sum()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


class _VocabCrossEntropy(torch.autograd.Function):
    """``logits[.., v], target[..], start[] -> losses[..]``, complete on every rank of ``groups``.

    Per token, the ranks share the largest logit, then the sum of exponentials, the target's logit, and
    (for smoothing) the sum of logits: Shoeybi et al. 2019, section 3. Saves the logits and one number per
    token; the gradient ``softmax - one_hot`` needs no communication.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, start: Tensor, ignore_index: int, smoothing: float, groups: Groups
    ) -> Tensor:
        wide, columns = _wide(logits.dtype), logits.shape[-1]
        local = target - start
        mine = (local >= 0) & (local < columns) & (target != ignore_index)
        column = local.masked_fill(~mine, 0).unsqueeze(-1)

        largest = all_reduce(logits.detach().amax(-1).to(wide), "max", groups)
        shifted = logits.to(wide) - largest.unsqueeze(-1)
        picked = shifted.gather(-1, column).squeeze(-1).masked_fill(~mine, 0)
        logit_sum = [shifted.sum(-1)] if smoothing else []
        sums = all_reduce(torch.stack([shifted.exp_().sum(-1), picked, *logit_sum]), "sum", groups)

        log_sum = sums[0].log()
        losses = (1 - smoothing) * (log_sum - sums[1])
        if smoothing:
            losses += smoothing * (log_sum - sums[2] / (columns * ranks(groups)))
        ctx.smoothing, ctx.classes = smoothing, columns * ranks(groups)
        ctx.save_for_backward(logits, largest + log_sum, column, mine, target != ignore_index)
        return losses.masked_fill(target == ignore_index, 0)

    @staticmethod
    def spmd_typecheck(*, logits: Tensor, target: Tensor, start: Tensor, groups: Groups) -> Any:
        spmd.rules.ignore(start)
        losses = spmd.rules.einsum("...v,...->...", logits, target)
        for group in groups:
            losses = spmd.rules.all_reduce(losses, group, src=V, dst=I)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, column, mine, counted = ctx.saved_tensors
        grad = grad.masked_fill(~counted, 0).unsqueeze(-1)
        found = (logits.to(log_sum.dtype) - log_sum.unsqueeze(-1)).exp_()
        if ctx.smoothing:
            found -= ctx.smoothing / ctx.classes
        found *= grad
        found.scatter_add_(-1, column, (-(1 - ctx.smoothing) * grad).masked_fill(~mine.unsqueeze(-1), 0))
        return found.to(logits.dtype), None, None, None, None, None
