"""What one rank holds over a step, as stretches of time with what is alive in each at its fullest moment.

Long steps are coarsened: of neighbouring stretches the fullest stands for all of them, so that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from planner.analysis.memory.storages import Direction, PeakReport
from planner.plan.timeline.step import StepEvents

STRETCHES = 160
"""So many stretches of a rank at most."""


class Stretch(NamedTuple):
    """From ``start_s`` to ``end_s`` no more is alive than at its fullest moment; ``what`` says what runs."""

    start_s: float
    end_s: float
    what: str
    peak: PeakReport


@dataclass(frozen=True)
class RankMemory:
    """A rank's memory over the step, without gaps; ``title`` says which rank, and what is special about it."""

    rank: int
    title: str
    stretches: tuple[Stretch, ...]

    @property
    def fullest(self) -> Stretch:
        """The first of the fullest stretches."""
        return max(self.stretches, key=lambda stretch: stretch.peak.bytes)


class OpenStretch(NamedTuple):
    """A stretch whose contents are not asked for yet."""

    start_s: float
    end_s: float
    what: str
    bytes: int
    report: Callable[[], PeakReport]

    @staticmethod
    def of(start_s: float, end_s: float, what: str, peak: PeakReport) -> OpenStretch:
        """One whose contents are known."""
        return OpenStretch(start_s, end_s, what, peak.bytes, lambda: peak)


def coarsened(spans: Sequence[OpenStretch]) -> tuple[Stretch, ...]:
    """At most :data:`STRETCHES`, the fullest of each group standing for it, from the beginning of the step on."""
    end_s = spans[-1].end_s or 1.0
    groups: dict[int, list[OpenStretch]] = {}
    for number, span in enumerate(spans):
        middle_s = (span.start_s + span.end_s) / 2
        key = number if len(spans) <= STRETCHES else int(STRETCHES * middle_s / end_s)
        groups.setdefault(key, []).append(span)
    starts = [0.0, *(group[0].start_s for group in [*groups.values()][1:]), spans[-1].end_s]
    chosen = (max(group, key=lambda span: span.bytes) for group in groups.values())
    return tuple(Stretch(*ends, span.what, span.report()) for ends, span in zip(pairwise(starts), chosen, strict=True))


def chosen_ranks(held: Sequence[int]) -> dict[int, str]:
    """Ranks whose memory is told, of their bytes: that with most and least, the first and the last; with titles."""
    if len(held) == 1:
        return {0: "every rank"}
    most, least = held.index(max(held)), held.index(min(held))
    told = {most: " (holds most)"} if most == least else {most: " (holds most)", least: " (holds least)"}
    return {rank: f"pipeline rank {rank}{told.get(rank, '')}" for rank in sorted({0, len(held) - 1, most, least})}


def directions(timeline: StepEvents) -> list[Direction]:
    """Of a step without micro-batches, what each event is part of; what comes once a step is part of backward."""
    turn = max((number for number, event in enumerate(timeline.events) if event.kind == "F"), default=-1)
    return ["forward" if number <= turn else "backward" for number in range(len(timeline.events))]
