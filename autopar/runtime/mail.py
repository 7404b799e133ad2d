"""Mail: how values get from one stage to the next, within a process or from rank to rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.runtime.stage import Passed, Stage
from planner.pipeline.schedule import Action, Schedule

Message = tuple[int, str, int]
"""The stage that it is for, the kind of action that waits for it, the micro-batch."""


class Mail(Protocol):
    """Carries messages."""

    def open(self, trains: bool) -> None:
        """A step begins, with backward or without."""

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send a message on its way; the tensors stay as they are until :meth:`close`."""

    def take(self, message: Message) -> list[Tensor]:
        """Wait for a message."""

    def share(self, value: Tensor | None, stage: int, dtype: torch.dtype) -> Tensor:
        """The number that ``stage`` has, on all ranks."""

    def close(self) -> None:
        """It is over: wait until everything sent has arrived."""


class Within:
    """All stages are in one process."""

    def __init__(self) -> None:
        self._held: dict[Message, list[Tensor]] = {}

    def open(self, trains: bool) -> None:
        self._held.clear()

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        self._held[message] = list(tensors)

    def take(self, message: Message) -> list[Tensor]:
        return self._held.pop(message)

    def share(self, value: Tensor | None, stage: int, dtype: torch.dtype) -> Tensor:
        assert value is not None
        return value

    def close(self) -> None:
        assert not self._held, "a message that nobody took"


class Between:
    """Stages are on several ranks, between which tensors are sent one by one.

    What one rank sends another arrives in the order in which it is sent, which is that of the sender's actions. The
    receiver may want it in another order: what comes before is then put aside.

    Args:
        schedule: the actions of all ranks of the pipeline.
        stages: those of this rank.
        group: the ranks of the pipeline that hold the same part of every stage.
        device: where messages arrive.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[Stage], group: ProcessGroup, device: torch.device):
        self.schedule, self.group, self.device = schedule, group, device
        self.rank = dist.get_rank(group)
        self._forms = {(stage.number, "F"): stage.received for stage in stages}
        self._forms |= {(stage.number, "B"): differentiable(stage.sent) for stage in stages}
        self._within = Within()
        self._coming: dict[int, deque[Message]] = {}
        self._aside: dict[Message, list[Tensor]] = {}
        self._pending: list[tuple[dist.Work, Tensor]] = []

    def open(self, trains: bool) -> None:
        """Work out what every other rank is going to send here, in order."""
        self._within.open(trains)
        self._aside.clear()
        self._coming = {}
        for sender, row in enumerate(self.schedule.rows):
            sent = (_message(action) for action in row if action.kind == "F" or trains)
            mine = (m for m in sent if 0 <= m[0] < self.schedule.stages and self._home(m[0]) == self.rank)
            self._coming[sender] = deque(mine)

    def _home(self, stage: int) -> int:
        return self.schedule.rank_of[stage]

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        receiver = self._home(message[0])
        if receiver == self.rank:
            self._within.put(message, tensors)
            return
        for tensor in tensors:
            sent = tensor.contiguous()
            work = dist.isend(sent, group=self.group, group_dst=receiver)
            assert work is not None
            self._pending.append((work, sent))

    def take(self, message: Message) -> list[Tensor]:
        stage, kind, _ = message
        sender = self._home(stage - 1 if kind == "F" else stage + 1)
        if sender == self.rank:
            return self._within.take(message)
        while message not in self._aside:
            coming = self._coming[sender].popleft()
            made = [torch.empty(form.shape, dtype=form.dtype, device=self.device) for form in self._forms[coming[:2]]]
            for tensor in made:
                dist.recv(tensor, group=self.group, group_src=sender)
            self._aside[coming] = made
        return self._aside.pop(message)

    def share(self, value: Tensor | None, stage: int, dtype: torch.dtype) -> Tensor:
        found = torch.zeros((), dtype=torch.float64, device=self.device)
        if value is not None:
            found.copy_(value)
        dist.broadcast(found, group=self.group, group_src=self._home(stage))
        return found.to(dtype) if value is None else value

    def close(self) -> None:
        self._within.close()
        assert not self._aside and not any(self._coming.values()), "a message that nobody took"
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()


def differentiable(passed: Sequence[Passed]) -> tuple[Passed, ...]:
    """Those through which a gradient comes back."""
    return tuple(each for each in passed if each.differentiable)


def _message(action: Action) -> Message:
    """What an action sends."""
    to = action.stage + 1 if action.kind == "F" else action.stage - 1
    return to, action.kind, action.micro_batch
