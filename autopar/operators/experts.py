"""A mixture of experts as one operator: every token goes through the experts that were chosen for it, and no other.

``x[t, h], indices[t, k], weights[t, k], up[e, 2 f, h], down[e, h, f] -> y[t, h]``. Rows are sorted by expert, go
through two grouped products (:mod:`autopar.operators.grouped`, :mod:`autopar.operators.expert`), and come back weighted
and summed. No token is dropped, however uneven the choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autopar.functions.carry import is_recorded
from autopar.functions.ranks import for_each_rank
from autopar.operators.autocast import product_dtype
from autopar.operators.expert import Expert, Layout
from autopar.operators.grouped import grouped_linear
from planner.base.errors import InputError

_LIBRARY = torch.library.Library("autopar", "DEF")
_LIBRARY.define(
    "experts(Tensor x, Tensor indices, Tensor weights, Tensor up, Tensor down, Tensor? up_bias=None, "
    "Tensor? down_bias=None, str activation='silu', str gate='halves', float alpha=1.0, float limit=0.0, "
    "float offset=0.0, bool transposed=False) -> Tensor"
)


def experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    gate: Layout = "halves",
    alpha: float = 1.0,
    limit: float | None = None,
    offset: float = 0.0,
    transposed: bool = False,
    prototypes: int | None = None,
) -> Tensor:
    """Send every token through its experts: ``sum over j of weights[t, j] * expert[indices[t, j]](x[t])``.

    Args:
        x: tokens, ``[.., h]``.
        indices: for each token the ``k`` experts that it goes to, whole numbers from 0, ``[.., k]``.
        weights: of each of these, ``[.., k]``; of an expert that is chosen twice they add up.
        up: the first matrix of every expert, ``[e, 2 * f, h]`` with gates, ``[e, f, h]`` without.
        down: the second, ``[e, h, f]``.
        up_bias, down_bias: ``[e, 2 * f]`` (or ``[e, f]``) and ``[e, h]``.
        activation: ``silu``, ``gelu``, ``gelu_tanh``, ``relu``, ``relu2``, ``sigmoid``, ``tanh``, or ``swish`` with
            ``alpha``.
        gate: where gates lie among what ``up`` makes: before all ups (``halves``), each before its up (``pairs``), or
            there are ``none``.
        alpha: of ``swish``: ``x * sigmoid(alpha * x)``.
        limit: clamps gates from above, and ups on both sides; without gates, what is activated from above.
        offset: added to ups beside gates.
        transposed: the matrices are ``[e, h, 2 * f]`` and ``[e, f, h]``.
        prototypes: the experts are that many groups, each with a router of its own (Yang et al. 2021, M6-T): a token
            goes to one expert of every group, ``k = prototypes``, and indices count within the group.

    Returns:
        ``[.., h]``, of the dtype of ``x``.

    Raises:
        InputError: shapes do not fit together, indices are no whole numbers or weights no floating point ones, or an
            option does nothing beside the others. Rows are computed with in the dtype of the matrices.
    """
    for name, tensor in {"x": x, "indices": indices, "weights": weights, "up": up, "down": down}.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"autopar.experts: {name} is a {type(tensor).__name__}, and it is a tensor")
    form = Expert(activation, gate, alpha, limit or 0.0, offset, transposed)
    _check(x, indices, weights, up, down, up_bias, down_bias, form)
    if prototypes is not None:
        if prototypes != indices.shape[-1] or len(up) % prototypes:
            raise InputError(
                f"autopar.experts: prototypes is {prototypes}, with {len(up)} experts and {indices.shape[-1]} chosen "
                "for each token; every token goes to one expert of each of so many groups of equal size"
            )
        group = len(up) // prototypes
        numbers = indices + torch.arange(prototypes, device=indices.device) * group
        indices = torch.where((indices >= 0) & (indices < group), numbers, -1)
    tokens = (t if t.dim() == 2 else t.reshape(-1, t.shape[-1]) for t in (x, indices, weights))
    found = torch.ops.autopar.experts.default(*tokens, up, down, up_bias, down_bias, *dataclasses.astuple(form))
    return found if x.dim() == 2 else found.reshape(x.shape)


def _check(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    form: Expert,
) -> None:
    def refuse(what: str) -> None:
        raise InputError(f"autopar.experts: {what}")

    for name, tensor, dims in (("up", up, "[e, 2 * f, h]"), ("down", down, "[e, h, f]")):
        if tensor.dim() != 3:
            refuse(f"{name} has shape {tuple(tensor.shape)}; it is the matrices of all experts, {dims}")
    if not x.dim() or indices.shape != weights.shape or indices.shape[:-1] != x.shape[:-1]:
        refuse(
            f"x, indices and weights have shapes {tuple(x.shape)}, {tuple(indices.shape)} and {tuple(weights.shape)}; "
            "they are [.., h], [.., k] and [.., k], with the same tokens"
        )
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        refuse(f"indices are of dtype {indices.dtype}; they are whole numbers, as torch.topk gives them")
    if not weights.is_floating_point():
        refuse(f"weights are of dtype {weights.dtype}; they are floating point numbers that results are multiplied by")
    count, hidden = len(up), down.shape[1 if form.transposed else 2]
    if indices.shape[-1] > count:
        refuse(f"each token goes to {indices.shape[-1]} experts, and there are {count}: choose at most as many")
    made = hidden * form.made
    wanted = (count, x.shape[-1], made) if form.transposed else (count, made, x.shape[-1])
    if tuple(up.shape) != wanted:
        refuse(
            f"up has shape {tuple(up.shape)}; with x of {x.shape[-1]} features, down of shape {tuple(down.shape)} and "
            f"gate={form.gate!r} it is {wanted}{', transposed' if form.transposed else ''}"
        )
    back = (count, hidden, x.shape[-1]) if form.transposed else (count, x.shape[-1], hidden)
    if tuple(down.shape) != back:
        refuse(f"down has shape {tuple(down.shape)}; with up of shape {tuple(up.shape)} it is {back}")
    for name, bias, size in (("up_bias", up_bias, made), ("down_bias", down_bias, x.shape[-1])):
        if bias is not None and tuple(bias.shape) != (count, size):
            refuse(f"{name} has shape {tuple(bias.shape)}; it is {(count, size)}")


def routed(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    first: Tensor | int = 0,
    *,
    form: Expert,
    count: int | None = None,
    seen: Callable[[Sequence[int]], None] | None = None,
) -> Tensor:
    """The operator on one device, which has the experts from number ``first`` on.

    Args:
        count: how many experts there are with those elsewhere; what goes to these alone is 0 here.
        seen: is told how many rows each expert has.
    """
    k, dtype, chosen = indices.shape[-1], x.dtype, known(indices, count or len(up))
    if len(up) < (count or 0):
        chosen = chosen - first
        chosen = torch.where((chosen >= 0) & (chosen < len(up)), chosen, len(up))
    slots, counts = by_expert(chosen, len(up))
    each = counts.tolist()
    if seen is not None:
        seen(each)
    rows = through(take(x, slots, k), each, up, down, up_bias, down_bias, form=form)
    return put(rows * weights.reshape(-1).index_select(0, slots).unsqueeze(-1), slots, len(x), k).to(dtype)


def known(indices: Tensor, count: int) -> Tensor:
    """The experts that are chosen, one after the other, of which there are ``count``.

    Raises:
        InputError: one of them does not exist.
    """
    chosen = indices.reshape(-1)
    least, most = map(int, torch.aminmax(chosen)) if len(chosen) else (0, 0)
    if least < 0 or most >= count:
        number = int(chosen[(chosen < 0) | (chosen >= count)][0])
        note = ", or, with prototypes, an index is not within its group" if number == -1 else ""
        raise InputError(f"autopar.experts: a token goes to expert {number}; there are {count}, numbered from 0{note}")
    return chosen


def by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The places among ``chosen`` that name one of ``count`` experts, sorted by expert, and how many name each; the
    number ``count`` names none.
    """
    counts = torch.bincount(chosen, minlength=count + 1)
    return torch.argsort(chosen, stable=True)[: len(chosen) - int(counts[count])], counts[:count]


def take(x: Tensor, slots: Tensor, k: int = 1) -> Tensor:
    """``x[t, h], slots[s] -> [s, h]``: slot ``t * k + j`` is of token ``t``."""
    return _Take.apply(x, slots, k)


def put(rows: Tensor, slots: Tensor, tokens: int, k: int = 1) -> Tensor:
    """``rows[s, h], slots[s] -> y[t, h]``: the sum of the rows of each token."""
    return _Put.apply(rows, slots, k, tokens)


def through(
    rows: Tensor,
    counts: Sequence[int],
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *,
    form: Expert,
) -> Tensor:
    """What experts make of rows that are sorted by expert: ``[s, h] -> [s, h]``."""
    dtype = product_dtype(up)
    up, down, rows = up.to(dtype), down.to(dtype), rows.to(dtype)
    up_bias, down_bias = (None if bias is None else bias.to(dtype) for bias in (up_bias, down_bias))
    made = grouped_linear(rows, up if form.transposed else up.mT, counts, up_bias)
    return grouped_linear(form.between(made), down if form.transposed else down.mT, counts, down_bias)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, k: int) -> Tensor:
        ctx.k, ctx.tokens = k, len(x)
        ctx.save_for_backward(slots)
        return x.index_select(0, slots // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return _summed(gradient, slots, ctx.k, ctx.tokens), None, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, k: int, tokens: int) -> Tensor:
        ctx.k = k
        ctx.save_for_backward(slots)
        return _summed(rows, slots, k, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return gradient.index_select(0, slots // ctx.k), None, None, None


def _summed(rows: Tensor, slots: Tensor, k: int, tokens: int) -> Tensor:
    """Without atomics: each row has a place of its own before places are summed."""
    if len(slots) == tokens * k:  # all places: to take them in order is quicker than to put them there
        order = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots), device=slots.device))
        places = rows.index_select(0, order)
    else:
        places = rows.new_zeros(tokens * k, rows.shape[-1]).index_copy_(0, slots, rows)
    return places if k == 1 else places.view(tokens, k, rows.shape[-1]).sum(1)


# --- the operator --------------------------------------------------------------------------------------


class _Shapes(torch.autograd.Function):
    """What the operator gives for tensors without data, with gradients of the right shapes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(x, *others)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(torch.empty_like(t) if t.is_floating_point() else None for t in ctx.saved_tensors)


def _run(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *arguments: Any,
) -> Tensor:
    form = Expert(*arguments)
    tensors = (x, indices, weights, up, down, up_bias, down_bias)
    if x.is_meta or isinstance(x, FakeTensor):
        return _Shapes.apply(*(t for t in tensors if t is not None))
    return for_each_rank(partial(routed, form=form), *tensors)


def _with_gradients(*args: Any) -> Tensor:
    if is_recorded():
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.autopar.experts.default(*args)
    return _run(*args)


_LIBRARY.impl("experts", _with_gradients, "Autograd")
_LIBRARY.impl("experts", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("experts", _run, "Meta")
