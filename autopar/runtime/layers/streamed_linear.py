"""Linear layers whose panels go around the ranks in a ring while others are multiplied (Wang et al. 2022).

Nothing is there whole: a rank has its own panel, the one that it multiplies and the one that comes. Backward saves the
rank's own part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.operators.autocast import as_autocast
from autopar.runtime.spmd.messages import shift, wait
from autopar.runtime.spmd.rank_index import Groups, cut


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    token_groups: Groups = (),
    feature_groups: Groups = (),
    sum_groups: Groups = (),
) -> Tensor:
    """``aten.linear``, streamed over one mesh axis.

    Args:
        input: ``[.., s, k]``; ``S`` on ``s`` over ``token_groups``, on ``k`` over the others.
        weight: ``[n, k]``; ``S`` on ``n``, over ``sum_groups`` on ``k``.
        bias: ``[n]``, sharded as ``n`` is; ``P`` on ``sum_groups``.
        token_groups, feature_groups, sum_groups: the axis that shares ``n`` while tokens, or input features, go around;
            or ``k``, while sums do.

    Returns:
        ``[.., s, n]``, ``S`` on ``n``; over ``sum_groups`` on ``s``.
    """
    if not (token_groups or feature_groups or sum_groups):
        return torch.ops.aten.linear.default(input, weight, bias)
    x, w = as_autocast(input), as_autocast(weight)
    b = None if bias is None else as_autocast(bias)
    if sum_groups:
        return _Scattered.apply(x, w, b, sum_groups[0])
    (ring,) = token_groups or feature_groups
    return _Gathered.apply(x, w, b, bool(token_groups), ring)


def added_matmul(
    addend: Tensor,
    input: Tensor,
    weight: Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    token_groups: Groups = (),
    feature_groups: Groups = (),
    sum_groups: Groups = (),
) -> Tensor:
    """``aten.addmm``; likewise of a linear layer whose ``weight`` is ``[k, n]``, and ``addend`` its bias."""
    if not (token_groups or feature_groups or sum_groups):
        return torch.ops.aten.addmm.default(addend, input, weight, beta=beta, alpha=alpha)
    groups = {"token_groups": token_groups, "feature_groups": feature_groups, "sum_groups": sum_groups}
    return linear(input, weight.mT, addend, **groups)


def _panels(length: int, first: int, ring: ProcessGroup, like: Tensor) -> Iterator[Tensor]:
    """At each step of a ring, the places of a panel of ``length`` that is so many ranks ahead of this one first."""
    with spmd.no_typecheck():
        here = cut(torch.arange(ring.size(), device=like.device), (ring,))
        for step in range(ring.size()):
            start = (here + first - step) % ring.size() * length
            yield start + torch.arange(length, device=like.device)


def _sent(tensor: Tensor, ring: ProcessGroup) -> Callable[[], Tensor]:
    """Send to the next rank; what is returned waits for what comes from the one before, of the same shape."""
    coming = shift(tensor.reshape(-1), ring)
    return lambda: wait(coming).view(tensor.shape)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2)


class _Gathered(torch.autograd.Function):
    """``x[.., s / P, k]`` or ``x[.., s, k / P]``, ``w[n / P, k], bias[n / P] -> y[.., s, n / P]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, by_tokens: bool, ring: ProcessGroup) -> Tensor:
        ctx.by_tokens, ctx.ring = by_tokens, ring
        ctx.save_for_backward(x, w)
        out, held = None, x
        last = ring.size() - 1
        for step, at in enumerate(_panels(x.shape[-2 if by_tokens else -1], 0, ring, x)):
            coming = _sent(held, ring) if step < last else None
            if by_tokens:
                found = F.linear(held, w, bias)
                if out is None:
                    out = found.new_empty(*x.shape[:-2], x.shape[-2] * ring.size(), w.shape[0])
                out.index_copy_(-2, at, found)
            else:
                found = F.linear(held, w.index_select(1, at), bias if step == 0 else None)
                out = found if out is None else out.add_(found)
            held = held if coming is None else coming()
        assert out is not None
        return out

    @staticmethod
    def spmd_typecheck(*, x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
        return spmd.rules.einsum("...k,nj->...n" if bias is None else "...k,nj,n->...n", x, w, *_given(bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), by_tokens, ring = ctx.saved_tensors, ctx.by_tokens, ctx.ring
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        length, last = x.shape[-2 if by_tokens else -1], ring.size() - 1
        held, behind, dx = x, None, None
        dw = torch.empty_like(w) if needs_w else None
        for step, (read, made) in enumerate(
            zip(_panels(length, 0, ring, x), _panels(length, -1, ring, x), strict=True)
        ):
            coming = _sent(held, ring) if needs_w and step < last else None
            if needs_x:
                dx = dy.index_select(-2, made) @ w if by_tokens else dy @ w.index_select(1, made)
                dx = dx if behind is None else dx.add_(behind())
                behind = _sent(dx, ring) if step < last else None
            if dw is not None:
                if by_tokens:
                    dw.addmm_(_rows(dy.index_select(-2, read)).t(), _rows(held), beta=float(step > 0))
                else:
                    dw.index_copy_(1, read, _rows(dy).t() @ _rows(held))
            held = held if coming is None else coming()
        return dx, dw, _rows(dy).sum(0) if needs_bias else None, None, None


class _Scattered(torch.autograd.Function):
    """``x[.., s, k / P], w[n, k / P]`` and terms of ``bias[n] -> y[.., s / P, n]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, ring: ProcessGroup) -> Tensor:
        ctx.ring = ring
        ctx.save_for_backward(x, w)
        out, behind, last = None, None, ring.size() - 1
        for step, at in enumerate(_panels(x.shape[-2] // ring.size(), -1, ring, x)):
            out = F.linear(x.index_select(-2, at), w, bias)
            out = out if behind is None else out.add_(behind())
            behind = _sent(out, ring) if step < last else None
        assert out is not None
        return out

    @staticmethod
    def spmd_typecheck(*, x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
        for term in _given(bias):
            spmd.rules.ignore(term)
        return spmd.rules.einsum("...k,nj->...n", x, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), ring = ctx.saved_tensors, ctx.ring
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        last, held = ring.size() - 1, dy
        dx = torch.empty_like(x) if needs_x else None
        dw = torch.empty_like(w) if needs_w else None
        db = w.new_zeros(w.shape[0]) if needs_bias else None
        for step, at in enumerate(_panels(dy.shape[-2], 0, ring, x)):
            coming = _sent(held, ring) if step < last else None
            if dx is not None:
                dx.index_copy_(-2, at, held @ w)
            if dw is not None:
                dw.addmm_(_rows(held).t(), _rows(x.index_select(-2, at)), beta=float(step > 0))
            if db is not None:
                db.add_(_rows(held).sum(0))
            held = held if coming is None else coming()
        return dx, dw, db, None


def _given(bias: Tensor | None) -> tuple[Tensor, ...]:
    return () if bias is None else (bias,)
