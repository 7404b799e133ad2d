"""Choices that another one equals or beats in every sum, whatever the neighbours choose."""

from __future__ import annotations

import numpy as np

from planner.solve.choices.dominance import Sum, dominated

ANY = ~np.eye(3, dtype=bool)


def test_each_sum_and_what_is_known_otherwise_counts() -> None:
    first, second = Sum(np.array([1.0, 2.0, 2.0]), []), Sum(np.array([1.0, 0.0, 3.0]), [])
    assert dominated(ANY, [], [first]).tolist() == [False, True, True]
    assert dominated(ANY, [], [first, second]).tolist() == [False, False, True]
    not_the_first = ANY & (np.arange(3) != 0)[:, None]
    assert dominated(not_the_first, [], [first]).tolist() == [False, False, True]


def test_a_choice_must_be_allowed_wherever_the_other_is() -> None:
    alone, costs = np.array([1.0, 2.0, 3.0]), np.array([[0.0, 9.0], [0.0, 0.0], [0.0, 0.0]])
    allowed = np.array([[True, False], [True, True], [True, False]])
    assert dominated(ANY, [allowed], [Sum(alone, [(costs, allowed)])]).tolist() == [False, False, True]


def test_one_of_several_is_left_that_rounding_has_cost_no_less_than_each_other() -> None:
    numbers = np.array([[0.72, 0.31, 0.09], [0.09, 0.72, 0.31], [0.31, 0.09, 0.72]])
    alone, *pairs = (each[:, None] for each in numbers.T)
    found = dominated(ANY, [], [Sum(alone[:, 0], [(each, None) for each in pairs])])
    assert 0 < found.sum() < 3
