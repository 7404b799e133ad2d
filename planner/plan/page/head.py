"""The head of the page: what was planned, in a sentence, how good it is, and what to know of it."""

from __future__ import annotations

from html import escape

from planner.base.formatting import in_count
from planner.plan.document.document import Document
from planner.plan.page.parts import pill
from planner.plan.report.sentence import sentence
from planner.plan.report.summary import dtypes, pinned, rebound


def head(document: Document) -> str:
    """The model, the cluster, and the plan in a sentence."""
    cluster, search, model = document.cluster, document.search, document.model
    proven = search.status == "optimal"
    told = (
        f"optimal {document.qualified}".rstrip()
        if proven
        else f"at most {search.gap * 100:.1f} % from the best {document.limited}".rstrip()
    )
    if document.rebinding is not None and document.rebinding.bound_by == "arithmetic":
        told = "rebound"
    pills = [pill(told, "good" if proven and not document.qualified else "warn")]
    pills += [pill(f"pinned: {each}") for each in pinned(document)]
    devices = f"{cluster.world_size} × {escape(cluster.device.kind)}"
    return (
        f'<div class="head"><h1>{escape(str(model["class"]))}</h1>{"".join(pills)}</div>'
        f'<div class="sub">{in_count(int(model["parameters"]))} parameters on {escape(cluster.name)}: {devices}, '
        f"{escape(cluster.backend)}{f'<br>{escape(said)}' if (said := dtypes(document)) else ''}</div>"
        f'<p class="sentence">{escape(sentence(document))}</p>'
    )


def notes(document: Document) -> str:
    """Where a plan was rebound from, what may not have been meant, and operators that no table knows."""
    came = "<br>".join(map(escape, rebound(document)))
    found = f'<div class="note"><b>Rebound</b> {came}</div>' if came else ""
    found += "".join(f'<div class="note">{escape(note)}</div>' for note in document.notes)
    if not document.coverage:
        return found
    ops = ", ".join(f"{times} × <code>{escape(op)}</code>" for op, times in document.coverage.items())
    return (
        f'{found}<div class="note"><b>Not in the op table</b>, so computed whole on every rank: {ops}. '
        "See docs/adding_an_op.md.</div>"
    )
