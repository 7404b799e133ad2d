"""Schedules as data: what exists, what is refused, and by which words."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.base.errors import ScheduleError
from planner.solve.pipeline.schedule import NAMES, VIRTUAL_STAGES, Action, Schedule, fullest, parse, placed, schedule


@st.composite
def sizes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A schedule's name, ranks, micro-batches and virtual stages that go together."""
    name = draw(st.sampled_from(NAMES))
    least, most = VIRTUAL_STAGES[name]
    ranks = draw(st.integers(1, 6))
    count = draw(st.integers(ranks if name == "2bw" else 1, 25))
    return name, ranks, count, draw(st.integers(least, most or least + 2))


@given(sizes())
def test_every_schedule_is_valid_for_any_count(size: tuple[str, int, int, int]) -> None:
    name, ranks, count, virtual = size
    found = schedule(name, ranks, count, virtual)
    found.check()
    assert found.ranks == ranks and found.stages == ranks * virtual
    assert found.rank_of == placed(name, ranks, virtual)
    for row in found.rows:
        kinds = [action.kind for action in row]
        assert kinds.count("F") == count * virtual == kinds.count("B") + kinds.count("I")
        assert kinds.count("I") == kinds.count("W")
        for stage in {action.stage for action in row}:  # in order, as running statistics go from one to the next
            assert [a.micro_batch for a in row if a.kind == "F" and a.stage == stage] == [*range(count)]


@given(sizes())
def test_what_is_written_is_read(size: tuple[str, int, int, int]) -> None:
    found = schedule(*size)
    assert parse(found.name, found.text(), found.micro_batches).rows == found.rows


def test_1f1b_by_hand() -> None:
    assert schedule("1f1b", 2, 3).text() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


def test_2bw_leaves_backwards_to_the_next_step_and_unrolls_to_1f1b() -> None:
    found = schedule("2bw", 3, 4)
    assert found.overlaps and not found.first.overlaps
    assert found.text().splitlines() == [
        "0F0,0B-2,0F1,0B-1,0F2,0B0,0F3,0B1",
        "1F0,1B-1,1F1,1B0,1F2,1B1,1F3,1B2",
        "2B-1,2F0,2B0,2F1,2B1,2F2,2B2,2F3",
    ]
    assert found.first.text().splitlines()[0] == "0F0,0F1,0F2,0B0,0F3,0B1"
    assert found.stream(5).rows == schedule("1f1b", 3, 20).rows
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
    assert schedule("gpipe", 2, 4).moments == 2 * ((((4,), False), ((3,), True)),)
    assert schedule("gpipe", 2, 1).moments == 2 * ((((1,), True),),)
    assert schedule("1f1b", 2, 4).moments == ((((2,), True),), (((1,), True),))
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


@pytest.mark.parametrize(
    "text, words",
    [
        ("0F0,0B0\n1F0,1Q0", "'1Q0' is not an action"),
        ("0F0,0B0\n1F0,1B1", "rank 1 does 1B1: there are kinds"),
        ("0F0,0B0,0B0\n1F0,1B0", "rank 0 does 0B0 after 0B0"),
        ("0F0,0B0,0W0\n1F0,1B0", "rank 0 does 0W0 after 0B0"),
        ("0F0,0B0,1B0\n1F0", "rank 1 does 1F0, but stage 1 is on rank 0"),
        ("0F0\n1F0,1B0", "no rank does B or I of stage 0 for micro-batch 0; add 0I0 to rank 0"),
        ("0F0,0B0\n1F0,1I0", "no rank does B or W of stage 1"),
        ("0B0\n1F0,1B0", "no rank does F of stage 0 for micro-batch 0"),
        ("0B0,0F0\n1F0,1B0", "rank 0 does 0B0 before 0F0"),
        ("0F0,0W0,0I0\n1F0,1B0", "rank 0 does 0W0 before 0I0"),
    ],
)
def test_a_wrong_edit_is_refused_by_naming_the_action(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(words)):
        parse("edited", text, 1)


@pytest.mark.parametrize(
    "text, words",
    [
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1", "no rank does B or I of stage 0 for micro-batch 1"),
        ("0F0,0B-1,0F1,0B0\n1F0,1F1,1B-2,1B-1", "waits at 0B0 for 1B or I0 of rank 1"),  # left to the next step
        ("0B-1,0F0,0F1,0B0\n1B0,1F0,1F1,1B1", "rank 1 does 1B0 before 1F0"),
        (
            "0F0,0B-1,0F1,0B0\n1F-1,1B-1,1F0,1B0",
            "a rank does 1F-1, left over from the step before; only whole backwards",
        ),
    ],
)
def test_steps_that_overlap_are_held_to_each_other(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(words)):
        parse("edited", text, 2)


def test_a_deadlock_says_who_waits_for_what() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 waits at 0B0 for 1B or I0 of rank 1; rank 1 waits at 1F1 for 0F1"):
        parse("edited", "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1", 2)


@given(sizes(), st.data())
def test_one_wrong_kind_is_always_found(size: tuple[str, int, int, int], data: st.DataObject) -> None:
    found = schedule(*size)
    rank = data.draw(st.integers(0, found.ranks - 1))
    row = list(found.rows[rank])
    place = data.draw(st.integers(0, len(row) - 1))
    action = row[place]
    row[place] = Action(action.stage, "W" if action.kind == "F" else "F", action.micro_batch)
    broken: Schedule = replace(found, rows=(*found.rows[:rank], tuple(row), *found.rows[rank + 1 :]))
    with pytest.raises(ScheduleError, match=r"does|rank"):
        broken.check()
