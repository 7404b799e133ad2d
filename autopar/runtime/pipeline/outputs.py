"""Joins what the model returns of each micro-batch, new values of buffers included, into the outputs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaving:
    """An output of the model over micro-batches.

    Attributes:
        dim: the dim along which micro-batches lie behind one another; ``None``: there is none.
        summed: whether what micro-batches give are terms of a sum.
        stage: where it is made.
        dtype: planned.
        differentiable: whether the model's own has a gradient.
        is_kept: whether a step with backward keeps it, too.
        buffer: of a new value of a buffer that the next micro-batch starts from, the name of that leaf.
    """

    dim: int | None
    summed: bool
    stage: int
    dtype: torch.dtype
    differentiable: bool
    is_kept: bool = True
    buffer: str | None = None


class Outputs:
    """Those that stages of this process make; the part of each micro-batch is written to its place in the whole.

    Args:
        leaving: the outputs of the model.
        micro_batches: how many there are.
    """

    def __init__(self, leaving: Sequence[Leaving], micro_batches: int):
        self.leaving, self.micro_batches = leaving, micro_batches
        self._made: dict[int, Tensor] = {}
        self._terms: dict[int, list[Tensor]] = {}

    def put(self, position: int, value: Tensor, micro_batch: int) -> None:
        """Take what one micro-batch gives of an output."""
        dim = self.leaving[position].dim
        if self.leaving[position].summed:
            self._terms.setdefault(position, []).append(value.detach())
        elif self.leaving[position].buffer is not None:
            self._made[position] = value.detach()
        elif dim is None:
            self._made.setdefault(position, value.detach())
        else:
            if position not in self._made:
                shape = [size * self.micro_batches if at == dim else size for at, size in enumerate(value.shape)]
                self._made[position] = value.new_empty(shape)
            self._made[position].chunk(self.micro_batches, dim)[micro_batch].copy_(value.detach())

    def get(self, position: int) -> Tensor | None:
        """The output of the whole batch; ``None``: it is made elsewhere."""
        terms = self._terms.get(position)
        if terms is None:
            return self._made.get(position)
        dtype = terms[0].dtype  # added up in float32 where it is narrower
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        return torch.stack(terms).to(wide).sum(0).to(dtype)
