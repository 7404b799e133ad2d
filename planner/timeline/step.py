"""Step: what every rank of a pipeline does in a step, and when.

A simulated step and an observed one are the same kind of value, so that they are drawn alike, and written alike in
Chrome's trace event format ("Trace Event Format", Google, 2016), which Perfetto opens: a process for each rank of the
pipeline, in it one thread for computing and one for communication.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from planner.errors import InputError
from planner.files import write_text
from planner.pipeline.schedule import Action
from planner.pipeline.simulate import Simulated
from planner.words import in_seconds

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "wait": "wait",
    "gather": "gather",
    "reduce": "reduce",
    "update": "update",
}
"""What a rank does: actions of schedules, waiting for what they need, and once a step gathering parameters, reducing
gradients, and the optimizer's update."""
THREADS = ("compute", "communication")
COMMUNICATION = {"wait", "gather", "reduce"}


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank does from ``start_s`` to ``end_s``; ``kind`` is one of :data:`KINDS`.

    ``action`` is the schedule's, or the one that waits; ``None``: once a step.
    """

    rank: int
    kind: str
    start_s: float
    end_s: float
    action: Action | None = None

    @property
    def name(self) -> str:
        """``2F0``, ``wait for 2F0``, ``reduce``."""
        what = "" if self.action is None else str(self.action)
        return f"wait for {what}" if self.kind == "wait" else what or self.kind


@dataclass(frozen=True, eq=False, repr=False)
class StepTimeline:
    """A step in turns on the ranks of a pipeline. A notebook shows the picture, ``print`` a drawing in characters.

    Attributes:
        what: ``predicted`` or ``observed``.
        schedule: its name.
        ranks, virtual_stages, micro_batches: ranks of the pipeline, stages on each, micro-batches of a step.
        events: what ranks do; of one rank, one thing after the other.
        step_s: seconds of the step; an observed one ends before the optimizer's update.
        bubble: of the time between the first action of the schedule and the end of the last, the part in which ranks
            compute nothing, of all ranks together.
        expected: the bubble that was predicted for a step that was observed.
    """

    what: str
    schedule: str
    ranks: int
    virtual_stages: int
    micro_batches: int
    events: tuple[Event, ...]
    step_s: float
    bubble: float
    expected: float | None = None

    def __repr__(self) -> str:
        return f"<StepTimeline: {self.title}>"

    def __str__(self) -> str:
        """A drawing in characters, one line per rank."""
        from planner.timeline.text import text

        return text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.to_svg()

    def to_svg(self) -> str:
        """The picture: a row per rank, and below it the time and what the colours are."""
        from planner.timeline.svg import svg

        return svg(self)

    @property
    def title(self) -> str:
        """The step in one line."""
        told = "" if self.expected is None else f", predicted {self.expected * 100:.1f} %"
        stages = f" of {self.virtual_stages} stages" if self.virtual_stages > 1 else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}{stages}"
        batches = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches != 1)}"
        return (
            f"{self.what} step {in_seconds(self.step_s)}, bubble {self.bubble * 100:.1f} %{told}: "
            f"{self.schedule}, {ranks}, {batches}"
        )

    @cached_property
    def end_s(self) -> float:
        """When the last event ends."""
        return max((event.end_s for event in self.events), default=0.0)

    def trace(self) -> dict[str, Any]:
        """Chrome's trace events: complete events (``X``) with microseconds, and the names of processes and threads."""
        names: list[dict[str, Any]] = []
        for rank in range(self.ranks):
            process = {"ph": "M", "pid": rank, "tid": 0}
            names.append({**process, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}})
            names.append({**process, "name": "process_sort_index", "args": {"sort_index": rank}})
            for number, thread in enumerate(THREADS):
                names.append({**process, "tid": number, "name": "thread_name", "args": {"name": thread}})
        events = [_traced(event) for event in self.events]
        facts = {"title": self.title, "step_s": self.step_s, "bubble": self.bubble}
        return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": facts}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`trace` as JSON for https://ui.perfetto.dev, atomically.

        Raises:
            InputError: the file cannot be written; then there is none, or the one that was there.
        """
        where = Path(path)
        try:
            write_text(where, json.dumps(self.trace(), allow_nan=False, separators=(",", ":")) + "\n")
        except OSError as error:
            raise InputError(
                f"cannot write the trace {str(where.absolute())!r}: {error.strerror}; give a file in a directory that "
                "exists and may be written to"
            ) from error


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


def predicted(
    found: Simulated, gather_s: Sequence[float], reduce_s: Sequence[float], update_s: Sequence[float]
) -> StepTimeline:
    """A simulated step, and what each rank does once a step, after the last action of all, as plans are priced.

    Args:
        gather_s, reduce_s, update_s: seconds once a step, by rank.
    """
    schedule = found.schedule
    rows: dict[int, list[Event]] = defaultdict(list)
    for action, rank, start, end in zip(
        found.actions, found.ranks, found.start_s.tolist(), found.end_s.tolist(), strict=True
    ):
        rows[rank].append(Event(rank, action.kind, start, end, action))
    last = float(found.end_s.max(initial=0.0))
    events: list[Event] = []
    for rank, row in sorted(rows.items()):
        events += _with_waits(row, last * 1e-9)
        start = last
        for kind, seconds in (("gather", gather_s[rank]), ("reduce", reduce_s[rank]), ("update", update_s[rank])):
            if seconds > 0:
                events.append(Event(rank, kind, start, start + seconds))
                start += seconds
    once_s = max(map(sum, zip(gather_s, reduce_s, update_s, strict=True)))
    return StepTimeline(
        "predicted",
        schedule.name,
        schedule.ranks,
        schedule.stages // schedule.ranks,
        schedule.micro_batches,
        tuple(events),
        found.step_s + once_s,
        found.bubble,
    )


def _with_waits(row: Iterable[Event], least_s: float) -> list[Event]:
    """A rank's actions, and before those that start late the waiting for what they need."""
    found: list[Event] = []
    ended = 0.0
    for event in row:
        if event.start_s - ended > least_s:
            found.append(Event(event.rank, "wait", ended, event.start_s, event.action))
        found.append(event)
        ended = event.end_s
    return found


def bubble_of(events: Iterable[Event], ranks: int) -> float:
    """The bubble of what ranks were seen to do, see :class:`StepTimeline`."""
    actions = [event for event in events if event.kind in ("F", "B", "I", "W")]
    span = max(event.end_s for event in actions) - min(event.start_s for event in actions)
    busy = sum(event.end_s - event.start_s for event in actions)
    return max(0.0, 1 - busy / (ranks * span)) if span > 0 else 0.0
