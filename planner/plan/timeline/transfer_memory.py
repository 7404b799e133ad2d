"""Memory of ranks over the step where model data moves: what its transfer schedule has on the device at each moment.

``(transfer schedules, StepTimeline) -> RankMemory`` of some ranks. A schedule goes from moment to moment: a block's
forward, or backward, of one micro-batch. Here these are laid beside the events of the timeline.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from planner.analysis.memory.storages import Held, PeakReport
from planner.plan.timeline.drawn import StepTimeline
from planner.plan.timeline.rank_memory import OpenStretch, RankMemory, Stretch, chosen_ranks, coarsened, directions
from planner.plan.timeline.step import Event
from planner.solve.transfers import TransferSchedule
from planner.solve.transfers.table import ACTIONS

BESIDE = "activations, gathered parameters, what operators need, and what stays"
NAME = re.compile(
    r"(?:(?P<way>forward|backward) (?P<block>\d+) .*?|(?P<end>begin|end)(?: stage (?P<stage>\d+))?)"
    r"(?:, micro-batch (?P<micro_batch>\d+))?",
    re.DOTALL,
)
"""That of a moment of a block, or before the blocks of a stage, see
:func:`planner.analysis.offload.chunks.moments_of`."""


class _Moment(NamedTuple):
    """What is on the device while a block runs."""

    name: str
    seconds: float
    peak: PeakReport


Key = tuple[str, int, int | None]
"""A direction, a block or the stage that it is of, and a micro-batch."""


def memory_of_transfers(
    tables: Sequence[TransferSchedule], timeline: StepTimeline, bounds: Sequence[int] = ()
) -> tuple[RankMemory, ...]:
    """Of the one rank that stands for all, or of some of a pipeline's.

    Args:
        tables: of every rank of the pipeline.
        bounds: where blocks are cut into stages, if a step is micro-batched.
    """
    chosen = chosen_ranks([table.high_water_bytes for table in tables])
    return tuple(
        RankMemory(rank, title, _of_rank(tables[rank], rank, timeline, bounds)) for rank, title in chosen.items()
    )


def _of_rank(table: TransferSchedule, rank: int, timeline: StepTimeline, bounds: Sequence[int]) -> tuple[Stretch, ...]:
    moments = defaultdict[Key, list[_Moment]](list)
    for moment in _on_device(table):
        found = NAME.fullmatch(moment.name)
        if found is not None:
            moments[_key_of(found, bounds)].append(moment)
    spans: list[OpenStretch] = []
    for event, direction in zip(timeline.events, directions(timeline), strict=True):
        if event.rank == rank and event.kind != "wait":
            spans += _within(event, moments.get(_key(event, direction), ()))
    spans.sort(key=lambda span: span.start_s)
    *_, last = _on_device(table)
    start_s = spans[-1].end_s if spans else 0.0
    return coarsened(
        [*spans, OpenStretch.of(start_s, max(start_s, timeline.end_s), "at the end of the step", last.peak)]
    )


def _key_of(name: re.Match[str], bounds: Sequence[int]) -> Key:
    micro_batch = None if name["micro_batch"] is None else int(name["micro_batch"])
    if name["end"]:
        place = int(name["stage"] or 0) if bounds else -1
        return "forward" if name["end"] == "begin" else "backward", place, micro_batch
    number = int(name["block"])
    stage = next((at for at, (_, stop) in enumerate(pairwise(bounds)) if number < stop), number)
    return name["way"], stage, micro_batch


def _key(event: Event, direction: str) -> Key:
    if event.action is not None:
        return "forward" if event.action.kind == "F" else "backward", event.action.stage, event.action.micro_batch
    return direction, -1 if event.block is None else event.block, None


def _within(event: Event, moments: Sequence[_Moment]) -> Iterator[OpenStretch]:
    """The moments of an event, which share its time as they take of it."""
    total, start_s = sum(moment.seconds for moment in moments), event.start_s
    for moment in moments:
        share = moment.seconds / total if total else 1 / len(moments)
        end_s = start_s + share * (event.end_s - event.start_s)
        yield OpenStretch.of(start_s, end_s, moment.name, moment.peak)
        start_s = end_s


def _on_device(table: TransferSchedule) -> Iterator[_Moment]:
    """Every moment on the device with what is there: chunks that are resident, coming or leaving, and all else."""
    states = dict(table.beginning)
    for moment, entry in zip(table.trace.moments, table.entries, strict=True):
        for action, name in entry.actions():
            states[name] = ACTIONS[action][1]
        if moment.on == "device":
            held = [
                Held(f"{name}, {state}" if state != "resident" else name, "chunks", table.trace.item[name].bytes)
                for name, state in states.items()
                if state != "home"
            ]
            alive = sorted([*held, Held(BESIDE, "beside", moment.other_bytes)], key=lambda each: -each.bytes)
            yield _Moment(
                moment.name, moment.seconds, PeakReport(sum(each.bytes for each in alive), moment.name, tuple(alive))
            )
