"""A timeline in characters, one line per rank."""

from __future__ import annotations

from collections.abc import Mapping

from planner.base.formatting import in_seconds
from planner.plan.timeline.shares import shares
from planner.plan.timeline.step import KINDS, StepEvents
from planner.solve.pipeline.simulate import Floats

WIDTH = 96
SIGNS = {"F": "█", "B": "▒", "I": "▒", "W": "░", "wait": "·", "R": "▓", "C": "c"}
SIGNS |= {"gather": "g", "reduce": "r", "update": "u", "offload": "·", "fetch": "f", "evict": "e"}


def text(found: StepEvents) -> str:
    """The title, the rows, the time, and what the signs are."""
    carried = bool(found.rows) or sum(event.kind != "wait" for event in found.events) > WIDTH / 2 * found.ranks
    rows = [_signs(row, carried) for row in shares(found, WIDTH)]
    label = len(found.row_name(found.ranks - 1))
    lines = [f"{found.row_name(rank):<{label}} {row}" for rank, row in enumerate(rows)]
    time = f"{'':<{label}} 0{in_seconds(found.end_s):>{WIDTH - 1}}"
    kinds = {event.kind for event in found.events} | ({"wait"} if found.schedule else set())
    names = [f"{SIGNS[kind]} {'idle' if kind == 'wait' else name}" for kind, name in KINDS.items() if kind in kinds]
    told = [f"memory {found.fullest}"] if found.fullest else []
    return "\n".join([found.title, *lines, time, f"{'':<{label}} {'   '.join(names)}", *told])


def _signs(row: Mapping[str, Floats], carried: bool) -> str:
    """A sign for each stretch: of what takes most of it; ``carried``: with what it was left of stretches before, so
    that of many short actions each kind gets its share of the row.
    """
    left = dict.fromkeys(row, 0.0)
    signs = []
    for place in range(WIDTH):
        wanted = {kind: left[kind] + float(parts[place]) for kind, parts in row.items()}
        most = max((kind for kind in row if row[kind][place] > 0), key=lambda kind: wanted[kind])
        signs.append(SIGNS[most])
        if carried:
            left = {**wanted, most: wanted[most] - 1}
    return "".join(signs)
