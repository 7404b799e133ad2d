"""Observes steps: when blocks run forward and backward, and what collectives take, beside what the plan predicts.

A block's program is one module that each of its instances calls, in order. Its backward begins when the gradient of its
result has arrived, and ends where that of the block before begins, or in a micro-batched step with its action. What
runs beside (gradients that are reduced) is not waited for. Every second step is left to torch's profiler, which knows
collectives, and slows down what is between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule
from torch.profiler import ProfilerActivity, profile

from autopar.runtime.spmd.carried_collectives import carried_collectives
from autopar.runtime.spmd.overlaps_seen import BACKWARD, BEGIN, END, ENDS, FORWARD, mark, overlaps_seen
from planner.analysis.overlaps import ObservedFlight
from planner.plan.timeline import Event
from planner.solve.pipeline.schedule import Action

Moment = Any
"""Seconds of the host's clock, or an event of the GPU's stream."""


@dataclass
class Seen:
    """Seconds of every observed step.

    Attributes:
        blocks: by number of the instance and phase, of every micro-batch.
        actions: of a micro-batched step, by stage and kind of action.
        collectives: of all calls of a kind in a step.
        overlaps: of every profiled step, the collectives that were on their way.
    """

    blocks: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    actions: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    collectives: dict[str, list[float]] = field(default_factory=dict)
    overlaps: list[list[ObservedFlight]] = field(default_factory=list)


class StepObserver:
    """Observes the steps that a program runs from :meth:`start` to :meth:`stop`, and counts those that came to an end.

    Args:
        blocks: the programs of blocks that it calls.
        device: where it runs.
        first_blocks: of a micro-batched step, the number of the first block of every stage.
        recorded: what the last micro-batched step did, action by action.
    """

    def __init__(
        self,
        blocks: Sequence[GraphModule],
        device: torch.device,
        first_blocks: Mapping[int, int] = MappingProxyType({}),
        recorded: Callable[[], Sequence[Event]] = tuple,
    ):
        self.blocks, self.device, self.seen = blocks, device, Seen()
        self._first_blocks, self._recorded = first_blocks, recorded
        self._now: Callable[[], Moment] = _on_stream if device.type == "cuda" else time.perf_counter
        self._hooks: list[Any] = []
        self._steps = 0
        self._is_running = False
        self._number = 0
        self._action: Action | None = None
        self._begun: Moment = None
        self._forward: list[tuple[int, Moment, Moment]] = []
        self._backward: list[tuple[int, Moment, Moment]] = []
        self._last: tuple[int, Moment] | None = None
        self._profiler: Any = None

    def start(self) -> None:
        """From the next step on."""
        for block in self.blocks:
            self._hooks.append(block.register_forward_pre_hook(self._begin))
            self._hooks.append(block.register_forward_hook(self._end))

    def stop(self) -> Seen:
        """No more steps; one that is not over counts as none."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._leave_step()
        return self.seen

    def begin_step(self) -> None:
        """The next one begins; one before that is not over failed."""
        self._leave_step()
        self._number, self._forward, self._backward, self._last, self._action = 0, [], [], None, None
        self._steps, self._is_running = self._steps + 1, True
        if self._steps % 2 == 0 and dist.is_initialized() and dist.get_world_size() > 1:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()

    def end_step(self) -> None:
        """The step that runs, if one does, is over."""
        if not self._is_running:
            return
        profiler = self._profiler
        self._leave_step()
        if profiler is not None:
            events, on_gpu = profiler.events(), self.device.type == "cuda"
            for kind, seconds in _collectives(events, on_gpu).items():
                self.seen.collectives.setdefault(kind, []).append(seconds)
            self.seen.overlaps.append(overlaps_seen(events, on_gpu))
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for phase, ran in (("forward", self._forward), ("backward", self._backward)):
            for number, begun, ended in ran:
                self.seen.blocks.setdefault((number, phase), []).append(_between_s(begun, ended))
        for event in self._recorded():
            if event.action is not None and event.kind != "wait":
                key = event.action.stage, event.kind
                self.seen.actions.setdefault(key, []).append(event.end_s - event.start_s)

    def _leave_step(self) -> None:
        """None runs from now on."""
        self._is_running = False
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def begin_action(self, action: Action) -> None:
        """One of a micro-batched step begins."""
        self._action, self._number = action, self._first_blocks[action.stage]
        mark(action, BEGIN)

    def end_action(self, action: Action) -> None:
        """It is over."""
        mark(action, END)
        self._end_backward(self._now(), self._first_blocks[action.stage] - 1)

    def _end_backward(self, now: Moment, following: int) -> None:
        """Of the block whose gradient arrived last, if the one before it follows, and not another that was not seen."""
        if self._last is not None and self._last[0] == following + 1:
            self._backward.append((*self._last, now))
        self._last = None

    def _begin(self, module: Any, args: Any) -> None:
        self._begun = self._now()
        mark(self._number, FORWARD)

    def _end(self, module: Any, args: Any, result: Any) -> None:
        number = self._number
        self._forward.append((number, self._begun, self._now()))
        self._number += 1
        mark(number, ENDS)

        def arrived(gradient: Tensor) -> None:
            if self._action is not None and self._action.kind != "B":  # in two parts, neither of which is the block's
                return
            if self._last is None or number < self._last[0]:
                now = self._now()
                self._end_backward(now, number)
                self._last = number, now
                mark(number, BACKWARD)

        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(arrived)


def _on_stream() -> Moment:
    moment = torch.cuda.Event(enable_timing=True)
    moment.record()
    return moment


def _between_s(first: Moment, second: Moment) -> float:
    return float(second - first) if isinstance(first, float) else float(first.elapsed_time(second)) / 1e3


def _collectives(events: Sequence[Any], on_gpu: bool) -> Mapping[str, float]:
    """Seconds of all calls of each kind; on a GPU of their kernels."""
    found: dict[str, float] = {}
    for each in carried_collectives(events, on_gpu):
        found[each.kind] = found.get(each.kind, 0.0) + each.range.elapsed_us() / 1e6
    return found
