"""Resharding at run time: one call, one axis, one collective, most of them of ``spmd_types``.

These are the functions that emitted programs call. Types are written as in :mod:`planner.ir.layout`; the
strip count of a shard is the rank-local one.

Sums, of values and of gradients, are made in the tensors' own dtype, as in DistributedDataParallel: a bfloat16 model
sends half the bytes of a float32 one. Gradients of parameters may be summed in a wider one, ``reduce_dtype``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from planner.ir.layout import LocalType, Mark, Shard, parse_layout

# spmd_types calls torch's functional collectives by the names that torch 2.13 is giving up.
warnings.filterwarnings(
    "ignore",
    r"`torch\.distributed\._functional_collectives\.\w+_tensor` is deprecated",
    FutureWarning,
    r"spmd_types\._collectives$",
)

_MARKS = {"R": spmd.R, "I": spmd.I, "P": spmd.P}


@functools.cache
def local_type(text: str) -> LocalType:
    """A local type as it is written, e.g. ``"S(1)"``."""
    return parse_layout(text, 1)[0]


def convert(x: Tensor, axis: ProcessGroup, src: str, dst: str, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Change the local type of ``x`` on one mesh axis; the backward follows from the types.

    Args:
        x: this rank's part.
        axis: the axis's process group.
        src, dst: local types, e.g. ``"P"``, ``"S(1)"``; a legal step of :data:`planner.formulation.resharding.STEPS`.
        reduce_dtype: in which its gradient is summed over ranks; left out: in that of ``x``.
    """
    source, target = local_type(src), local_type(dst)
    if {src, dst} == {"R", "I"} and not (x.requires_grad or spmd.is_type_checking()):
        return x
    # What a resharding hands on as it is keeps its strides, with gradients or without: recomputation relies on that.
    x, restore = open_strips(x if {src, dst} == {"R", "I"} else x.contiguous(), source, target)
    src_type, dst_type = _spmd_type(source, restore), _spmd_type(target, restore)
    result = _step(x, axis, src_type, dst_type, reduce_dtype or x.dtype)
    if result.requires_grad:
        with spmd.no_typecheck():
            result.register_hook(Tensor.contiguous)
    return _close_strips(result, restore)


def _step(x: Tensor, axis: ProcessGroup, src: object, dst: object, reduce_dtype: torch.dtype) -> Tensor:
    if isinstance(src, spmd.Shard) and isinstance(dst, spmd.Shard):
        return _AllToAll.apply(x, axis, src.dim, dst.dim)
    # Into R, the backward sums; spmd_types wants to be told in which dtype where that is narrower than float32.
    dtypes = {"op_dtype": reduce_dtype, "out_dtype": x.dtype}
    options = {"backward_options": dtypes} if dst is spmd.R else {}
    if src is spmd.P:
        if isinstance(dst, spmd.Shard):
            return spmd.reduce_scatter(x, axis, src=src, dst=dst)
        if spmd.is_type_checking():
            return spmd.all_reduce(x, axis, src=src, dst=dst, **options)
        return _AllReduce.apply(x, axis, dst is spmd.R)
    if isinstance(src, spmd.Shard):
        return spmd.all_gather(x, axis, src=src, dst=dst, **options)
    return spmd.convert(x, axis, src=src, dst=dst, expert_mode=True, **options)


class _AllReduce(torch.autograd.Function):
    """The sum over ranks; the gradient is its own sum where ranks have terms of it.

    ``spmd_types`` calls the functional collective, whose way through Python takes longer than a small sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: ProcessGroup, has_terms: bool) -> Tensor:
        ctx.axis, ctx.has_terms = axis, has_terms
        found = x.clone()
        dist.all_reduce(found, group=axis)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllReduce.apply(grad.contiguous(), ctx.axis, True) if ctx.has_terms else grad, None, None


class _AllToAll(torch.autograd.Function):
    """From shards of dim ``src`` to shards of dim ``dst``; backward is the way back.

    In one tensor on the wire: ``spmd_types`` sends a list of tensors, which gloo cannot in every torch from 2.11 on.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: ProcessGroup, src: int, dst: int) -> Tensor:
        ctx.axis, ctx.src, ctx.dst = axis, src, dst
        sent = x.unflatten(dst, (axis.size(), -1)).movedim(dst, 0).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=axis)
        return received.movedim(0, src).flatten(src, src + 1)

    @staticmethod
    def spmd_typecheck(*, x: Tensor, axis: ProcessGroup, src: int, dst: int) -> Any:
        return spmd.rules.all_to_all(x, axis)  # not which dims: it knows no two axes that shard one

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad, ctx.axis, ctx.dst, ctx.src), None, None, None


def open_strips(x: Tensor, *types: LocalType) -> tuple[Tensor, tuple[int, ...]]:
    """View dims that are cut in strips as (strips, rest); returns those dims, last first."""
    cut = sorted({(t.dim, t.outer) for t in types if isinstance(t, Shard) and t.outer > 1}, reverse=True)
    for dim, strips in cut:
        x = x.unflatten(dim, (strips, x.shape[dim] // strips))
    return x, tuple(dim for dim, _ in cut)


def _close_strips(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in reversed(dims):
        x = x.flatten(dim, dim + 1)
    return x


def _spmd_type(each: LocalType, opened: Sequence[int]) -> object:
    if isinstance(each, Mark):
        return _MARKS[each.letter]
    shift = sum(1 for dim in opened if dim < each.dim or (dim == each.dim and each.outer > 1))
    return spmd.S(each.dim + shift)
