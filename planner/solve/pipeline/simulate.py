"""Simulates a schedule: when each action starts and ends, from what stages and transfers take.

An action starts when its rank is free and what it needs has arrived. A result leaves for the neighbouring stage when
its action ends and arrives ``send_s`` later, forwards or backwards; between stages of one rank it takes no time.
Sending keeps nobody from computing, and transfers do not slow each other down.

So a step takes as long as its longest *path*: actions and transfers of which each waits for the one before. Every path
of a schedule is a lower bound on the step for any durations, which :mod:`planner.solve.pipeline.stages` builds on.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.solve.pipeline.schedule import Action, Schedule, check_fits, period, schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEADY = 1e-11
"""Part of a step by which a period's shift may differ between actions: what adding in another order changes."""


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds per micro-batch, one entry per stage; a whole backward takes ``input_s + weight_s``.

    ``send_s`` has one entry less: the way between a stage and the next, for a result or its gradient.
    """

    forward_s: Floats
    input_s: Floats
    weight_s: Floats
    send_s: Floats

    @property
    def work_s(self) -> Floats:
        """Seconds per stage and micro-batch, all in all."""
        return self.forward_s + self.input_s + self.weight_s

    def check(self, stages: int) -> None:
        """Assert that there are times for so many stages, none below zero."""
        for seconds in (self.forward_s, self.input_s, self.weight_s, self.send_s):
            assert len(seconds) == stages - (seconds is self.send_s), f"{len(seconds)} times, {stages} stages"
            assert (np.isfinite(seconds) & (seconds >= 0)).all(), f"times of {seconds.tolist()}"


@dataclass(frozen=True, eq=False)
class Path:
    """How often a path does each stage's parts (rows: forward, input, weight) and takes each way between stages.

    A step takes at least :meth:`seconds`, whatever the times are.
    """

    work: Floats
    sends: Floats

    def seconds(self, times: Times) -> float:
        parts = np.stack([times.forward_s, times.input_s, times.weight_s])
        return float((self.work * parts).sum() + self.sends @ times.send_s)

    def plus(self, other: Path, often: float) -> Path:
        """What this does, and another path so often besides."""
        return Path(self.work + often * other.work, self.sends + often * other.sends)


@dataclass(frozen=True, eq=False)
class SimulatedSchedule:
    """When each action runs: what :mod:`planner.plan.timeline` draws. Arrays have an entry per action.

    Where steps overlap (2bw) it is one in the middle of a run: what the one before has done is there at its start.
    """

    schedule: Schedule
    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    start_s: Floats
    end_s: Floats
    step_s: float
    bubble: float


def simulate(found: Schedule, times: Times) -> SimulatedSchedule:
    """When each action of the schedule starts and ends, and what part of the ranks' time is idle."""
    times.check(found.stages)
    ends = np.array(_ends(found, times)[:-1])
    step = float(ends.max())
    durations = _durations(times)[_program(found).work]
    return SimulatedSchedule(
        found, found.flow.actions, found.flow.ranks, ends - durations, ends, step,
        bubble(found.micro_batches, times, found.ranks, step),
    )  # fmt: skip


def bubble(micro_batches: int, times: Times, ranks: int, step_s: float) -> float:
    """The part of a step in which ranks do nothing, of all ranks together."""
    return max(0.0, 1 - micro_batches * float(times.work_s.sum()) / (ranks * step_s)) if step_s > 0 else 0.0


def longest(found: Schedule, times: Times) -> tuple[float, Path]:
    """Seconds of a step, and a path that takes as long."""
    times.check(found.stages)
    ends = _ends(found, times)
    return max(ends), _counted(found, *_walk(found, times, ends))


def step_s(name: str, ranks: int, micro_batches: int, virtual_stages: int, times: Times) -> float:
    """Seconds of a step by the schedule's name, as :func:`simulate` has it, without simulating long steps throughout.

    The middle of a step repeats itself. Once everything in it is late by the same time after one more period, for as
    many micro-batches as its actions look back and ahead, so is what follows for each further period: a shorter step
    says the rest.
    """
    check_fits(name, ranks, micro_batches, virtual_stages)
    times.check(ranks * virtual_stages)
    if name == "gpipe":
        return _gpipe_s(micro_batches, times)
    steady = _steady(name, ranks, micro_batches, virtual_stages, times)
    if steady is not None:
        return max(steady.ends) + steady.shift_s * steady.periods
    return max(_ends(schedule(name, ranks, micro_batches, virtual_stages), times))


def critical(name: str, ranks: int, micro_batches: int, virtual_stages: int, times: Times) -> tuple[float, Path]:
    """What :func:`longest` says, by the schedule's name and from a shorter step where that is enough.

    A path that comes by the same work some periods later can go the way between as often as there are more periods.
    """
    check_fits(name, ranks, micro_batches, virtual_stages)
    times.check(ranks * virtual_stages)
    steady = None if name == "gpipe" else _steady(name, ranks, micro_batches, virtual_stages, times)
    if steady is not None:
        path = _lengthened(steady, *_walk(steady.schedule, times, steady.ends))
        if path is not None:
            return max(steady.ends) + steady.shift_s * steady.periods, path
    return longest(schedule(name, ranks, micro_batches, virtual_stages), times)


def several_critical(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, times: Times, count: int
) -> tuple[float, list[Path]]:
    """Seconds of a step, and several of its longest paths, drawn at random where one waits for two at once.

    Where stages take equally long nearly everything does, and one path says little of what the others come to.
    """
    check_fits(name, ranks, micro_batches, virtual_stages)
    times.check(ranks * virtual_stages)
    steady = None if name == "gpipe" else _steady(name, ranks, micro_batches, virtual_stages, times)
    found = schedule(name, ranks, micro_batches, virtual_stages) if steady is None else steady.schedule
    ends = _ends(found, times) if steady is None else steady.ends
    paths, draw = list[Path](), random.Random(0)
    for _ in range(count):
        walked = _walk(found, times, ends, draw)
        path = _counted(found, *walked) if steady is None else _lengthened(steady, *walked)
        if path is not None:
            paths.append(path)
    if not paths:
        seconds, path = longest(schedule(name, ranks, micro_batches, virtual_stages), times)
        return seconds, [path]
    return max(ends) + (0.0 if steady is None else steady.shift_s * steady.periods), paths


def _lengthened(steady: _Steady, places: list[int], ways: list[int]) -> Path | None:
    """A path of a shorter step in the longer one: what lies between two actions alike it does as often again as there
    are more periods; ``None`` where there are none so far apart.
    """
    found = steady.schedule
    seen: dict[tuple[int, str, int], int] = {}
    for step, place in enumerate(places):  # from the last action back to the first
        stage, kind, late = found.flow.actions[place]
        if not steady.first <= late < steady.last:
            continue
        since = seen.setdefault((stage, kind, late % steady.period), step)
        apart = found.flow.actions[places[since]].micro_batch - late
        if apart > 0 and not (steady.periods * steady.period) % apart:
            circuit = _counted(found, places[since:step], ways[since:step])
            return _counted(found, places, ways).plus(circuit, steady.periods * steady.period // apart)
    return None


@dataclass(frozen=True, eq=False)
class _Steady:
    """A step that is ``periods`` shorter than another, each of ``period`` micro-batches and ``shift_s`` seconds.

    Between the micro-batches ``first`` and ``last`` it repeats itself.
    """

    schedule: Schedule
    ends: list[float]
    period: int
    periods: int
    shift_s: float
    first: int
    last: int


def _steady(name: str, ranks: int, micro_batches: int, virtual_stages: int, times: Times) -> _Steady | None:
    """The shortest step that is tried whose middle repeats itself: of four micro-batches a rank, or of six where ranks
    have several stages and so look further back and ahead.
    """
    each = period(name, ranks, micro_batches, virtual_stages)
    if each is None:
        return None
    short = (4 if virtual_stages == 1 else 6) * ranks
    while short < micro_batches:
        found = schedule(name, ranks, short, virtual_stages)
        ends = _ends(found, times)
        again = _again(found, ends, each)
        if again is not None:
            return _Steady(found, ends, each, (micro_batches - short) // each, *again)
        short *= 2
    return None


def _again(found: Schedule, ends: list[float], each: int) -> tuple[float, int, int] | None:
    """By how much everything in the middle of a step is late after so many more micro-batches, and from and up to which
    one; ``None`` where that is not the same for all, or the step is too short to tell.
    """
    program = _program(found)
    if found.micro_batches <= each:
        return None
    when = np.array(ends)[program.table]
    late = (when[:, :, each:] - when[:, :, :-each]).reshape(-1, found.micro_batches - each)
    width = 2 * program.reach + each
    first = (late.shape[1] - width) // 2
    if first < 0:
        return None
    stretch = late[:, first : first + width]
    least, most = float(stretch.min()), float(stretch.max())
    return ((least + most) / 2, first, first + width) if most - least <= STEADY * max(ends) else None


def repeating(
    name: str, ranks: int, micro_batches: int, virtual_stages: int, times: Times
) -> tuple[Path, Path, int, int] | None:
    """The longest path of long steps whose middle repeats itself: what it does anyway and for each micro-batch, by how
    many micro-batches such steps differ from one of this many, and from which number on; ``None`` where none is found.
    """
    check_fits(name, ranks, micro_batches, virtual_stages)
    times.check(ranks * virtual_stages)
    round_ = period(name, ranks, micro_batches, virtual_stages)
    if round_ is None:
        return None
    for rounds, longer in itertools.product(range(1, ranks + 1), (1, 2, 4)):
        each, short = round_ * rounds, 4 * ranks * min(virtual_stages, 2) * longer
        count = short + (micro_batches - short) % each
        found = schedule(name, ranks, count, virtual_stages)
        ends = _ends(found, times)
        again = _again(found, ends, each)
        if again is None:
            continue
        places, ways = _walk(found, times, ends)
        seen: dict[tuple[int, str, int], int] = {}
        for step, place in enumerate(places):  # from the last action back to the first
            stage, kind, at = found.flow.actions[place]
            if not again[1] <= at < again[2]:
                continue
            since = seen.setdefault((stage, kind, at % round_), step)
            apart = found.flow.actions[places[since]].micro_batch - at
            if apart > 0 and not each % apart:
                whole, circuit = _counted(found, places, ways), _counted(found, places[since:step], ways[since:step])
                path = Path(circuit.work / apart, circuit.sends / apart)
                return whole.plus(path, -count), path, each, count
    return None


def _walk(
    found: Schedule, times: Times, ends: list[float], draw: random.Random | None = None
) -> tuple[list[int], list[int]]:
    """The actions of a longest path, last first, and over which way each is reached (the last: over none).

    Args:
        draw: says where an action waits for two at once which of them the path comes by; else the one on its own rank.
    """
    flow, program, sends = found.flow, _program(found), [*times.send_s.tolist(), 0.0]
    places, ways = [], []
    last_s = max(ends)
    place, tie = ends.index(last_s), STEADY * last_s
    way_first = 0.0 if draw is None else draw.random()
    while place < len(flow.actions):
        before, needs, way = flow.before[place], flow.needs[place], program.ways[place]
        there = ends[needs] + sends[way] - ends[before]
        waits = there > 0.0 if draw is None or abs(there) > tie else draw.random() < way_first
        places.append(place)
        ways.append(way if waits else found.stages - 1)
        place = needs if waits else before
    return places, ways


def _counted(found: Schedule, places: list[int], ways: list[int]) -> Path:
    did = np.bincount(_program(found).work[places], minlength=4 * found.stages).reshape(4, found.stages)
    sends = np.bincount(ways, minlength=found.stages)[:-1]
    return Path((did[:3] + did[3] * np.array([[0], [1], [1]])).astype(float), sends.astype(float))


@dataclass(frozen=True, eq=False)
class _Program:
    """Per action of a flow: which duration it takes, and over which way its need comes (the last: no time).

    ``table`` is where each (kind, stage, micro-batch) stands in the flow, kinds F and B or I; what is left over from
    the step before has the place of what is left to the next. ``reach`` is the most micro-batches between an action
    and the one before on its rank.
    """

    work: Ints
    ways: tuple[int, ...]
    table: Ints
    reach: int


@lru_cache(maxsize=256)
def _program(found: Schedule) -> _Program:
    flow, stages = found.flow, found.stages
    stage = np.array([a.stage for a in flow.actions])
    kind = np.array(["FIWB".index(a.kind) for a in flow.actions])
    micro_batch = np.array([a.micro_batch for a in flow.actions])
    home = np.array(found.rank_of)
    left = np.where(kind == 0, stage - 1, stage)  # the way between stages left and left + 1
    apart = np.append(home[:-1] != home[1:], False)
    ways = np.where((np.array(flow.needs) < len(flow.actions)) & apart[left], left, stages - 1)
    table = np.empty((2, stages, found.micro_batches), dtype=np.int64)
    chosen = kind != 2
    table[(kind != 0).astype(int)[chosen], stage[chosen], micro_batch[chosen]] = np.flatnonzero(chosen)
    jumps = [abs(a.micro_batch - b.micro_batch) for row in found.rows for a, b in pairwise(row)]
    return _Program(kind * stages + stage, tuple(ways.tolist()), table, max(jumps, default=0))


def _durations(times: Times) -> Floats:
    return np.concatenate([times.forward_s, times.input_s, times.weight_s, times.input_s + times.weight_s])


def _ends(found: Schedule, times: Times) -> list[float]:
    """When each action of the flow ends; a zero behind the last stands for what is not waited for."""
    program, flow = _program(found), found.flow
    durations = _durations(times)[program.work].tolist()
    delays = np.append(times.send_s, 0.0)[list(program.ways)].tolist()
    ends = [0.0] * (len(durations) + 1)
    for place, (before, needs, delay, duration) in enumerate(
        zip(flow.before, flow.needs, delays, durations, strict=True)
    ):
        free, there = ends[before], ends[needs] + delay
        ends[place] = (free if free > there else there) + duration
    return ends


def _gpipe_s(micro_batches: int, times: Times) -> float:
    """Both halves are chains of equal jobs: the first through all stages, the others as the slowest stage lets them."""
    backward = times.input_s + times.weight_s
    through = times.forward_s.sum() + backward.sum() + 2 * times.send_s.sum()
    return float(through + (micro_batches - 1) * (times.forward_s.max() + backward.max()))
