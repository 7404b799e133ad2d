"""Cheapest assignments under many weights at once, against exhaustive enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.solve.choices.under_many import in_order, least_of_each

WEIGHTS = 2


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    density=st.sampled_from([0.0, 0.4, 1.0]),
    forbidden=st.sampled_from([0.0, 0.2]),
)
def test_assignments_come_cheapest_first_and_each_once(
    seed: int, sizes: list[int], density: float, forbidden: float
) -> None:
    rng = np.random.default_rng(seed)
    singles = [rng.integers(0, 4, (WEIGHTS, size)).astype(float) for size in sizes]  # many cost the same
    singles = [np.where(rng.random(each.shape) < forbidden, np.inf, each) for each in singles]
    ends = [ends for ends in itertools.combinations(range(len(sizes)), 2) if rng.random() < density]
    pairs = {(i, j): rng.integers(0, 3, (WEIGHTS, sizes[i], sizes[j])).astype(float) for i, j in ends}

    def cost(k: int, chosen: tuple[int, ...]) -> float:
        alone = sum(each[k, choice] for each, choice in zip(singles, chosen, strict=True))
        return float(alone + sum(table[k, chosen[i], chosen[j]] for (i, j), table in pairs.items()))

    least = least_of_each(singles, pairs)
    for k in range(WEIGHTS):
        told = [(each, tuple(map(int, chosen))) for each, chosen in in_order(least, k)]
        every = sorted(cost(k, chosen) for chosen in itertools.product(*map(range, sizes)))
        assert [each for each, _ in told] == pytest.approx([each for each in every if np.isfinite(each)])
        assert [each for each, _ in told] == pytest.approx([cost(k, chosen) for _, chosen in told])
        assert len({chosen for _, chosen in told}) == len(told)
