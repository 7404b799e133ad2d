"""Rows of stacked parameters: which members a rank holds something of, and a parameter for each."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from autopar.runtime.module import ParallelModule
from autopar.runtime.optim.parts import local
from autopar.runtime.spmd.mesh import rows_of
from planner.formulation.constraints.labels import RUNNING_MODELS


class MemberRows:
    """A stacked parameter, and a parameter of its own for each member of which this rank holds something."""

    def __init__(self, stacked: Tensor, members: Sequence[int]):
        self.stacked = stacked
        values = local(stacked).detach()
        self.of = {member: nn.Parameter(row) for member, row in zip(members, values.unbind(), strict=True)}
        self._address = values.data_ptr()
        itself = weakref.ref(self)

        def arrived(_: Tensor) -> None:
            if (rows := itself()) is not None:
                rows.take_gradients([True] * (max(members, default=0) + 1))

        stacked.register_post_accumulate_grad_hook(arrived)  # for whom looks at rows before the step

    def follow(self, running: Sequence[bool]) -> None:
        """Let rows lie where the stacked parameter does, and have its gradients; of members that are stopped, none."""
        values = local(self.stacked).detach()
        if values.data_ptr() != self._address:
            self._address = values.data_ptr()
            for row, value in zip(self.of.values(), values.unbind(), strict=True):
                row.data = value
        self.take_gradients(running)

    def take_gradients(self, running: Sequence[bool]) -> None:
        """Of members that are trained, those of the stacked parameter."""
        gradient = self.stacked.grad
        gradients = [None] * len(self.of) if gradient is None else local(gradient).unbind()
        for (member, row), own in zip(self.of.items(), gradients, strict=True):
            row.grad = own if running[member] else None


def members_of(parallel: ParallelModule | None, name: str, members: int) -> Sequence[int]:
    """The members of whose tensor of a name this rank holds something."""
    if parallel is None:
        return range(members)
    leaf = parallel.stored[name]
    first, *_ = rows_of(leaf.shape, leaf.layout, parallel.mesh, parallel.rank)
    return torch.arange(members)[first].tolist()


def set_running(parallel: ParallelModule, running: Tensor) -> None:
    """Tell a parallel module's part of the buffer which members are trained."""
    leaf = parallel.stored.get(RUNNING_MODELS)
    if leaf is not None:
        parallel.get_buffer(RUNNING_MODELS).copy_(running[[*members_of(parallel, RUNNING_MODELS, len(running))]])
