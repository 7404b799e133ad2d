"""The least weighted sum, by small tables and by large ones, against exhaustive enumeration."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.solve.choices import almost_lightest, cheapest, corners, lightest, lower_bounds
from planner.solve.choices.cheapest import Cheapest
from planner.solve.choices.model import ChoiceModel, Weights, build_model, drop_forbidden, total
from planner.solve.problem import Problem, evaluate, least_bytes, most_bytes
from tests.planner.solve.test_solve import random_problem

SLACKS = (1.1, 1.5)

problems = st.builds(
    random_problem,
    seed=st.integers(0, 2**32),
    vertices=st.integers(1, 6),
    choices=st.integers(1, 4),
    density=st.sampled_from([0.4, 1.0, 2.0]),
    spans=st.just(False),
)


def weighted(model: ChoiceModel, weights: Weights) -> list[float]:
    """What every assignment costs."""
    every = (total(model, np.array(each)) for each in itertools.product(*map(range, model.sizes)))
    return [
        float(weights.columns[:3] @ (t.time_s, t.exposed_s, t.held_bytes)) if t.allowed else math.inf for t in every
    ]


@settings(max_examples=150, deadline=None)
@given(problems, st.sampled_from([1, 4, 16, 100_000]), st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 3))
@example(random_problem(14032388, 1, 2, 0.4, spans=False), 1, (0.0, 0.3, 0.0))  # less than nothing, in no table
def test_the_least_weighted_sum_is_found_whatever_the_size_of_small_tables(
    problem: Problem, entries: int, columns: tuple[float, float, float]
) -> None:
    model = drop_forbidden(build_model(problem))
    if model is None:
        return
    weights = Weights(np.array([*columns, 1.0]), 0.0, np.zeros(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cheapest, "_FEW_ENTRIES", entries)
        least = Cheapest(model).under(weights)
    best = min(weighted(model, weights))
    assert least.bound == pytest.approx(best, rel=1e-8, abs=1e-12)
    if math.isfinite(best):
        held = least.totals
        cost = float(weights.columns[:3] @ (held.time_s, held.exposed_s, held.held_bytes))
        assert held.allowed and cost == pytest.approx(best, rel=1e-8, abs=1e-12)
        assert math.isfinite(evaluate(problem, least.choices).time_s)


@settings(max_examples=100, deadline=None)
@given(problems)
def test_bounds_hold_for_every_assignment(problem: Problem) -> None:
    bounds, light = lower_bounds(problem), lightest(problem)
    every = [evaluate(problem, c) for c in itertools.product(*(range(v.choices) for v in problem.vertices))]
    allowed = [found for found in every if math.isfinite(found.time_s)]
    if problem.limit_bytes is not None:
        assert all(bounds.peak_bytes <= found.peak_bytes for found in allowed)
    fits = [found for found in allowed if found.feasible]
    assert all(bounds.time_s <= found.time_s * (1 + 1e-9) for found in fits)
    if bounds.choices is not None:
        assert evaluate(problem, bounds.choices).feasible
    assert light is not None or not allowed
    if light is not None and problem.limit_bytes is not None and not any(v.spans for v in problem.vertices):
        assert evaluate(problem, light).peak_bytes == min(found.peak_bytes for found in allowed)


@settings(max_examples=60, deadline=None)
@given(problems)
def test_of_what_is_almost_lightest_some_is_nearly_as_fast_as_what_is_known_to_need_no_more(problem: Problem) -> None:
    first = lightest(replace(problem, limit_bytes=most_bytes(problem)))
    light = almost_lightest(problem, SLACKS)
    assert light[:1] == (() if first is None else (first,))
    if first is None:
        return
    found = [evaluate(replace(problem, limit_bytes=None), each) for each in light]
    least = found[0].peak_bytes
    assert all(math.isfinite(each.time_s) for each in found)
    assert least_bytes(problem) <= least
    for slack in SLACKS:
        bounds = lower_bounds(replace(problem, limit_bytes=math.ceil(slack * least)))
        fast_s = min(each.time_s for each in found if each.peak_bytes <= math.ceil(slack * least))
        if bounds.choices is not None:
            assert bounds.time_s * (1 - 1e-9) <= fast_s
            assert fast_s <= evaluate(problem, bounds.choices).time_s * 1.02 or fast_s == found[0].time_s
    assert almost_lightest(problem, (), least) == light[:1]
    assert almost_lightest(problem, SLACKS, least - 1) == ()


@settings(max_examples=60, deadline=None)
@given(problems)
def test_corners_lead_from_the_fastest_to_what_holds_least_without_choices_that_are_forbidden(problem: Problem) -> None:
    problem = replace(problem, limit_bytes=None)
    found = [evaluate(problem, each) for each in corners(problem)]
    every = [evaluate(problem, c) for c in itertools.product(*(range(v.choices) for v in problem.vertices))]
    allowed = [each for each in every if math.isfinite(each.time_s)]
    assert bool(found) == bool(allowed) and all(math.isfinite(each.time_s) for each in found)
    if not found:
        return
    assert found[0].time_s >= lower_bounds(problem).time_s * (1 - 1e-9)
    free = replace(problem, vertices=tuple(replace(v, transient_bytes=0 * v.transient_bytes) for v in problem.vertices))
    held = [evaluate(free, each).peak_bytes for each in corners(problem)]
    assert held == sorted(held, reverse=True)
    assert held[-1] == min(
        evaluate(free, c).peak_bytes
        for c in itertools.product(*(range(v.choices) for v in problem.vertices))
        if math.isfinite(evaluate(free, c).time_s)
    )
