"""A timeline as an SVG picture that needs nothing else: title, a row per rank, time, legend."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from planner.plan.timeline.shapes import RowFrame, class_of, colours, legend, rows, short, ticks
from planner.plan.timeline.step import StepEvents

WIDTH, LEFT, RIGHT, TOP = 1160, 62, 10, 34
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
    frame = RowFrame.of(found.ranks, LEFT, TOP, WIDTH - LEFT - RIGHT)
    high = frame.high
    bottom = frame.y(found.ranks)
    height = bottom + 50 + 18 * bool(found.fullest)
    scale = frame.width / (found.end_s or 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="autopar-steps" viewBox="0 0 {WIDTH} {short(height)}" '
        f'role="img" aria-label="{escape(found.title)}"><style>{STYLE}{"".join(colours(found))}</style>'
    ]
    every = math.ceil(13 / (high + frame.gap))
    for rank in range(found.ranks):
        y = frame.y(rank)
        parts.append(
            f'<rect class="idle" x="{LEFT}" y="{short(y)}" width="{WIDTH - LEFT - RIGHT}" height="{short(high)}"/>'
        )
        if rank % every == 0:
            parts.append(
                f'<text class="label" x="{LEFT - 8}" y="{short(y + high / 2 + 4)}">{found.row_name(rank)}</text>'
            )
    parts += _time(found, bottom, scale)
    drawn, divided = rows(found, frame, has_words=True), ""
    parts += drawn.parts
    if drawn.is_divided:
        divided = "; heights are shares of the time"
    title = found.title[:1].upper() + found.title[1:] + divided
    parts.append(f'<text class="title" x="0" y="16">{escape(title)}</text>')
    if found.fullest:
        parts.append(f'<text x="0" y="{short(height - 4)}">Memory {escape(found.fullest)}</text>')
    parts += _legend(found, bottom + 40)
    return "".join(parts) + "</svg>"


def _time(found: StepEvents, y: float, scale: float) -> Iterator[str]:
    """Lines at round times."""
    if not found.end_s:
        return
    step, unit, name = ticks(found.end_s, 8)
    for number in range(int(found.end_s / step * (1 + 1e-9)) + 1):
        x = short(LEFT + number * step * scale)
        label = f"{number * step / unit:.6g}"
        yield f'<path class="grid" d="M{x} {TOP - 4}V{short(y + 2)}"/>'
        yield f'<text class="tick" x="{x}" y="{short(y + 14)}">{label}{f" {name}" if not number else ""}</text>'


def _legend(found: StepEvents, y: float) -> Iterator[str]:
    x = float(LEFT)
    for kind, name in legend(found):
        box = f'class="{class_of((kind, 0))}"' if kind else 'class="idle"'
        yield f'<rect {box} x="{short(x)}" y="{short(y - 9)}" width="11" height="11" rx="2.5"/>'
        yield f'<text x="{short(x + 17)}" y="{short(y)}">{name}</text>'
        x += 17 + 6.4 * len(name) + 20
    if found.virtual_stages > 1:
        yield f'<text x="{short(x)}" y="{short(y)}">lighter: later stages of the same rank</text>'
