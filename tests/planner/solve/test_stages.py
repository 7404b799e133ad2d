"""Cuts: what they take, by hand; the best ones, by trying all; bounds; and what is refused."""

from __future__ import annotations

import math
import re
from itertools import combinations, product

import numpy as np
import pytest

from planner.base.errors import InfeasibleError, ScheduleError
from planner.solve.pipeline import partition
from planner.solve.pipeline.partition import cut
from planner.solve.pipeline.schedule import NAMES, VIRTUAL_STAGES, schedule
from planner.solve.pipeline.simulate import simulate
from planner.solve.pipeline.stages import (
    Chain,
    ChainBlock,
    Pipeline,
    RematOption,
    blocks_of,
    bound_s,
    evaluate,
    rank_bytes,
    stage_times,
)

MiB, GiB = 2**20, 2**30
EVERYTHING = (RematOption(0.0, 0),)
LAYER = ChainBlock(
    "layer",
    1.0,
    1.0,
    1.0,
    3 * GiB,
    (RematOption(0.0, 400 * MiB), RematOption(0.15, 150 * MiB), RematOption(1.0, 34 * MiB)),
    0.05,
)
EMBEDDING = ChainBlock("embedding", 0.1, 0.05, 0.1, 6 * GiB, (RematOption(0.0, 34 * MiB),), 0.05)
HEAD = ChainBlock("head", 1.3, 1.3, 1.3, 6 * GiB, (RematOption(0.0, 500 * MiB),), 0.05)
LLAMA: Chain = [(EMBEDDING, 1), (LAYER, 126), (HEAD, 1)]


def brute_force(pipeline: Pipeline, chain: Chain, limit: int | None) -> float:
    """The shortest step of all cuts and savings that fit; infinite if none does."""
    blocks = blocks_of(chain)
    best = math.inf
    for inner in combinations(range(1, len(blocks)), pipeline.stages - 1):
        bounds = (0, *inner, len(blocks))
        for savings in product(*(range(len(block.savings)) for block in blocks)):
            if limit is None or max(rank_bytes(pipeline, chain, bounds, savings)) <= limit:
                times = stage_times(chain, bounds, savings)
                found = schedule(pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.virtual_stages)
                best = min(best, simulate(found, times).step_s)
    return best


def random_chain(rng: np.random.Generator, size: int, ways: int) -> Chain:
    way = float(rng.choice([0.0, 0.3]))
    return [
        (
            ChainBlock(
                f"block {i}",
                *(rng.random(3) + 0.05).tolist(),
                int(rng.integers(1, 50)),
                tuple(RematOption(float(rng.random() * each), int(rng.integers(1, 30))) for each in range(ways)),
                float(rng.random() * way),
                int(rng.integers(0, 50)),
            ),
            1,
        )
        for i in range(size)
    ]


def near(rng: np.random.Generator, pipeline: Pipeline, chain: Chain) -> int:
    """A limit around what a random cut needs."""
    size = len(blocks_of(chain))
    inner = sorted(rng.choice(range(1, size), pipeline.stages - 1, replace=False).tolist())
    return int(max(rank_bytes(pipeline, chain, (0, *inner, size), [0] * size)) * rng.uniform(0.6, 1.1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(12))
def test_the_best_cut_is_the_best_of_all(name: str, seed: int) -> None:
    rng = np.random.default_rng([seed, NAMES.index(name)])
    least, most = VIRTUAL_STAGES[name]
    virtual = least if most else int(rng.integers(least, 3))
    ranks, ways = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    size = int(rng.integers(ranks * virtual, max(ranks * virtual + 1, 9 if ways == 1 else 6)))
    pipeline = Pipeline(name, ranks, int(rng.integers(ranks, 10)), virtual)
    chain = random_chain(rng, size, ways)
    limit = near(rng, pipeline, chain) if seed % 3 else None
    wanted = brute_force(pipeline, chain, limit)
    assert bound_s(pipeline, chain) <= wanted * (1 + 1e-9)
    if wanted == math.inf:
        with pytest.raises(InfeasibleError) as told:
            cut(pipeline, chain, limit)
        assert told.value.excess_bytes >= 0
        return
    found = cut(pipeline, chain, limit)
    assert found is not None and found.status == "optimal"
    assert found.step_s == pytest.approx(wanted, rel=1e-7)
    assert found.bound_s <= wanted * (1 + 1e-9)
    assert limit is None or max(found.rank_bytes) <= limit
    assert cut(pipeline, chain, limit, cutoff_s=wanted * 0.999) is None


@pytest.mark.parametrize("name, virtual", [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize("seed", range(3))
def test_chains_of_twelve_blocks(name: str, virtual: int, seed: int) -> None:
    rng = np.random.default_rng([seed, virtual, len(name)])
    pipeline = Pipeline(name, 3, 6, virtual)
    chain = random_chain(rng, 12, 1)
    limit = near(rng, pipeline, chain)
    wanted = brute_force(pipeline, chain, limit)
    if wanted < math.inf:
        found = cut(pipeline, chain, limit)
        assert found is not None and found.status == "optimal" and found.step_s == pytest.approx(wanted, rel=1e-7)
    else:
        with pytest.raises(InfeasibleError):
            cut(pipeline, chain, limit)


def test_more_effort_proves_more() -> None:
    """Random blocks with two ways to save each, and bytes that stages share: 4096 ways to save for every cut."""
    pipeline = Pipeline("interleaved_1f1b", 3, 6, 2)
    chain = random_chain(np.random.default_rng(1), 12, 2)
    limit = int(0.8 * max(rank_bytes(pipeline, chain, (0, 2, 4, 6, 8, 10, 12), [0] * 12)))
    first, second = cut(pipeline, chain, limit, effort=100), cut(pipeline, chain, limit, effort=100_000)
    assert first.gap > 0 and second.status == "optimal"
    assert first.bound_s <= second.step_s <= first.step_s


@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.parametrize("seed", range(3))
def test_what_known_paths_say_of_a_block_that_moves_is_how_long_they_are_then(name: str, seed: int) -> None:
    rng, ranks = np.random.default_rng(seed), 3
    pipeline = Pipeline(name, ranks, 6, VIRTUAL_STAGES[name][0])
    work = partition._Work(pipeline, random_chain(rng, 11, 2), None, 100, (0,) * pipeline.stages)
    found, bounds = partition._Found(math.inf), (0, *range(2, 1 + pipeline.stages), 11)
    savings = tuple(rng.integers(0, 2, 11).tolist())
    again_s = np.add.reduceat(work.recompute[np.arange(11), list(savings)], bounds[:-1])
    assert again_s.any()
    for other in (bounds, (*range(pipeline.stages), 11)):
        found.offer(work, other, savings)
    moves = [(step_s, tuple(each.tolist())) for step_s, each in partition._moves(work, found, bounds, savings)]
    stages = range(pipeline.stages)
    sizes = {tuple(int(k == taker) - int(k == giver) for k in stages) for giver, taker in product(stages, repeat=2)}
    assert {tuple(np.diff(each) - np.diff(bounds)) for _, each in moves} == sizes - {(0,) * len(stages)}
    assert [step_s for step_s, _ in moves] == sorted(step_s for step_s, _ in moves)
    for step_s, each in moves:
        if (np.diff(each) > 0).all():
            times, _, _ = work.totals(each, (0,) * 11)
            flat = np.concatenate([times.forward_s, times.input_s + again_s, times.weight_s, times.send_s])
            assert step_s == pytest.approx(max(float(path @ flat) for path in found.paths))


def test_a_cut_is_bettered_until_no_block_that_moves_helps_with_little_effort() -> None:
    """Sixteen stages on two ranks: what moving blocks finds is the same as with ten times the effort."""
    rng = np.random.default_rng(0)
    pipeline = Pipeline("interleaved_1f1b", 2, 32, 8)
    chain = random_chain(rng, 34, 1)
    little, much = (cut(pipeline, chain, effort=effort) for effort in (300, 3000))
    assert little is not None and much is not None
    assert little.step_s <= much.step_s * 1.001


def test_a_cut_by_hand() -> None:
    """1f1b on two ranks, four micro-batches; rank 0 holds two of them, rank 1 one."""
    chain = [
        (ChainBlock("a", 1, 1, 1, 100, (RematOption(0, 10), RematOption(0.5, 4)), 0.25), 3),
        (ChainBlock("b", 2, 2, 2, 7, EVERYTHING), 1),
    ]
    pipeline = Pipeline("1f1b", 2, 4)
    found = evaluate(pipeline, chain, (0, 2, 4), (0, 1, 0, 0))
    times = stage_times(chain, (0, 2, 4), (0, 1, 0, 0))
    assert (
        times.forward_s.tolist() == [2, 3] and times.input_s.tolist() == [2.5, 3] and times.weight_s.tolist() == [2, 3]
    )
    assert times.send_s.tolist() == [0.25]
    assert found.rank_bytes == (200 + 2 * (10 + 4), 107 + 10)
    assert found.step_s == pytest.approx(2 + 0.25 + 4 * 9 + 0.25 + 4.5)  # there, all of rank 1, and back


def test_gradients_count_when_the_first_backward_is_over() -> None:
    """Four micro-batches of 2 x 10 bytes: all of them with gpipe, or three and gradients, whichever is more."""
    for gradient_bytes, most in ((3, 80), (30, 60 + 2 * 30)):
        chain = [(ChainBlock("a", 1, 1, 1, 100, (RematOption(0, 10),), gradient_bytes=gradient_bytes), 4)]
        assert rank_bytes(Pipeline("gpipe", 2, 4), chain, (0, 2, 4), (0,) * 4) == (200 + most, 200 + most)
        in_micro_batch = rank_bytes(Pipeline("1f1b", 2, 4), chain, (0, 2, 4), (0,) * 4)
        assert in_micro_batch == (200 + 2 * gradient_bytes + 40, 200 + 2 * gradient_bytes + 20)


def test_equal_blocks_may_be_cut_unevenly_where_the_head_is_heavy() -> None:
    found = cut(
        Pipeline("1f1b", 4, 32),
        [(ChainBlock("layer", 1, 1, 1, 1, EVERYTHING), 10), (ChainBlock("head", 2, 2, 2, 1, EVERYTHING), 1)],
    )
    assert found is not None and found.status == "optimal"
    assert np.diff(found.bounds).tolist() == [3, 3, 3, 2]


def test_early_stages_recompute_more_since_they_hold_more() -> None:
    chain = [(ChainBlock("layer", 1, 1, 1, 0, (RematOption(0.0, 10), RematOption(0.5, 1))), 8)]
    found = cut(Pipeline("1f1b", 4, 16), chain, limit_bytes=30)
    assert found is not None and found.status == "optimal"
    recomputed = [sum(found.savings[i:j]) for i, j in zip(found.bounds, found.bounds[1:], strict=False)]
    assert recomputed[0] > recomputed[-1] == 0
    assert max(found.rank_bytes) <= 30


@pytest.mark.parametrize("name, virtual", [("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 8), ("zbv", 2)])
def test_a_chain_of_126_equal_blocks(name: str, virtual: int) -> None:
    pipeline = Pipeline(name, 16, 64, virtual)
    found = cut(pipeline, LLAMA, 60 * GiB)
    assert found is not None and max(found.rank_bytes) <= 60 * GiB
    assert bound_s(pipeline, LLAMA) <= found.bound_s <= found.step_s
    assert found == cut(pipeline, LLAMA, 60 * GiB)
    assert found.gap < (0.15 if virtual == 2 else 0.05)
    again = evaluate(pipeline, LLAMA, found.bounds, found.savings)
    assert (again.step_s, again.rank_bytes) == (found.step_s, found.rank_bytes)


@pytest.mark.parametrize("name, virtual", [("1f1b", 1), ("interleaved_1f1b", 2), ("2bw", 1)])
def test_more_memory_and_less_work_never_make_it_slower_where_it_is_proved(name: str, virtual: int) -> None:
    pipeline = Pipeline(name, 2, 6, virtual)
    chain = random_chain(np.random.default_rng(5), 7, 2)
    limit = rank_bytes(pipeline, chain, (0, *range(1, pipeline.stages), 7), [0] * 7)
    steps = []
    for part in (0.9, 1.0, 1.2, 2.0):
        found = cut(pipeline, chain, int(max(limit) * part))
        assert found is not None and found.status == "optimal"
        steps.append(found.step_s)
    assert steps == sorted(steps, reverse=True)


def test_what_does_not_fit_is_said_by_how_much() -> None:
    with pytest.raises(InfeasibleError, match=re.escape("no cut into 4 stages was found that fits")) as told:
        cut(Pipeline("interleaved_1f1b", 2, 4, 2), [(ChainBlock("layer", 1, 1, 1, 100, (RematOption(0, 1),)), 8)], 403)
    assert told.value.excess_bytes > 0
    with pytest.raises(InfeasibleError, match="layer alone needs"):
        cut(Pipeline("1f1b", 2, 4), [(ChainBlock("layer", 1, 1, 1, 100, (RematOption(0, 1),)), 8)], 50)


@pytest.mark.parametrize(
    "pipeline, chain, words",
    [
        (Pipeline("1f1b", 4, 4), [(LAYER, 3)], "4 stages (4 ranks of 1) need as many blocks; the chain has 3"),
        (Pipeline("interleaved_1f1b", 2, 4, 2), [(LAYER, 3)], "4 stages (2 ranks of 2)"),
        (Pipeline("1f1c", 2, 4), LLAMA, "no schedule '1f1c'"),
        (Pipeline("2bw", 4, 2), LLAMA, "at least as many micro-batches as stages"),
    ],
)
def test_wrong_input_is_refused(pipeline: Pipeline, chain: Chain, words: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(words)):
        cut(pipeline, chain)


@pytest.mark.parametrize("limit", [None, 700])
def test_very_many_blocks_are_cut_as_well_between_bundles(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of block in turn and one of its own at each end, so that the best cut is between blocks of a bundle."""
    savings = (RematOption(0.0, 7), RematOption(0.9, 1))
    wide = ChainBlock("wide", 1.0, 1.0, 1.0, 2, savings, 0.01, 1)
    narrow = ChainBlock("narrow", 0.6, 0.6, 0.6, 1, savings[:1], 0.01, 1)
    chain = [(narrow, 1), *[(wide, 37), (narrow, 29)] * 2, (wide, 1)]
    pipeline = Pipeline("1f1b", 3, 6)
    one_by_one = cut(pipeline, chain, limit)
    monkeypatch.setattr(partition, "MOST_BLOCKS", 24)
    bundled = cut(pipeline, chain, limit)
    assert one_by_one is not None and bundled is not None
    assert (limit is None) or (any(one_by_one.savings) and max(bundled.rank_bytes) <= limit)
    assert bundled.bound_s <= one_by_one.step_s * (1 + 1e-9)
    assert bundled.step_s <= one_by_one.step_s * 1.005


def test_what_fits_only_between_blocks_of_a_bundle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    block = ChainBlock("block", 1.0, 1.0, 1.0, 5, (RematOption(0.0, 4),), 0.01, 2)
    pipeline, chain = Pipeline("1f1b", 2, 4), [(block, 22)]

    def said(limit: int) -> str:
        try:
            found = cut(pipeline, chain, limit)
            assert found is not None and max(found.rank_bytes) <= limit
            return "fits"
        except InfeasibleError as error:
            return f"{error} {error.excess_bytes}"

    limits = range(100, 300, 3)
    one_by_one = [said(limit) for limit in limits]
    monkeypatch.setattr(partition, "MOST_BLOCKS", 3)
    assert [said(limit) for limit in limits] == one_by_one
    assert 5 < one_by_one.count("fits") < len(limits) - 5
