"""Bounds of a multiple of a space's micro-batches are no more than its own costs say, and than what its plans take."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from planner.analysis.pipeline.chain import links_of
from planner.analysis.pipeline.staged import stage
from planner.cost.cluster import ClusterSpec, Device, Level, PeakFlops
from planner.formulation.assignment import assignment_of
from planner.formulation.remat.levels import LEVELS
from planner.formulation.stage_costs import StageCosts
from planner.formulation.unsharding import Gathers
from planner.ir.graph import Graph
from planner.search import pipeline_bounds
from planner.search.parallel_config import pipelines_of
from planner.search.pipeline_bounds import PipelineBounds
from planner.solve.pipeline.master import Paths
from tests.planner.analysis.test_staged import space_of, wide_first
from tests.planner.plans import named, residual_mlp
from tests.planner.search.test_search import chain


def a_cluster(rng: random.Random, devices: int) -> ClusterSpec:
    """One in which communication, memory or products may take nearly all time, and routes differ."""

    def level(name: str, size: int) -> Level:
        return Level(name=name, size=size, latency_s=10 ** rng.uniform(-7, -5), bandwidth_bytes_per_s=some(7, 11))

    def some(least: float, most: float) -> float:
        return 10 ** rng.uniform(least, most)

    device = Device(
        kind="test", memory_bytes=2**34, peak_flops_per_s=PeakFlops(float32=some(9, 13)),
        memory_bandwidth_bytes_per_s=some(9, 13), launch_overhead_s=1e-7, reserve_fraction=0.0,
    )  # fmt: skip
    is_split = devices > 2 and rng.random() < 0.6
    levels = (level("node", devices // 2), level("network", 2)) if is_split else (level("node", devices),)
    return ClusterSpec(name="test", device=device, levels=levels, backend="nccl")


def a_model(rng: random.Random) -> Graph:
    batch = rng.choice((64, 256, 2048))
    which = rng.choice(("chain", "residual", "wide"))
    if which == "chain":
        return chain(layers=rng.choice((2, 3, 5)), width=rng.choice((8, 64, 256)), batch=batch)
    if which == "residual":
        return residual_mlp(layers=rng.choice((2, 4)), batch=batch)
    return wide_first(64 * rng.choice((1, 4, 16)), rng.choice((2, 3)))


@dataclass(frozen=True)
class Drawn:
    """A model on a cluster, in so few micro-batches, and in so many times as many."""

    graph: Graph
    spec: ClusterSpec
    stages: int
    sizes: Mapping[str, int]
    gathers: Gathers
    fewest: int
    times: int

    @classmethod
    def of(cls, seed: int) -> Drawn:
        rng = random.Random(seed)
        graph, devices = a_model(rng), rng.choice((2, 4, 8))
        stages = rng.choice([count for count in (1, 2, 4) if count <= devices])
        ranks = devices // stages
        sizes = {"data": 2, "tensor": ranks // 2} if ranks >= 4 and rng.random() < 0.6 else {"data": ranks}
        fewest, times = rng.choice((1, 2, 4) if stages > 1 else (2, 4)), rng.choice((2, 4, 8))
        gathers: tuple[Gathers, ...] = ("each", "each", "once")
        return cls(graph, a_cluster(rng, devices), stages, sizes, rng.choice(gathers), fewest, times)

    def bounds(self, micro_batches: int, limit_bytes: int | None = None) -> PipelineBounds:
        space = space_of(self.graph, self.spec, self.stages, micro_batches, "1f1b", self.gathers, **self.sizes)
        return PipelineBounds(StageCosts(space, named(space.folded, LEVELS)), limit_bytes, 0.0, waits=True)


@pytest.mark.parametrize("seed", range(40))
def test_a_multiple_is_bounded_by_no_more_than_its_own_costs(seed: int) -> None:
    """Gradients are all-reduced once a step though each micro-batch gathers: with more, another route may be best."""
    drawn = Drawn.of(seed)
    fewest, count = drawn.fewest, drawn.fewest * drawn.times
    of_fewest, own = drawn.bounds(fewest), drawn.bounds(count)
    for enough_s in (math.inf, 1.1 * own.free_s, 0.9 * own.free_s):
        found = of_fewest.free_of([fewest, count, 2 * count], enough_s)
        assert of_fewest.free_s * (1 - 1e-9) <= found[count] <= own.free_s * (1 + 1e-9)
        assert found[fewest] <= found[count] <= found[2 * count]
    for pipeline in pipelines_of(drawn.stages, count, len(own.costs.folded.instances)):
        assert of_fewest.packed_s(pipeline) <= own.packed_s(pipeline) * (1 + 2e-5)
    (pipeline, *_), narrowed = pipelines_of(drawn.stages, fewest, drawn.stages), drawn.bounds(fewest)
    narrowed.packed_s(pipeline, 0.9 * narrowed.free_s)  # drops choices of slower plans, as all are
    free_s = narrowed.free_of([count], math.inf)[count]
    assert free_s <= own.free_s * (1 + 1e-9)
    assert narrowed.work_s(pipeline, narrowed.free_s) <= drawn.bounds(fewest).work_s(pipeline, narrowed.free_s)
    (choices,) = own.choices
    links = links_of(assignment_of(own.costs.space, choices), named(own.costs.folded, LEVELS))
    pipelines = pipelines_of(drawn.stages, count, len(links))
    if (free := stage(links, pipelines, None)) is None:  # more stages than blocks
        return
    for share in (1.0, 0.9, 0.7):
        limit_bytes = int(free.peak_bytes * share)
        if (plan := stage(links, pipelines, limit_bytes)) is not None:
            bounds = drawn.bounds(fewest, limit_bytes)
            free_s = bounds.free_of([count], math.inf)[count]
            assert bounds.work_s(plan.pipeline, free_s) <= plan.step_s * (1 + 1e-9)
            for enough_s in (plan.step_s, 1.2 * plan.step_s, math.inf):
                assert bounds.packed_s(plan.pipeline, enough_s) <= plan.step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", sorted({*range(24)} - {2, 23}))  # these have more stages than blocks
def test_proofs_without_what_is_dominated_say_as_much_as_with_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are so small that they are split at first, as those of large models are."""
    monkeypatch.setattr(pipeline_bounds, "ENTRIES", 2)
    drawn, left_out = Drawn.of(seed), list[int]()
    undominated = StageCosts.undominated

    def counted(costs: StageCosts) -> StageCosts:
        found = undominated(costs)
        left_out.append(sum(map(len, costs.kept or ())) - sum(map(len, found.kept or ())))
        return found

    monkeypatch.setattr(StageCosts, "undominated", counted)
    free = drawn.bounds(drawn.fewest)
    (choices,) = free.choices
    links = links_of(assignment_of(free.costs.space, choices), named(free.costs.folded, LEVELS))
    pipelines = pipelines_of(drawn.stages, drawn.fewest, len(links))
    whole = stage(links, pipelines, None)
    assert whole is not None
    for share in (1.0, 0.8):
        limit_bytes = int(whole.peak_bytes * share)
        plan = stage(links, pipelines, limit_bytes)
        if plan is None:
            continue
        for enough_s in (1.02 * plan.step_s, 3 * plan.step_s):
            without, all_choices = (
                drawn.bounds(drawn.fewest, limit_bytes).of(Paths(plan.pipeline), enough_s, in_order=in_order)
                for in_order in (False, True)
            )
            assert without.left is None
            assert without.time_s <= plan.step_s * (1 + 1e-9)
            assert without.time_s == pytest.approx(all_choices.time_s, rel=2e-3)
    assert max(left_out) > 0


@pytest.mark.parametrize("seed", [40, 49])
def test_what_every_micro_batch_gathers_counts_in_each_of_a_multiple(seed: int) -> None:
    """Of these models on slow networks less than half of a step is what does not grow with the micro-batches."""
    drawn = Drawn.of(seed)
    bounds, count = drawn.bounds(drawn.fewest), drawn.fewest * drawn.times
    assert drawn.gathers == "each"
    assert bounds.free_of([count], math.inf)[count] > 2 * bounds.free_s
