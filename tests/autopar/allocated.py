"""Allocated: what the CPU's allocator gives and takes while code runs, as torch's profiler is told.

A dispatch mode, which counts what operators return, has autograd add gradients into new tensors and composed operators
add out of place, where both are done in place without it; and it does not see what is allocated inside of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Change:
    """So many bytes at an address are given, or (less than zero) taken back."""

    time_ns: int
    address: int
    bytes: int


def changes_during(run: Callable[[], object]) -> list[Change]:
    """What the allocator does for this thread while it runs something, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    roots = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    found = [
        Change(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
        for event in _all_of(roots)
        if event.tag == _EventType.Allocation
    ]
    return sorted(found, key=lambda change: change.time_ns)


def _all_of(events: list[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def most_bytes(changes: list[Change]) -> int:
    """Bytes at the peak, of what was given since the first change."""
    given: dict[int, int] = {}
    now = most = 0
    for change in changes:
        if change.bytes > 0:
            given[change.address] = change.bytes
            now += change.bytes
            most = max(most, now)
        else:
            now -= given.pop(change.address, 0)
    return most
