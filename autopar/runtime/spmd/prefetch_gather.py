"""Gathers a block's parameters while the block before it computes (prefetch).

Who asks for the rows of one gathering starts those of the next block: in forward those of the block after, in backward
those of the block before, which runs its backward next. So a gather has all of a block's computing to hide behind, and
does not wait behind the reduced gradients of that block, which are sent after it. With micro-batches these are the
blocks of one stage: nothing is on its way when the next action of the schedule begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.runtime.spmd.flight import Flight

# Torch 2.13 has other names for these two, and warns of the old ones.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PrefetchedGather:
    """Parts of parameters, gathered in one call as often as they are asked for.

    Args:
        parts: this rank's parts, all of one dtype.
        axis: the group of those that have the others.
        previous: gatherings of the block before, which start this one in forward if it is still there; they do not
            hold it, since it may hold them: a forward that fails leaves nothing behind.
        again: those of the last block before that gathers again in backward, which this one starts there.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        axis: ProcessGroup,
        previous: Sequence[PrefetchedGather] = (),
        again: Sequence[PrefetchedGather] = (),
    ):
        self._parts, self._axis = parts, axis
        self._following: list[weakref.ref[PrefetchedGather]] | None = []  # none once forward asked for the rows
        self._again = tuple(again)
        self._underway: tuple[Tensor, Tensor, Flight] | None = None
        for each in previous:
            assert each._following is not None, "blocks run in order"
            each._following.append(weakref.ref(self))

    def start(self) -> None:
        """Send the parts, unless they are on their way."""
        if self._underway is None:
            flat = [part.detach().reshape(-1) for part in self._parts]
            own = flat[0] if len(flat) == 1 else torch.cat(flat)
            every = own.new_empty(self._axis.size() * own.numel())
            flight = Flight("all_gather", lambda: all_gather(every, own, group=self._axis, async_op=True))
            self._underway = own, every, flight

    def rows(self) -> Tensor:
        """Every rank's parts behind one another, a row each; the next block's are on their way from here on.

        The first time is in forward, and every other one in backward.
        """
        self.start()
        assert self._underway is not None
        (_, every, flight), self._underway = self._underway, None
        following, self._following = self._following, None
        starts = self._again if following is None else [each for found in following if (each := found()) is not None]
        for each in starts:
            each.start()
        flight.wait()
        return every.view(self._axis.size(), -1)
