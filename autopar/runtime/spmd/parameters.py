"""How parameters enter a program, and how their gradients leave it.

Parameters enter as this rank's parts (:func:`local_parts`). Where a block uses parameters replicated that are stored
whole, their gradients are summed in one all-reduce (:func:`replicate_parameters`); those that are stored in shards are
gathered in one call, and their gradients reduced in one (:func:`gather_parameters`). Both run beside the rest of
backward: autograd takes the node that was made last first, so the parts, made before the program, come after all of
it, and wait there. Gradients on their way to be reduced are whole, so they are waited for where the next block's are
sent.

Where a plan updates in backward, what one block alone reads passes :func:`complete_parameters` before that block. Its
gradients are used there, once they are reduced and the next block's are on their way, and let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autopar.runtime.host.gradient_buckets import Buckets
from autopar.runtime.spmd.flight import Flight
from autopar.runtime.spmd.prefetch_gather import PrefetchedGather, reduce_scatter
from autopar.runtime.spmd.resharding import convert, local_type, open_strips
from planner.ir.layout import Shard


class Updater(Protocol):
    """Updates parameters while backward runs, see :mod:`autopar.runtime.optim.early_update`."""

    def begin_with(self, parameters: Mapping[str, DTensor]) -> None:
        """A program begins with these."""

    def called(self, call: Any) -> None:
        """A call of the program, by the node of autograd that hands parameters their gradients."""

    def updates(self) -> bool:
        """Whether this backward does."""

    def use(self, block: str, grads: Mapping[DTensor, Tensor]) -> None:
        """Update parameters of a block by these gradients."""

    def finish(self, call: Any) -> None:
        """Backward of a call is over."""


class _LocalParts(torch.autograd.Function):
    """``to_local()`` of all parameters at once, whose gradients are known to lie as the parameters do.

    ``to_local()`` works that out anew for every parameter in every step; that, and a node of autograd for each of
    them, shows beside small layers.
    """

    @staticmethod
    def forward(ctx, buckets, updater, *parameters):  # type: ignore[no-untyped-def]
        ctx.specs, ctx.buckets = [p._spec for p in parameters], buckets
        ctx.pending, ctx.sent, ctx.completed = [], _Sent(), None
        ctx.set_materialize_grads(False)
        if updater is not None:
            ctx.buckets, ctx.completed = None, _Completed(parameters, updater, ctx)
            updater.called(ctx)
        return tuple(p._local_tensor.detach() for p in parameters)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        while ctx.pending:
            ctx.pending.pop(0).wait()
        ctx.sent.wait()
        if ctx.completed is not None and ctx.completed.finish(ctx, grads):
            grads = (None,) * len(grads)
        # Strides of a DTensor are those of its spec: autograd does not see what else a local gradient has, and fused
        # optimizers go through memory.
        found = [
            None if g is None else DTensor(g.contiguous(), spec, requires_grad=g.requires_grad)
            for g, spec in zip(grads, ctx.specs, strict=True)
        ]
        return None, None, *found


class _Rounded:
    """A reduction in a wider dtype, whose result is rounded where it is waited for.

    Args:
        work: what reduces; ``None``: it is reduced already.
        wide: where the result comes.
        narrow: where it is to be.
    """

    def __init__(self, work: Any, wide: Tensor, narrow: Tensor):
        self._work, self._wide, self._narrow = work, wide, narrow

    def wait(self) -> None:
        """Until it is there."""
        if self._work is not None:
            self._work.wait()
        self._narrow.copy_(self._wide)


class _Sent:
    """The gradients that are being reduced: of one block at a time, since they are there for as long.

    Attributes:
        count: how often some were sent.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last: tuple[Any, Tensor] | None = None

    def wait(self) -> None:
        """Until those that were sent last are reduced; they are let go."""
        if self._last is not None:
            self._last[0].wait()
            self._last = None

    def put(self, work: Any, sent: Tensor) -> None:
        """Some are sent."""
        assert self._last is None
        self._last, self.count = (work, sent), self.count + 1


class _Completed:
    """Gradients of parameters that nobody adds to any more: of one block, perhaps on their way to be reduced.

    Args:
        parameters: all of them.
        updater: what uses the gradients.
        parts: the node whose results are the parts of the parameters.
    """

    def __init__(self, parameters: Sequence[DTensor], updater: Updater, parts: Any):
        self._parameters, self._updater, self._sent = parameters, updater, parts.sent
        self._pending: list[Any] = parts.pending
        self._last: tuple[str, dict[DTensor, Tensor], list[Any], int] | None = None

    def take(self, block: str, grads: Mapping[int, Tensor]) -> bool:
        """A block is over, with these gradients by number of the parameter; whether they are used here.

        Those of the block before are used now, and these as soon where nothing is on its way.
        """
        if torch.is_grad_enabled() or not self._updater.updates():  # enabled: gradients are to be derived again
            return False
        before = 0 if self._last is None else self._last[3]
        works, count = self._pending[:], self._sent.count
        self._pending.clear()
        self._use_last()
        self._last = block, {self._parameters[number]: grad for number, grad in grads.items()}, works, count
        if not works and count == before:
            self._use_last()
        return True

    def finish(self, parts: Any, grads: Sequence[Tensor | None]) -> bool:
        """Backward is over, with these gradients of all that several blocks read; whether they are used here."""
        rest = {number: grad for number, grad in enumerate(grads) if grad is not None}
        is_used = self.take("what several blocks read", rest)
        self._use_last()
        self._updater.finish(parts)
        return is_used

    def _use_last(self) -> None:
        if self._last is not None:
            (block, grads, works, count), self._last = self._last, None
            for work in works:
                work.wait()
            if count == self._sent.count:  # else waited for where others were sent
                self._sent.wait()
            if grads:
                self._updater.use(block, grads)


class _Complete(torch.autograd.Function):
    """Identity on what one block alone reads of the parts; backward has their gradients where the block is over."""

    @staticmethod
    def forward(ctx, block, *parameters):  # type: ignore[no-untyped-def]
        ctx.block = block
        ctx.set_materialize_grads(False)
        return parameters

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        takers = [taker for taker in ctx.next_functions if taker[0] is not None]
        parts = takers[0][0]
        found = {place: grad for (_, place), grad in zip(ctx.next_functions, grads, strict=True) if grad is not None}
        if parts.completed is not None and parts.completed.take(ctx.block, found):
            grads = (None,) * len(grads)
        return None, *grads


def _parts_of(node: Any) -> tuple[Any, int] | None:
    """Where a node of autograd need not wait for the gradients that it finds, if all it found them for are parts.

    Returns:
        Their node, which waits for what is ``pending`` and ``sent``, and the number of the first part; ``None``: other
        nodes read the gradients too.
    """
    takers = [(taker, place) for taker, place in node.next_functions if taker is not None]
    if all(isinstance(taker, _Complete._backward_cls) for taker, _ in takers):
        takers = [taker.next_functions[place] for taker, place in takers]
    return takers[0] if all(isinstance(taker, _LocalParts._backward_cls) for taker, _ in takers) else None


def local_parts(tensors: Mapping[str, Tensor], buckets: Buckets, updater: Updater | None = None) -> dict[str, Tensor]:
    """What a rank holds, by name: of a parameter its part, whose gradient is the parameter's, in its layout.

    Args:
        tensors: parameters and buffers by name.
        buckets: where gradients of parameters that a block uses replicated are summed.
        updater: updates parameters in backward, and lets their gradients go, which then are in no buckets.
    """
    trained = {name: t for name, t in tensors.items() if isinstance(t, DTensor) and t.requires_grad}
    if updater is not None:
        updater.begin_with(trained)
    frozen = {name: t._local_tensor.detach() for name, t in tensors.items() if isinstance(t, DTensor)}
    parts = dict(zip(trained, _LocalParts.apply(buckets, updater, *trained.values()), strict=True))
    return {**tensors, **frozen, **parts}


def renew(parameters: Iterable[DTensor]) -> None:
    """Go on in new memory: what :func:`local_parts` gave of them stays as it is, whatever an optimizer does."""
    for parameter in parameters:
        parameter._local_tensor = parameter._local_tensor.detach().clone()


class _Gather(torch.autograd.Function):
    """Shards of a block's parameters gathered in one call; backward reduces their gradients in one."""

    @staticmethod
    def forward(ctx, gathering, axis, shards, reduce_dtype, *parameters):  # type: ignore[no-untyped-def]
        forms = [_ShardedForm(part.shape, shard, axis.size()) for part, shard in zip(parameters, shards, strict=True)]
        ctx.axis, ctx.forms, ctx.like, ctx.reduce_dtype = axis, forms, parameters[0].detach(), reduce_dtype
        ctx.set_materialize_grads(False)
        rows = gathering.rows().split([parameter.numel() for parameter in parameters], 1)
        return tuple(form.whole(each) for form, each in zip(forms, rows, strict=True))

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        sizes, found = [form.part.numel() for form in ctx.forms], _parts_of(ctx)
        if found is not None:
            found[0].sent.wait()
        every = ctx.like.new_empty(ctx.axis.size(), sum(sizes), dtype=ctx.reduce_dtype)
        for form, grad, rows in zip(ctx.forms, grads, every.split(sizes, 1), strict=True):
            form.fill(rows, grad)
        reduced = every.new_empty(sum(sizes))
        work: Any = Flight(
            "reduce_scatter", partial(reduce_scatter, reduced, every.view(-1), group=ctx.axis, async_op=True)
        )
        own = reduced if reduced.dtype == ctx.like.dtype else ctx.like.new_empty(sum(sizes))
        work = work if own is reduced else _Rounded(work, reduced, own)
        if found is not None:
            found[0].sent.put(work, every)
        else:
            work.wait()
        parts = (part.view(form.part) for part, form in zip(own.split(sizes), ctx.forms, strict=True))
        return None, None, None, None, *(None if g is None else part for part, g in zip(parts, grads, strict=True))


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
    def forward(ctx, axis, reduce_dtype, *parameters):  # type: ignore[no-untyped-def]
        ctx.axis, ctx.reduce_dtype = axis, reduce_dtype
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
        is_wide = ctx.reduce_dtype is not None and ctx.reduce_dtype != like[0][1]
        if found is None:
            flat = _joined(terms)
            wide = flat.to(ctx.reduce_dtype) if is_wide else flat
            Flight("all_reduce", partial(dist.all_reduce, wide, group=ctx.axis, async_op=True)).wait()
            if is_wide:
                flat.copy_(wide)
        else:
            parts, place = found
            flat = _joined(terms) if parts.buckets is None else parts.buckets.joined(place, terms)
            if is_wide:  # beside the gradients, so of one block at a time
                parts.sent.wait()
                wide = flat.to(ctx.reduce_dtype)
                reduce = partial(dist.all_reduce, wide, group=ctx.axis, async_op=True)
                parts.sent.put(_Rounded(Flight("all_reduce", reduce), wide, flat), wide)
            else:
                reduce = partial(dist.all_reduce, flat, group=ctx.axis, async_op=True)
                parts.pending.append(Flight("all_reduce", reduce))
        sums = flat.split([term.numel() for term in terms])
        return None, None, *(None if g is None else s.view_as(g) for s, g in zip(sums, grads, strict=True))


def _joined(terms: Sequence[Tensor]) -> Tensor:
    return torch.cat([term.reshape(-1) for term in terms])


def replicate_parameters(
    parameters: Sequence[Tensor], axis: ProcessGroup, reduce_dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """``I -> R`` for all parameters of a block at once: their gradients are summed in one all-reduce.

    A sum is waited for where the gradient reaches its parameter, so nothing else may read it before.

    Args:
        parameters: local parameters, all of one dtype, invariant on ``axis``, each read here alone.
        reduce_dtype: in which gradients are summed; left out: in that of the parameters.
    """
    if spmd.is_type_checking() or not torch.is_grad_enabled():
        return tuple(convert(p, axis, "I", "R", reduce_dtype) for p in parameters)
    return _one_by_one(_SumGradients.apply(axis, reduce_dtype, *parameters))


def gather_parameters(
    parameters: Sequence[Tensor],
    axis: ProcessGroup,
    shards: Sequence[str],
    gathering: PrefetchedGather | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """``S -> R`` for all parameters of a block at once: gathered in one call, and their gradients reduced in one.

    A reduced gradient is waited for where it reaches its parameter, so nothing else may read it before.

    Args:
        parameters: local parameters, all of one dtype, each read here alone.
        shards: how each is cut along ``axis``, e.g. ``"S(0)"``; strips counted on one rank.
        gathering: of these parameters, where one was made before; perhaps they are on their way.
        reduce_dtype: in which gradients are reduced; left out: in that of the parameters.
    """
    if spmd.is_type_checking():
        return tuple(convert(p, axis, shard, "R", reduce_dtype) for p, shard in zip(parameters, shards, strict=True))
    gathering = gathering or PrefetchedGather(parameters, axis)
    return _one_by_one(_Gather.apply(gathering, axis, tuple(shards), reduce_dtype, *parameters))


def complete_parameters(parameters: Sequence[Tensor], block: str) -> tuple[Tensor, ...]:
    """The same, of which backward updates the originals when it is over with a block, where it updates.

    Args:
        parameters: local parameters that this block alone reads, as they are stored.
        block: its name.
    """
    if spmd.is_type_checking() or not torch.is_grad_enabled():
        return tuple(parameters)
    found: tuple[Tensor, ...] = _Complete.apply(block, *parameters)
    return found


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
