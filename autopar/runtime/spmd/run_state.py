"""What an emitted program needs to know beyond its tensors: train or eval mode, random state."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.runtime.spmd.random_state import RandomState


@dataclass
class RunState:
    """Whether the module trains (dropout draws) and the random numbers it draws from."""

    random: RandomState
    training: bool = True
