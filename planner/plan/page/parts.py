"""What cards are made of: tables, bars and their legends, pills, layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from planner.base.formatting import in_bytes, in_percent
from planner.formulation.resharding import Collective
from planner.plan.report.summary import traffic

Cell = str | tuple[str, str]
"""HTML, or HTML and a class."""
FOLDED = 12
"""Rows of a table beyond so many are folded away."""


def card(title: str, body: str, kind: str = "") -> str:
    """A part of the page with a title."""
    return f'<section class="card {kind}"><h2>{escape(title)}</h2>{body}</section>'


def table(header: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """A table that scrolls by itself where it is too wide."""

    def cell(tag: str, content: Cell) -> str:
        html, kind = content if isinstance(content, tuple) else (content, "")
        return f'<{tag} class="{kind}">{html}</{tag}>' if kind else f"<{tag}>{html}</{tag}>"

    head = "".join(cell("th", content) for content in header)
    body = "".join(f"<tr>{''.join(cell('td', content) for content in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded_table(header: Sequence[Cell], rows: Sequence[Sequence[Cell]], what: str) -> str:
    """A table whose first rows are shown; all of them below, folded away."""
    shown = table(header, rows[:FOLDED])
    return shown if len(rows) <= FOLDED else shown + folded(f"all {len(rows):,} {what}", table(header, rows))


def folded(summary: str, body: str) -> str:
    """Something that opens when it is asked for."""
    return f'<details class="more"><summary>{escape(summary)}</summary>{body}</details>'


def pill(text: str, tone: str = "") -> str:
    """A short remark."""
    return f'<span class="pill {tone}">{escape(text)}</span>'


def bar(uses: Mapping[str, float], total: float, kind: str = "") -> str:
    """A bar that is divided among uses."""
    parts = [
        f'<i class="u{i % 6}" style="width:{100 * value / total:.2f}%" title="{escape(name)}"></i>'
        for i, (name, value) in enumerate(uses.items())
        if value and total
    ]
    return f'<div class="bar {kind}">{"".join(parts)}</div>'


def legend(
    uses: Mapping[str, float], total: float, show: Callable[[float], str], hints: Mapping[str, str] | None = None
) -> str:
    """The uses of a bar, with figures and what they are."""
    parts = [
        f'<span title="{escape((hints or {}).get(name, ""))}"><i class="u{i % 6}"></i>{escape(name)} '
        f"<b>{show(value)}</b> {in_percent(value / total)}</span>"
        for i, (name, value) in enumerate(uses.items())
        if value and total
    ]
    return f'<div class="legend">{"".join(parts)}</div>'


def axis_chip(text: str, axis: int) -> str:
    """A word in the colour of a mesh axis."""
    return f'<span class="chip a{axis % 3}">{escape(text)}</span>'


def layout_chips(layout: str) -> str:
    """A layout, type by type; what shards in the colour of its axis."""
    chips = (
        axis_chip(each, i) if each[0] in "SP" else f'<span class="chip">{escape(each)}</span>'
        for i, each in enumerate(layout.split())
    )
    return f'<span class="lay">{"".join(chips)}</span>'


def call_lines(calls: Iterable[tuple[Collective, int]]) -> str:
    """Collectives, a line for all of one kind, axis and phase."""
    return "".join(
        f'<span class="call" title="{row.phase}"><span class="dir">{"→" if row.phase == "forward" else "←"}</span>'
        f'{escape(row.kind)} <span class="soft">{escape(row.axis)}</span> {in_bytes(row.bytes_in)}</span>'
        for row in traffic(calls)
    )
