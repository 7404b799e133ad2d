"""What one expert computes: two products, and between them an activation, in most of today's models with a gate.

A gated expert makes two values for each of its hidden features, ``gate`` and ``up``, and takes
``act(gate) * (up + offset)``, both clamped where there is a ``limit``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.base.errors import InputError

Layout = Literal["halves", "pairs", "none"]
"""Where gates lie among what the first product makes: all before all ups, each before its up, or there are none."""

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
SWISH = "swish"
"""``x * sigmoid(alpha * x)``."""


@dataclass(frozen=True)
class Expert:
    """How every expert of a layer computes; the arguments of the operator that are no tensors, in its order.

    Attributes:
        activation: one of :data:`ACTIVATIONS`, or :data:`SWISH`.
        gate: where gates lie.
        alpha: of swish.
        limit: what gates are at most, and ups in magnitude; without gates what is activated is at most; 0: none.
        offset: added to ups.
        transposed: its matrices are ``[h, 2 * f]`` and ``[f, h]``, not ``[2 * f, h]`` and ``[h, f]``.
    """

    activation: str = "silu"
    gate: Layout = "halves"
    alpha: float = 1.0
    limit: float = 0.0
    offset: float = 0.0
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.activation not in (*ACTIVATIONS, SWISH):
            known = ", ".join((*ACTIVATIONS, SWISH))
            raise InputError(f"experts have no activation {self.activation!r}; known: {known}")
        if self.gate not in get_args(Layout):
            raise InputError(
                f"gate is {self.gate!r}; gates lie before all ups ('halves'), each before its up ('pairs'), or there "
                "are 'none'"
            )
        for name, value in (("alpha", self.alpha), ("limit", self.limit), ("offset", self.offset)):
            if not isinstance(value, int | float) or not math.isfinite(value) or (name == "limit" and value < 0):
                raise InputError(f"{name} is {value!r}; it is a finite number{', not below 0' * (name == 'limit')}")
        if self.alpha != 1 and self.activation != SWISH:
            raise InputError(
                f"alpha is {self.alpha} with activation {self.activation!r}; alpha is of {SWISH!r} alone: leave it "
                f"out, or take activation={SWISH!r}"
            )
        if self.offset and self.gate == "none":
            raise InputError(f"offset is {self.offset} with gate='none'; it is added to ups beside gates: leave it out")

    @property
    def made(self) -> int:
        """How many values its first product makes for each hidden feature."""
        return 1 if self.gate == "none" else 2

    def between(self, made: Tensor) -> Tensor:
        """``[s, 2 * f] -> [s, f]``; ``[s, f] -> [s, f]`` without gates."""
        if self.gate == "none":
            return self._act(made.clamp(max=self.limit) if self.limit else made)
        gate, up = made.chunk(2, dim=-1) if self.gate == "halves" else made.unflatten(-1, (-1, 2)).unbind(-1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + self.offset if self.offset else up) * self._act(gate)

    def _act(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x * self.alpha) if self.activation == SWISH else ACTIVATIONS[self.activation](x)
