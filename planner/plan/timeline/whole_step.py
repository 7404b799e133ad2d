"""The timeline of a step without micro-batches: forward block by block, backward, and what comes once a step.

All ranks do the same then, so that there is one row. Where a step communicates among other ranks than it computes, it
is drawn as it is priced: one after the other, and of reducing gradients what backward does not hide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.plan.timeline.drawn import StepTimeline
from planner.plan.timeline.step import Event

ONCE = {"gradients": "reduce", "optimizer": "update", "offload": "offload"}
"""Seconds by use that come once a step -> the kind of their event, in order."""


@dataclass(frozen=True)
class BlockSeconds:
    """What one instance of a block takes.

    Attributes:
        number: in execution order; a negative one is what runs before the first block, and its backward.
        name: ``transformer.h.*, 2 of 12``.
        forward, backward: seconds by kind of event, in the order of time.
    """

    number: int
    name: str
    forward: Mapping[str, float] = field(default_factory=dict)
    backward: Mapping[str, float] = field(default_factory=dict)


def whole_step(blocks: Sequence[BlockSeconds], time_s: Mapping[str, float], fullest: str = "") -> StepTimeline:
    """The predicted step.

    Args:
        blocks: in execution order.
        time_s: seconds by use, see :class:`planner.analysis.prediction.Prediction`.
        fullest: when and where memory is fullest, in words.
    """
    events, now = list[Event](), 0.0
    for kind, seconds, block in _stretches(blocks, time_s):
        if seconds > 0:
            what, number = ("", None) if block is None else (block.name, block.number)
            events.append(Event(0, kind, now, now + seconds, what=what, block=number))
            now += seconds
    return StepTimeline("predicted", "", 1, 1, 1, tuple(events), now, 0.0, fullest=fullest)


def _stretches(
    blocks: Sequence[BlockSeconds], time_s: Mapping[str, float]
) -> Iterator[tuple[str, float, BlockSeconds | None]]:
    for block in blocks:
        yield from ((kind, seconds, block) for kind, seconds in block.forward.items())
    for block in reversed(blocks):
        yield from ((kind, seconds, block) for kind, seconds in block.backward.items())
    yield from ((kind, time_s.get(use, 0.0), None) for use, kind in ONCE.items())
