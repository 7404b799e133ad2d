"""The two figures of a plan: seconds of a step, and bytes of the fullest device."""

from __future__ import annotations

from html import escape

from planner.base.formatting import MEMORY_USES, TIME_USES, in_bytes, in_percent, in_seconds
from planner.plan.document.document import Document
from planner.plan.page.parts import bar, legend


def step_card(document: Document) -> str:
    """What a step takes, and for what."""
    predicted = document.predicted
    return (
        f'<div class="card"><div class="figure"><b>{in_seconds(predicted.step_time_s)}</b>'
        f"<span>predicted for one step</span></div>{bar(predicted.time_s, predicted.step_time_s)}"
        f"{legend(predicted.time_s, predicted.step_time_s, in_seconds, TIME_USES)}</div>"
    )


def memory_card(document: Document) -> str:
    """What the fullest device holds, and of what."""
    predicted, device = document.predicted, document.cluster.device
    limit, peak = device.usable_bytes, predicted.peak_bytes
    thin = "thin" if peak < limit / 3 else ""
    scale = f"<span>0</span><span>{in_bytes(limit)} usable of {in_bytes(device.memory_bytes)}</span>"
    fullest = f'<p class="key">fullest in {escape(predicted.fullest_at)}</p>' if predicted.fullest_at else ""
    return (
        f'<div class="card"><div class="figure"><b>{in_bytes(peak)}</b><span>predicted peak per device, '
        f"{in_percent(peak / limit)} of what is usable</span></div>"
        f"{bar(predicted.memory_bytes, peak) if peak < limit / 3 else ''}"
        f'{bar(predicted.memory_bytes, max(limit, peak), thin)}<div class="scale">{scale}</div>'
        f"{legend(predicted.memory_bytes, peak, in_bytes, MEMORY_USES)}{fullest}</div>"
    )
