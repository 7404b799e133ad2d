"""How schedules grow with their micro-batches: what is said of other counts is what is simulated there."""

from __future__ import annotations

import numpy as np
import pytest

from planner.base.errors import ScheduleError
from planner.solve.pipeline.growth import Counts, Growth, growth
from planner.solve.pipeline.running import running
from planner.solve.pipeline.schedule import NAMES, VIRTUAL_STAGES, schedule
from planner.solve.pipeline.simulate import Times, longest
from planner.solve.pipeline.stages import Pipeline

SHAPES = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (2, 3)]


def seconds_of(found: Growth, times: Times, count: int) -> float:
    """Seconds of the path that is said to be the longest."""
    rows = zip(found.work, (times.forward_s, times.input_s, times.weight_s), strict=True)
    parts = [(line, s) for lines, seconds in rows for line, s in zip(lines, seconds, strict=True)]
    parts += zip(found.sends, times.send_s, strict=True)
    return sum(float(start + each * count) * s for (start, each), s in parts)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_even", [True, False])
def test_every_count_that_is_told_is_as_simulated(name: str, is_even: bool) -> None:
    """The longest path, micro-batches in flight and late gradients, far beyond the counts that were tried."""
    rng, told = np.random.default_rng(7), 0
    for ranks, virtual in SHAPES:
        if VIRTUAL_STAGES[name][0] > virtual or (VIRTUAL_STAGES[name][1] or virtual) < virtual:
            continue
        stages = ranks * virtual
        draw = (lambda size: np.ones(size)) if is_even else (lambda size: rng.uniform(1, 2, size))
        times = Times(draw(stages), draw(stages), draw(stages), 0.2 * draw(stages - 1))
        for planned in (2, 4, 5, 12):
            try:
                found = growth(Pipeline(name, ranks, planned, virtual), times)
            except ScheduleError:  # 2bw with fewer micro-batches than stages
                continue
            if found is None:
                continue
            assert planned in found.counts
            last = found.counts.most or 10 * stages + 30
            counts = [count for count in range(1, last + 1) if count in found.counts]
            for count in counts[:12] + counts[-6:]:
                order = schedule(name, ranks, count, virtual)
                assert seconds_of(found, times, count) == pytest.approx(longest(order, times)[0], rel=1e-9)
                there, as_planned = (running(name, ranks, each, virtual) for each in (count, planned))
                numbers = tuple(tuple(each.numbers for each in rank) for rank in there)
                assert late_and_held(found, count) == (order.late, numbers)
                forms = [[[each.form for each in rank] for rank in every] for every in (as_planned, there)]
                assert forms[0] == forms[1]
                told += count != planned
    assert told > 40


def late_and_held(found: Growth, count: int) -> object:
    """As a schedule says them."""
    held = tuple(tuple(tuple(start + each * count for start, each in moment) for moment in rank) for rank in found.held)
    return tuple(start + each * count for start, each in found.late), held


def test_by_hand() -> None:
    """All micro-batches one after another on the slowest stage, once through the others."""
    times = Times(np.array([1.0, 3.0]), np.array([2.0, 6.0]), np.zeros(2), np.array([0.5]))
    for name, held in (("gpipe", [(-1, 1), (-1, 1)]), ("1f1b", [(1, 0), (0, 0)])):  # beside the one that runs
        found = growth(Pipeline(name, 2, 8), times)
        assert found is not None and [rank[0][0] for rank in found.held] == held
        for count in (4, 9, 100):
            assert count in found.counts
            assert seconds_of(found, times, count) == pytest.approx(1 + 2 + 2 * 0.5 + 9 * count)


def test_rounds_that_are_not_full_are_others() -> None:
    times = Times(*(np.ones(4) for _ in range(3)), np.zeros(3))
    full = growth(Pipeline("interleaved_1f1b", 2, 8, 2), times)
    assert full is not None and full.counts.step == 2 and 9 not in full.counts and 100 in full.counts
    assert growth(Pipeline("interleaved_1f1b", 2, 9, 2), times) is None


@pytest.mark.parametrize(
    "counts, text",
    [
        (Counts(2, None), "2, 3, ..."),
        (Counts(4, None, 4), "4, 8, ..."),
        (Counts(2, 5), "2 to 5"),
        (Counts(3, 9, 2), "3 to 9, every 2 further"),
        (Counts(3, 3), "3"),
    ],
    ids=str,
)
def test_counts_in_words(counts: Counts, text: str) -> None:
    assert str(counts) == text
    assert counts.least in counts and counts.least - counts.step not in counts
