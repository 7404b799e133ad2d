"""The Pareto front of step time and memory: every point is the best within its memory, by fresh searches and by brute
force.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.search.pareto_front import FrontPoint, Stopped, pareto_front
from planner.search.search import begin_search, search
from tests.planner.search.brute_force import best_of
from tests.planner.search.one_space import Case, drawn, peak_of
from tests.planner.search.test_optimum import with_memory

SEEDS = (101, 206, 370)
ON_DEVICE = Pins(offload="none")
ROUNDING = 1e-9


@cache
def front_of(seed: int) -> tuple[Case, tuple[FrontPoint, ...], Stopped]:
    case = drawn(seed)
    assert case is not None
    found = search(case.graph, case.cluster, ON_DEVICE, Training())
    usable = case.cluster.device.usable_bytes
    first = FrontPoint(found.peak_bytes, usable, found.evaluation.time_s, found.bound_s, found.best)
    with begin_search(case.graph, case.cluster, ON_DEVICE, Training()) as begun:
        return case, *pareto_front(begun, first, most=8)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_point_is_the_best_within_its_memory(seed: int) -> None:
    case, points, stopped = front_of(seed)
    is_proved = all(point.bound_s >= point.step_s * (1 - ROUNDING) for point in points)
    assert stopped == ("complete" if is_proved else "open") and len(points) > 1
    for point in points:
        assert point.found is None or peak_of(point.found) == point.memory_bytes
        assert point.bound_s <= point.step_s * (1 + ROUNDING)
        best = best_of(case.brute.optima(point.memory_bytes))
        assert point.bound_s <= best.time_s * (1 + ROUNDING)
        assert point.step_s == pytest.approx(best.time_s, rel=ROUNDING)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_memory_never_takes_longer(seed: int) -> None:
    _, points, _ = front_of(seed)
    for lean, fast in pairwise(points):
        assert lean.memory_bytes < fast.memory_bytes and lean.step_s > fast.step_s and lean.bound_s >= fast.bound_s


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_a_fresh_search_within_the_memory_of_a_point_finds_nothing_faster(seed: int) -> None:
    case, points, _ = front_of(seed)
    for point in points:
        fresh = search(case.graph, with_memory(case.cluster, point.memory_bytes), ON_DEVICE, Training())
        assert point.bound_s <= point.step_s <= fresh.evaluation.time_s * (1 + ROUNDING)
