"""Schedules as data: what exists, what is refused, and by which words."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.base.errors import ScheduleError
from planner.solve.pipeline.schedule import NAMES, VIRTUAL_STAGES, Schedule, fullest, is_left_over, placed, schedule


@st.composite
def sizes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A schedule's name, ranks, micro-batches and virtual stages that go together."""
    name = draw(st.sampled_from(NAMES))
    least, most = VIRTUAL_STAGES[name]
    ranks = draw(st.integers(1, 6))
    count = draw(st.integers(ranks if name == "2bw" else 1, 25))
    return name, ranks, count, draw(st.integers(least, most or least + 2))


def text(found: Schedule) -> str:
    """One line per rank, actions between commas, as torch reads it."""
    return "\n".join(",".join(map(str, row)) for row in found.rows) + "\n"


def stream(found: Schedule, steps: int) -> Schedule:
    """Several steps after each other as one schedule, from an empty pipeline to an empty pipeline."""
    rows = []
    for row in found.rows:
        left = tuple(filter(is_left_over, row))
        all_ = [
            a._replace(micro_batch=a.micro_batch + step * found.micro_batches)
            for step, actions in enumerate((*(steps * (row,)), left))
            for a in actions
        ]
        rows.append(tuple(action for action in all_ if not is_left_over(action)))
    return replace(found, micro_batches=steps * found.micro_batches, rows=tuple(rows))


def check(found: Schedule) -> None:
    """Each action is there once, on its stage's rank and after what that must have done before, and no rank hangs."""
    for each in {found, found.first, stream(found, 2)} if found.overlaps else {found}:
        assert len(each.flow.actions) == sum(map(len, each.rows))
    whole, done = stream(found, 2) if found.overlaps else found, Counter[tuple[int, str, int]]()
    for rank, row in enumerate(whole.rows):
        for at, action in enumerate(row):
            first = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            assert first is None or action._replace(kind=first) in row[:at], action
            assert whole.rank_of[action.stage] == rank
            done.update(
                (action.stage, part, action.micro_batch) for part in ("IW" if action.kind == "B" else action.kind)
            )
    assert done == Counter(itertools.product(range(whole.stages), "FIW", range(whole.micro_batches)))


@given(sizes())
def test_every_schedule_is_valid_for_any_count(size: tuple[str, int, int, int]) -> None:
    name, ranks, count, virtual = size
    found = schedule(name, ranks, count, virtual)
    check(found)
    assert found.ranks == ranks and found.stages == ranks * virtual
    assert found.rank_of == placed(name, ranks, virtual)
    for row in found.rows:
        kinds = [action.kind for action in row]
        assert kinds.count("F") == count * virtual == kinds.count("B") + kinds.count("I")
        assert kinds.count("I") == kinds.count("W")
        for stage in {action.stage for action in row}:  # in order, as running statistics go from one to the next
            assert [a.micro_batch for a in row if a.kind == "F" and a.stage == stage] == [*range(count)]


def test_1f1b_by_hand() -> None:
    assert text(schedule("1f1b", 2, 3)) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


def test_2bw_leaves_backwards_to_the_next_step_and_unrolls_to_1f1b() -> None:
    found = schedule("2bw", 3, 4)
    assert found.overlaps and not found.first.overlaps
    assert text(found).splitlines() == [
        "0F0,0B-2,0F1,0B-1,0F2,0B0,0F3,0B1",
        "1F0,1B-1,1F1,1B0,1F2,1B1,1F3,1B2",
        "2B-1,2F0,2B0,2F1,2B1,2F2,2B2,2F3",
    ]
    assert text(found.first).splitlines()[0] == "0F0,0F1,0F2,0B0,0F3,0B1"
    assert stream(found, 5).rows == schedule("1f1b", 3, 20).rows
    assert found.held == (((3,),), ((2,),), ((1,),))
    assert schedule("1f1b", 3, 4).first is schedule("1f1b", 3, 4)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("gpipe", (8, 8, 8, 8)),
        ("1f1b", (4, 3, 2, 1)),  # as many as stages from here on (PipeDream-Flush)
        ("zero_bubble", (4, 4, 4, 4)),  # ZB-H1 holds no more than 1f1b's first stage (Qi et al., 2023)
    ],
)
def test_micro_batches_held(name: str, expected: tuple[int, ...]) -> None:
    assert schedule(name, 4, 8).held == tuple(((count,),) for count in expected)


def test_gradients_are_there_when_the_first_backward_is_over() -> None:
    """With gpipe, after the moment at which most is in flight; otherwise as much is in flight again."""
    assert schedule("gpipe", 2, 4).moments == tuple((((4,), False, rank), ((3,), True, rank)) for rank in range(2))
    assert schedule("gpipe", 2, 1).moments == tuple((((1,), True, rank),) for rank in range(2))
    assert schedule("1f1b", 2, 4).moments == ((((2,), True, 0),), (((1,), True, 1),))
    assert all(moment.added for row in schedule("zbv", 4, 8, 2).moments for moment in row)


def test_on_a_v_the_late_stage_holds_what_the_early_one_gave_up() -> None:
    moments = (((8, 0), (7, 1)), ((7, 1), (6, 2)), ((6, 2), (5, 3)), ((5, 3), (4, 4)))
    assert schedule("zbv", 4, 8, 2).held == moments


@given(sizes())
def test_the_fullest_moments_are_the_largest_of_all(size: tuple[str, int, int, int]) -> None:
    found = schedule(*size)
    for row, moments in zip(found.rows, found.held, strict=True):
        stages = sorted({action.stage for action in row})
        counts = dict.fromkeys(stages, sum(action.micro_batch < 0 for action in row))
        seen = {tuple(counts.values())}
        for action in row:
            counts[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
            seen.add(tuple(counts.values()))
        assert set(moments) <= seen
        assert all(any(all(a <= b for a, b in zip(each, most, strict=True)) for most in moments) for each in seen)


@pytest.mark.parametrize("count", [30, 36, 77, 120])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_longer_step_holds_no_more(name: str, ranks: int, count: int) -> None:
    least, most = VIRTUAL_STAGES[name]
    for virtual in range(least, (most or 4) + 1):
        assert fullest(name, ranks, count, virtual) == schedule(name, ranks, count, virtual).moments


@pytest.mark.parametrize(
    "size, words",
    [
        (("1f2b", 2, 2, 1), "no schedule '1f2b'; there are: gpipe, 1f1b,"),
        (("1f1b", 0, 2, 1), "0 ranks"),
        (("1f1b", 2, 0, 1), "0 micro-batches"),
        (("1f1b", 2, 2, 0), "0 virtual stages"),
        (("1f1b", 2, 2, 2), "1 virtual stage(s) per rank, not 2"),
        (("interleaved_1f1b", 2, 2, 1), "at least 2 virtual stage(s) per rank, not 1"),
        (("zbv", 2, 2, 3), "2 virtual stage(s) per rank, not 3"),
        (("2bw", 4, 3, 1), "at least as many micro-batches as stages"),
    ],
)
def test_what_does_not_exist_is_refused(size: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(words)):
        schedule(*size)
