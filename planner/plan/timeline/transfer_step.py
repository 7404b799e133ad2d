"""The timeline of a step whose model data moves beside computing: one row for each that is busy at once.

``TransferSchedule -> StepTimeline``: the device, every direction of every link, and the host, as the schedule is
simulated in the middle of a run. What goes on when the next step begins stands at the beginning, where it goes on from
the step before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from planner.plan.timeline.drawn import StepTimeline
from planner.plan.timeline.step import Event
from planner.solve.transfers import LaneSpan, TransferSchedule, simulate

DEVICE, HOST = "device", "host"
KIND_OF = {"forward": "F", "begin": "F", "backward": "B", "end": "B"}
"""The kind of a moment on the device by its first word; of all others it is updating."""


def transfer_step(table: TransferSchedule, fullest: str = "") -> StepTimeline:
    """The predicted step, as all ranks make it.

    Args:
        fullest: when and where memory is fullest, in words.
    """
    found = simulate(table)
    lanes = sorted({span.lane for span in found.spans}, key=_place)
    events = [
        event
        for row, lane in enumerate(lanes)
        for event in _events(row, [span for span in found.spans if span.lane == lane], found.step_s)
    ]
    rows = tuple(lanes)
    return StepTimeline("predicted", "", len(lanes), 1, 1, tuple(events), found.step_s, 0.0, fullest=fullest, rows=rows)


def _place(lane: str) -> tuple[bool, bool, bool, str]:
    """The device first, then what is fetched, what is evicted, and the host."""
    return lane != DEVICE, lane == HOST, lane.startswith("evict"), lane


def _events(row: int, spans: Iterable[LaneSpan], step_s: float) -> Iterator[Event]:
    """What is done in a row, in the order of time; of the device also how it waits."""
    events = sorted((event for span in spans for event in _wrapped(row, span, step_s)), key=lambda each: each.start_s)
    yield from events
    if row == 0:
        starts = [*(event.start_s for event in events), step_s]
        ends = [0.0, *(event.end_s for event in events)]
        for end, start in zip(ends, starts, strict=True):
            if start - end > 1e-9 * step_s:
                yield Event(row, "offload", end, start)


def _wrapped(row: int, span: LaneSpan, step_s: float) -> Iterator[Event]:
    """A span, and what of it goes on in the next step at the beginning of this one, of which it is a circle."""
    kind, number, what = _told(span)
    for turn in range(int(span.end_s // step_s) + 1):
        start_s, end_s = max(0.0, span.start_s - turn * step_s), min(step_s, span.end_s - turn * step_s)
        if end_s > start_s:
            yield Event(row, kind, start_s, end_s, what=what, block=number)


def _told(span: LaneSpan) -> tuple[str, int | None, str]:
    """Kind, block and words of a span: ``("F", 3, "3 model.layers.2")``."""
    word, _, rest = span.name.partition(" ")
    if span.lane == HOST:
        return "update", None, rest
    if span.lane != DEVICE:
        return span.lane.partition(" ")[0], None, span.name
    number = re.match(r"\d+", rest)
    kind = KIND_OF.get(word, "update")
    return kind, int(number[0]) if number else (None if kind == "update" else -1), rest
