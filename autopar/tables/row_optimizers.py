"""Optimizers of single rows: each updates the rows that were looked up, and no others.

Those of rows that were not have a gradient of 0, with which SGD and Adagrad leave them as they are; Adam would not, and
is taken to be ``torch.optim.SparseAdam``, which leaves their moments alone. Every update is that of torch, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Name = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
Update = Callable[[Tensor, tuple[Tensor, ...], Tensor, int, Mapping[str, Any]], None]
"""Weight, state and gradient of some rows, the number of the step from 1, and the options."""


@dataclass(frozen=True)
class RowOptimizer:
    """One kind of optimizer.

    Attributes:
        widths: numbers that each tensor of its state has for a row of so many features.
        update: changes weight and state of some rows.
        defaults: of its options.
    """

    widths: Callable[[int], tuple[int, ...]]
    update: Update
    defaults: Mapping[str, Any]


def _sgd(weight: Tensor, state: tuple[Tensor, ...], grad: Tensor, step: int, options: Mapping[str, Any]) -> None:
    weight.add_(grad, alpha=-options["lr"])


def _adagrad(weight: Tensor, state: tuple[Tensor, ...], grad: Tensor, step: int, options: Mapping[str, Any]) -> None:
    (total,) = state
    total.addcmul_(grad, grad, value=1)
    weight.addcdiv_(grad, total.sqrt().add_(options["eps"]), value=-options["lr"])


def _rowwise_adagrad(
    weight: Tensor, state: tuple[Tensor, ...], grad: Tensor, step: int, options: Mapping[str, Any]
) -> None:
    """One number for each row, the mean of squares (Mudigere et al. 2022)."""
    (total,) = state
    total.add_(grad.square().mean(1, keepdim=True))
    weight.addcdiv_(grad, total.sqrt().add_(options["eps"]), value=-options["lr"])


def _adam(weight: Tensor, state: tuple[Tensor, ...], grad: Tensor, step: int, options: Mapping[str, Any]) -> None:
    first, second = state
    beta1, beta2 = options["betas"]
    first.add_(grad.sub(first).mul_(1 - beta1))
    second.add_(grad.pow(2).sub_(second).mul_(1 - beta2))
    size = options["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    weight.add_(-size * first.div(second.sqrt().add_(options["eps"])))


ROW_OPTIMIZERS: Mapping[Name, RowOptimizer] = {
    "sgd": RowOptimizer(lambda features: (), _sgd, {"lr": 1e-3}),
    "adagrad": RowOptimizer(lambda features: (features,), _adagrad, {"lr": 1e-2, "eps": 1e-10}),
    "rowwise_adagrad": RowOptimizer(lambda features: (1,), _rowwise_adagrad, {"lr": 1e-2, "eps": 1e-10}),
    "adam": RowOptimizer(
        lambda features: (features, features), _adam, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    ),
}
"""With torch's defaults."""
