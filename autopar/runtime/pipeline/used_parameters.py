"""Used parameters: a step's leaves as its stages use them, and how gradients come back from there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.autograd.recompute import memory_of
from autopar.runtime.pipeline.stage import Stage
from autopar.runtime.pipeline.step_spec import StepSpec


class UsedParameters:
    """The leaves of one step, gathered before the first micro-batch; gradients add up in what is used.

    Attributes:
        local: the leaves, apart from what made them.
        made, used: of each stage, the parameters as ``gather`` gives them: what the gradients go back through, and the
            same apart, where they add up.
        counts: of each stage, what is known of all micro-batches before the first.
    """

    def __init__(self, spec: StepSpec, given: Mapping[str, Tensor], trains: bool):
        self._spec = spec
        self.local = {name: leaf.detach().requires_grad_(leaf.requires_grad and trains) for name, leaf in given.items()}
        count = spec.micro_batches.count
        self._parts = {name: self.local[name].chunk(count, dim) for name, dim in spec.split.items()}
        self.made: dict[int, tuple[Tensor, ...]] = {}
        self.used: dict[int, tuple[Tensor, ...]] = {}
        self.counts: dict[int, tuple[Tensor, ...]] = {}

    def gather(self) -> None:
        """Convert parameters, once a step, and count what must be known of all micro-batches."""
        for number, stage in self._spec.stages.items():
            stored = tuple(self.local[name] for name in stage.parameters)
            self.made[number] = stored if stage.gather is None else stage.gather(*stored)
            self.used[number] = tuple(map(self._apart, self.made[number]))
            self.counts[number] = self._counted(stage)

    def _apart(self, made: Tensor) -> Tensor:
        used = made.detach().requires_grad_(made.requires_grad)
        if used.requires_grad and self._spec.state.gradient_dtype is not None:
            used.grad_dtype = self._spec.state.gradient_dtype
        return used

    def leaves(self, stage: Stage, micro_batch: int) -> list[Tensor]:
        """What a stage takes of the leaves for a micro-batch, parameters aside."""
        return [self._parts[name][micro_batch] if name in self._parts else self.local[name] for name in stage.leaves]

    def carry(self, buffer: str | None, value: Tensor) -> None:
        """Let the next micro-batch find a buffer as this one leaves it."""
        if buffer is not None:
            self.local[buffer] = value.detach()

    def _counted(self, stage: Stage) -> tuple[Tensor, ...]:
        if stage.count is None:
            return ()
        found = []
        for micro_batch in range(self._spec.micro_batches.count):
            self._spec.micro_batches.now = micro_batch
            found.append(stage.count(*self.leaves(stage, micro_batch)))
        return tuple(torch.stack(each).sum(0) for each in zip(*found, strict=True))

    def reduce(self) -> None:
        """From the gradients of used parameters to those of stored ones, which are in the dtypes of parameters."""
        stored = {id(leaf) for leaf in self.local.values()}
        starts, gradients = [], []
        for number in self._spec.stages:
            for made, used in zip(self.made[number], self.used[number], strict=True):
                gradient, used.grad = used.grad, None
                if gradient is None:
                    continue
                gradient = gradient.to(made.dtype)
                if id(made) in stored:  # used as it is stored
                    made.grad = gradient if made.grad is None else made.grad.add_(gradient)
                else:
                    starts.append(made)
                    gradients.append(gradient)
        if starts:
            torch.autograd.backward(starts, gradients)
        for tie in self._spec.ties:
            for leaf in (self.local[name] for name in tie.leaves):
                if leaf.requires_grad:
                    leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                    dist.all_reduce(leaf.grad, group=tie.group)

    def leave(self) -> None:
        """All forwards are over: only gradients are missing."""
        self._parts.clear()
        self.counts.clear()

    def borrowed(self) -> set[str]:
        """The parameters that are used in the memory in which they are stored."""
        taken = {memory_of(used) for each in self.used.values() for used in each if used.requires_grad}
        names = {name for stage in self._spec.stages.values() for name in stage.parameters}
        return {name for name in names if memory_of(self.local[name]) in taken}
