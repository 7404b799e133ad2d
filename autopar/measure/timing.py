"""Measures the seconds of a function on a rank that measures beside all others.

What is computed is repeated over a stretch longer than the scheduler's time slices. Where a rank computes in one
thread, the seconds that it computed count, times how many ranks share a core: other users of the machine do not show in
them. On a GPU the seconds count that it computes, one kernel after another as in a step that keeps it busy: all are
queued behind large products, which also bring the clock down to what the chip's power lets it sustain.

On CPUs a collective is not repeated back to back, which no step does: the next call would fill the gaps of the last,
and no rank would come late. The rank computes between calls, and what counts is by how much a call makes that longer.
Where it is *waited for*, that is from when a rank has computed its share until it goes on: others come later, as the
scheduler deals out the cores, and threads that sleep are woken on every hop. *Beside* computing a call takes what its
threads take of the cores, since computing fills the gaps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from planner.base import host

Act = Callable[[], object]
Key = tuple[Any, ...]
Found = Mapping[Key, Sequence[float]]
"""Seconds of every figure, once per round so far."""


@dataclass(frozen=True)
class Pace:
    """How long to measure.

    Attributes:
        stretch_s: seconds over which an act is repeated.
        calls: how many collectives are timed together.
        between_s: seconds that a rank computes between two of them; longer beside one that takes longer.
    """

    stretch_s: float = 0.01
    calls: int = 4
    between_s: float = 0.01


@dataclass(frozen=True)
class Task:
    """A figure: what to repeat, in how many parts its time is to be divided, and which figure is part of it.

    ``less`` names an earlier figure, which is taken away: a backward is timed together with its forward.
    ``on_host``: on the host of a GPU.
    """

    key: Key
    act: Act
    parts: int = 1
    less: Key | None = None
    on_host: bool = False

    def seconds(self, found: Found, pace: Pace, device: torch.device) -> float:
        """Mean seconds of a part."""
        mean_s = _mean_s(self.act, pace.stretch_s, torch.device("cpu") if self.on_host else device) / self.parts
        if self.less is None:
            return mean_s
        # No less than a tenth of what is taken away: noise must not make a backward free.
        less_s = found[self.less][-1]
        return max(mean_s - less_s, less_s / 10)


@dataclass(frozen=True)
class TimedCall:
    """The figure of a collective that is waited for: all ranks call equally often."""

    key: Key
    act: Act

    def seconds(self, found: Found, pace: Pace, device: torch.device) -> float:
        """Mean seconds by which a call makes a step longer."""
        if device.type == "cuda":
            return _called_s(self.act, pace.stretch_s, device)
        return _lengthened_s(lambda: self.act, pace.calls, _computing(pace.between_s), is_beside=False)


@dataclass(frozen=True)
class Beside:
    """The figure of a collective that runs beside computing, on CPUs.

    Args:
        send: sends, and returns what waits until it is done.
        waited: the figure of the same call where it is waited for.
    """

    key: Key
    send: Callable[[], Act]
    waited: Key

    def seconds(self, found: Found, pace: Pace, device: torch.device) -> float:
        """Mean seconds by which computing that is long enough to hide a call becomes longer."""
        hidden_s = max(pace.between_s, found[self.waited][-1] / _share())
        return _lengthened_s(self.send, pace.calls, _computing(hidden_s), is_beside=True)


def _mean_s(act: Act, stretch_s: float, device: torch.device) -> float:
    act()
    dist.barrier()
    if device.type == "cuda":
        return _on_gpu_s(act, stretch_s, device)
    clock = _computing_s if _in_one_thread() else time.perf_counter
    once_s = _stretch_s(act, 1, device, clock)
    if once_s > stretch_s:
        return once_s
    count = math.ceil(stretch_s / max(once_s, 1e-7))
    return _stretch_s(act, count, device, clock) / count


def _stretch_s(act: Act, count: int, device: torch.device, clock: Callable[[], float]) -> float:
    _wait(device)
    start = clock()
    for _ in range(count):
        act()
    _wait(device)
    return clock() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- cores that ranks share ------------------------------------------------------------------------------------------


def _in_one_thread() -> bool:
    return torch.get_num_threads() == 1


def _share() -> float:
    """Ranks that share a core."""
    return max(1.0, dist.get_world_size() / host.cores())


def _computing_s() -> float:
    """CPU seconds of this thread, as wall seconds of a machine without other users where all ranks compute."""
    return time.thread_time() * _share()


LEAST_S = 1e-7
"""Of a call that noise has made free."""


def _lengthened_s(send: Callable[[], Act], count: int, compute: Act, *, is_beside: bool) -> float:
    """Mean seconds by which calls make computing longer, which is before each of them, or beside it."""
    send()()
    dist.barrier()
    # What computing takes is known from the CPU seconds of its thread; of several threads, from when they are alone.
    counts = _in_one_thread()
    computed_s = 0.0 if counts else _stretch_s(compute, count, torch.device("cpu"), time.perf_counter)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        wait = send() if is_beside else None
        begun_s = _computing_s()
        compute()
        computed_s += _computing_s() - begun_s if counts else 0.0
        (wait or send())()
    return max(LEAST_S, (time.perf_counter() - start - computed_s) / count)


def _computing(seconds: float) -> Act:
    """Work of about so many seconds on a core of one's own, the same on all ranks: products that its cache holds."""
    x, w = torch.ones(256, 512), torch.ones(512, 512)
    F.linear(x, w)
    start = time.thread_time()
    F.linear(x, w)
    agreed = torch.tensor([seconds / max(1e-6, time.thread_time() - start)])
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    count = math.ceil(agreed.item())

    def compute() -> None:
        for _ in range(count):
            F.linear(x, w)

    return compute


# ---- a GPU -----------------------------------------------------------------------------------------------------------


def _called_s(act: Act, stretch_s: float, device: torch.device) -> float:
    """Calls after one another, on all ranks equally many."""
    act()
    dist.barrier()
    once_s = _stretch_s(act, 1, device, time.perf_counter)
    agreed = torch.tensor([max(1, math.ceil(stretch_s / max(once_s, 1e-7)))])
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    count = int(agreed.item())
    return _stretch_s(act, count, device, time.perf_counter) / count


QUEUED = 16
"""Acts at most that are queued at once: a GPU takes about a thousand kernels before the host has to wait."""
HOT_ROWS = 8192
HOT_S = 0.02
"""Seconds at least of products before anything is measured on a GPU."""


def _on_gpu_s(act: Act, stretch_s: float, device: torch.device) -> float:
    """Seconds on the GPU, which multiplies until all is queued, so that the host's share does not count."""
    hot = _hot(device)
    hot @ hot  # the first of all starts the library
    queuing_s, once_s = _queued_and_done_s(act, device)
    count = max(1, min(QUEUED, math.ceil(stretch_s / once_s)))
    _, hot_s = _queued_and_done_s(lambda: hot @ hot, device)
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(math.ceil(max(2 * count * queuing_s, HOT_S) / hot_s)):
        hot @ hot
    begun.record()
    for _ in range(count):
        act()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3 / count


@cache
def _hot(device: torch.device) -> Tensor:
    return torch.randn(HOT_ROWS, HOT_ROWS, device=device, dtype=torch.float16) / HOT_ROWS


def _queued_and_done_s(act: Act, device: torch.device) -> tuple[float, float]:
    """Seconds until an act is queued, and until it is done."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    act()
    queued_s = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return queued_s, time.perf_counter() - start
