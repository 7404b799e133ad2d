"""How parameters enter a program, and how their gradients leave it.

Parameters enter as this rank's parts (:func:`local_parts`). Where a block uses parameters replicated, their
gradients are summed in one all-reduce (:func:`replicate_parameters`), which runs beside the rest of backward:
autograd takes the node that was made last first, so the parts, made before the program, come after all of it, and
wait there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autopar.runtime.buckets import Buckets
from autopar.runtime.conversions import convert


class _LocalParts(torch.autograd.Function):
    """``to_local()`` of all parameters at once, whose gradients are known to lie as the parameters do.

    ``to_local()`` works that out anew for every parameter in every step; that, and a node of autograd for each of
    them, shows beside small layers.
    """

    @staticmethod
    def forward(ctx, buckets, *parameters):  # type: ignore[no-untyped-def]
        ctx.specs, ctx.buckets, ctx.pending = [p._spec for p in parameters], buckets, []
        ctx.set_materialize_grads(False)
        return tuple(p._local_tensor.detach() for p in parameters)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        found = [
            None if g is None else DTensor(g, spec, requires_grad=g.requires_grad)
            for g, spec in zip(grads, ctx.specs, strict=True)
        ]
        while ctx.pending:
            ctx.pending.pop(0).wait()
        return None, *found


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
        takers = [(node, place) for node, place in ctx.next_functions if node is not None]
        if all(isinstance(node, _LocalParts._backward_cls) for node, _ in takers):
            parts, place = takers[0]
            flat = parts.buckets.joined(place, terms)
            parts.pending.append(dist.all_reduce(flat, group=ctx.axis, async_op=True))
        else:
            flat = torch.cat([term.reshape(-1) for term in terms])
            dist.all_reduce(flat, group=ctx.axis)
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
    return _SumGradients.apply(axis, *parameters)
