"""Cheapest assignments under many weights at once, against exhaustive enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.solve.choices import under_many
from planner.solve.choices.under_many import in_order, least_of_each, least_with_choices
from planner.solve.problem import Floats

WEIGHTS = 2
Pairs = dict[tuple[int, int], Floats]
PROBLEMS = {
    "seed": st.integers(0, 2**32 - 1),
    "sizes": st.lists(st.integers(1, 3), min_size=1, max_size=5),
    "density": st.sampled_from([0.0, 0.4, 1.0]),
    "forbidden": st.sampled_from([0.0, 0.2]),
}


def problem(seed: int, sizes: list[int], density: float, forbidden: float) -> tuple[list[Floats], Pairs]:
    """Singles and pairs, many of which cost the same."""
    rng = np.random.default_rng(seed)
    singles = [rng.integers(0, 4, (WEIGHTS, size)).astype(float) for size in sizes]
    singles = [np.where(rng.random(each.shape) < forbidden, np.inf, each) for each in singles]
    ends = [ends for ends in itertools.combinations(range(len(sizes)), 2) if rng.random() < density]
    return singles, {(i, j): rng.integers(0, 3, (WEIGHTS, sizes[i], sizes[j])).astype(float) for i, j in ends}


def cost(singles: list[Floats], pairs: Pairs, k: int, chosen: tuple[int, ...]) -> float:
    alone = sum(each[k, choice] for each, choice in zip(singles, chosen, strict=True))
    return float(alone + sum(table[k, chosen[i], chosen[j]] for (i, j), table in pairs.items()))


@given(**PROBLEMS, entries=st.sampled_from([3, 9, 1000]))
def test_nothing_costs_less_than_bounds_say_whether_tables_are_split_or_not(
    seed: int, sizes: list[int], density: float, forbidden: float, entries: int
) -> None:
    singles, pairs = problem(seed, sizes, density, forbidden)
    least = least_of_each(singles, pairs, entries=entries)
    with_each = least_with_choices(least)
    choices = [(v, c) for v, size in enumerate(sizes) for c in range(size)]
    for k in range(WEIGHTS):
        every = {chosen: cost(singles, pairs, k, chosen) for chosen in itertools.product(*map(range, sizes))}
        bounds = [float(least.bounds[k]), *(float(with_each[v][k, c]) for v, c in choices)]
        costs = [min(every.values()), *(min(every[o] for o in every if o[v] == c) for v, c in choices)]
        assert all(bound <= true + 1e-9 for bound, true in zip(bounds, costs, strict=True))
        if least.tree.exact:
            assert bounds == pytest.approx(costs)
            assert every[tuple(map(int, least.assignment(k)))] == pytest.approx(costs[0])


@given(**PROBLEMS, kept=st.sampled_from([1, 2, 7]))
def test_tables_that_are_too_large_to_be_kept_are_made_part_by_part(
    seed: int, sizes: list[int], density: float, forbidden: float, kept: int
) -> None:
    singles, pairs = problem(seed, sizes, density, forbidden)
    whole = least_of_each(singles, pairs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_many, "KEPT", kept)
        found = least_of_each(singles, pairs)
    assert all(np.array_equal(one, other) for one, other in zip(found.messages, whole.messages, strict=True))
    assert np.array_equal(found.bounds, whole.bounds)


@given(**PROBLEMS)
def test_assignments_come_cheapest_first_and_each_once(
    seed: int, sizes: list[int], density: float, forbidden: float
) -> None:
    singles, pairs = problem(seed, sizes, density, forbidden)
    least = least_of_each(singles, pairs)
    for k in range(WEIGHTS):
        told = [(each, tuple(map(int, chosen))) for each, chosen in in_order(least, k)]
        every = sorted(cost(singles, pairs, k, chosen) for chosen in itertools.product(*map(range, sizes)))
        assert [each for each, _ in told] == pytest.approx([each for each in every if np.isfinite(each)])
        assert [each for each, _ in told] == pytest.approx([cost(singles, pairs, k, chosen) for _, chosen in told])
        assert len({chosen for _, chosen in told}) == len(told)
