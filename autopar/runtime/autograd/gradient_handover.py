"""The loss of a micro-batched step, whose backward hands the gradients that the step found to autograd.

By how much the loss is scaled is known only when backward is called, so a step assumes a scale, and what differs is put
right here: a loss scale keeps small gradients of half precision from vanishing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from planner.base.errors import InputError


def handing_over(
    loss: Tensor,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    seed: Tensor,
    called: Callable[[Tensor], None],
) -> Tensor:
    """The loss, whose backward gives each of these parameters its gradient, once.

    Args:
        gradients: those of the loss times ``seed``; they are scaled in place.
        called: what backward begins with, given the gradient of the loss.
    """
    result: Tensor = _HandOver.apply(loss, gradients, seed, called, _anchor(), *parameters)
    return result


def refusing(output: Tensor, why: str) -> Tensor:
    """An output whose backward raises :class:`InputError`."""
    result: Tensor = _RefusingBackward.apply(output, why, _anchor())
    return result


def power_of_two(number: Tensor) -> Tensor:
    """One close to it, by which numbers are multiplied without rounding; 1 for what is zero or not finite."""
    _, exponent = torch.frexp(number.double())
    return torch.where(
        torch.isfinite(number) & (number != 0),
        torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent - 1),
        1.0,
    )


def _anchor() -> Tensor:
    """Where all that is trained is on other processes, backward starts here all the same."""
    return torch.zeros((), requires_grad=True)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, gradients, seed, called, anchor, *parameters):  # type: ignore[no-untyped-def]
        ctx.gradients, ctx.seed, ctx.called = gradients, seed, called
        return loss.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            raise RuntimeError(
                "the gradients of a micro-batched step were handed over before: call loss.backward() once a step"
            )
        ctx.called(grad)
        scale = grad / ctx.seed.to(grad)
        present = [gradient for gradient in found if gradient is not None]
        at_home = [gradient for gradient in present if gradient.device.type == "cpu"]
        here = [gradient for gradient in present if gradient.device.type != "cpu"]
        if here:
            torch._foreach_mul_(here, scale)
        if at_home and (number := scale.item()) != 1:
            torch._foreach_mul_(at_home, number)
        return None, None, None, None, None, *found


class _RefusingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, why, anchor):  # type: ignore[no-untyped-def]
        ctx.why = why
        return output.detach()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        raise InputError(ctx.why)
