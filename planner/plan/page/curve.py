"""Step time against memory per device as a curve whose points can be chosen: the plan of each, and what it takes.

It needs no script: each point is a radio button, so that arrow keys go from one to the next, and a style sheet shows
what belongs to the chosen one; with script there is a slider, too. What is drawn is stretched to the width there is;
what is written is not.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from planner.base.formatting import in_bytes, in_percent, in_seconds
from planner.plan.document.document import Document
from planner.plan.document.encoding import dump, encode
from planner.plan.document.pareto_point import memory_unit
from planner.plan.page.figures import memory_card, step_card
from planner.plan.page.page import page as page_of
from planner.plan.page.page import styled
from planner.plan.report.pareto import Points, counted, decisions, price
from planner.plan.report.sentence import sentence

EMBEDDED_BYTES = 2**18
"""A plan of a larger file is not part of the page."""
MARGIN = 0.06
"""Part of the picture that is left free on each side."""
TICKS = 5
"""About so many marks on an axis."""


def page(document: Document, points: Points, stopped: str) -> str:
    """The plan's page with the curve, and plans as files to download."""
    return page_of(document, _card(document, points, stopped, is_page=True))


def fragment(document: Document, points: Points, stopped: str) -> str:
    """The curve by itself, to put into a page."""
    return styled(_card(document, points, stopped, is_page=False))


def _card(document: Document, points: Points, stopped: str, *, is_page: bool) -> str:
    """The curve, and what its points do, one of which is shown."""
    facts = [dict(document.model), *((point.memory_bytes, point.step_s) for point in points)]
    name = f"p{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"
    picked = next((number for number, point in enumerate(points) if point.plan is document), len(points) - 1)
    inputs = (
        f'<input class="pick" type="radio" name="{name}" id="{name}-{number}"{" checked" * (number == picked)} '
        f'aria-label="{in_seconds(point.step_s)} a step within {in_bytes(point.memory_bytes)}">'
        for number, point in enumerate(points)
    )
    panels = (f"<div>{_panel(points, number, is_page=is_page)}</div>" for number in range(len(points)))
    key = (
        f"{counted(points)}, each the fastest found within its memory: choose one, with the arrow keys too. The "
        f"shaded band is what is not proved: no plan is below it; "
        f"a dashed line is all that a device can use. {stopped[0].upper()}{stopped[1:]}."
    )
    return (
        f'<div class="card curve" role="radiogroup" aria-label="Step time against memory per device">'
        f"<style>{''.join(_rules(name, len(points)))}</style><h2>Step time against memory per device</h2>"
        f'<p class="key">{escape(key)}</p>{"".join(inputs)}{_slider(points, picked)}'
        f"{_drawing(document, points, name)}"
        f'<div class="panels">{"".join(panels)}</div></div>'
    )


def _slider(points: Points, picked: int) -> str:
    """A slider over the points, from the leanest on, which waits for the script."""
    low, high = in_bytes(points[0].memory_bytes), in_bytes(points[-1].memory_bytes)
    return (
        f'<label class="slider" hidden><span>{low}</span><input class="slide" type="range" min="0" '
        f'max="{len(points) - 1}" value="{picked}" aria-label="Memory per device"><span>{high}</span></label>'
    )


def _rules(name: str, count: int) -> Iterator[str]:
    """What the choice of each point shows."""
    for number in range(count):
        own = f"#{name}-{number}"
        yield f".autopar {own}:checked~.panels>:nth-child({number + 1}){{display:block}}"
        yield f'.autopar {own}:checked~.plot label[for="{name}-{number}"]{{--dot:9px;--fill:var(--a1);z-index:2}}'
        yield f'.autopar {own}:focus-visible~.plot label[for="{name}-{number}"]{{--ring:2px}}'


def _panel(points: Points, number: int, *, is_page: bool) -> str:
    """What the plan of a point does and takes, and how to have it."""
    point = points[number]
    document, costs = point.plan, price(points, point)
    told = f"No plan within {in_bytes(point.memory_bytes)} takes less than {in_seconds(point.bound_s)}"
    told += f", {in_percent(point.gap)} less." if point.gap > 0 else "."
    if costs:
        told += f" Each {memory_unit(points[-1].memory_bytes)[0]} less costs {costs} a step at least."
    return (
        f'<p class="sentence">{escape(sentence(document))}</p>'
        f'<p class="soft">{escape(decisions(document))}. {escape(told)}</p>'
        f'<div class="two">{step_card(document)}{memory_card(document)}</div>'
        f"{_saved(document, number, is_page=is_page)}"
    )


def _saved(document: Document, number: int, *, is_page: bool) -> str:
    """A link to the plan's file, or how to write it."""
    call = f'<code>curve.points[{number}].plan.save("plan.json")</code>'
    if not is_page:
        return f'<p class="key">{call} saves this plan</p>'
    text = dump(encode(document)).encode()
    if len(text) > EMBEDDED_BYTES:
        return (
            f'<p class="key">This plan is a file of {in_bytes(len(text))}: {call} saves it, or '
            f"<code>autopar plan ... --pareto FOLDER</code> the plans of all points.</p>"
        )
    data = base64.b64encode(text).decode()
    return (
        f'<p><a class="get" download="plan_{number}.json" href="data:application/json;base64,{data}">'
        f"Download this plan ({in_bytes(len(text))})</a></p>"
    )


# ---- the picture -----------------------------------------------------------------------------------------------------


class _Scale(NamedTuple):
    """From values to parts of the picture, in percent from its left and top."""

    left: float
    right: float
    low: float
    high: float

    def x(self, memory_bytes: float) -> float:
        return 100 * (memory_bytes - self.left) / (self.right - self.left)

    def y(self, seconds: float) -> float:
        return 100 * (self.high - seconds) / (self.high - self.low)


def _drawing(document: Document, points: Points, name: str) -> str:
    """Axes, the staircase of what was found above what is proved, and a label for each point."""
    scale = _scale(document, points)
    spots = [(scale.x(point.memory_bytes), scale.y(point.step_s), scale.y(point.bound_s)) for point in points]
    usable = scale.x(document.cluster.device.usable_bytes)
    ends = [*(x for x, _, _ in spots[1:]), min(100.0, usable)]
    lows = [*(low for _, _, low in spots[1:]), spots[-1][2]]
    found = f"M{spots[0][0]:.2f} 0" + "".join(f"V{y:.2f}H{end:.2f}" for (_, y, _), end in zip(spots, ends, strict=True))
    band = "".join(
        f"M{x:.2f} {y:.2f}H{end:.2f}V{low:.2f}H{x:.2f}Z" for (x, y, _), end, low in zip(spots, ends, lows, strict=True)
    )
    limit = f'<path class="limit" d="M{usable:.2f} 0V100"/>' if usable <= 100.0 else ""
    seconds, sizes = _marks(scale.low, scale.high), _marks(scale.left, scale.right, binary=True)
    grid = "".join(f"M0 {scale.y(mark):.2f}H100" for mark in seconds)
    rows = (f'<span class="row" style="top:{scale.y(mark):.2f}%">{in_seconds(mark)}</span>' for mark in seconds)
    columns = (
        f'<span class="column{" odd" * (at % 2)}" style="left:{scale.x(mark):.2f}%">{in_bytes(mark)}</span>'
        for at, mark in enumerate(sizes)
    )
    labels = (
        f'<label for="{name}-{number}" style="left:{x:.2f}%;top:{y:.2f}%" title="{in_seconds(point.step_s)} within '
        f'{in_bytes(point.memory_bytes)}: {escape(decisions(point.plan))}"></label>'
        for number, ((x, y, _), point) in enumerate(zip(spots, points, strict=True))
    )
    return (
        f'<div class="plot"><svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="grid" d="{grid}"/><path class="open" d="{band}"/>{limit}<path class="found" d="{found}"/></svg>'
        f"{''.join(rows)}{''.join(columns)}{''.join(labels)}</div>"
    )


def _scale(document: Document, points: Points) -> _Scale:
    """All points and bounds with some room around; what a device can use too, where that is not far to the right."""
    least, most = points[0].memory_bytes, points[-1].memory_bytes
    usable = document.cluster.device.usable_bytes
    most = max(most, usable) if usable < 2 * most else most
    wide = (most - least) or most
    low, high = min(point.bound_s for point in points), points[0].step_s
    tall = (high - low) or high
    return _Scale(
        max(0.0, least - MARGIN * wide), most + MARGIN * wide, max(0.0, low - MARGIN * tall), high + MARGIN * tall
    )


def _marks(low: float, high: float, *, binary: bool = False) -> list[float]:
    """Round numbers between two: 1, 2 or 5 of a power of ten, or powers of two of bytes."""
    step = (high - low) / TICKS
    if binary:
        step = 2.0 ** math.ceil(math.log2(step))
    else:
        power = 10.0 ** math.floor(math.log10(step))
        step = next(each * power for each in (1, 2, 5, 10) if each * power >= step)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]
