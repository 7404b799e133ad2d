"""Memory of ranks over the step: what is alive in every stretch of a timeline, at its fullest moment.

``(Assignment, Staged, StepTimeline) -> RankMemory`` of some ranks. Long steps are coarsened: of neighbouring stretches
the fullest stands for all of them, so that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from planner.analysis.memory.storages import PeakReport
from planner.analysis.memory.through_step import BlockPeak, block_peaks
from planner.analysis.pipeline.peak_report import RankReport
from planner.analysis.pipeline.staged import Staged
from planner.analysis.pipeline.through_step import block_works
from planner.formulation.assignment import Assignment
from planner.plan.timeline.drawn import StepTimeline
from planner.plan.timeline.step import KINDS, Event
from planner.solve.pipeline.schedule import Action

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


def memory_over_step(assignment: Assignment, staged: Staged | None, timeline: StepTimeline) -> tuple[RankMemory, ...]:
    """Of the one rank that stands for all; of a pipeline, of those that hold most and least, the first and the last."""
    if staged is None:
        return (RankMemory(0, "every rank", tuple(_whole_step(block_peaks(assignment), timeline))),)
    told: dict[int, list[str]] = {}
    held = staged.rank_bytes
    for rank, what in (
        (staged.peak_rank, "holds most"),
        (held.index(min(held)), "holds least"),
        (0, ""),
        (len(held) - 1, ""),
    ):
        told.setdefault(rank, []).append(what)
    found = []
    for rank in sorted(told):
        notes = ", ".join(filter(None, told[rank])) if len(held) > 1 else ""
        title = f"pipeline rank {rank}" if len(held) > 1 else "every rank"
        stretches = tuple(_of_rank(assignment, staged, rank, timeline))
        found.append(RankMemory(rank, title + (f", {notes}" if notes else ""), stretches))
    return tuple(found)


class _Span(NamedTuple):
    """A stretch whose contents are not asked for yet."""

    start_s: float
    end_s: float
    what: str
    bytes: int
    report: Callable[[], PeakReport]


def _whole_step(peaks: Sequence[BlockPeak], timeline: StepTimeline) -> list[Stretch]:
    at: dict[tuple[str, int | None], PeakReport] = {(each.direction, each.number): each.peak for each in peaks}
    last = peaks[-1].peak
    turn = max((number for number, event in enumerate(timeline.events) if event.kind == "F"), default=-1)
    spans = []
    for number, event in enumerate(timeline.events):
        place = "forward" if number <= turn else "backward", event.block
        peak = at.get(place, last)
        spans.append(_Span(event.start_s, event.end_s, event.name, peak.bytes, partial(_known, peak)))
    return _stretches(spans)


def _known(peak: PeakReport) -> PeakReport:
    return peak


def _of_rank(assignment: Assignment, staged: Staged, rank: int, timeline: StepTimeline) -> list[Stretch]:
    report = RankReport(assignment, staged, rank)
    works = block_works(staged, rank)
    of_action: dict[Action, list[int]] = {}
    for number, work in enumerate(works):
        of_action.setdefault(work.action, []).append(number)
    spans: list[_Span] = []
    for event in sorted((e for e in timeline.events if e.rank == rank), key=lambda e: e.start_s):
        if event.kind == "wait" or event.action is None:
            continue
        start = event.start_s
        for number in of_action.get(event.action, ()):  # none where a first stage leaves all to a later action
            work = works[number]
            end = start + work.share * (event.end_s - event.start_s)
            asked = partial(report.during, work.peak)
            what = f"{_told(event, staged.pipeline.stages)}: {work.name}"
            spans.append(_Span(start, end, what, work.peak.bytes, asked))
            start = end
    last_s = spans[-1].end_s
    at_end = report.at_end()
    spans.append(_Span(last_s, timeline.end_s, "at the end of the step", at_end.bytes, partial(_known, at_end)))
    return _stretches(spans)


def _told(event: Event, stages: int) -> str:
    """``forward of micro-batch 3, stage 5``."""
    assert event.action is not None
    told = f"{KINDS[event.kind]} of micro-batch {event.action.micro_batch}"
    return f"{told}, stage {event.action.stage}" if stages > 1 else told


def _stretches(spans: Iterable[_Span]) -> list[Stretch]:
    """At most :data:`STRETCHES`, the fullest of each group standing for it."""
    every = [*spans]
    end_s = every[-1].end_s
    groups: dict[int, list[_Span]] = {}
    for number, span in enumerate(every):
        middle = (span.start_s + span.end_s) / 2
        key = number if len(every) <= STRETCHES else int(STRETCHES * middle / end_s)
        groups.setdefault(key, []).append(span)
    found = []
    for group in groups.values():
        fullest = max(group, key=lambda span: span.bytes)
        found.append((group[0].start_s, fullest))
    starts = [0.0, *(start for start, _ in found[1:]), end_s]
    return [
        Stretch(starts[number], starts[number + 1], span.what, span.report()) for number, (_, span) in enumerate(found)
    ]
