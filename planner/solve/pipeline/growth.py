"""How the actions of a schedule grow with its micro-batches.

``(Pipeline, Times) -> Growth``. The longest path through a schedule, how many micro-batches its stages hold, and how
many gradients of weights it finds late are ``start + each * micro-batches`` as long as that path stays the longest one.
While a pipeline has few micro-batches others are, the middle of a long step may repeat itself only after several, and
schedules in rounds are others where a round is not full. For which counts it is so is tried count by count, up to where
the middle repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from planner.base.errors import ScheduleError
from planner.solve.pipeline.running import running
from planner.solve.pipeline.schedule import period
from planner.solve.pipeline.simulate import Path, Times, critical, repeating, step_s
from planner.solve.pipeline.stages import Pipeline

SAME = 1e-9
"""The part of a step by which a path may be shorter and still be the longest: what adding up otherwise leaves."""


@dataclass(frozen=True)
class Counts:
    """The numbers of micro-batches ``least``, ``least + step`` ... up to ``most``; ``None``: without end."""

    least: int
    most: int | None
    step: int = 1

    def __contains__(self, count: int) -> bool:
        is_between = self.least <= count and (self.most is None or count <= self.most)
        return is_between and (count - self.least) % self.step == 0

    def __str__(self) -> str:
        """``2, 3, ...``; ``4, 8, ...``; ``2 to 3``."""
        every = "" if self.step == 1 else f", every {self.step} further"
        if self.most is None:
            return f"{self.least}, {self.least + self.step}, ..."
        return f"{self.least} to {self.most}{every}" if self.most > self.least else str(self.least)


Line = tuple[Fraction, Fraction]
"""``start`` and ``each``, of ``start + each * micro-batches``."""


@dataclass(frozen=True)
class Growth:
    """What a schedule does, by the number of its micro-batches.

    Attributes:
        counts: those for which it is so.
        work: how often the longest path does the forward, input and weight part of each stage [part][stage].
        sends: how often it goes from each stage to the next or back.
        held: for each rank and each of its fullest moments the numbers of
            :class:`planner.solve.pipeline.running.Running`; all else of that is the same for all counts.
        late: for how many micro-batches each stage finds the gradients of weights in an action of their own.
    """

    counts: Counts
    work: tuple[tuple[Line, ...], ...]
    sends: tuple[Line, ...]
    held: tuple[tuple[tuple[Line, ...], ...], ...]
    late: tuple[Line, ...]


def growth(pipeline: Pipeline, times: Times) -> Growth | None:
    """How a pipeline's schedule grows from its number of micro-batches on; ``None``: not evenly.

    Args:
        times: of a micro-batch in each stage.
    """
    count = pipeline.micro_batches
    now = _At(pipeline, times, count)
    for start, each, step, settled in _paths(pipeline, times):
        line = _Line(start, each, now, _at(pipeline, times, count + step))
        if not (line.is_so(now) and line.is_so(line.after)):
            continue
        least = most = count
        while least > step and line.is_so(_at(pipeline, times, least - step)):
            least -= step
        while (settled is None or most < settled) and line.is_so(_at(pipeline, times, most + step)):
            most += step
        return line.growth(Counts(least, None if settled is not None and most >= settled else most, step))
    return None


def _paths(pipeline: Pipeline, times: Times) -> Iterator[tuple[Path, Path, int, int | None]]:
    """Paths that may be the longest, by what they do anyway and for each micro-batch, by how many more micro-batches
    they come, and from which number on without end: that which goes round in the middle of long steps; and of few
    micro-batches, what one round more adds to the path.
    """
    p = pipeline
    if p.schedule == "gpipe":
        yield (*_gpipe(times), 1, 1)
        return
    found = repeating(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, times)
    if found is not None:
        yield found
    round_ = period(p.schedule, p.ranks, p.micro_batches, p.virtual_stages)
    if round_ is not None and p.micro_batches < 4 * p.ranks * p.virtual_stages:
        now, after = (
            critical(p.schedule, p.ranks, count, p.virtual_stages, times)[1]
            for count in (p.micro_batches, p.micro_batches + round_)
        )
        each = Path((after.work - now.work) / round_, (after.sends - now.sends) / round_)
        yield now.plus(each, -p.micro_batches), each, round_, None


def _gpipe(times: Times) -> tuple[Path, Path]:
    """All stages once, forward and backward, and the slowest of each way again for every further micro-batch."""
    stages = len(times.forward_s)
    slowest = int(times.forward_s.argmax()), int((times.input_s + times.weight_s).argmax())
    work = np.zeros((3, stages))
    work[0, slowest[0]] = work[1, slowest[1]] = work[2, slowest[1]] = 1
    each = Path(work, np.zeros(stages - 1))
    return Path(np.ones((3, stages)), np.full(stages - 1, 2.0)).plus(each, -1), each


class _At:
    """What a schedule does with some number of micro-batches."""

    def __init__(self, pipeline: Pipeline, times: Times, count: int):
        p = replace(pipeline, micro_batches=count)
        self.count, self.times = count, times
        self.step_s = step_s(p.schedule, p.ranks, count, p.virtual_stages, times)
        self.held = running(p.schedule, p.ranks, count, p.virtual_stages)
        self.late = p.late


def _at(pipeline: Pipeline, times: Times, count: int) -> _At | None:
    try:
        return _At(pipeline, times, count)
    except ScheduleError:
        return None


class _Line:
    """A path and counts that grow evenly, as two numbers of micro-batches say."""

    def __init__(self, start: Path, each: Path, now: _At, after: _At | None):
        self.start, self.each, self.now, self.after = start, each, now, after
        self.lines: list[Line] = []
        if after is not None and _form(now) == _form(after):
            for a, b in zip(_flat(now), _flat(after), strict=True):
                each_more = Fraction(b - a, after.count - now.count)
                self.lines.append((a - each_more * now.count, each_more))

    def is_so(self, at: _At | None) -> bool:
        """Whether a schedule is what this says of it."""
        if at is None or not self.lines or _form(at) != _form(self.now):
            return False
        path_s = self.start.plus(self.each, at.count).seconds(at.times)
        is_longest = abs(path_s - at.step_s) <= SAME * at.step_s
        return is_longest and [start + each * at.count for start, each in self.lines] == _flat(at)

    def growth(self, counts: Counts) -> Growth:
        """All of it, for some counts."""
        lines = iter(self.lines)
        held = tuple(tuple(tuple(next(lines) for _ in each.numbers) for each in rank) for rank in self.now.held)
        work = tuple(tuple(map(_line, *rows)) for rows in zip(self.start.work, self.each.work, strict=True))
        return Growth(counts, work, tuple(map(_line, self.start.sends, self.each.sends)), held, tuple(lines))


def _form(at: _At) -> list[list[object]]:
    """The moments that each rank has, without numbers."""
    return [[each.form for each in rank] for rank in at.held]


def _flat(at: _At) -> list[int]:
    """How much is held beside each action, and how many micro-batches are late."""
    return [*(number for rank in at.held for each in rank for number in each.numbers), *at.late]


def _line(start: float, each: float) -> Line:
    return Fraction(start).limit_denominator(1 << 20), Fraction(each).limit_denominator(1 << 20)
