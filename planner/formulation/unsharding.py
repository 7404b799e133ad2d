"""Unsharding: when a training step gathers its sharded parameters for use, and reduces their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from planner.formulation.training import Gathers, Training


@dataclass(frozen=True)
class Unsharding:
    """When parameters are gathered and their gradients reduced in one step.

    Attributes:
        stages: of the pipeline; 1 without one.
        micro_batches: of the step.
        training: where parameters are at home, and what was decided of gathering them.
    """

    stages: int
    micro_batches: int
    training: Training

    @property
    def brings_beside(self) -> bool:
        """Whether parameters are brought, and their gradients reduced, while another block computes."""
        return not self.micro_batched and self.training.tier == "device"

    @property
    def gathers_beside(self) -> bool:
        """Whether parameters are gathered while another block computes."""
        return self.training.tier == "device" and not self.brings_once

    @property
    def micro_batched(self) -> bool:
        """Whether a step is more than one forward and one backward."""
        return self.stages > 1 or self.micro_batches > 1

    @property
    def brings_once(self) -> bool:
        """Whether parameters are gathered, and gradients reduced, once for all of a micro-batched step: not where that
        was decided otherwise, nor where they come from their home for each forward and backward.
        """
        return self.micro_batched and self.training.tier == "device" and self.training.gathers == "once"

    @property
    def sums_once(self) -> bool:
        """Whether gradients of parameters that come with each micro-batch are summed once a step all the same over
        ranks that store the same: not where they leave the device in between.
        """
        return self.micro_batched and self.training.tier == "device" and not self.brings_once

    @property
    def gathers(self) -> Gathers:
        """When that is done in a micro-batched step."""
        return "once" if self.brings_once else "each"

    @property
    def brought(self) -> int:
        """How often a step converts a parameter for forward."""
        return 1 if self.brings_once else self.micro_batches
