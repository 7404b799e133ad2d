"""Turn a model into its assignment of least peak memory, for when no assignment fits the limit."""

from __future__ import annotations

import math
import time

from planner.solve.eliminate import decode, eliminate
from planner.solve.exact import minimise_exactly
from planner.solve.model import Model, allow_everything, drop_forbidden, restrict, total
from planner.solve.tree import build_tree
from planner.solve.window import HELD_ONLY, MAX_ENTRIES


def least_peak(model: Model, deadline: float) -> tuple[int, ...]:
    """The problem's choices of least peak; forbidden ones only when every assignment is forbidden.

    Where elimination is not exact CP-SAT improves on it, until ``deadline`` (``time.monotonic``).
    """
    allowed = drop_forbidden(model)
    choices = None if allowed is None else _least_allowed_peak(allowed, deadline)
    if choices is None:
        choices = _least_allowed_peak(allow_everything(model), deadline)
    assert choices is not None, "without walls every assignment is allowed"
    return choices


def _least_allowed_peak(model: Model, deadline: float) -> tuple[int, ...] | None:
    """The least held bytes under a cap on the transients bound every peak under that cap: a few caps suffice."""
    tree = build_tree(model, MAX_ENTRIES)
    found: tuple[int, ...] | None = None
    least = math.inf
    capped: Model | None = model
    while capped is not None:
        held = eliminate(capped, tree, HELD_ONLY)
        assignment = decode(held)
        totals = total(capped, assignment)
        if not totals.allowed:
            break
        if totals.peak_bytes < least:
            found, least = capped.choices(assignment), totals.peak_bytes
        # Only smaller transients than these can still give a smaller peak.
        cap = min(totals.transient_bytes, least - held.bound)
        kept = restrict(capped, [values < cap for values in capped.transient])
        capped = None if kept is None else drop_forbidden(kept)
    if not tree.exact:
        outcome = minimise_exactly(model, "peak", None, deadline - time.monotonic())
        if outcome.assignment is not None and total(model, outcome.assignment).peak_bytes < least:
            found = model.choices(outcome.assignment)
    return found
