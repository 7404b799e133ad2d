"""Sends values from one pipeline stage to the next, within a process or between ranks."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.pipeline.stage import Passed, Stage
from autopar.runtime.spmd.flight import Flight
from autopar.runtime.spmd.pipeline_ranks import PipelineRanks
from planner.solve.pipeline.schedule import Action, Schedule

Message = tuple[int, str, int]
"""The stage that it is for, the kind of action that waits for it, the micro-batch."""
Messages = dict[Message, list[Tensor]]


def tag_of(message: Message) -> int:
    """The number that marks a message, of every micro-batch: a receiver that knows tags takes no other one for it."""
    stage, kind, _ = message
    return 2 * stage + (kind == "B")


def crossed_by(tag: int) -> tuple[int, str]:
    """What a message crosses: the boundary behind this stage, ``forward`` or ``backward``."""
    stage, is_gradient = divmod(tag, 2)
    return (stage, "backward") if is_gradient else (stage - 1, "forward")


class StageLinks(Protocol):
    """Carries messages."""

    def open(self, trains: bool, left: Messages | None) -> None:
        """A step begins.

        Args:
            trains: with backward.
            left: what was not taken in the step before, whose last backwards this one does; ``None``: it does none.
        """

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Send a message on its way; the tensors must stay as they are."""

    def take(self, message: Message) -> list[Tensor]:
        """Wait for a message."""

    def share(self, loss: Tensor | None, seed: Tensor, stage: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The loss that ``stage`` has, of this dtype, and the gradient that its backward began with, on all ranks."""

    def close(self) -> Messages:
        """It is over: wait until everything sent has arrived. Returns what nobody took."""


class InProcessLinks:
    """All stages are in one process."""

    def __init__(self) -> None:
        self._held: Messages = {}

    def open(self, trains: bool, left: Messages | None) -> None:
        self._held = dict(left or {})

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        self._held[message] = list(tensors)

    def take(self, message: Message) -> list[Tensor]:
        return self._held.pop(message)

    def share(self, loss: Tensor | None, seed: Tensor, stage: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        assert loss is not None
        return loss, seed

    def close(self) -> Messages:
        kept, self._held = self._held, {}
        return kept


@dataclass(frozen=True)
class _Works:
    """What is waited for of the tensors of one message."""

    each: Sequence[dist.Work]

    def wait(self) -> None:
        for work in self.each:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.each)


@dataclass(frozen=True)
class _Coming:
    """A message that is being received.

    Attributes:
        taken: the messages from here that its sender has taken before it sends this one.
    """

    message: Message
    taken: Sequence[Message]
    tensors: list[Tensor]
    flight: Flight


class RankLinks:
    """Stages are on several ranks, between which tensors are sent one by one.

    What one rank sends another arrives in the order in which it is sent, which is that of the sender's actions. The
    receiver may want it in another order: what comes before is then put aside. The next message of every sender is
    received while others are worked on.

    What was sent is let go when its receiver answers with something that it sends later, as memory is priced
    (:mod:`planner.solve.pipeline.running`). Without backward few answer: there it is let go when the work says that it
    is done, too, which gloo's never does.

    Args:
        schedule: the actions of all ranks of the pipeline.
        stages: those of this rank.
        pipeline: the ranks.
        device: where messages arrive.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[Stage], pipeline: PipelineRanks, device: torch.device):
        self.schedule, self.pipeline, self.device = schedule, pipeline, device
        self._forms = {(stage.number, "F"): stage.received for stage in stages}
        self._forms |= {(stage.number, "B"): differentiable(stage.sent) for stage in stages}
        self._within = InProcessLinks()
        self._arriving = {
            (trains, first): self._all_arriving(schedule.first if first else schedule, trains)
            for trains in (False, True)
            for first in (False, True)
        }
        self._expected: dict[int, deque[tuple[Message, Sequence[Message]]]] = {}
        self._coming: dict[int, _Coming] = {}
        self._aside: Messages = {}
        self._pending: dict[Message, tuple[Flight, list[Tensor]]] = {}
        self._is_open = self._trains = False

    def open(self, trains: bool, left: Messages | None) -> None:
        """Begin to receive what every other rank is going to send here.

        Raises:
            RuntimeError: the step before was left in the middle.
        """
        if self._is_open:
            raise RuntimeError(
                "the step before did not finish, and some of what was sent in it may still be on its way: start the "
                "processes again, from a checkpoint"
            )
        self._is_open, self._trains = True, trains
        kept = left or {}
        own = {message for message in kept if self._sender(message) == self.pipeline.rank}
        self._within.open(trains, {message: kept[message] for message in own})
        self._aside = {message: tensors for message, tensors in kept.items() if message not in own}
        arriving = self._arriving[trains, left is None]
        self._expected = {sender: deque(messages) for sender, messages in arriving.items()}
        for sender in self._expected:
            self._receive(sender)

    def _all_arriving(self, schedule: Schedule, trains: bool) -> dict[int, list[tuple[Message, Sequence[Message]]]]:
        """The messages of a step that every other rank sends here, in order, each with those from here that the sender
        takes between the one before and this one.
        """
        found: dict[int, list[tuple[Message, Sequence[Message]]]] = {}
        for sender, row in enumerate(schedule.rows):
            if sender == self.pipeline.rank:
                continue
            taken: list[Message] = []
            for action in (action for action in row if action.kind == "F" or (trains and action.kind in "BI")):
                received, sent = _received(action), _message(action)
                if self._is_between(received) and self._sender(received) == self.pipeline.rank:
                    taken.append(received)
                if self._is_between(sent) and self._home(sent[0]) == self.pipeline.rank:
                    found.setdefault(sender, []).append((sent, taken))
                    taken = []
        return found

    def _is_between(self, message: Message) -> bool:
        """Whether a message goes from one stage to another, and not into the first or out of the last."""
        stage, kind, _ = message
        return 0 < stage < self.schedule.stages if kind == "F" else 0 <= stage < self.schedule.stages - 1

    def _home(self, stage: int) -> int:
        return self.schedule.rank_of[stage]

    def _sender(self, message: Message) -> int:
        stage, kind, _ = message
        return self._home(stage - 1 if kind == "F" else stage + 1)

    def _receive(self, sender: int) -> None:
        """Begin to receive a sender's next message, if there is one."""
        if not self._expected[sender]:
            return
        message, taken = self._expected[sender].popleft()
        forms = self._forms[message[0], message[1]]
        tensors = [torch.empty(form.shape, dtype=form.dtype, device=self.device) for form in forms]
        group, source = self.pipeline.ways[sender, self.pipeline.rank], self.pipeline.global_rank(sender)

        def receive() -> _Works:
            works = [dist.irecv(tensor, source, group, tag_of(message)) for tensor in tensors]
            return _Works([work for work in works if work is not None])

        with self._naming(sender, message):
            flight = Flight("receive", receive, str(Action(*message)))
        self._coming[sender] = _Coming(message, taken, tensors, flight)

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        receiver = self._home(message[0])
        if receiver == self.pipeline.rank:
            self._within.put(message, tensors)
            return
        if not self._trains:
            for each in [each for each, (flight, _) in self._pending.items() if flight.is_over]:
                self._let_go(each)
        group, target = self.pipeline.ways[self.pipeline.rank, receiver], self.pipeline.global_rank(receiver)
        sent = [tensor.contiguous() for tensor in tensors]

        def send() -> _Works:
            works = [dist.isend(tensor, target, group, tag_of(message)) for tensor in sent]
            return _Works([work for work in works if work is not None])

        with self._naming(receiver, message):
            self._pending[message] = Flight("send", send, str(Action(*message))), sent

    @contextlib.contextmanager
    def _naming(self, other: int, message: Message) -> Iterator[None]:
        """Say with whom a message was exchanged when that fails."""
        stage, kind, micro_batch = message
        try:
            yield
        except RuntimeError as error:
            what, rank = "values" if kind == "F" else "gradients", self.pipeline.global_rank(other)
            raise RuntimeError(
                f"{what} of micro-batch {micro_batch} for stage {stage}: rank {rank} (number {other} of the pipeline) "
                f"has gone or does not answer: {error}"
            ) from error

    def take(self, message: Message) -> list[Tensor]:
        sender = self._sender(message)
        if sender == self.pipeline.rank:
            return self._within.take(message)
        while message not in self._aside:
            self._put_aside(sender)
        return self._aside.pop(message)

    def _put_aside(self, sender: int) -> None:
        """Wait for the message that is coming from a rank, and begin to receive its next one."""
        coming = self._coming.pop(sender)
        with self._naming(sender, coming.message):
            coming.flight.wait()
        for message in coming.taken:
            self._let_go(message)
        self._receive(sender)
        self._aside[coming.message] = coming.tensors

    def _let_go(self, message: Message) -> None:
        """Let go of a message that was sent, when it has arrived."""
        if message in self._pending:
            flight, _ = self._pending.pop(message)
            with self._naming(self._home(message[0]), message):
                flight.wait()

    def share(self, loss: Tensor | None, seed: Tensor, stage: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        if loss is not None:
            found[0].copy_(loss)
            found[1].copy_(seed)
        dist.broadcast(found, group=self.pipeline.ranks, group_src=self._home(stage))
        return found[0].to(dtype), found[1]

    def close(self) -> Messages:
        while self._coming and self.schedule.overlaps:
            self._put_aside(next(iter(self._coming)))
        assert not self._coming, "a message that nobody took"
        for message in [*self._pending]:
            self._let_go(message)
        kept, self._aside = {**self._within.close(), **self._aside}, {}
        self._is_open = False
        return kept


def differentiable(passed: Sequence[Passed]) -> tuple[Passed, ...]:
    """Those through which a gradient comes back."""
    return tuple(each for each in passed if each.differentiable)


def _message(action: Action) -> Message:
    """What an action sends."""
    if action.kind == "F":
        return action.stage + 1, "F", action.micro_batch
    return action.stage - 1, "B", action.micro_batch


def _received(action: Action) -> Message:
    """What an action takes."""
    return action.stage, "F" if action.kind == "F" else "B", action.micro_batch
