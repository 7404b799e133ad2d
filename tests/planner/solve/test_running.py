"""What a rank holds beside each action of a schedule."""

from __future__ import annotations

import pytest

from planner.solve.pipeline.running import Running, running
from planner.solve.pipeline.schedule import NAMES, VIRTUAL_STAGES, schedule


def test_two_stages_of_gpipe_by_hand() -> None:
    """All forwards before the first backward; gradients that were sent back are held until the end of the step."""
    values, gradients = (1, "F"), (0, "B")
    first, second = running("gpipe", 2, 4, 1)
    room = (gradients, False, 1)
    assert {*first} == {
        Running(0, "F", False, (3,), (0,), (False,), (room, (values, True, 3))),
        Running(0, "B", True, (3,), (0,), (False,), (room,)),
        Running(0, "B", False, (2,), (0,), (True,), (room,)),
    }
    assert {*second} == {
        Running(1, "F", False, (3,), (0,), (False,), ()),
        Running(1, "B", True, (3,), (0,), (False,), ()),
        Running(1, "B", False, (2,), (0,), (True,), ((gradients, True, 1),)),
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks, count", [(2, 4), (4, 9), (3, 24)])
def test_no_moment_of_a_schedule_holds_more(name: str, ranks: int, count: int) -> None:
    """Micro-batches in flight, the one that is worked on included, are those of the schedule's fullest moments."""
    virtual = VIRTUAL_STAGES[name][0]
    held = schedule(name, ranks, count, virtual).held
    for rank, every in enumerate(running(name, ranks, count, virtual)):
        stages = sorted({each.stage for each in every})
        counts = {
            tuple(number + (stage == each.stage) for stage, number in zip(stages, each.counts, strict=True))
            for each in every
        }
        assert {*held[rank]} <= counts
        assert all(any(all(map(int.__le__, one, most)) for most in held[rank]) for one in counts)
