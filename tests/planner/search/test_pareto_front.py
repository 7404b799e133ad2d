"""The Pareto front of step time and memory: every corner is the best within its memory, by fresh searches and by brute
force.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.search.pareto_front import Corner, Stopped, pareto_front
from planner.search.search import begin_search, search
from tests.planner.search.brute_force import best_of
from tests.planner.search.one_space import Case, drawn, peak_of
from tests.planner.search.test_optimum import with_memory

SEEDS = (101, 206, 370)
ON_DEVICE = Pins(offload="none")
ROUNDING = 1e-9


@cache
def front_of(seed: int) -> tuple[Case, tuple[Corner, ...], Stopped]:
    case = drawn(seed)
    assert case is not None
    found = search(case.graph, case.cluster, ON_DEVICE, Training())
    usable = case.cluster.device.usable_bytes
    first = Corner(found.peak_bytes, usable, found.evaluation.time_s, found.bound_s, found.best)
    return case, *pareto_front(begin_search(case.graph, case.cluster, ON_DEVICE, Training()), first, points=8)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_corner_is_the_best_within_its_memory(seed: int) -> None:
    case, corners, stopped = front_of(seed)
    is_proved = all(corner.bound_s >= corner.step_s * (1 - ROUNDING) for corner in corners)
    assert stopped == ("complete" if is_proved else "open") and len(corners) > 1
    for corner in corners:
        assert corner.found is None or peak_of(corner.found) == corner.memory_bytes
        assert corner.bound_s <= corner.step_s * (1 + ROUNDING)
        best = best_of(case.brute.optima(corner.memory_bytes))
        assert corner.bound_s <= best.time_s * (1 + ROUNDING)
        assert corner.step_s == pytest.approx(best.time_s, rel=ROUNDING)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_memory_never_takes_longer(seed: int) -> None:
    _, corners, _ = front_of(seed)
    for lean, fast in pairwise(corners):
        assert lean.memory_bytes < fast.memory_bytes and lean.step_s > fast.step_s and lean.bound_s >= fast.bound_s


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_a_fresh_search_within_the_memory_of_a_corner_finds_nothing_faster(seed: int) -> None:
    case, corners, _ = front_of(seed)
    for corner in corners:
        fresh = search(case.graph, with_memory(case.cluster, corner.memory_bytes), ON_DEVICE, Training())
        assert corner.bound_s <= corner.step_s <= fresh.evaluation.time_s * (1 + ROUNDING)
