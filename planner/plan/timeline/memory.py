"""Memory of ranks over the step, with all model data on the device: what is alive in every stretch of a timeline.

``(Assignment, Staged, StepTimeline) -> RankMemory`` of some ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from planner.analysis.memory.through_step import BlockPeak, block_peaks
from planner.analysis.pipeline.peak_report import RankReport
from planner.analysis.pipeline.staged import Staged
from planner.analysis.pipeline.through_step import block_works
from planner.formulation.assignment import Assignment
from planner.plan.timeline.drawn import StepTimeline
from planner.plan.timeline.rank_memory import OpenStretch, RankMemory, Stretch, chosen_ranks, coarsened, directions
from planner.plan.timeline.step import KINDS, Event
from planner.solve.pipeline.schedule import Action


def memory_over_step(assignment: Assignment, staged: Staged | None, timeline: StepTimeline) -> tuple[RankMemory, ...]:
    """Of the one rank that stands for all, or of some of a pipeline's."""
    if staged is None:
        return (RankMemory(0, "every rank", _whole_step(block_peaks(assignment), timeline)),)
    return tuple(
        RankMemory(rank, title, _of_rank(assignment, staged, rank, timeline))
        for rank, title in chosen_ranks(staged.rank_bytes).items()
    )


def _whole_step(peaks: Sequence[BlockPeak], timeline: StepTimeline) -> tuple[Stretch, ...]:
    at: dict[tuple[str, int | None], BlockPeak] = {(each.direction, each.number): each for each in peaks}
    fullest = max(peaks, key=lambda peak: peak.bytes)
    spans = [] if timeline.events else [OpenStretch(0.0, 0.0, "the step", fullest.bytes, fullest.report)]
    for event, direction in zip(timeline.events, directions(timeline), strict=True):
        peak = at.get((direction, event.block), peaks[-1])
        spans.append(OpenStretch(event.start_s, event.end_s, event.name, peak.bytes, peak.report))
    return coarsened(spans)


def _of_rank(assignment: Assignment, staged: Staged, rank: int, timeline: StepTimeline) -> tuple[Stretch, ...]:
    report = RankReport(assignment, staged, rank)
    works = block_works(staged, rank)
    of_action: dict[Action, list[int]] = {}
    for number, work in enumerate(works):
        of_action.setdefault(work.action, []).append(number)
    spans: list[OpenStretch] = []
    for event in sorted((e for e in timeline.events if e.rank == rank), key=lambda e: e.start_s):
        if event.kind == "wait" or event.action is None:
            continue
        start = event.start_s
        for number in of_action.get(event.action, ()):  # none where a first stage leaves all to a later action
            work = works[number]
            end = start + work.share * (event.end_s - event.start_s)
            asked = partial(report.during, work.peak)
            what = f"{_told(event, staged.pipeline.stages)}: {work.name}"
            spans.append(OpenStretch(start, end, what, work.peak.bytes, asked))
            start = end
    last_s = spans[-1].end_s
    spans.append(OpenStretch.of(last_s, timeline.end_s, "at the end of the step", report.at_end()))
    return coarsened(spans)


def _told(event: Event, stages: int) -> str:
    """``forward of micro-batch 3, stage 5``."""
    assert event.action is not None
    told = f"{KINDS[event.kind]} of micro-batch {event.action.micro_batch}"
    return f"{told}, stage {event.action.stage}" if stages > 1 else told
