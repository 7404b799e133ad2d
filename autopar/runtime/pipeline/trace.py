"""Records what each rank of a pipeline did in the last step, and when.

Every micro-batched step is recorded, which takes a few readings of a clock per action: the host's, or on a GPU events
of the stream. Clocks are compared only when somebody asks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.runtime.spmd.pipeline_ranks import PipelineRanks
from planner.base.errors import InputError
from planner.plan.timeline import Event, StepTimeline, bubble_of
from planner.solve.pipeline.schedule import Action, Schedule

EXCHANGES = 16
"""So many messages there and back compare two clocks; the quickest counts."""

Moment = Any
"""Seconds of the host's clock, or an event of the GPU's stream."""


class Watcher(Protocol):
    """Is told of a step while it runs."""

    def begin_step(self) -> None:
        """A step begins."""

    def begin_action(self, action: Action) -> None:
        """An action of the schedule begins."""

    def end_action(self, action: Action) -> None:
        """It is over."""

    def end_step(self) -> None:
        """The step came to its end; one that fails does not."""


class Recorder:
    """Records the step that runs, and keeps the last that came to its end.

    Args:
        schedule: the actions of all ranks of the pipeline.
        device: where the actions run.
        bubble: as it was predicted.

    Attributes:
        watcher: who else is told.
    """

    def __init__(self, schedule: Schedule, device: torch.device, bubble: float | None = None):
        self.schedule, self.device, self.bubble = schedule, device, bubble
        self._last: list[tuple[str, Action | None, Moment, Moment]] = []
        self._running: list[tuple[str, Action | None, Moment, Moment]] = []
        self._now: Callable[[], Moment] = self._on_stream if device.type == "cuda" else time.perf_counter
        self._kind = ""
        self._action: Action | None = None
        self._began: Moment = None
        self._ended: Moment = None
        self.watcher: Watcher | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        """One that has seen nothing."""
        return Recorder(self.schedule, self.device, self.bubble)

    def open(self) -> None:
        """A step begins."""
        self._running = []
        if self.watcher is not None:
            self.watcher.begin_step()

    def begin(self, kind: str, action: Action | None = None) -> None:
        """An action begins, or what is done once a step; kinds are :data:`planner.plan.timeline.step.KINDS`."""
        self._kind, self._action = kind, action
        if self.watcher is not None and action is not None:
            self.watcher.begin_action(action)
        self._began, self._ended = self._now(), None

    def arrived(self) -> None:
        """What it waited for is there."""
        now = self._now()
        self._running.append(("wait", self._action, self._began, now))
        self._began = now

    def made(self) -> None:
        """It is done but for sending its result."""
        self._ended = self._now()

    def end(self) -> None:
        """It is over."""
        ended = self._now() if self._ended is None else self._ended
        self._running.append((self._kind, self._action, self._began, ended))
        if self.watcher is not None and self._action is not None:
            self.watcher.end_action(self._action)

    def close(self) -> None:
        """The step is over."""
        self._last, self._running = self._running, []
        if self.watcher is not None:
            self.watcher.end_step()

    @staticmethod
    def _on_stream() -> Moment:
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def events(self, rank: int) -> list[Event]:
        """The last step, in seconds of this process's clock; waits until the GPU has done it.

        Raises:
            InputError: there was none.
        """
        if not self._last:
            raise InputError("no step was seen yet: call the model and loss.backward() first, on every rank")
        now, host_s = self._now(), time.perf_counter()
        if self.device.type == "cuda":
            now.synchronize()
            host_s = time.perf_counter()

        def seconds(moment: Moment) -> float:
            return moment if isinstance(moment, float) else host_s - moment.elapsed_time(now) / 1e3

        return [Event(rank, kind, seconds(start), seconds(end), action) for kind, action, start, end in self._last]


def observed(recorder: Recorder, pipeline: PipelineRanks | None) -> StepTimeline:
    """The last step of all ranks of the pipeline, from the first that began; every rank of it must call this.

    Raises:
        InputError: there was none.
    """
    events = recorder.events(0 if pipeline is None else pipeline.rank)
    if pipeline is not None:
        late = ahead_s(pipeline.ranks, recorder.device)
        mine = [(e.rank, e.kind, e.start_s - late, e.end_s - late, e.action) for e in events]
        everyone: list[Any] = [None] * pipeline.size
        dist.all_gather_object(everyone, mine, group=pipeline.ranks)
        events = [Event(*each) for row in everyone for each in row]
    start = min(event.start_s for event in events)
    shifted = [Event(e.rank, e.kind, e.start_s - start, e.end_s - start, e.action) for e in events]
    ranks = 1 if pipeline is None else pipeline.size
    schedule = recorder.schedule
    trained = any(event.kind in ("B", "I") for event in events)
    return StepTimeline(
        "observed",
        schedule.name,
        ranks,
        schedule.stages // ranks,
        schedule.micro_batches,
        tuple(shifted),
        max(event.end_s for event in shifted),
        bubble_of(shifted, ranks),
        recorder.bubble if trained else None,
    )


def ahead_s(ranks: ProcessGroup, device: torch.device) -> float:
    """By how much this process's clock is ahead of the first rank's; every rank of the group must call this.

    The first asks each other rank in turn for its time, and takes it to be that of the middle between asking and
    hearing, in the exchange that was quickest (Cristian, "Probabilistic clock synchronization", 1989). So it is wrong
    by less than half of what that exchange took.
    """
    number = torch.zeros(1, dtype=torch.float64, device=device)
    rank, first = dist.get_rank(ranks), dist.get_global_rank(ranks, 0)
    if rank:
        for _ in range(EXCHANGES):
            dist.recv(number, first, ranks)
            number.fill_(_host_s(device))
            dist.send(number, first, ranks)
        dist.recv(number, first, ranks)
        return float(number.item())
    for other in range(1, ranks.size()):
        there = dist.get_global_rank(ranks, other)
        best = (float("inf"), 0.0)
        for _ in range(EXCHANGES):
            asked = _host_s(device)
            dist.send(number, there, ranks)
            dist.recv(number, there, ranks)
            heard = _host_s(device)
            best = min(best, (heard - asked, float(number.item()) - (asked + heard) / 2))
        number.fill_(best[1])
        dist.send(number, there, ranks)
    return 0.0


def _host_s(device: torch.device) -> float:
    """The host's clock, once the GPU has received what was sent."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def save_together(found: StepTimeline, path: str | os.PathLike[str]) -> None:
    """Rank 0 of all processes writes the trace; an error is raised on every rank.

    Raises:
        InputError: the file cannot be written.
    """
    failed: list[InputError | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found.save_trace(path)
        except InputError as error:
            failed = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise failed[0]
