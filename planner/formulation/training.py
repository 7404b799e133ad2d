"""What a step keeps besides the model (gradients, optimizer state), on which tier, and when parameters are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import Scaling
from planner.formulation.unsharding import PER_STEP, Unsharding
from planner.ir.graph import Node
from planner.ir.node import ITEM_BYTES

Tier = Literal["device", "host", "either", "disk"]
Update = Literal["after", "backward"]
ReduceDtype = Literal["float32", "float64"]
Activations = int | Literal["all"]
"""Of how many blocks, the first ones, what is saved for backward may leave the device."""


@dataclass(frozen=True)
class Training:
    """What a training step keeps besides the model, and where.

    Attributes:
        optimizer_bytes_per_element: of optimizer state, per parameter element; Adam's two moments in float32 are 8,
            with masters in float32 12.
        tier: where parameters, gradients and optimizer state are at home: on the device; on the host, which then
            updates them, and devices hold of them what they use; or either, of each block what fits
            (:mod:`planner.analysis.offload.step_timing`); or in files, which the host updates. To the search, which
            decides before that, either is the host.
        update: when parameters are updated: after all of backward, or in backward, each block's as soon as its
            gradients are complete. The search of offloaded plans counts it as after.
        activations: of how many blocks what is saved for backward may leave for where model data is at home.
        unsharding: when parameters are gathered, and their gradients reduced.
        discards: names of the outputs that a step does not keep, see :mod:`planner.formulation.discarded_outputs`;
            ``None``: in a step of several micro-batches all that may be, in another none.
        compile: whether blocks are compiled, and so priced as :mod:`planner.ops.fusion` fuses them.
        float8: whether linear layers of blocks that repeat multiply in float8, and what has a scale of its own
            (:mod:`planner.formulation.float8`).
        hides_transfers: whether nothing waits for what moves, nor for what the host may do meanwhile: no step does so,
            but none takes less.
        reduce_dtype: in which gradients of parameters in narrower ones are reduced over ranks; ``None``: in their own.
    """

    optimizer_bytes_per_element: int = 8
    tier: Tier = "device"
    update: Update = "after"
    activations: Activations = 0
    unsharding: Unsharding = PER_STEP
    discards: tuple[str, ...] | None = None
    compile: bool = False
    reduce_dtype: ReduceDtype | None = None
    float8: Scaling | None = None
    hides_transfers: bool = False

    def compiles(self, cluster: ClusterSpec, repeats: bool) -> bool:
        """Whether a block is compiled, by this plan or by the software that runs it.

        Args:
            repeats: whether it has several instances.
        """
        return self.compile or cluster.software.compile == "all" or (cluster.software.compile == "layers" and repeats)

    def widening(self, node: Node) -> int:
        """How many bytes of a gradient are reduced for one that is stored: 1, unless a parameter's is reduced wider."""
        if self.reduce_dtype is None or node.op != "param":
            return 1
        return max(1, ITEM_BYTES[self.reduce_dtype] // node.results[0].item_bytes)

    @property
    def updates_on_device(self) -> bool:
        """Whether devices update parameters in backward, so that all gradients are never there at once."""
        return self.update == "backward" and self.tier == "device"

    @property
    def on_disk(self) -> bool:
        """Whether what is not on the device is in files."""
        return self.tier == "disk"
