"""Exactness in the whole space: what a search says of stages, micro-batches, schedules, cuts, recomputation and
gathering is what counting out every plan says.

These are few cases that are quick; ``python -m benchmarks exact`` has hundreds.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from planner.analysis.memory import usage
from planner.analysis.pipeline.chain import chain_of
from planner.analysis.pipeline.staged import price
from planner.cost.cluster import ClusterSpec, Host
from planner.formulation.assignment import assignment_of
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.search import offload_bound, offload_search
from planner.search.branch_and_bound import Searched
from planner.search.search import search
from planner.solve.pipeline.stages import evaluate
from planner.solve.problem import evaluate as cost_of
from tests.planner.plans import Build
from tests.planner.search import one_space
from tests.planner.search.brute_force import BruteForce, Parts, Whole, best_of
from tests.planner.search.brute_force_offload import best_offloaded
from tests.planner.search.one_space import Case, Tally, check, drawn

SEEDS = (34, 36, 46, 69, 74, 98, 101, 123, 127, 206, 252, 290, 368, 370)


@functools.cache
def case_of(seed: int) -> Case:
    case = drawn(seed)
    assert case is not None, f"seed {seed} is too large to be counted out"
    return case


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_search_says_is_what_brute_force_says(seed: int) -> None:
    case, tally = case_of(seed), Tally()
    check(case, tally)
    assert tally.problems == len(case.limits) and tally.rows + tally.infeasible
    assert not [str(each) for each in tally.violations]
    assert not tally.unfound
    assert not tally.above


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What searches prove of offloaded steps: a plan says no more than its own."""
    found = list[float]()

    def least_step_s(*args: Any) -> float:
        found.append(offload_bound.least_step_s(*args))
        return found[-1]

    monkeypatch.setattr(offload_search, "least_step_s", least_step_s)
    return found


@pytest.mark.parametrize("seed", [1484, 3140])
def test_no_offloaded_step_is_predicted_shorter_than_is_proved(seed: int, proved: list[float]) -> None:
    rng = random.Random(seed)
    graph, _ = one_space.random_model(rng)
    devices, rates = rng.choice(one_space.DEVICES), [10 ** rng.uniform(7, 10) for _ in range(2)]
    host = Host(memory_bytes=one_space.AMPLE, link_bytes_per_s=rates[0], memory_bandwidth_bytes_per_s=rates[1])
    cluster = one_space.with_memory(one_space.random_cluster(rng, devices), one_space.AMPLE)
    cluster = cluster.model_copy(update={"host": host})
    alone = one_space.in_one_piece(graph, cluster, folding=True)
    assert alone is not None
    limits = None, int(alone.evaluation.peak_bytes * rng.uniform(0.5, 0.95))
    for limit, (home, pinned) in itertools.product(limits, one_space.PINS.items()):
        limited = one_space.within(cluster, limit)
        best, found = best_offloaded(graph, limited, home), one_space.searched(graph, limited, pinned)
        assert isinstance(found, Searched)
        assert 0.1 * best.time_s < proved[-1] <= best.time_s * (1 + one_space.EXACT)
        assert found.bound_s == pytest.approx(proved[-1])
        assert found.planned_step_s >= best.time_s * (1 - one_space.EXACT)


def test_no_offloaded_step_of_equal_blocks_that_differ_is_predicted_shorter_than_is_proved(
    proved: list[float],
) -> None:
    """Linears split by columns and by rows in turn communicate less than any way to run all of them alike."""
    b = Build()
    value = b.leaf("x", 8, 512)
    for number in range(4):
        value = b.linear(f"linear{number}", value, 512, f"layers.{number}")
    cluster = ClusterSpec.local(2, "1 GiB", cores=2, host_memory_bytes="4 GiB")
    assert cluster.host is not None
    fast = cluster.host.model_copy(update={"link_bytes_per_s": 1e12, "memory_bandwidth_bytes_per_s": 1e12})
    pins = {"tensor": 2, "offload": "host", "pipeline": 1, "micro_batches": 1, "recompute": "none"}
    spec, told = cluster.model_copy(update={"host": fast}), list[str]()
    found = search(b.mean(value), spec, Pins.parse(pins), Training(), progress=told.append)
    assert told[-1].startswith("proving what steps take at least")
    assert len(found.best.space.folded.kinds) > 1
    assert 0.9 * found.planned_step_s < proved[-1] <= found.planned_step_s


def test_a_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that is too high by a hundred-thousandth, and a plan that is not the best."""
    case = replace(case_of(38), limits=(None,))
    best = best_of(case.brute.optima(None))
    honest = one_space.searched(case.graph, case.cluster)
    assert isinstance(honest, Searched)
    rows = honest.candidates

    def said(off: float = 0.0, **changes: object) -> set[str]:
        found = replace(honest, **changes)
        vars(found)["evaluation"] = replace(honest.evaluation, time_s=best.time_s * (1 + off))
        monkeypatch.setattr(one_space, "searched", lambda graph, cluster: found)
        tally = Tally()
        check(case, tally)
        return {each.what for each in tally.violations}

    assert said() == set()
    assert said(1e-5, status="optimal", gap=0.0) == {"missed"}
    assert said(1e-5, status="feasible", gap=5e-6) == {"bound"}
    assert said(1e-5, status="feasible", gap=2e-5) == set()
    assert said(-1e-5) == {"better"}
    for number, row in enumerate(rows):
        own_s = case.brute.optima(None)[one_space.config_of(row, case.brute.configs)].time_s
        above = replace(row, bound_s=own_s * (1 + 1e-5))
        assert said(candidates=(*rows[:number], above, *rows[number + 1 :])) == {"row"}


def test_what_is_shared_and_pruned_leaves_out_nothing() -> None:
    """Every assignment on its own, without what chains have in common or what prunes any."""
    case = case_of(55)
    for config in (each for each in case.brute.configs if not each.in_one_piece):
        parts = case.brute.parts[config]
        for limit in (None, 100, 90, 70):
            assert parts.best(limit).time_s == pytest.approx(_parts_counted(parts, limit), rel=1e-9)
    for limit in (None, 120, 110, 90):
        for whole in case.brute.whole.values():
            assert whole.best(limit).time_s == pytest.approx(_whole_counted(whole, limit), rel=1e-9)


def test_where_equal_blocks_may_differ_there_is_more_and_nothing_is_lost() -> None:
    case = case_of(46)
    apart = BruteForce(case.graph, case.cluster, apart=True)
    for config, parts in case.brute.parts.items():
        assert len(apart.parts[config].chains) >= len(parts.chains)
        for limit in case.limits:
            assert apart.parts[config].best(limit).time_s <= parts.best(limit).time_s * (1 + 1e-9)
    assert any(len(apart.parts[config].chains) > len(parts.chains) for config, parts in case.brute.parts.items())


def _parts_counted(parts: Parts, limit_bytes: int | None) -> float:
    best = math.inf
    for row in parts.rows.tolist():
        links = parts.links(row)
        for pipeline in parts.pipelines:
            for inner in itertools.combinations(range(1, len(links)), pipeline.stages - 1):
                for savings in itertools.product(*(range(len(link.levels)) for link in links)):
                    found = evaluate(pipeline, chain_of(links), (0, *inner, len(links)), savings)
                    for prefetch in (True, False):
                        staged = price(links, pipeline, found, prefetch)
                        if limit_bytes is None or staged.peak_bytes <= limit_bytes:
                            best = min(best, staged.step_s)
    return best


def _whole_counted(whole: Whole, limit_bytes: int | None) -> float:
    best = math.inf
    for amount, row in itertools.product(whole.amounts, whole.rows.tolist()):
        fits = limit_bytes is None or usage(assignment_of(whole.space, row, amount)).peak_bytes <= limit_bytes
        best = min(best, cost_of(whole.space.problem(None, amount), tuple(row)).time_s) if fits else best
    return best
