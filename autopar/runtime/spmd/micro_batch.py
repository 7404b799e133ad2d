"""Turns as a program sees them: what stands for the axis of micro-batches where another axis has a process group."""

from __future__ import annotations

import torch
from torch import Tensor


class Turns:
    """The micro-batches of a step.

    Attributes:
        now: the number of the one that is being computed.
    """

    def __init__(self, count: int):
        self.count = count
        self.now = 0

    def size(self) -> int:
        """How many there are; a process group's word for it."""
        return self.count


def of_this_turn(value: Tensor, turns: Turns, dim: int | None = None) -> Tensor:
    """What the present turn has of a value that is the same in all.

    Args:
        dim: cut into as many parts as there are turns; ``None``: the value is a term of a sum, added in the first turn.
    """
    if dim is not None:
        return value.chunk(turns.count, dim)[turns.now]
    return value if turns.now == 0 else torch.zeros_like(value)
