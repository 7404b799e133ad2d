"""LAMB: Adam whose update of each parameter is scaled to the norm of the whole parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.runtime.optim.norms import whole_norms
from autopar.runtime.optim.parts import evaluated, like, local


class Lamb(torch.optim.Optimizer):
    """Layer-wise adaptive moments for batch training (You et al. 2020, arXiv:1904.00962, algorithm 2).

    Of a weight ``w`` with Adam's moments ``m`` and ``v``, corrected for their start at zero, and decay ``b``::

        r = m / (sqrt(v) + eps) + b w
        w = w - lr * |w| / |r| * r                                (1 for |w| / |r| where either is 0, or not adapted)

    It steps plain parameters, and those of a parallel module, of which ranks hold parts: norms are of whole ones.

    Args:
        adapt: whether the update is scaled by norms; an option of groups: biases and norms usually are in one with
            ``adapt=False, weight_decay=0.0``.
    """

    takes_parts = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have gradients; every rank that holds parts of them must call it."""
        loss = evaluated(closure)
        stepped = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        updates = {parameter: self._update(parameter, group) for group, parameter in stepped}
        adapted = [p for group, p in stepped if group["adapt"]]
        norms = whole_norms([*adapted, *(like(p, updates[p]) for p in adapted)])
        for parameter, of_weight, of_update in zip(adapted, norms[: len(adapted)], norms[len(adapted) :], strict=True):
            updates[parameter] *= torch.where((of_weight > 0) & (of_update > 0), of_weight / of_update, 1.0)
        for group, parameter in stepped:
            local(parameter).sub_(updates[parameter].mul_(group["lr"]))
            torch.autograd.graph.increment_version(parameter)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's part of what Adam would subtract, at a rate of 1."""
        weight, gradient, state = local(parameter), local(parameter.grad), self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (like(parameter, torch.zeros_like(weight)) for _ in range(2))
        state["step"] += 1
        first, second = group["betas"]
        count, mean, square = int(state["step"]), local(state["exp_avg"]), local(state["exp_avg_sq"])
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        deviation = (square / (1 - second**count)).sqrt_().add_(group["eps"])
        return (mean / (1 - first**count)).div_(deviation).add_(weight, alpha=group["weight_decay"])
