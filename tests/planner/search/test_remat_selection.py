"""Which results are worth keeping: corners of the front by hand, and plans that are faster for them."""

from __future__ import annotations

import functools
import itertools
import math

import pytest

from planner.analysis.pipeline.staged import Staged
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.certificate import certify
from planner.formulation.decisions import DecisionGraph
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import fold
from planner.ir.graph import Graph
from planner.search.branch_and_bound import Searched
from planner.search.remat_selection import MOST, WORTH, corners, with_levels_between
from planner.search.search import search
from tests.planner.plans import Build, cluster, named, whole

BATCH, WIDTH, WIDE = 512, 64, 256


@functools.cache
def bottlenecks(layers: int = 6) -> Graph:
    """Layers of ``x + silu(down(silu(up(x))))``: a byte of ``down``'s result takes four times as long."""
    b, row = Build(), (BATCH, WIDTH)
    value = b.linear("stem", b.leaf("x", *row), WIDTH, "stem")
    for i in range(layers):
        path = f"layers.{i}"
        up = b.linear(f"up{i}", value, WIDE, f"{path}.up")
        wide = b.call(f"wide{i}", "silu.default", BATCH, WIDE, path=path, self=up)
        narrow = b.linear(f"down{i}", wide, WIDTH, f"{path}.down")
        value = b.add(f"sum{i}", value, b.call(f"narrow{i}", "silu.default", *row, path=path, self=narrow), path)
        value = b.call(f"square{i}", "pow.Tensor_Scalar", *row, path=path, self=value, exponent=2)
    return b.mean(value)


def decision_graph_of(graph: Graph) -> tuple[DecisionGraph, int]:
    folded = fold(graph)
    return DecisionGraph(folded, rules_of(graph, folded)), max(
        range(len(folded.kinds)), key=lambda k: len(folded.kinds[k])
    )


def priced(flops_per_s: float = 1e9) -> ClusterSpec:
    """Devices that pass over a gigabyte a second: products of these sizes take longer than what they read and write."""
    spec = cluster(2)
    device = spec.device.model_copy(
        update={
            "peak_flops_per_s": spec.device.peak_flops_per_s.model_copy(update={"float32": flops_per_s}),
            "matmul_efficiency": 1.0,
            "memory_bandwidth_bytes_per_s": 1e9,
            "memory_efficiency": 1.0,
            "launch_overhead_s": 0.0,
        }
    )
    return spec.model_copy(update={"device": device})


def test_what_is_expensive_for_its_bytes_is_discarded_last() -> None:
    decision_graph, kind = decision_graph_of(bottlenecks())
    names = [node.name[:-1] for node in decision_graph.blocks.backward(kind).nodes]
    front = corners(decision_graph, kind, CostModel(priced()))
    kept = [{names[at] for at in each.level} if isinstance(each.level, tuple) else each.level for each in front]
    assert kept == ["gathered", {"up", "down"}, {"down"}, "full"]
    narrow, wide = (BATCH * width * 4 for width in (WIDTH, WIDE))
    # Kept besides the input: of ``up`` and ``down`` their results, what ``down`` reads, and what is squared.
    assert [each.held_bytes for each in front] == [
        3 * narrow + 2 * wide,
        2 * narrow + wide,
        2 * narrow,
        narrow,
    ]
    product_s = 2 * BATCH * WIDTH * WIDE / 1e9
    elementwise_s = (2 * wide + 2 * narrow + 3 * narrow) / 1e9  # both silus, and the sum
    assert [each.seconds for each in front] == pytest.approx(
        [0.0, elementwise_s, elementwise_s + product_s, elementwise_s + 2 * product_s]
    )


@pytest.mark.parametrize("flops_per_s", [1e6, 1e9, 1e10, 1e15])
def test_levels_are_few_convex_and_within_one_another(flops_per_s: float) -> None:
    decision_graph, kind = decision_graph_of(bottlenecks())
    front = corners(decision_graph, kind, CostModel(priced(flops_per_s)))
    assert 2 < len(front) <= MOST + 2
    slopes = [(b.seconds - a.seconds) / (a.held_bytes - b.held_bytes) for a, b in itertools.pairwise(front)]
    assert slopes == sorted(slopes) and all(slope > 0 for slope in slopes)
    runs = [decision_graph.blocks.again(kind, each.level) for each in front]
    for some, more in itertools.pairwise(runs):
        assert some.operators < more.operators and some.values < more.values
        assert all(few <= many for few, many in zip(some.taken, more.taken, strict=True))
    for before, point, after in zip(front, front[1:], front[2:], strict=False):
        share = (before.held_bytes - point.held_bytes) / (before.held_bytes - after.held_bytes)
        mixed_s = before.seconds + share * (after.seconds - before.seconds)
        assert mixed_s - point.seconds >= WORTH * front[-1].seconds


def test_every_kind_goes_its_own_way_and_what_is_cheap_for_its_bytes_goes_first() -> None:
    decision_graph, kind = decision_graph_of(bottlenecks())
    plain = named(decision_graph.folded)
    levels = with_levels_between(plain, decision_graph, CostModel(priced()))
    assert levels.first == plain.first
    gathers = [move for move in plain.moves if move[1] == "gathered"]
    assert [*levels.moves[: len(gathers)]] == gathers
    assert [*levels.of(kind)[1:]] == [each.level for each in corners(decision_graph, kind, CostModel(priced()))]
    others = {each: levels.of(each) for each in range(len(plain.first)) if each != kind}
    assert others == dict.fromkeys(others, ("none", "gathered"))


@functools.cache
def gathering(layers: int = 6) -> Graph:
    """Layers of ``silu(down(up(x)))``."""
    b = Build()
    value = b.linear("stem", b.leaf("x", BATCH, WIDTH), WIDTH, "stem")
    for i in range(layers):
        path = f"layers.{i}"
        down = b.linear(f"down{i}", b.linear(f"up{i}", value, WIDE, f"{path}.up"), WIDTH, f"{path}.down")
        value = b.call(f"silu{i}", "silu.default", BATCH, WIDTH, path=path, self=down)
    return b.mean(value)


def gathered_within(memory_bytes: int | None, world: int, **pins: object) -> Searched:
    """The best plan where each product has a part of its columns, so that the next one gathers what it reads."""
    spec = priced()
    device = spec.device.model_copy(update={"memory_bytes": memory_bytes or 2**30, "reserve_fraction": 0.0})
    quick = {"size": world, "latency_s": 1e-7, "bandwidth_bytes_per_s": 1e10}
    spec = spec.model_copy(update={"device": device, "levels": (spec.levels[0].model_copy(update=quick),)})
    columns = {"layers": {"*.up": {"tensor": "n"}, "*.down": {"tensor": "n"}}, "tensor": 2}
    return search(gathering(), spec, whole({**columns, **pins}), Training())


def test_what_products_read_gathered_is_gathered_again_where_that_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    most, least = (gathered_within(None, 2, recompute=each).peak_bytes for each in ("none", "full"))
    limits = [int(least + share * (most - least)) for share in (0.4, 0.7, 0.95)]
    plans = [gathered_within(limit, 2) for limit in limits]
    counts = [sum(amount.count("resharded") for amount in plan.assignment.recompute.amounts) for plan in plans]
    assert any(counts)
    monkeypatch.setattr("planner.search.remat_selection.gathering_s", lambda cost: math.inf)
    without = [gathered_within(limit, 2) for limit in limits]
    for limit, some, others in zip(limits, plans, without, strict=True):
        assert certify(some.assignment, 0.0).holds and some.peak_bytes <= limit
        assert some.evaluation.time_s < 0.99 * others.evaluation.time_s


@pytest.mark.parametrize("stages", [1, 2])
def test_micro_batches_and_stages_gather_again_too(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(memory_bytes: int | None, **pins: object) -> Staged:
        plan = gathered_within(memory_bytes, 2 * stages, pipeline=stages, micro_batches=4, **pins)
        assert plan.staged is not None and plan.bound_s <= plan.staged.step_s
        return plan.staged

    most, again = (found(None, recompute=each).peak_bytes for each in ("none", "resharded"))
    limits = [int(again + share * (most - again)) for share in (0.0, 0.5)]
    plans = [found(limit) for limit in limits]
    monkeypatch.setattr("planner.search.remat_selection.gathering_s", lambda cost: math.inf)
    for limit, some in zip(limits, plans, strict=True):
        assert "resharded" in some.levels and some.peak_bytes <= limit
        assert some.step_s < 0.99 * found(limit).step_s


def searched(spec: ClusterSpec) -> Searched:
    return search(bottlenecks(), spec, whole({"data": 2, "zero": 0}), Training())


def test_keeping_some_results_is_faster_than_keeping_all_dear_ones_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same memory, against the four levels that have a name; with room for everything nothing is recomputed."""
    spec = priced()
    roomy = searched(spec)
    assert not roomy.assignment.recompute
    leanest = search(bottlenecks(), spec, whole({"data": 2, "zero": 0, "recompute": "full"}), Training())
    least, most = leanest.memory.peak_bytes, roomy.memory.peak_bytes
    faster = []
    for share in (0.2, 0.4):
        device = spec.device.model_copy(
            update={"memory_bytes": int(least + share * (most - least)), "reserve_fraction": 0.0}
        )
        tight = spec.model_copy(update={"device": device})
        found = searched(tight)
        with monkeypatch.context() as patch:
            patch.setattr("planner.search.micro_batch_search.with_levels_between", lambda levels, *_: levels)
            plain = searched(tight)
        levels = {level for each in found.assignment.recompute.amounts for level, _ in each.levels}
        assert any(isinstance(level, tuple) for level in levels)
        assert found.memory is not None and found.memory.peak_bytes <= device.usable_bytes
        faster.append(1 - found.evaluation.time_s / plain.evaluation.time_s)
    assert faster[0] > 0.03 and faster[1] >= 0.0, faster
