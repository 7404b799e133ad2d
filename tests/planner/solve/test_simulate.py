"""The simulated step: closed forms, laws, and the same by other ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.solve.pipeline.schedule import NAMES, VIRTUAL_STAGES, schedule
from planner.solve.pipeline.simulate import Times, critical, longest, simulate, step_s
from tests.planner.solve.test_schedule import stream

Size = tuple[str, int, int, int]
SIZES = [(2, 2), (2, 7), (4, 4), (4, 12), (8, 32), (16, 64)]


def equal(stages: int, forward: float, backward_input: float, backward_weight: float, send: float = 0.0) -> Times:
    parts = (np.full(stages, each) for each in (forward, backward_input, backward_weight))
    return Times(*parts, np.full(stages - 1, send))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Size, Times]:
    """A schedule's size and random times, some of them 0."""
    name = draw(st.sampled_from(NAMES))
    least, most = VIRTUAL_STAGES[name]
    ranks = draw(st.integers(1, 5))
    count = draw(st.integers(ranks, 60))
    virtual = draw(st.integers(least, most or least + 1))
    stages = ranks * virtual
    seconds = st.floats(0.01, 1) | st.sampled_from([0.0, 1.0])
    parts = [np.array(draw(st.lists(seconds, min_size=n, max_size=n))) for n in (stages, stages, stages, stages - 1)]
    return (name, ranks, count, virtual), Times(*parts)


@pytest.mark.parametrize("ranks, count", SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name: str, ranks: int, count: int) -> None:
    found = simulate(schedule(name, ranks, count), equal(ranks, 1.0, 1.5, 0.5))
    assert found.bubble == pytest.approx((ranks - 1) / (count + ranks - 1))


@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("ranks, count", [size for size in SIZES if size[1] % size[0] == 0])
def test_interleaving_divides_the_idle_time_by_the_virtual_stages(ranks: int, count: int, virtual: int) -> None:
    """Narayanan et al., 2021, section 2.2: idle over ideal time is (p - 1) / (v m)."""
    found = simulate(
        schedule("interleaved_1f1b", ranks, count, virtual),
        equal(ranks * virtual, 1 / virtual, 1 / virtual, 1 / virtual),
    )
    assert found.step_s / (3 * count) - 1 == pytest.approx((ranks - 1) / (virtual * count))


@pytest.mark.parametrize("ranks, count", [(4, 8), (8, 32), (16, 64)])
def test_splitting_the_backward_fills_the_bubble(ranks: int, count: int) -> None:
    def idle(name: str, virtual: int) -> float:
        parts = (1 / virtual,) * 3
        return simulate(schedule(name, ranks, count, virtual), equal(ranks * virtual, *parts)).step_s - 3 * count

    assert idle("1f1b", 1) == pytest.approx(3 * (ranks - 1))
    assert idle("zero_bubble", 1) == pytest.approx(ranks - 1)  # ZB-H1: (p - 1)(F + I - W), Qi et al., 2023, table 2
    assert idle("zbv", 2) == idle("dualpipev", 2) == pytest.approx((ranks - 1) / 2)


@pytest.mark.parametrize("ranks, count", [(4, 4), (4, 8), (8, 32), (16, 64)])
def test_2bw_only_waits_for_the_pipeline_to_fill(ranks: int, count: int) -> None:
    """The last rank has a backward to do until the first forward comes, ``ranks - 1`` forwards late."""
    times = equal(ranks, 1, 1, 1)
    assert simulate(schedule("2bw", ranks, count), times).step_s == pytest.approx(3 * count + (ranks - 1) - 2)
    idle = longest(stream(schedule("2bw", ranks, count), 60), times)[0] - 3 * count * 60
    assert idle == pytest.approx(3 * (ranks - 1))  # without the waiting between steps: only once


@given(cases())
def test_2bw_takes_at_least_its_part_of_a_long_run(case: tuple[Size, Times]) -> None:
    """A run that waits after every step; the first and the last, which only does what is left, are shorter."""
    (_, ranks, count, _), times = case
    parts = (each[:ranks] for each in (times.forward_s, times.input_s, times.weight_s))
    times, found = Times(*parts, times.send_s[: ranks - 1]), schedule("2bw", ranks, count)
    assert longest(stream(found, 5), times)[0] <= 6 * simulate(found, times).step_s * (1 + 1e-9)


def test_by_hand() -> None:
    """Two stages, one micro-batch, one second on the way: 1 + 1 + 2 + 4 + 1 + 2."""
    times = Times(np.array([1.0, 2.0]), np.array([1.0, 3.0]), np.array([1.0, 1.0]), np.array([1.0]))
    found = simulate(schedule("1f1b", 2, 1), times)
    when = {str(a): (s, e) for a, s, e in zip(found.actions, found.start_s, found.end_s, strict=True)}
    assert when == {"0F0": (0, 1), "1F0": (2, 4), "1B0": (4, 8), "0B0": (9, 11)}
    assert found.step_s == 11
    assert found.bubble == pytest.approx(1 - 9 / 22)


@given(cases())
def test_nothing_starts_before_what_it_needs(case: tuple[Size, Times]) -> None:
    size, times = case
    found = simulate(schedule(*size), times)
    home = found.schedule.rank_of
    end = dict(zip(found.actions, found.end_s, strict=True))
    end |= {a._replace(kind="I"): seconds for a, seconds in end.items() if a.kind == "B"}
    free = dict.fromkeys(home, 0.0)
    for action, rank, start, until in zip(found.actions, found.ranks, found.start_s, found.end_s, strict=True):
        assert start >= free[rank] - 1e-9
        free[rank] = until
        other = action.stage + {"F": -1, "W": 0}.get(action.kind, 1)
        needs = action._replace(stage=other, kind="F" if action.kind == "F" else "I")
        is_done_before = action.micro_batch < 0 and needs not in end
        if action.kind != "W" and 0 <= other < len(home) and not is_done_before:
            way = times.send_s[min(action.stage, other)] if home[action.stage] != home[other] else 0.0
            assert start >= end[needs] + way - 1e-9


@given(cases())
def test_never_below_the_busiest_rank_nor_the_way_of_one_micro_batch(case: tuple[Size, Times]) -> None:
    (name, ranks, count, virtual), times = case
    found = schedule(name, ranks, count, virtual)
    step = step_s(name, ranks, count, virtual, times)
    busy = np.zeros(ranks)
    np.add.at(busy, list(found.rank_of), times.work_s)
    assert step >= count * busy.max() * (1 - 1e-9)
    if name != "2bw":  # whose steps overlap
        assert step >= (times.forward_s + times.input_s).sum() * (1 - 1e-9)


@given(cases(), st.data())
def test_longer_parts_never_make_a_shorter_step(case: tuple[Size, Times], data: st.DataObject) -> None:
    size, times = case
    field = data.draw(st.sampled_from(["forward_s", "input_s", "weight_s", "send_s"]))
    seconds = getattr(times, field)
    if len(seconds):
        longer = seconds.copy()
        longer[data.draw(st.integers(0, len(seconds) - 1))] += data.draw(st.floats(0, 1))
        slower = Times(**{**vars(times), field: longer})
        assert step_s(*size, slower) >= step_s(*size, times) * (1 - 1e-9)


@given(cases(), st.data())
def test_a_step_is_as_long_as_a_path_and_no_path_is_longer(case: tuple[Size, Times], data: st.DataObject) -> None:
    size, times = case
    found = schedule(*size)
    seconds, path = longest(found, times)
    assert seconds == pytest.approx(simulate(found, times).step_s)
    assert path.seconds(times) == pytest.approx(seconds)
    order = data.draw(st.permutations(range(found.stages)))
    other = Times(times.forward_s[order], times.input_s[order], times.weight_s[order], times.send_s)
    assert path.seconds(other) <= longest(found, other)[0] * (1 + 1e-9) + 1e-12


@given(cases())
def test_a_short_step_says_how_long_a_long_one_takes(case: tuple[Size, Times]) -> None:
    (name, ranks, count, virtual), times = case
    count *= ranks  # so that rounds come out even
    wanted = simulate(schedule(name, ranks, count, virtual), times).step_s
    assert step_s(name, ranks, count, virtual, times) == pytest.approx(wanted, rel=1e-8, abs=1e-12)
    seconds, path = critical(name, ranks, count, virtual, times)
    assert seconds == pytest.approx(wanted, rel=1e-8, abs=1e-12)
    assert path.seconds(times) == pytest.approx(wanted, rel=1e-8, abs=1e-12)
    reverse = Times(*(each[::-1] for each in (times.forward_s, times.input_s, times.weight_s, times.send_s)))
    assert path.seconds(reverse) <= step_s(name, ranks, count, virtual, reverse) * (1 + 1e-8) + 1e-12
