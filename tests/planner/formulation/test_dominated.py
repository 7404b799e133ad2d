"""What costs no less than another choice, whatever the prices, may be left out without changing any bound."""

from __future__ import annotations

import numpy as np
import pytest

from planner.formulation.cost_table import BODY, COVER, FORWARD, HELD, Costs
from planner.formulation.dominated import dominated
from planner.solve.choices.under_many import least_of_each
from planner.solve.pipeline.master import Prices
from planner.solve.problem import Floats
from tests.planner.search.test_pipeline_bounds import Drawn


def one(**uses: list[float]) -> Costs:
    numbers = {"forward": FORWARD, "cover": COVER, "held": HELD}
    parts = {numbers[name]: np.array(each) for name, each in uses.items()}
    return Costs(BODY, (len(next(iter(parts.values()))),), parts)


def a_pair(forward: list[list[float]], wall: Floats | None = None) -> Costs:
    table = np.array(forward)
    return Costs(BODY, table.shape, {FORWARD: table}, wall=wall)


EVERY = (np.arange(3), np.arange(2))


def test_a_choice_that_is_dearer_in_each_use_is_dominated_and_of_equal_ones_all_but_the_first() -> None:
    singles = (one(forward=[1.0, 2.0, 1.0], held=[3.0, 3.0, 3.0]), one(forward=[1.0, 2.0], held=[2.0, 1.0]))
    first, second = dominated(singles, {}, EVERY)
    assert first.tolist() == [False, True, True] and second.tolist() == [False, False]


def test_more_work_that_covers_is_not_dearer() -> None:
    singles = (one(forward=[1.0, 2.0, 1.5], cover=[0.0, 1.0, 0.0]), one(forward=[1.0, 1.0], cover=[0.0, 1.0]))
    first, second = dominated(singles, {}, EVERY)
    assert first.tolist() == [False, False, True] and second.tolist() == [True, False]


def test_what_a_neighbour_makes_dearer_or_forbids_counts() -> None:
    singles = (one(forward=[1.0, 2.0, 4.0]), one(forward=[1.0, 1.0]))
    dearer = {(0, 1): [a_pair([[0.0, 1.5], [0.0, 0.0], [0.0, 0.0]])]}
    assert dominated(singles, dearer, EVERY)[0].tolist() == [False, False, True]
    walled = {(0, 1): [a_pair([[0.0, 0.0]] * 3, np.array([[0.0, np.inf], [0.0, np.inf], [0.0, 0.0]]))]}
    assert dominated(singles, walled, EVERY)[0].tolist() == [False, True, False]
    itself = {(0, 0): [a_pair([[9.0] * 3, [0.0] * 3, [0.0] * 3])]}
    assert dominated(singles, itself, EVERY)[0].tolist() == [True, False, True]


def test_of_very_many_choices_none_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    singles, pairs = (one(forward=[1.0, 2.0, 3.0]), one(forward=[1.0, 1.0])), {(0, 1): [a_pair([[0.0, 0.0]] * 3)]}
    assert dominated(singles, pairs, EVERY)[0].tolist() == [False, True, True]
    monkeypatch.setattr("planner.formulation.dominated.MOST", 17)
    assert not dominated(singles, pairs, EVERY)[0].any()


@pytest.mark.parametrize("seed", range(20))
def test_no_prices_say_more_or_less_without_what_is_dominated(seed: int) -> None:
    drawn, rng = Drawn.of(seed), np.random.default_rng(seed)
    costs = drawn.bounds(drawn.fewest).costs
    fewer = costs.undominated()
    assert costs.kept is not None and fewer.kept is not None
    assert sum(map(len, fewer.kept)) < sum(map(len, costs.kept))
    at = [(stage, level) for stage in range(drawn.stages) for level in range(len(costs.levels))]
    for _ in range(5):
        forward, backward, held, saved = rng.random((4, drawn.stages)) * rng.integers(0, 2, (4, 1))
        nothing = np.zeros(drawn.stages)
        prices = Prices(forward, backward, 1e-9 * held, 1e-9 * saved, nothing, 0.0, 0.0)
        once = float(rng.random())
        behind = once * float(rng.integers(0, 2))
        before, after = (least_of_each(*each.under(at, prices, prices, once, behind)).bounds for each in (costs, fewer))
        assert after == pytest.approx(before, rel=1e-9, abs=1e-15)
