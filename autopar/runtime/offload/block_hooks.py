"""Hooks around blocks: how offloaded parameters reach the program, and how their gradients leave it.

The program says when it enters a block (:func:`enter_block`), which hands it the block's parameters on the device, and
when it leaves one (:func:`leave_block`), which backward passes first. Gradients of a block's parameters leave the
program where backward leaves the block, and reach ``.grad`` from their home when backward is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.runtime.offload.executor import OffloadExecutor
from planner.analysis.memory.storages import is_before
from planner.base.errors import InputError


class _Home(torch.autograd.Function):
    """Parameters at home; their gradients, too, which the offload has when backward is over.

    One more result goes into all blocks as they are left, so that this comes after all of them in backward.
    """

    @staticmethod
    def forward(ctx, offload, names, *parameters):  # type: ignore[no-untyped-def]
        ctx.offload, ctx.names, ctx.specs = offload, names, [parameter._spec for parameter in parameters]
        ctx.set_materialize_grads(False)
        offload.early.called(ctx)
        found = tuple(parameter._local_tensor.detach() for parameter in parameters)
        frozen = [each for each, parameter in zip(found, parameters, strict=True) if not parameter.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return *found, torch.empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, *_):  # type: ignore[no-untyped-def]
        found = ctx.offload.finish(ctx)
        grads = [
            DTensor(found[name], spec, requires_grad=False) if name in found else None
            for name, spec in zip(ctx.names, ctx.specs, strict=True)
        ]
        return None, None, *grads


class _Entering(torch.autograd.Function):
    """A block's parameters, from their home to the device; their gradients go to the offload."""

    @staticmethod
    def forward(ctx, offload, number, *parts):  # type: ignore[no-untyped-def]
        ctx.offload, ctx.number, ctx.count = offload, number, len(parts)
        ctx.set_materialize_grads(False)
        found = offload.values(number)
        ctx.mark_non_differentiable(*(v for v, part in zip(found, parts, strict=True) if not part.requires_grad))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        if is_before(ctx.number):
            ctx.offload.enter(ctx.number, is_backward=True)
        ctx.offload.made(ctx.number, grads)
        return None, None, *(None for _ in range(ctx.count))


class _Leaving(torch.autograd.Function):
    """Identity; backward enters the block."""

    @staticmethod
    def forward(ctx, offload, number, _, *values):  # type: ignore[no-untyped-def]
        ctx.offload, ctx.number, ctx.versions = offload, number, offload.versions(number)
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        ctx.offload.check_unchanged(ctx.versions)
        ctx.offload.enter(ctx.number, is_backward=True)
        return None, None, None, *grads


class _NotPlanned(torch.autograd.Function):
    """Identity on what the plan's step does not go backward from."""

    @staticmethod
    def forward(ctx, name, value):  # type: ignore[no-untyped-def]
        ctx.name = name
        return value.detach()

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        raise InputError(
            f"backward came to a result of block {ctx.name} from which the plan's loss is not computed, and with pin "
            "'offload' a step goes backward from the loss alone: the output called 'loss', or else the first "
            "differentiable number that the model returns. Return the sum of all that is trained as the loss, or plan "
            "with pin 'offload' 'none'"
        )


def parts_at_home(offload: OffloadExecutor, parameters: Mapping[str, DTensor]) -> dict[str, Tensor]:
    """What a rank holds of parameters in chunks, at home, by name; their gradients arrive when backward is over.

    Raises:
        InputError: a parameter was replaced, or requires a gradient that the plan does not make.
    """
    offload.begin_with(parameters)
    *found, offload.token = _Home.apply(offload, tuple(parameters), *parameters.values())
    return dict(zip(parameters, found, strict=True))


def enter_block(offload: OffloadExecutor, number: int, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The parameters of a block on the device.

    Args:
        number: of the block, or that of what comes before all blocks.
        parts: the parameters at home.

    Raises:
        TransferScheduleError: they cannot be on the device now, or not within the budget.
    """
    offload.enter(number, is_backward=False)
    if offload.micro_batched and not is_before(number):
        return offload.adding(number)
    return _Entering.apply(offload, number, *parts) if parts else ()


def leave_block(
    offload: OffloadExecutor,
    number: int,
    values: Sequence[Tensor],
    apart: Sequence[int] = (),
    needed: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """What a block returns; backward enters the block where it comes to it.

    Args:
        apart: the places of values from which the loss is not computed. What made them must not be undone with the
            others: autograd would ask for what it saved, gradient or not.
        needed: what of all that blocks made is read later, where the rest of what they saved may leave.

    Raises:
        TransferScheduleError: a value shares the memory of parameters that are this block's own.
    """
    offload.check_leaving(number, values)
    if needed is not None:
        offload.saved.leave(number, needed)
    places = [place for place, value in enumerate(values) if value.requires_grad and place not in apart]
    left = _Leaving.apply(offload, number, offload.token, *(values[place] for place in places)) if places else ()
    found = dict(zip(places, left, strict=True))
    for place in apart:
        if values[place].requires_grad:
            found[place] = _NotPlanned.apply(offload.transfers.path(number), values[place])
    return tuple(found.get(place, value) for place, value in enumerate(values))
