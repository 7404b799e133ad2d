"""The search's table: what each candidate takes, or at least would, and what became of it."""

from __future__ import annotations

from html import escape

from planner.base.formatting import in_bytes, in_seconds
from planner.plan.document.document import Document
from planner.plan.page.parts import Cell, card, folded_table
from planner.plan.report.summary import candidate_cells, candidate_name, counted, standing


def search_card(document: Document) -> str:
    """What the search took and how it stands, and all that it looked at."""
    search = document.search
    steps = ", ".join(f"{escape(name)} {in_seconds(seconds)}" for name, seconds in search.seconds.items())
    rows: list[list[Cell]] = []
    for candidate in search.candidates:
        seconds, bound = candidate["step_time_s"], candidate["bound_s"]
        status, _ = candidate_cells(candidate)
        rows.append([
            escape(candidate_name(candidate)),
            escape(status) if bound is not None else f'<span class="bad">{escape(status)}</span>',
            (in_seconds(seconds) if seconds is not None else "", "n"),
            (in_seconds(bound) if bound is not None else "∞", "n"),
            (in_bytes(candidate["peak_bytes"]), "n"),
        ])  # fmt: skip
    header: list[Cell] = ["mesh", "answer", ("step", "n"), ("proven bound", "n"), ("peak", "n")]
    took = f'<p class="key">{in_seconds(counted(search.seconds))}: {steps}</p>' if steps else ""
    told = f'<p class="key">{escape(standing(document))}</p>' if len(search.candidates) > 1 else ""
    return card("Search", took + told + (folded_table(header, rows, "candidates") if rows else ""))
