"""A timeline as an SVG picture that needs nothing else.

Few actions are boxes of their own with their micro-batches on them, and say more under the pointer; of more, those that
look alike are one path; and where they are too narrow to be told apart, each stretch of a row is divided, from below,
among what is done in it. So the picture stays small. Colours are those of the report where it stands in one, and
otherwise legible on light and dark.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from html import escape

import numpy as np

from planner.base.formatting import in_seconds
from planner.plan.timeline.shares import by_rank, shares
from planner.plan.timeline.step import KINDS, Event, StepEvents

WIDTH, LEFT, RIGHT, TOP = 1160, 62, 10, 34
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
}
STYLE = (
    ".autopar-steps{width:100%;max-width:1160px;height:auto;display:block}"
    ".autopar-steps text{fill:var(--soft,#7b8698);font:11px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
    ".autopar-steps .title{fill:var(--ink,#6d798c);font-size:13px;font-weight:600}"
    ".autopar-steps .number{fill:#fff;font-size:10px;font-weight:600;text-anchor:middle;pointer-events:none}"
    ".autopar-steps .label{text-anchor:end}.autopar-steps .tick{text-anchor:middle}"
    ".autopar-steps .idle{fill:var(--well,#8a94a626)}.autopar-steps .grid{stroke:var(--line,#8a94a640)}"
    ".autopar-steps rect:hover{filter:brightness(1.12)}"
)
"""A page that the picture stands in takes the style sheet over, so that it only speaks of what is in the picture."""


def svg(found: StepEvents) -> str:
    """The picture: title, a row per rank, time, legend."""
    high = max(6.0, min(26.0, 460 / found.ranks))
    gap = 4.0 if high > 12 else 1.5
    bottom = TOP + found.ranks * (high + gap)
    height = bottom + 50 + 18 * bool(found.fullest)
    scale = (WIDTH - LEFT - RIGHT) / (found.end_s or 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="autopar-steps" viewBox="0 0 {WIDTH} {_short(height)}" '
        f'role="img" aria-label="{escape(found.title)}"><style>{STYLE}{"".join(_colours(found))}</style>'
    ]
    every = math.ceil(13 / (high + gap))
    for rank in range(found.ranks):
        y = TOP + rank * (high + gap)
        parts.append(
            f'<rect class="idle" x="{LEFT}" y="{_short(y)}" width="{WIDTH - LEFT - RIGHT}" height="{_short(high)}"/>'
        )
        if rank % every == 0:
            parts.append(f'<text class="label" x="{LEFT - 8}" y="{_short(y + high / 2 + 4)}">rank {rank}</text>')
    parts += _time(found, bottom, scale)
    actions, divided = sum(event.kind != "wait" for event in found.events), ""
    if actions <= BOXES:
        for rank, events in enumerate(by_rank(found)):
            parts += _boxes(found, events, TOP + rank * (high + gap), high, scale)
    elif actions <= SHAPES and actions * LEAST <= found.ranks * (WIDTH - LEFT - RIGHT):
        parts += _shapes(found, high, gap, scale)
    else:
        parts += _divided(found, high, gap)
        divided = "; heights are shares of the time"
    title = found.title[:1].upper() + found.title[1:] + divided
    parts.append(f'<text class="title" x="0" y="16">{escape(title)}</text>')
    if found.fullest:
        parts.append(f'<text x="0" y="{_short(height - 4)}">Memory {escape(found.fullest)}</text>')
    parts += _legend(found, bottom + 40)
    return "".join(parts) + "</svg>"


def _boxes(found: StepEvents, events: Iterable[Event], y: float, high: float, scale: float) -> Iterator[str]:
    """Each event as a box with its micro-batch on it, where there is room."""
    for event in events:
        if event.kind == "wait":
            continue
        x, wide = LEFT + event.start_s * scale, (event.end_s - event.start_s) * scale
        yield (
            f'<rect class="{_class(_look(found, event))}" x="{_short(x)}" y="{_short(y)}" '
            f'width="{_short(max(wide - 0.8, 0.4))}" height="{_short(high)}" rx="{2 if wide > 6 else 0}">'
            f"<title>{escape(_told(event))}</title></rect>"
        )
        number = "" if event.action is None else str(event.action.micro_batch)
        if number and high >= 11 and wide >= 6 * len(number) + 4:
            yield f'<text class="number" x="{_short(x + wide / 2)}" y="{_short(y + high / 2 + 3.5)}">{number}</text>'


def _look(found: StepEvents, event: Event) -> Look:
    return event.kind, 0 if event.action is None else event.action.stage // found.ranks


def _told(event: Event) -> str:
    """What is shown under the pointer."""
    lasts = f"{in_seconds(event.end_s - event.start_s)} from {in_seconds(event.start_s)}"
    if event.action is None:
        return f"{KINDS[event.kind]}, rank {event.rank}: {lasts}"
    stage, _, micro_batch = event.action
    return f"{event.name}: {KINDS[event.kind]}, stage {stage}, micro-batch {micro_batch}; {lasts}"


def _shapes(found: StepEvents, high: float, gap: float, scale: float) -> Iterator[str]:
    """All that looks alike as one path, a little apart from the next where it is wide enough."""
    paths: dict[Look, list[str]] = defaultdict(list)
    for event in found.events:
        wide = (event.end_s - event.start_s) * scale
        if event.kind != "wait":
            shown = _short(wide - 0.4 if wide > 2 else wide)
            start = f"M{_short(LEFT + event.start_s * scale)} {_short(TOP + event.rank * (high + gap))}"
            paths[_look(found, event)].append(f"{start}h{shown}v{_short(high)}h-{shown}z")
    return (f'<path class="{_class(each)}" d="{"".join(path)}"/>' for each, path in paths.items())


def _divided(found: StepEvents, high: float, gap: float) -> Iterator[str]:
    """Each rank's row as areas that lie on each other, as high as their shares of each stretch."""
    kinds = [kind for kind in COLOURS if any(event.kind == kind for event in found.events)]
    count = min((WIDTH - LEFT - RIGHT) // 2, max(40, CORNERS // (found.ranks * len(kinds))))
    wide = (WIDTH - LEFT - RIGHT) / count
    for rank, row in enumerate(shares(found, count)):
        bottom = TOP + rank * (high + gap) + high
        tops = np.cumsum([row.get(kind, np.zeros(count)) for kind in kinds], axis=0)
        for kind, top in reversed([*zip(kinds, tops, strict=True)]):
            ys = [_short(bottom - high * float(share)) for share in np.minimum(top, 1)]
            steps = [place for place in range(count) if not place or ys[place] != ys[place - 1]]
            path = "".join(f"H{_short(LEFT + place * wide)}V{ys[place]}" for place in steps)
            yield f'<path class="{kind}" d="M{LEFT} {_short(bottom)}{path}H{WIDTH - RIGHT}V{_short(bottom)}z"/>'


def _time(found: StepEvents, y: float, scale: float) -> Iterator[str]:
    """Lines at round times."""
    if not found.end_s:
        return
    rough = found.end_s / 8
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(round_ for round_ in (1, 2, 5, 10) if round_ * power >= rough)
    unit, name = next((u, n) for u, n in ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "us")) if found.end_s >= 2 * u)
    for number in range(int(found.end_s / step * (1 + 1e-9)) + 1):
        x = _short(LEFT + number * step * scale)
        label = f"{number * step / (unit or 1e-6):.6g}"
        yield f'<path class="grid" d="M{x} {TOP - 4}V{_short(y + 2)}"/>'
        yield f'<text class="tick" x="{x}" y="{_short(y + 14)}">{label}{f" {name}" if not number else ""}</text>'


def _legend(found: StepEvents, y: float) -> Iterator[str]:
    x = float(LEFT)
    kinds = {event.kind for event in found.events}
    names = {kind: name for kind, name in KINDS.items() if kind in kinds and kind != "wait"}
    for kind, name in [*names.items(), ("", "idle")]:
        box = f'class="{_class((kind, 0))}"' if kind else 'class="idle"'
        yield f'<rect {box} x="{_short(x)}" y="{_short(y - 9)}" width="11" height="11" rx="2.5"/>'
        yield f'<text x="{_short(x + 17)}" y="{_short(y)}">{name}</text>'
        x += 17 + 6.4 * len(name) + 20
    if found.virtual_stages > 1:
        yield f'<text x="{_short(x)}" y="{_short(y)}">lighter: later stages of the same rank</text>'


def _colours(found: StepEvents) -> Iterator[str]:
    """The style of every look; later stages of a rank are lighter."""
    for kind, stage in sorted({_look(found, event) for event in found.events if event.kind != "wait"}):
        light = 1 - 0.45 * stage / max(1, found.virtual_stages - 1)
        shade = f";fill-opacity:{_short(light, 2)}" if stage else ""
        yield f".autopar-steps .{_class((kind, stage))}{{fill:{COLOURS[kind]}{shade}}}"


def _class(each: Look) -> str:
    return f"{each[0]}{each[1] or ''}"


def _short(number: float, digits: int = 1) -> str:
    """Without what nobody sees."""
    return f"{number:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{number:.0f}"
