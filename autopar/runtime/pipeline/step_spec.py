"""Step specs: all that the ranks of a pipeline know of a micro-batched step before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed import ProcessGroup

from autopar.runtime.offload.executor import OffloadExecutor
from autopar.runtime.pipeline.outputs import Leaving
from autopar.runtime.pipeline.p2p import StageLinks
from autopar.runtime.pipeline.stage import Stage
from autopar.runtime.pipeline.trace import Recorder
from autopar.runtime.spmd.micro_batch import MicroBatches
from autopar.runtime.spmd.run_state import RunState
from planner.solve.pipeline.schedule import Action, is_left_over


@dataclass(frozen=True)
class Trainers:
    """The ranks of a pipeline that hold parameters that are trained.

    Attributes:
        alike: whether their parameters have the same dtypes.
    """

    group: ProcessGroup
    alike: bool


@dataclass(frozen=True)
class Tie:
    """Parameters that several ranks of a pipeline hold, each for its own stages.

    Attributes:
        leaves: their names.
        group: the ranks that hold them.
        first: whether this is the first of these ranks.
    """

    leaves: tuple[str, ...]
    group: ProcessGroup
    first: bool


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What this process runs of a micro-batched step, in which order, and with whom.

    Attributes:
        stages: those of this process, by number.
        actions: its actions in order; where a step takes over backwards from the one before, those of micro-batches
            below 0.
        leaves: the names of all leaves, in the order in which they are given.
        split: the leaves of which a micro-batch takes a part -> the dim along which micro-batches lie behind one
            another.
        outputs: the outputs of the model.
        loss: the position of the output that backward starts at, if there is one.
        draws: how often each stage of the model draws random numbers for a micro-batch.
        trained: whether the model has parameters that are trained, on this process or another.
        recorder: of what is done when.
        ties: the parameters that other processes hold too.
        trainers: who trains parameters, where this rank does and stages are on several.
        offload: what moves parameters and gradients, if they move; ``offloaded``: the names that it has of them ->
            those of the leaves.
    """

    stages: Mapping[int, Stage]
    actions: Sequence[Action]
    leaves: Sequence[str]
    split: Mapping[str, int]
    outputs: Sequence[Leaving]
    loss: int | None
    micro_batches: MicroBatches
    state: RunState
    links: StageLinks
    draws: Sequence[int]
    trained: bool
    recorder: Recorder
    ties: Sequence[Tie] = ()
    trainers: Trainers | None = None
    offload: OffloadExecutor | None = None
    offloaded: Mapping[str, str]

    @cached_property
    def first(self) -> list[Action]:
        """The actions of a step that nothing is left to."""
        return [action for action in self.actions if not is_left_over(action)]

    @cached_property
    def overlaps(self) -> bool:
        """Whether a step takes over backwards from the one before, and hands over the gradients of that one."""
        return any(is_left_over(action) for action in self.actions)

    @property
    def share_of_loss(self) -> float:
        """The gradient of what one micro-batch gives to the loss."""
        assert self.loss is not None
        return 1.0 if self.outputs[self.loss].summed else 1 / self.micro_batches.count
