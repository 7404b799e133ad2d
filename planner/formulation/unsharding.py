"""Unsharding: when a step all-gathers the parameters that it stores in shards, and reduces their gradients.

In FSDP's words: a module *unshards* its parameters before it computes, *reshards* them after forward or after backward,
and may *prefetch*, that is unshard the next one's while it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from planner.formulation.remat.levels import Level

Gathers = Literal["once", "each"]
"""How plan files say whether a step unshards once, or in each micro-batch."""


@dataclass(frozen=True)
class Unsharding:
    """When a step unshards (all-gathers) its parameters, and reduces their gradients.

    Once per step is what FSDP does with ``set_reshard_after_backward(False)``, and gradients that are reduced after the
    last micro-batch alone: everything is unsharded before the first one. Otherwise every micro-batch unshards a block's
    parameters where it computes, and reduces their gradients. Then each block says for itself, by its level of
    recomputation, whether it reshards after forward (``reshard_after_forward=True``) or after backward.

    There is a choice only in a micro-batched step whose parameters are on the device, which is what is left to the
    defaults; :meth:`of_step` says what a choice comes to in others.

    Attributes:
        once_per_step: instead of in each micro-batch.
        prefetch: whether a micro-batch unshards a block's while it computes the block before; else where they are used.
        micro_batched: whether the step is more than one forward and one backward.
        on_device: whether parameters are with their home on the device, and not brought from a host or a disk for each
            use.
    """

    once_per_step: bool = True
    prefetch: bool = True
    micro_batched: bool = True
    on_device: bool = True

    @classmethod
    def named(cls, gathers: Gathers, waits: bool = False) -> Unsharding:
        """As a plan file says it."""
        return cls(gathers == "once", not waits)

    @property
    def name(self) -> Gathers:
        """The word of plan files."""
        return "once" if self.once_per_step else "each"

    def of_step(self, micro_batched: bool, on_device: bool) -> Unsharding:
        """What it comes to in a step, which unshards for each use where it has no choice."""
        return replace(
            self,
            once_per_step=self.once_per_step and micro_batched and on_device,
            micro_batched=micro_batched,
            on_device=on_device,
        )

    def unshards_again(self, level: Level) -> bool:
        """Whether a block at a level of recomputation reshards after forward and unshards again in backward."""
        return level != "none" and not self.once_per_step

    @property
    def overlaps_gather(self) -> bool:
        """Whether parameters may be gathered while another block computes."""
        return self.on_device and not self.once_per_step

    @property
    def prefetches(self) -> bool:
        """Whether they are."""
        return self.prefetch and self.overlaps_gather

    @property
    def overlaps_reduce(self) -> bool:
        """Whether gradients are reduced while another block computes."""
        return self.on_device and not self.micro_batched

    @property
    def all_reduces_once(self) -> bool:
        """Whether gradients that each micro-batch reduces are summed once per step all the same over ranks that store
        the same: not where they leave the device in between.
        """
        return self.on_device and self.micro_batched and not self.once_per_step


PER_STEP, PER_MICRO_BATCH = Unsharding(), Unsharding(once_per_step=False)
