"""A step in Chrome's trace event format ("Trace Event Format", Google, 2016), which Perfetto opens.

A process for each rank of the pipeline, or one for all ranks alike; in it one thread for computing and one for
communication.
"""

from __future__ import annotations

from typing import Any

from planner.plan.timeline.step import KINDS, Event, StepEvents

THREADS = ("compute", "communication")
COMMUNICATION = {"wait", "gather", "reduce", "C", "offload", "fetch", "evict"}


def trace(found: StepEvents) -> dict[str, Any]:
    """Complete events (``X``) with microseconds, and the names of processes and threads."""
    names: list[dict[str, Any]] = []
    for rank in range(found.ranks):
        name = f"pipeline rank {rank}" if found.schedule else found.row_name(rank)
        process = {"ph": "M", "pid": rank, "tid": 0}
        names.append({**process, "name": "process_name", "args": {"name": name}})
        names.append({**process, "name": "process_sort_index", "args": {"sort_index": rank}})
        for number, thread in enumerate(THREADS):
            names.append({**process, "tid": number, "name": "thread_name", "args": {"name": thread}})
    events = [_traced(event) for event in found.events]
    facts = {"title": found.title, "step_s": found.step_s}
    facts |= {"bubble": found.bubble} if found.schedule else {}
    facts |= {"memory": found.fullest} if found.fullest else {}
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": facts}


def _traced(event: Event) -> dict[str, Any]:
    """A complete event."""
    what = {} if event.action is None else {"stage": event.action.stage, "micro_batch": event.action.micro_batch}
    return {
        "name": event.name,
        "cat": KINDS[event.kind],
        "ph": "X",
        "pid": event.rank,
        "tid": THREADS.index("communication" if event.kind in COMMUNICATION else "compute"),
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "args": {"kind": event.kind, **what},
    }
