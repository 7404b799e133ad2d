"""Blocks packed on ranks: no way to share them out is shorter than the bound, which memory raises."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.solve.pipeline.packing import BlockVariant, Packing, RankCapacities


def shortest_s(
    count: int, variants: list[BlockVariant], capacities: RankCapacities, leading_s: float | None = None
) -> float:
    """Seconds of the shortest step, of all ways to share blocks out and to run them; the first one may take less."""
    if leading_s is not None:
        taken_s, each = capacities.taken_s, np.eye(len(capacities.taken_s)) * leading_s
        return min(shortest_s(count - 1, variants, replace(capacities, taken_s=taken_s + more)) for more in each)
    ranks = range(len(capacities.taken_s))
    least = {(rank, 0): 0.0 for rank in ranks}
    for rank, own in itertools.product(ranks, range(1, count + 1)):
        fitting = (
            sum(each.work_s for each in ways)
            for ways in itertools.combinations_with_replacement(variants, own)
            if sum(each.held_bytes + capacities.in_flight[rank] * each.saved_bytes for each in ways)
            <= capacities.free_bytes[rank] * (1 + 1e-12)
        )
        least[rank, own] = min(fitting, default=math.inf) + capacities.taken_s[rank]
    shares = (each for each in itertools.product(range(count + 1), repeat=len(ranks)) if sum(each) == count)
    return min(max(least[rank, own] for rank, own in enumerate(each)) for each in shares)


def packing(
    count: int, variants: list[BlockVariant], known: int = 1, leading_s: float | None = None
) -> tuple[Packing, list[tuple[float, float]]]:
    """That of blocks with these variants, of which the first are known; and the prices that it asks for."""
    asked: list[tuple[float, float]] = []

    def cost_s(held: float, saved: float) -> tuple[float, BlockVariant]:
        asked.append((held, saved))
        costs = [each.work_s + held * each.held_bytes + saved * each.saved_bytes for each in variants]
        return min(costs), variants[int(np.argmin(costs))]

    return Packing(count, min(each.work_s for each in variants), cost_s, variants[:known], leading_s), asked


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_no_way_to_share_blocks_out_is_shorter(ranks: int) -> None:
    rng, raised, close = random.Random(ranks), 0, 0
    for _ in range(120):
        count = rng.randint(ranks, 5)
        sizes = sorted((rng.uniform(0.2, 1.0), rng.uniform(0.2, 1.0)) for _ in range(3))
        variants = [BlockVariant(3.0 - held - saved, held, saved) for held, saved in sizes]
        in_flight = np.array([float(ranks - rank) for rank in range(ranks)])
        least = min(each.held_bytes + ranks * each.saved_bytes for each in variants)
        free_bytes = np.full(ranks, least * math.ceil(count / ranks) * rng.uniform(0.6, 1.6))
        capacities = RankCapacities(np.array([rng.choice((0.0, 0.3)) for _ in range(ranks)]), free_bytes, in_flight)
        optimum_s = shortest_s(count, variants, capacities)
        packed, _ = packing(count, variants)
        without_memory_s, found_s = packed.least_s(capacities, 0.0), packed.least_s(capacities, math.inf)
        assert without_memory_s * (1 - 1e-8) <= found_s <= optimum_s * (1 + 1e-9)
        raised += found_s > without_memory_s * 1.01
        close += found_s > 0.9 * optimum_s
    assert raised > 20 and close > 15, (raised, close)


def test_blocks_that_are_all_alike_are_packed_as_well_as_can_be() -> None:
    """Rounding down is all there is to it."""
    alike = [BlockVariant(2.0, 1.0, 0.5)]
    for count, room in ((4, 10.0), (5, 10.0), (5, 4.1), (5, 2.1)):
        capacities = RankCapacities(np.array([1.0, 0.0]), np.array([room, 10.0]), np.array([2.0, 1.0]))
        unlimited = RankCapacities(capacities.taken_s, np.full(2, 1e9), capacities.in_flight)
        assert packing(count, alike)[0].least_s(capacities, 0.0) == pytest.approx(
            shortest_s(count, alike, unlimited), rel=1e-8
        )
        assert packing(count, alike)[0].least_s(capacities, math.inf) == pytest.approx(
            shortest_s(count, alike, capacities), rel=1e-2
        )


def test_the_first_block_takes_less_wherever_it_is() -> None:
    """It fits where another one does not."""
    alike = [BlockVariant(2.0, 1.0, 0.5)]
    capacities = RankCapacities(np.array([0.5, 0.0]), np.array([1e9, 4.1]), np.array([2.0, 1.0]))
    for count, leading_s in ((3, 1.4), (3, 0.1), (4, 1.9), (5, 0.6), (5, 2.0)):
        found_s = packing(count, alike, leading_s=leading_s)[0].least_s(capacities, math.inf)
        least_s = shortest_s(count, alike, capacities, leading_s)
        assert found_s == pytest.approx(least_s, rel=1e-8), (count, leading_s)
    assert shortest_s(3, alike, capacities, 0.1) < shortest_s(3, alike, capacities)


def test_nothing_is_asked_beyond_what_is_enough() -> None:
    variants = [BlockVariant(1.0, 1.0, 4.0), BlockVariant(1.5, 1.0, 1.0)]
    capacities = RankCapacities(np.zeros(1), np.array([8.0]), np.ones(1))
    packed, asked = packing(4, variants, known=2)
    assert packed.least_s(capacities, 3.9) == pytest.approx(4.0, rel=1e-8) and not asked
    assert packed.least_s(capacities, 5.0) >= 5.0 and len(asked) == 1
    assert packed.least_s(capacities, 5.0) >= 5.0 and len(asked) == 1


def test_what_is_not_in_flight_is_not_limited() -> None:
    """Prices that were asked for a rank with micro-batches in flight say nothing of one without."""
    variants = [BlockVariant(1.0, 0.0, 4.0), BlockVariant(2.0, 0.0, 1.0)]
    packed, asked = packing(2, variants, known=2)
    full, empty = (RankCapacities(np.zeros(1), np.array([2.0]), np.array([each])) for each in (1.0, 0.0))
    assert packed.least_s(full, math.inf) > 3.9 and asked
    assert packed.least_s(empty, math.inf) == pytest.approx(2.0, rel=1e-8)
