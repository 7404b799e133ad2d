"""Micro-batches as a program sees them: what stands for their axis where another axis has a process group."""

from __future__ import annotations

import torch
from torch import Tensor


class MicroBatches:
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


def of_this_micro_batch(value: Tensor, micro_batches: MicroBatches, dim: int | None = None) -> Tensor:
    """What the present micro-batch has of a value that is the same in all.

    Args:
        dim: cut into as many parts as there are micro-batches; ``None``: the value is a term of a sum, added in the
            first micro-batch.
    """
    if dim is not None:
        return value.chunk(micro_batches.count, dim)[micro_batches.now]
    return value if micro_batches.now == 0 else torch.zeros_like(value)
