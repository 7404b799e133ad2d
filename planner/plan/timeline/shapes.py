"""The events of a timeline as shapes of SVG, in rows of a given size: what pictures and pages are drawn with.

Few actions are boxes of their own, which have their micro-batches on them and say more under the pointer; of more,
those that look alike are one path; and where they are too narrow to be told apart, each stretch of a row is divided,
from below, among what is done in it. So a picture stays small. Colours are those of the report where it stands in one,
and otherwise legible on light and dark.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

import numpy as np

from planner.base.formatting import in_seconds
from planner.plan.timeline.shares import by_rank, shares
from planner.plan.timeline.step import KINDS, Event, StepEvents

Look = tuple[str, int]
"""How an event looks: its kind, and which of its rank's stages it is of, the first that forward reaches being 0."""
BOXES = 700
"""Up to so many actions are boxes of their own."""
SHAPES, LEAST = 9000, 2.0
"""Up to so many actions, so wide on average, are shapes of their own."""
CORNERS = 18000
"""About so many corners have stretches that are divided."""

COLOURS = {
    "F": "var(--u0,#4a7fe0)",
    "B": "var(--u3,#34a88a)",
    "I": "var(--u4,#9576cf)",
    "W": "var(--u1,#e0923c)",
    "gather": "var(--ink,#6d798c)",
    "reduce": "var(--u2,#cf6250)",
    "update": "var(--u5,#8a94a3)",
    "R": "var(--u1,#e0923c)",
    "C": "var(--u2,#cf6250)",
    "offload": "var(--u4,#9576cf)",
    "fetch": "var(--u2,#cf6250)",
    "evict": "var(--u1,#e0923c)",
}


class RowFrame(NamedTuple):
    """Where rows are drawn: from ``left`` on, ``width`` wide, the first at ``top``, each ``high`` with a ``gap``."""

    left: float
    top: float
    width: float
    high: float
    gap: float

    @staticmethod
    def of(ranks: int, left: float, top: float, width: float) -> RowFrame:
        """Rows that together are not too high."""
        high = max(6.0, min(26.0, 460 / ranks))
        return RowFrame(left, top, width, high, 4.0 if high > 12 else 1.5)

    def y(self, rank: int) -> float:
        """The upper edge of a row."""
        return self.top + rank * (self.high + self.gap)


class Rows(NamedTuple):
    """Every row's events, drawn; ``is_divided``: heights are shares of the time."""

    parts: list[str]
    is_divided: bool


def rows(found: StepEvents, frame: RowFrame, *, has_words: bool) -> Rows:
    """Events as boxes, shapes or areas, by how many there are; ``has_words``: boxes say what they are."""
    actions, scale = sum(event.kind != "wait" for event in found.events), frame.width / (found.end_s or 1.0)
    if has_words and actions <= BOXES:
        events = enumerate(by_rank(found))
        return Rows([p for rank, row in events for p in _boxes(found, row, frame.y(rank), frame, scale)], False)
    if actions <= SHAPES and actions * LEAST <= found.ranks * frame.width:
        return Rows([*_shapes(found, frame, scale)], False)
    return Rows([*_divided(found, frame)], True)


def _boxes(found: StepEvents, events: Iterable[Event], y: float, frame: RowFrame, scale: float) -> Iterator[str]:
    """Each event as a box with its micro-batch on it, where there is room."""
    for event in events:
        if event.kind == "wait":
            continue
        x, wide = frame.left + event.start_s * scale, (event.end_s - event.start_s) * scale
        yield (
            f'<rect class="{class_of(look_of(found, event))}" x="{short(x)}" y="{short(y)}" '
            f'width="{short(max(wide - 0.8, 0.4))}" height="{short(frame.high)}" rx="{2 if wide > 6 else 0}">'
            f"<title>{escape(_told(found, event))}</title></rect>"
        )
        number = "" if event.action is None else str(event.action.micro_batch)
        if number and frame.high >= 11 and wide >= 6 * len(number) + 4:
            middle = short(x + wide / 2), short(y + frame.high / 2 + 3.5)
            yield f'<text class="number" x="{middle[0]}" y="{middle[1]}">{number}</text>'


def _told(found: StepEvents, event: Event) -> str:
    """What is shown under the pointer."""
    lasts = f"{in_seconds(event.end_s - event.start_s)} from {in_seconds(event.start_s)}"
    if event.what:
        return f"{event.name}: {lasts}"
    if event.action is None:
        return f"{KINDS[event.kind]}, {found.row_name(event.rank)}: {lasts}"
    stage, _, micro_batch = event.action
    return f"{event.name}: {KINDS[event.kind]}, stage {stage}, micro-batch {micro_batch}; {lasts}"


def _shapes(found: StepEvents, frame: RowFrame, scale: float) -> Iterator[str]:
    """All that looks alike as one path, a little apart from the next where it is wide enough."""
    paths: dict[Look, list[str]] = defaultdict(list)
    for event in found.events:
        wide = (event.end_s - event.start_s) * scale
        if event.kind != "wait":
            shown = short(wide - 0.4 if wide > 2 else wide)
            start = f"M{short(frame.left + event.start_s * scale)} {short(frame.y(event.rank))}"
            paths[look_of(found, event)].append(f"{start}h{shown}v{short(frame.high)}h-{shown}z")
    return (f'<path class="{class_of(each)}" d="{"".join(path)}"/>' for each, path in paths.items())


def _divided(found: StepEvents, frame: RowFrame) -> Iterator[str]:
    """Each rank's row as areas that lie on each other, as high as their shares of each stretch."""
    kinds = [kind for kind in COLOURS if any(event.kind == kind for event in found.events)]
    count = min(int(frame.width) // 2, max(40, CORNERS // (found.ranks * len(kinds))))
    wide, left, right = frame.width / count, short(frame.left), short(frame.left + frame.width)
    for rank, row in enumerate(shares(found, count)):
        bottom = frame.y(rank) + frame.high
        tops = np.cumsum([row.get(kind, np.zeros(count)) for kind in kinds], axis=0)
        for kind, top in reversed([*zip(kinds, tops, strict=True)]):
            ys = [short(bottom - frame.high * float(share)) for share in np.minimum(top, 1)]
            steps = [place for place in range(count) if not place or ys[place] != ys[place - 1]]
            path = "".join(f"H{short(frame.left + place * wide)}V{ys[place]}" for place in steps)
            yield f'<path class="{kind}" d="M{left} {short(bottom)}{path}H{right}V{short(bottom)}z"/>'


def legend(found: StepEvents) -> list[tuple[str, str]]:
    """The kinds that occur, and what they are; none where a rank may be idle."""
    kinds = {event.kind for event in found.events}
    names = [(kind, name) for kind, name in KINDS.items() if kind in kinds and kind != "wait"]
    return [*names, ("", "idle")] if found.schedule else names


def ticks(end_s: float, count: int) -> tuple[float, float, str]:
    """About so many round times up to an end: seconds from one to the next, seconds of their unit, and its name."""
    rough = end_s / count
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(round_ for round_ in (1, 2, 5, 10) if round_ * power >= rough)
    unit, name = next(((u, n) for u, n in ((1.0, "s"), (1e-3, "ms")) if end_s >= 2 * u), (1e-6, "us"))
    return step, unit, name


def colours(found: StepEvents) -> Iterator[str]:
    """The style of every look; later stages of a rank are lighter."""
    for kind, stage in sorted({look_of(found, event) for event in found.events if event.kind != "wait"}):
        light = 1 - 0.45 * stage / max(1, found.virtual_stages - 1)
        shade = f";fill-opacity:{short(light, 2)}" if stage else ""
        yield f".autopar-steps .{class_of((kind, stage))}{{fill:{COLOURS[kind]}{shade}}}"


def look_of(found: StepEvents, event: Event) -> Look:
    """How an event looks."""
    return event.kind, 0 if event.action is None else event.action.stage // found.ranks


def class_of(each: Look) -> str:
    """The class of a look in style sheets."""
    return f"{each[0]}{each[1] or ''}"


def short(number: float, digits: int = 1) -> str:
    """A number without what nobody sees."""
    return f"{number:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{number:.0f}"
