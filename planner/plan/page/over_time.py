"""The step over time: what ranks do, below it what one of them holds, and a cursor over both.

What is drawn is stretched to the width that there is; what is written is not. Without script the fullest moment is
told; with it that under the cursor, which the pointer moves, and the arrow keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from planner.analysis.memory.storages import PeakReport
from planner.base.errors import PlanError, ScheduleError
from planner.base.formatting import MEMORY_USES, in_bytes, in_percent, in_seconds
from planner.plan.document.document import Document
from planner.plan.page.parts import card, table
from planner.plan.timeline import StepTimeline
from planner.plan.timeline.rank_memory import RankMemory, Stretch
from planner.plan.timeline.shapes import COLOURS, RowFrame, colours, rows, short, ticks
from planner.plan.timeline.shapes import legend as kinds_of

WIDE, HIGH = 1000.0, 100.0
"""Units of a stretched drawing, and of the height of memory."""
LABELLED = 14
"""So many pixels does the label of a row need."""
NAMED = 6
"""So many of the largest tensors are named."""
CURSOR = (
    '<div class="line" hidden></div><input class="cursor" type="range" min="0" max="1000" step="1" value="0" '
    'aria-label="Cursor over the step: arrow keys move it" hidden>'
)
"""The cursor's line, and the control that keys move; both wait for the script."""


def over_time_card(document: Document) -> str:
    """Timeline and memory; or why they are not known."""
    try:
        memory = document.memory_over_step
    except (PlanError, ScheduleError) as error:
        return timeline_card(
            document, f'{_at_peak(document)}<p class="key">memory over the step: {escape(str(error))}</p>'
        )
    shown = max(range(len(memory)), key=lambda at: memory[at].fullest.peak.bytes)
    uses = [*document.predicted.memory_bytes]
    return timeline_card(document, _alive(memory, shown, uses), _memories(document, memory, shown) + CURSOR)


def timeline_card(document: Document, below: str | None = None, within: str = "") -> str:
    """The timeline; or why there is none.

    Args:
        below: HTML below it; left out: what is alive at the peak.
        within: HTML on the same axis of time.
    """
    try:
        timeline = document.timeline()
    except (PlanError, ScheduleError) as error:
        return card("Step over time", f"<p>{escape(str(error))}</p>{_at_peak(document)}")
    drawn, is_divided = _timeline(timeline)
    told = _at_peak(document) if below is None else below
    title = timeline.title[:1].upper() + timeline.title[1:] + ("; heights are shares of the time" * is_divided)
    body = (
        f'<p class="sentence">{escape(title)}</p>{_kinds(timeline)}'
        f'<div class="over-time">{drawn}{_ticks(timeline)}{within}</div>{told}'
    )
    return card("Step over time", body, "steps")


# ---- what ranks do ---------------------------------------------------------------------------------------------------


def _timeline(timeline: StepTimeline) -> tuple[str, bool]:
    """Rows of ranks, with labels beside them as far as there is room."""
    frame = RowFrame.of(timeline.ranks, 0.0, 0.0, WIDE)
    height = frame.y(timeline.ranks)
    drawn, is_divided = rows(timeline, frame, has_words=False)
    every = math.ceil(LABELLED / (frame.high + frame.gap))
    labels = (
        f'<span class="row" style="top:{short(frame.y(rank) + frame.high / 2)}px">{timeline.row_name(rank)}</span>'
        for rank in range(0, timeline.ranks, every)
    )
    idle = "".join(
        f'<rect class="idle" y="{short(frame.y(rank))}" width="{WIDE:.0f}" height="{short(frame.high)}"/>'
        for rank in range(timeline.ranks)
    )
    return (
        f'<div class="track" style="height:{short(height)}px">{"".join(labels)}<svg class="autopar-steps" '
        f'viewBox="0 0 {WIDE:.0f} {short(height)}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(timeline.title)}"><style>{"".join(colours(timeline))}</style>{idle}{"".join(drawn)}</svg>'
        "</div>",
        is_divided,
    )


def _kinds(timeline: StepTimeline) -> str:
    """What the colours of the timeline are."""
    parts = [
        f'<span><i style="background:{COLOURS.get(kind, "var(--well)")}"></i>{name}</span>'
        for kind, name in kinds_of(timeline)
    ]
    parts += ["<span>lighter: later stages of the same rank</span>"] * (timeline.virtual_stages > 1)
    return f'<div class="legend">{"".join(parts)}</div>'


def _ticks(timeline: StepTimeline) -> str:
    """Round times below what ranks do."""
    if not timeline.end_s:
        return ""
    step, unit, name = ticks(timeline.end_s, 8)
    marks = (
        f'<span class="{"odd" if number % 2 else ""}" style="left:{100 * number * step / timeline.end_s:.2f}%">'
        f"{number * step / unit:.6g}{f' {name}' if not number else ''}</span>"
        for number in range(int(timeline.end_s / step * (1 + 1e-9)) + 1)
    )
    return f'<div class="ticks">{"".join(marks)}</div>'


# ---- what they hold --------------------------------------------------------------------------------------------------


def _memories(document: Document, memory: Sequence[RankMemory], shown: int) -> str:
    """A drawing for each rank, one of which is shown; all on one scale."""
    most = max(stretch.peak.bytes for each in memory for stretch in each.stretches)
    usable, uses = document.cluster.device.usable_bytes, [*document.predicted.memory_bytes]
    top = 1.06 * (max(most, usable) if most > usable / 3 else most) or 1.0
    limit = f'<path class="limit" d="M0 {short(HIGH * (1 - usable / top))}H{WIDE:.0f}"/>' if usable < top else ""
    marks = [size for size in (0, usable) if size < top]
    marks += [most] * all(abs(most - mark) > 0.12 * top for mark in marks)
    labels = "".join(
        f'<span class="row" style="top:{short(100 - 100 * size / top)}%">{in_bytes(size)}</span>' for size in marks
    )
    return "".join(
        f'<div class="track memory" data-rank="{at}"{" hidden" * (at != shown)}>{labels}'
        f'<svg viewBox="0 0 {WIDE:.0f} {HIGH:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="memory of {escape(each.title)}">{"".join(_areas(each, uses, top))}{limit}</svg></div>'
        for at, each in enumerate(memory)
    )


def _areas(memory: RankMemory, uses: Sequence[str], top: float) -> Iterator[str]:
    """Areas on each other, one for each use; the last is drawn first."""
    end_s = memory.stretches[-1].end_s or 1.0
    sums = [0.0] * len(memory.stretches)
    found = []
    by_use = [stretch.peak.by_use() for stretch in memory.stretches]
    for number, use in enumerate(uses):
        sizes = [each.get(use, 0) for each in by_use]
        if not any(sizes):
            continue
        sums = [before + size for before, size in zip(sums, sizes, strict=True)]
        path, known = "", ""
        for stretch, size in zip(memory.stretches, sums, strict=True):
            y = short(HIGH * (1 - size / top))
            if y != known:
                path, known = f"{path}H{short(WIDE * stretch.start_s / end_s)}V{y}", y
        found.append(f'<path class="m{number}" d="M0 {HIGH:.0f}{path}H{WIDE:.0f}V{HIGH:.0f}z"/>')
    yield from reversed(found)


# ---- what is alive at the cursor -------------------------------------------------------------------------------------


def _alive(memory: Sequence[RankMemory], shown: int, uses: Sequence[str]) -> str:
    """The stretch under the cursor, to begin with the fullest one; and all others, for the script."""
    options = "".join(
        f'<option value="{at}"{" selected" * (at == shown)}>{escape(each.title)}</option>'
        for at, each in enumerate(memory)
    )
    choice = f'<label class="choose" hidden>memory of <select>{options}</select></label>' if len(memory) > 1 else ""
    each = memory[shown]
    stretch = each.fullest
    data = json.dumps(_encoded(memory, shown, uses), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'{choice}<div class="alive" aria-live="polite"><p class="when">{_when(each, stretch)}</p>'
        f'<p class="key at">{_fullest(stretch)}</p>'
        f'<div class="uses">{_uses(memory, stretch.peak, uses)}</div>{_largest(stretch.peak)}</div>'
        f'<script type="application/json" class="data">{data}</script>'
    )


def _at_peak(document: Document) -> str:
    """The largest tensors when memory is fullest, where that moment alone is known."""
    named = [(escape(name), (in_bytes(size), "n")) for name, size in document.predicted.largest]
    return table(("alive when memory is fullest", ("bytes", "n")), named) if named else ""


def _when(memory: RankMemory, stretch: Stretch) -> str:
    return (
        f"<b>{in_bytes(stretch.peak.bytes)}</b> at {in_seconds(stretch.start_s)} on {escape(memory.title)}: "
        f"{escape(stretch.what)}"
    )


def _fullest(stretch: Stretch) -> str:
    return f"fullest in {escape(stretch.peak.at)}"


def _uses(memory: Sequence[RankMemory], peak: PeakReport, names: Sequence[str]) -> str:
    """A bar and its legend, in which what occurs at other moments alone is hidden."""
    occur = {
        use for each in memory for stretch in each.stretches for use, size in stretch.peak.by_use().items() if size
    }
    sizes, total = peak.by_use(), peak.bytes or 1
    uses = [(at, use, sizes.get(use, 0)) for at, use in enumerate(names) if use in occur]
    bars = (
        f'<i class="u{at}" data-use="{at}" style="width:{100 * size / total:.2f}%"{" hidden" * (not size)}></i>'
        for at, use, size in uses
    )
    told = (
        f'<span data-use="{at}" title="{escape(MEMORY_USES.get(use, ""))}"{" hidden" * (not size)}>'
        f'<i class="u{at}"></i>{escape(use)} <b>{in_bytes(size)}</b> '
        f'<span class="share">{in_percent(size / total)}</span></span>'
        for at, use, size in uses
    )
    return f'<div class="bar">{"".join(bars)}</div><div class="legend">{"".join(told)}</div>'


def _largest(peak: PeakReport) -> str:
    named = [(escape(name), (in_bytes(size), "n")) for name, size in _named(peak)]
    return table(("alive then, largest first", ("bytes", "n")), named)


def _named(peak: PeakReport) -> list[tuple[str, int]]:
    """The largest tensors and their bytes."""
    return [(held.title, held.all_bytes) for held in peak.alive[:NAMED] if held.bytes]


def _encoded(memory: Sequence[RankMemory], shown: int, uses: Sequence[str]) -> dict[str, Any]:
    """All stretches: texts, and what is alive, once each, and per rank the stretches as numbers of these."""
    words, states = _Numbered(), _Numbered()
    ranks = []
    for each in memory:
        at = []
        for stretch in each.stretches:
            largest = [[words.of(name), size] for name, size in _named(stretch.peak)]
            sizes = stretch.peak.by_use()
            state = states.of([[sizes.get(use, 0) for use in uses], largest])
            at.append([float(f"{stretch.start_s:.6g}"), words.of(stretch.what), words.of(stretch.peak.at), state])
        ranks.append({"title": each.title, "fullest": each.stretches.index(each.fullest), "at": at})
    end_s = memory[0].stretches[-1].end_s or 1.0
    return {"end": end_s, "shown": shown, "ranks": ranks, "words": words.values, "states": states.values}


class _Numbered:
    """Values by number, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._known: dict[str, int] = {}

    def of(self, value: Any) -> int:
        """The number of a value."""
        key = json.dumps(value)
        if key not in self._known:
            self._known[key] = len(self.values)
            self.values.append(value)
        return self._known[key]
