"""Cuts a timeline into equal stretches of time, with the share of each kind of event in each."""

from __future__ import annotations

import numpy as np

from planner.plan.timeline.step import KINDS, Event, StepEvents
from planner.solve.pipeline.simulate import Floats


def shares(found: StepEvents, count: int) -> list[dict[str, Floats]]:
    """For each rank, by kind, its part of each of ``count`` stretches; ``wait`` is all that is left."""
    edges = np.linspace(0, found.end_s, count + 1)
    rows = []
    for events in by_rank(found):
        row: dict[str, Floats] = {}
        for kind in KINDS:
            ends = np.array([end for event in events if event.kind == kind for end in (event.start_s, event.end_s)])
            if kind != "wait" and len(ends):
                done = np.append(0.0, np.cumsum(np.diff(ends)[::2])).repeat(2)[1:-1]
                row[kind] = np.diff(np.interp(edges, ends, done)) * count / found.end_s
        row["wait"] = np.clip(1 - sum(row.values(), np.zeros(count)), 0, 1)
        rows.append(row)
    return rows


def by_rank(found: StepEvents) -> list[list[Event]]:
    """Every rank's events in the order of time."""
    rows: list[list[Event]] = [[] for _ in range(found.ranks)]
    for event in found.events:
        rows[event.rank].append(event)
    return [sorted(row, key=lambda event: (event.start_s, event.end_s)) for row in rows]
