"""Collectives in a trace of torch's profiler: what was called, and what carried it.

Collectives are carried in the order in which they are called. Over gloo the call says which kind it is: torch reduces
and scatters by an all-reduce. Messages are left out there, of which a trace shows how long they were waited for alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WORDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "send",
}
"""What names of calls (``c10d::allreduce_``), and of what carries them (``gloo:all_reduce``,
``ncclDevKernel_AllReduce_Sum_f32_RING_LL``), begin with.
"""
CALL = re.compile(r"c10d::(.*)")
CARRIER = {False: re.compile(r"gloo:(.*)"), True: re.compile(r"nccl(?:dev)?kernel_(.*)", re.IGNORECASE)}
"""What carries a collective, on a GPU or not."""


@dataclass(frozen=True)
class CarriedCollective:
    """A collective that was carried.

    Attributes:
        range: when.
        called: the moment of its call; ``None``: there are not as many calls as are carried.
    """

    kind: str
    range: Any
    called: float | None


def carried_collectives(events: Sequence[Any], on_gpu: bool) -> list[CarriedCollective]:
    """All of a trace, in the order in which they began to be carried."""
    carriers, calls = _named(events, CARRIER[on_gpu], on_gpu), _named(events, CALL, on_gpu)
    if len(calls) != len(carriers):
        return [CarriedCollective(kind, each, None) for kind, each in carriers]
    return [
        CarriedCollective(kind if on_gpu else called_kind, each, call.start)
        for (kind, each), (called_kind, call) in zip(carriers, calls, strict=True)
    ]


def _named(events: Sequence[Any], name: re.Pattern[str], with_messages: bool) -> list[tuple[str, Any]]:
    """The kinds of the events with such names, and when they were, in order."""
    found = []
    for event in events:
        match = name.match(event.name)
        kind = None if match is None else _kind(match.group(1))
        if kind is not None and (with_messages or kind != "send"):
            found.append((kind, event.time_range))
    return sorted(found, key=lambda each: each[1].start)


def _kind(name: str) -> str | None:
    word = name.lower().replace("_", "")
    return next((kind for begins, kind in WORDS.items() if word.startswith(begins)), None)
