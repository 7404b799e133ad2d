"""Zigzag order: each rank exchanges half of its part of a sequence, so that all have as much of a causal mask.

Of ``2 P`` parts rank ``r`` holds ``2 r`` and ``2 r + 1`` outside of attention. Inside it has ``2 r`` and, of its mirror
image, ``2 P - 1 - 2 r``, the earlier first. So tokens lie in their order wherever places matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.functions.ranks import for_each_rank_no_grad
from autopar.runtime.spmd.messages import mirror, wait


@dataclass(frozen=True)
class Zigzag:
    """The exchange with this rank's mirror image in ``group``; ``source``, ``[]``, is this rank's place there."""

    group: ProcessGroup
    source: Tensor

    def enter(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """``[.., n, d]`` of this rank's own part: of an early part and a late one. One message, of one dtype."""
        into = tuple(map(torch.empty_like, tensors))
        return self._exchanged(tensors, into, is_leaving=False)

    def leave(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The way back, ``into`` tensors of the same sizes."""
        return self._exchanged(tensors, into, is_leaving=True)

    def _exchanged(self, tensors: Sequence[Tensor], into: Sequence[Tensor], is_leaving: bool) -> tuple[Tensor, ...]:
        count = len(tensors)
        (sent,) = for_each_rank_no_grad(partial(self._sent, is_leaving), self.source, *tensors)
        arrived = wait(mirror(sent, self.group))
        return for_each_rank_no_grad(partial(self._placed, count, is_leaving), self.source, arrived, *tensors, *into)

    def _sent(self, is_leaving: bool, source: Tensor, *tensors: Tensor) -> tuple[Tensor]:
        goes = 0 if is_leaving and not self._is_early(source) else 1
        return (torch.cat([tensor.chunk(2, -2)[goes].reshape(-1) for tensor in tensors]),)

    def _placed(
        self, count: int, is_leaving: bool, source: Tensor, arrived: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        given, into = tensors[:count], tensors[count:]
        late = 0 if self._is_early(source) else 1
        stays, to = (late, 0) if is_leaving else (0, late)
        for whole, made, came in zip(given, into, arrived.split([t.numel() // 2 for t in given]), strict=True):
            halves = made.chunk(2, -2)
            halves[to].copy_(whole.chunk(2, -2)[stays])
            halves[1 - to].copy_(came.view(halves[0].shape))
        return into

    def _is_early(self, source: Tensor) -> bool:
        """Whether this rank's own half comes before what it gets."""
        return 2 * int(source) < self.group.size()
