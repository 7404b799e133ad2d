"""What every rank does in a step, and when; simulated or observed, the same kind of value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from planner.base.formatting import in_seconds
from planner.solve.pipeline.schedule import Action

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "backward of weights",
    "R": "recompute",
    "C": "communication",
    "wait": "wait",
    "gather": "gather",
    "reduce": "reduce",
    "update": "update",
    "offload": "wait for transfers",
    "fetch": "fetch",
    "evict": "evict",
}
"""What a rank does: actions of schedules, waiting for what they need; without micro-batches also recomputing, and
communicating, block by block; once a step gathering parameters, reducing gradients, and the optimizer's update; and
what moves to and from the device meanwhile."""


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank does from ``start_s`` to ``end_s``; ``kind`` is one of :data:`KINDS`.

    ``action`` is the schedule's, or the one that waits; ``None``: once a step, or without micro-batches. Then ``what``
    names the block that runs, and ``block`` is its number.
    """

    rank: int
    kind: str
    start_s: float
    end_s: float
    action: Action | None = None
    what: str = ""
    block: int | None = None

    @property
    def name(self) -> str:
        """``2F0``, ``wait for 2F0``, ``forward of transformer.h.0``, ``reduce``."""
        if self.action is None:
            return f"{KINDS[self.kind]} of {self.what}" if self.what else self.kind
        return f"wait for {self.action}" if self.kind == "wait" else str(self.action)


@dataclass(frozen=True, eq=False, repr=False)
class StepEvents:
    """A step on the ranks of a pipeline, or on all ranks alike.

    Attributes:
        what: ``predicted`` or ``observed``.
        schedule: its name; empty: forward once, backward once, without micro-batches.
        ranks, virtual_stages, micro_batches: ranks of the pipeline, stages on each, micro-batches of a step.
        events: what ranks do; of one rank, one thing after the other.
        step_s: seconds of the step; an observed one ends before the optimizer's update.
        bubble: of the time between the first action of the schedule and the end of the last, the part in which ranks
            compute nothing, of all ranks together.
        expected: the bubble that was predicted for a step that was observed.
        fullest: when and where memory is fullest, and with what, in words, where that is known.
        rows: names of the rows where they are no ranks, but what of any rank is busy at once.
    """

    what: str
    schedule: str
    ranks: int
    virtual_stages: int
    micro_batches: int
    events: tuple[Event, ...]
    step_s: float
    bubble: float
    expected: float | None = None
    fullest: str = ""
    rows: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The step in one line."""
        if not self.schedule:
            return f"{self.what} step {in_seconds(self.step_s)}: forward once, backward once, on all ranks alike"
        told = "" if self.expected is None else f", predicted {self.expected * 100:.1f} %"
        stages = f" of {self.virtual_stages} stages" if self.virtual_stages > 1 else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}{stages}"
        batches = f"{self.micro_batches} micro-batch{'es' * (self.micro_batches != 1)}"
        return (
            f"{self.what} step {in_seconds(self.step_s)}, bubble {self.bubble * 100:.1f} %{told}: "
            f"{self.schedule}, {ranks}, {batches}"
        )

    def row_name(self, rank: int) -> str:
        """What the row of a rank is called."""
        if self.rows:
            return self.rows[rank]
        return f"rank {rank}" if self.schedule else "all ranks"

    @cached_property
    def end_s(self) -> float:
        """When the last event ends."""
        return max((event.end_s for event in self.events), default=0.0)


def bubble_of(events: Iterable[Event], ranks: int) -> float:
    """The bubble of what ranks were seen to do, see :class:`StepEvents`."""
    actions = [event for event in events if event.kind in ("F", "B", "I", "W")]
    span = max(event.end_s for event in actions) - min(event.start_s for event in actions)
    busy = sum(event.end_s - event.start_s for event in actions)
    return max(0.0, 1 - busy / (ranks * span)) if span > 0 else 0.0
