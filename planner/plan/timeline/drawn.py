"""A step that shows itself as a picture, in characters and as a trace."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.base.errors import InputError
from planner.base.files import write_text
from planner.plan.timeline.step import Event, StepEvents
from planner.plan.timeline.svg import svg
from planner.plan.timeline.text import text
from planner.plan.timeline.trace import trace
from planner.solve.pipeline.simulate import SimulatedSchedule


@dataclass(frozen=True, eq=False, repr=False)
class StepTimeline(StepEvents):
    """A micro-batched step. A notebook shows the picture, ``print`` a drawing in characters."""

    def __repr__(self) -> str:
        return f"<StepTimeline: {self.title}>"

    def __str__(self) -> str:
        """A drawing in characters, one line per rank."""
        return text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.to_svg()

    def to_svg(self) -> str:
        """The picture: a row per rank, and below it the time and what the colours are."""
        return svg(self)

    def trace(self) -> dict[str, Any]:
        """Chrome's trace events, see :mod:`planner.plan.timeline.trace`."""
        return trace(self)

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


def predicted(
    found: SimulatedSchedule,
    gather_s: Sequence[float],
    reduce_s: Sequence[float],
    update_s: Sequence[float],
    fullest: str = "",
) -> StepTimeline:
    """A simulated step, and what each rank does once a step, after the last action of all, as plans are priced.

    Args:
        gather_s, reduce_s, update_s: seconds once a step, by rank.
        fullest: when and where memory is fullest, in words.
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
        fullest=fullest,
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
