"""LARS: the rate of each parameter goes by the norms of the whole parameter and of its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.runtime.optim.norms import whole_norms
from autopar.runtime.optim.parts import evaluated, like, local


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, arXiv:1708.03888, algorithm 1).

    Of a weight ``w`` with gradient ``g``, decay ``b`` and momentum ``m``::

        rate = trust_coefficient * |w| / (|g| + b |w| + eps)      (1 where |w| or |g| is 0, or not adapted)
        v    = m v + lr * rate * (g + b w)
        w    = w - v

    It steps plain parameters, and those of a parallel module, of which ranks hold parts: norms are of whole ones.

    Args:
        adapt: whether the rate goes by norms; an option of groups: biases and norms usually are in one with
            ``adapt=False, weight_decay=0.0``.
    """

    takes_parts = True

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        adapt: bool = True,
    ):
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**options, "trust_coefficient": trust_coefficient, "eps": eps, "adapt": adapt})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients; every rank that holds parts of them must call it."""
        loss = evaluated(closure)
        stepped = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        adapted = [p for group, p in stepped if group["adapt"]]
        norms = whole_norms([*adapted, *(p.grad for p in adapted)])
        rates = {
            parameter: pair
            for parameter, *pair in zip(adapted, norms[: len(adapted)], norms[len(adapted) :], strict=True)
        }
        for group, parameter in stepped:
            weight, decay = local(parameter), group["weight_decay"]
            update = local(parameter.grad) + decay * weight
            if parameter in rates:
                of_weight, of_gradient = rates[parameter]
                rate = group["trust_coefficient"] * of_weight / (of_gradient + decay * of_weight + group["eps"])
                update *= torch.where((of_weight > 0) & (of_gradient > 0), rate, 1.0)
            update *= group["lr"]
            self._add(parameter, update, group["momentum"])
        return loss

    def _add(self, parameter: Tensor, update: Tensor, momentum: float) -> None:
        """Subtract an update, with those before it where there is momentum."""
        if momentum:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = like(parameter, torch.zeros_like(update))
            update = local(state["momentum_buffer"]).mul_(momentum).add_(update)
        local(parameter).sub_(update)
        torch.autograd.graph.increment_version(parameter)
