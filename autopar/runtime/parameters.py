"""How parameters enter a program, and how their gradients leave it.

A parameter enters as this rank's part (:func:`local_part`). Where a block uses parameters replicated, their
gradients are summed in one all-reduce (:func:`replicate_parameters`), which runs beside the rest of backward:
autograd takes the node that was made last first, so the parts, made before the program, come after all of it, and
wait there.
"""

from __future__ import annotations

from collections.abc import Sequence

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autopar.runtime.conversions import convert


class _LocalPart(torch.autograd.Function):
    """``to_local()``, but the gradient is known to lie as the parameter does.

    ``to_local()`` works that out anew for every parameter in every step, which shows beside small layers.
    """

    @staticmethod
    def forward(ctx, parameter):  # type: ignore[no-untyped-def]
        ctx.spec, ctx.pending = parameter._spec, None
        ctx.set_materialize_grads(False)
        local = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        if ctx.pending is not None:
            ctx.pending.wait()
            ctx.pending = None
        return None if grad is None else DTensor(grad, ctx.spec, requires_grad=grad.requires_grad)


def local_part(parameter: DTensor) -> Tensor:
    """This rank's part of a parameter; its gradient is the parameter's, in the parameter's layout."""
    return _LocalPart.apply(parameter)


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
        flat = torch.cat([term.reshape(-1) for term in terms])  # a copy of ours, so it may be summed in place
        pending = dist.all_reduce(flat, group=ctx.axis, async_op=True)
        takers = [node for node, _ in ctx.next_functions if node is not None]
        if all(isinstance(node, _LocalPart._backward_cls) for node in takers):
            for node in takers:
                node.pending = pending
        else:
            pending.wait()
        sums = flat.split([term.numel() for term in terms])
        return None, *(None if g is None else s.view(g.shape) for s, g in zip(sums, grads, strict=True))


def replicate_parameters(parameters: Sequence[Tensor], axis: ProcessGroup) -> tuple[Tensor, ...]:
    """``I -> R`` for all parameters of a block at once: their gradients are summed in one all-reduce.

    A sum is waited for where the gradient reaches its parameter, so nothing else may read it before.

    Args:
        parameters: local parameters, all of one dtype, invariant on ``axis``, each read here alone.
    """
    if spmd.is_type_checking() or not torch.is_grad_enabled():
        return tuple(convert(p, axis, "I", "R") for p in parameters)
    return _SumGradients.apply(axis, *parameters)
