"""What the programs of a module know beyond their tensors: train or eval mode, random state, the scale of the loss."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.runtime.spmd.expert_load import Routed
from autopar.runtime.spmd.random_state import RandomState

SEEN = 10_000
"""Calls of experts that are remembered."""


@dataclass
class RunState:
    """Shared by all programs of a module.

    Attributes:
        random: the random numbers that it draws from.
        training: whether it trains (dropout draws).
        routed: how many tokens the experts of this rank had in the last calls.
        gradient_dtype: in which gradients are added up, where that is wider than the parameter's; ``None``: in that.
        loss_scale: of a gradient scaler, which the backwards of the next micro-batched step assume; ``None``: 1.
    """

    random: RandomState
    training: bool = True
    gradient_dtype: torch.dtype | None = None
    loss_scale: Tensor | None = None
    routed: deque[Routed] = field(default_factory=lambda: deque(maxlen=SEEN))
