"""The collectives of a step, by the size of their messages: few large ones use a link well, many small ones wait."""

from __future__ import annotations

from collections import Counter
from html import escape

from planner.base.formatting import in_bytes
from planner.plan.document.document import Document
from planner.plan.page.parts import Cell, card, folded_table


def collectives_card(document: Document) -> str:
    """A row for each size of each kind on each axis, those that pass in most bytes in a step first."""
    found = Counter[tuple[str, str, str, int]]()
    for call, count in document.predicted.calls:
        found[call.kind, call.axis, call.phase, call.bytes_in] += count
    if not found:
        return card("Collectives by size", '<p class="soft">None: one device computes everything.</p>')
    most = max(size * count for (*_, size), count in found.items()) or 1
    ordered = sorted(found.items(), key=lambda item: (-item[0][3] * item[1], item[0]))
    rows: list[list[Cell]] = [
        [
            (in_bytes(size), "n"),
            escape(kind),
            escape(axis),
            phase,
            (f"{count:,}", "n"),
            (in_bytes(size * count), "n"),
            (_rule(size * count / most), "rule"),
        ]
        for (kind, axis, phase, size), count in ordered
    ]
    header: list[Cell] = [
        ("message", "n"), "kind", "axis", "phase", ("calls", "n"), ("bytes in, per rank", "n"), ("", "rule")
    ]  # fmt: skip
    calls, total = sum(found.values()), sum(size * count for (*_, size), count in found.items())
    key = f'<p class="key">{calls:,} calls pass in {in_bytes(total)}, most first</p>'
    return card("Collectives by size", key + folded_table(header, rows, "sizes"))


def _rule(share: float) -> str:
    """A bar for one figure of a column."""
    return f'<span class="bar thin"><i class="u2" style="width:{100 * share:.1f}%"></i></span>'
