"""How parameters enter a program, and how their gradients leave it.

Parameters enter as this rank's parts (:func:`local_parts`). Where a block uses parameters replicated that are stored
whole, their gradients are summed in one all-reduce (:func:`replicate_parameters`); those that are stored in shards are
gathered in one call, and their gradients reduced in one (:func:`gather_parameters`). Both run beside the rest of
backward: autograd takes the node that was made last first, so the parts, made before the program, come after all of
it, and wait there. Gradients on their way to be reduced are whole, so they are waited for where the next block's are
sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autopar.runtime.host.gradient_buckets import Buckets
from autopar.runtime.spmd.prefetch_gather import PrefetchedGather, reduce_scatter
from autopar.runtime.spmd.resharding import convert, local_type, open_strips
from planner.ir.layout import Shard


class _LocalParts(torch.autograd.Function):
    """``to_local()`` of all parameters at once, whose gradients are known to lie as the parameters do.

    ``to_local()`` works that out anew for every parameter in every step; that, and a node of autograd for each of
    them, shows beside small layers.
    """

    @staticmethod
    def forward(ctx, buckets, *parameters):  # type: ignore[no-untyped-def]
        ctx.specs, ctx.buckets = [p._spec for p in parameters], buckets
        ctx.pending, ctx.sent = [], _Sent()
        ctx.set_materialize_grads(False)
        return tuple(p._local_tensor.detach() for p in parameters)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        while ctx.pending:
            ctx.pending.pop(0).wait()
        ctx.sent.wait()
        # Strides of a DTensor are those of its spec: autograd does not see what else a local gradient has, and fused
        # optimizers go through memory.
        found = [
            None if g is None else DTensor(g.contiguous(), spec, requires_grad=g.requires_grad)
            for g, spec in zip(grads, ctx.specs, strict=True)
        ]
        return None, *found


class _Sent:
    """The gradients that are being reduced: of one block at a time, since they are there for as long."""

    def __init__(self) -> None:
        self._last: tuple[Any, Tensor] | None = None

    def wait(self) -> None:
        """Until those that were sent last are reduced; they are let go."""
        if self._last is not None:
            self._last[0].wait()
            self._last = None

    def put(self, work: Any, sent: Tensor) -> None:
        """Some are sent."""
        assert self._last is None
        self._last = work, sent


def _parts_of(node: Any) -> tuple[Any, int] | None:
    """Where a node of autograd need not wait for the gradients that it finds, if all it found them for are parts.

    Returns:
        Their node, which waits for what is ``pending`` and ``sent``, and the number of the first part; ``None``: other
        nodes read the gradients too.
    """
    takers = [(taker, place) for taker, place in node.next_functions if taker is not None]
    return takers[0] if all(isinstance(taker, _LocalParts._backward_cls) for taker, _ in takers) else None


def local_parts(tensors: Mapping[str, Tensor], buckets: Buckets) -> dict[str, Tensor]:
    """What a rank holds, by name: of a parameter its part, whose gradient is the parameter's, in its layout.

    Args:
        tensors: parameters and buffers by name.
        buckets: where gradients of parameters that a block uses replicated are summed.
    """
    trained = {name: t for name, t in tensors.items() if isinstance(t, DTensor) and t.requires_grad}
    frozen = {name: t._local_tensor.detach() for name, t in tensors.items() if isinstance(t, DTensor)}
    parts = dict(zip(trained, _LocalParts.apply(buckets, *trained.values()), strict=True))
    return {**tensors, **frozen, **parts}


def renew(parameters: Iterable[DTensor]) -> None:
    """Go on in new memory: what :func:`local_parts` gave of them stays as it is, whatever an optimizer does."""
    for parameter in parameters:
        parameter._local_tensor = parameter._local_tensor.detach().clone()


class _Gather(torch.autograd.Function):
    """Shards of a block's parameters gathered in one call; backward reduces their gradients in one."""

    @staticmethod
    def forward(ctx, gathering, axis, shards, *parameters):  # type: ignore[no-untyped-def]
        forms = [_ShardedForm(part.shape, shard, axis.size()) for part, shard in zip(parameters, shards, strict=True)]
        ctx.axis, ctx.forms, ctx.like = axis, forms, parameters[0].detach()
        ctx.set_materialize_grads(False)
        rows = gathering.rows().split([parameter.numel() for parameter in parameters], 1)
        return tuple(form.whole(each) for form, each in zip(forms, rows, strict=True))

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        sizes, found = [form.part.numel() for form in ctx.forms], _parts_of(ctx)
        if found is not None:
            found[0].sent.wait()
        every = ctx.like.new_empty(ctx.axis.size(), sum(sizes))
        for form, grad, rows in zip(ctx.forms, grads, every.split(sizes, 1), strict=True):
            form.fill(rows, grad)
        own = every.new_empty(sum(sizes))
        work = reduce_scatter(own, every.view(-1), group=ctx.axis, async_op=found is not None)
        if found is not None:
            found[0].sent.put(work, every)
        parts = (part.view(form.part) for part, form in zip(own.split(sizes), ctx.forms, strict=True))
        return None, None, None, *(None if g is None else part for part, g in zip(parts, grads, strict=True))


class _ShardedForm:
    """A parameter that is cut along an axis of the mesh.

    Args:
        part: this rank's shape.
        shard: how it is cut, e.g. ``"S(0)"``; strips counted on one rank.
        ranks: of the axis.
    """

    def __init__(self, part: torch.Size, shard: str, ranks: int):
        cut = local_type(shard)
        assert isinstance(cut, Shard)
        self.part, self.cut, self.ranks = part, cut, ranks
        self.shape = [size * ranks if dim == cut.dim else size for dim, size in enumerate(part)]

    def whole(self, rows: Tensor) -> Tensor:
        """The parameter from every rank's part, a row each; in their memory only if that is all of it."""
        return self._opened(rows).reshape(self.shape).contiguous()

    def fill(self, rows: Tensor, grad: Tensor | None) -> None:
        """Write what each rank gets of the gradient, a row each; nothing came for one that does not reach the loss."""
        if grad is None:
            rows.zero_()
        else:
            opened = self._opened(rows)
            opened.copy_(grad.reshape(opened.shape))

    def _opened(self, rows: Tensor) -> Tensor:
        """Rows in the order of the whole, as a view: the dim that is cut is (strips,) ranks, what one has of each."""
        parts, strips = open_strips(rows.view(self.ranks, *self.part), Shard(self.cut.dim + 1, self.cut.outer))
        return parts.movedim(0, self.cut.dim + len(strips))


class _SumGradients(torch.autograd.Function):
    """Identity forward; backward sums the gradients of a block's parameters over an axis in one all-reduce."""

    @staticmethod
    def forward(ctx, axis, *parameters):  # type: ignore[no-untyped-def]
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return parameters

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        # A parameter that does not reach the loss has no gradient; it keeps its place among the summed ones.
        like = ctx.like
        terms = [
            torch.zeros(s, dtype=d, device=v) if g is None else g for g, (s, d, v) in zip(grads, like, strict=True)
        ]
        found = _parts_of(ctx)
        if found is None:
            flat = torch.cat([term.reshape(-1) for term in terms])
            dist.all_reduce(flat, group=ctx.axis)
        else:
            parts, place = found
            flat = parts.buckets.joined(place, terms)
            parts.pending.append(dist.all_reduce(flat, group=ctx.axis, async_op=True))
        sums = flat.split([term.numel() for term in terms])
        return None, *(None if g is None else s.view_as(g) for s, g in zip(sums, grads, strict=True))


def replicate_parameters(parameters: Sequence[Tensor], axis: ProcessGroup) -> tuple[Tensor, ...]:
    """``I -> R`` for all parameters of a block at once: their gradients are summed in one all-reduce.

    A sum is waited for where the gradient reaches its parameter, so nothing else may read it before.

    Args:
        parameters: local parameters, all of one dtype, invariant on ``axis``, each read here alone.
    """
    if spmd.is_type_checking() or not torch.is_grad_enabled():
        return tuple(convert(p, axis, "I", "R") for p in parameters)
    return _one_by_one(_SumGradients.apply(axis, *parameters))


def gather_parameters(
    parameters: Sequence[Tensor], axis: ProcessGroup, shards: Sequence[str], gathering: PrefetchedGather | None = None
) -> tuple[Tensor, ...]:
    """``S -> R`` for all parameters of a block at once: gathered in one call, and their gradients reduced in one.

    A reduced gradient is waited for where it reaches its parameter, so nothing else may read it before.

    Args:
        parameters: local parameters, all of one dtype, each read here alone.
        shards: how each is cut along ``axis``, e.g. ``"S(0)"``; strips counted on one rank.
        gathering: of these parameters, where one was made before; perhaps they are on their way.
    """
    if spmd.is_type_checking():
        return tuple(convert(p, axis, shard, "R") for p, shard in zip(parameters, shards, strict=True))
    return _one_by_one(_Gather.apply(gathering or PrefetchedGather(parameters, axis), axis, tuple(shards), *parameters))


def _one_by_one(parameters: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The same, each with a node of autograd of its own, where a backward in two parts may end."""
    return tuple(parameter.view_as(parameter) for parameter in parameters)


def gather_ahead(
    parameters: Sequence[Tensor],
    axis: ProcessGroup,
    previous: Sequence[PrefetchedGather],
    again: Sequence[PrefetchedGather],
) -> PrefetchedGather:
    """What :func:`gather_parameters` will take; nothing is sent yet.

    Args:
        parameters: local parameters, as they are stored.
        previous: gatherings of the block before.
        again: those of the last block before that gathers again in backward.
    """
    return PrefetchedGather(parameters, axis, previous, again)
