"""Exactness: folded search, unfolded search and brute force agree, on random clusters, however tight memory is.

Brute force adds up every assignment of the unfolded problem of every mesh, and knows nothing of folds, bounds or
solvers. What is exact is the search within its own sum of memory, so plans are not followed here to see what it misses.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.analysis.memory import usage
from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec, Device, PeakFlops
from planner.cost.cluster import Level as NetworkLevel
from planner.cost.model import CostModel
from planner.formulation.certificate import certify
from planner.formulation.constraints.mesh_candidates import candidate_meshes
from planner.formulation.constraints.pins import Pins
from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.levels import pareto_frontier, unfolded
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import fold, fold_off, relabel
from planner.ir.graph import Graph
from planner.ir.layout import Mesh
from planner.search.branch_and_bound import Searched
from planner.search.remat_selection import with_levels_between
from planner.search.search import search
from planner.solve.problem import Problem, evaluate, most_bytes
from tests.planner.plans import Build, filtered, named, whole
from tests.planner.search.test_search import chain

CASES = 100
RECOMPUTING = 60
CHUNK = 20
FREE = Pins()


def random_cluster(rng: random.Random, levels: tuple[int, ...]) -> ClusterSpec:
    def rate(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    network = tuple(
        NetworkLevel(name=f"l{i}", size=size, latency_s=rate(1e-8, 1e-4), bandwidth_bytes_per_s=rate(1e6, 1e10))
        for i, size in enumerate(levels)
    )
    device = Device(
        kind="random",
        memory_bytes=2**40,
        peak_flops_per_s=PeakFlops(float32=rate(1e7, 1e11)),
        memory_bandwidth_bytes_per_s=rate(1e8, 1e10),
        launch_overhead_s=rate(1e-8, 1e-5),
        reserve_fraction=0.0,
    )
    return ClusterSpec(name="random", device=device, levels=network, backend=rng.choice(["nccl", "gloo"]))


def with_memory(spec: ClusterSpec, memory_bytes: int) -> ClusterSpec:
    return spec.model_copy(update={"device": spec.device.model_copy(update={"memory_bytes": memory_bytes})})


@functools.cache
def graph_of(layers: int, width: int, batch: int) -> Graph:
    return chain(layers, width=width, batch=batch, relu=False)


@functools.cache
def gated(width: int, batch: int) -> Graph:
    """Three layers of ``silu(linear(x)) ** 2``: besides their input they keep two values, or the expensive one, or
    none.
    """
    b = Build()
    value = b.leaf("x", batch, width)
    for i in range(3):
        path = f"layers.{i}"
        silu = b.call(
            f"silu{i}", "silu.default", batch, width, path=path, self=b.linear(f"linear{i}", value, width, path)
        )
        value = b.call(f"square{i}", "pow.Tensor_Scalar", batch, width, path=path, self=silu, exponent=2)
    return b.mean(value)


@functools.cache
def pairs(width: int, batch: int) -> Graph:
    """Three layers of ``down(up(x))``: a product saves what the layer made, perhaps gathered for it."""
    b = Build()
    value = b.leaf("x", batch, width)
    for i in range(3):
        up = b.linear(f"up{i}", value, 2 * width, f"layers.{i}.up")
        value = b.linear(f"down{i}", up, width, f"layers.{i}.down")
    return b.mean(value)


def problems(graph: Graph, spec: ClusterSpec, limit_bytes: int | None) -> list[Problem]:
    """The unfolded problem of every mesh, without recomputation."""
    cost, rules, folded = CostModel(spec), rules_of(graph), fold_off(graph)
    meshes = candidate_meshes(spec, max_axes=2)
    return [Space(folded, mesh, cost, Training(), rules).problem(limit_bytes) for mesh in meshes]


def problems_with_recomputation(
    graph: Graph, spec: ClusterSpec, limit_bytes: int | None, pins: Pins = FREE
) -> list[Problem]:
    """The problem of every mesh and every amount of recomputation, in which each block decides for itself."""
    cost, rules, folded = CostModel(spec), rules_of(graph), fold(graph)
    single = relabel(folded, range(len(folded.instances)))
    meshes = [Mesh.of(**pins.sizes)] if pins.sizes else candidate_meshes(spec, max_axes=2)
    spaces = [Space(single, mesh, cost, Training(), rules, *filtered(pins, graph, rules, mesh)) for mesh in meshes]
    decision_graph = DecisionGraph(folded, rules)
    numbers, levels = decision_graph.blocks.numbers, with_levels_between(named(folded), decision_graph, cost)
    steps = [unfolded(step, numbers) for step in pareto_frontier(folded, levels)]
    return [space.problem(limit_bytes, step) for space in spaces for step in steps]


def sums(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Step time and least peak (held and transient bytes) of every assignment, one array axis per vertex."""
    count = len(problem.vertices)
    time, exposed, held, transient = (np.zeros((1,) * count) for _ in range(4))

    def spread(values: np.ndarray, *axes: int) -> np.ndarray:
        if len(axes) == 2 and axes[0] > axes[1]:
            values, axes = values.T, axes[::-1]
        shape = [1] * count
        for axis, size in zip(axes, values.shape, strict=True):
            shape[axis] = size
        return values.reshape(shape)

    for v, vertex in enumerate(problem.vertices):
        time = time + spread(vertex.time_s, v)
        exposed = exposed + spread(vertex.background_s - vertex.cover_s, v)
        held = held + spread(vertex.held_bytes, v)
        transient = np.maximum(transient, spread(vertex.transient_bytes, v))
    for edge in problem.edges:
        time = time + spread(edge.time_s, edge.tail, edge.head)
        exposed = exposed + spread(edge.background_s, edge.tail, edge.head)
        held = held + spread(edge.held_bytes, edge.tail, edge.head)
    return time + np.maximum(0.0, exposed), held + transient


def brute_force(tried: list[Problem], spec: ClusterSpec) -> float:
    """The least step time of any assignment of any problem that fits; infinite if none does."""
    best = math.inf
    for problem in tried:
        time, peak = sums(problem)
        time = np.where(peak <= spec.device.usable_bytes, time, math.inf)
        for flat in np.argsort(time, axis=None, kind="stable"):
            place = np.unravel_index(flat, time.shape)
            if not time[place] < best:
                break
            found = evaluate(problem, tuple(map(int, place)))
            if found.feasible:
                assert found.time_s == pytest.approx(time[place], rel=1e-12)
                best = found.time_s
    return best


def least_peak_and_fastest(tried: list[Problem]) -> tuple[int, int]:
    """The least peak of any assignment, and the peak of the fastest."""
    found = [sums(problem) for problem in tried]
    least = min(int(peak[np.isfinite(time)].min()) for time, peak in found)
    fastest = min((float(time.min()), int(peak.flat[time.argmin()])) for time, peak in found)
    return least, max(least, fastest[1])


def searched(graph: Graph, spec: ClusterSpec, folding: bool, pins: Pins) -> Searched | None:
    try:
        return search(graph, spec, replace(pins, stages=1, micro_batches=1), Training(), folding=folding)
    except InfeasibleError:
        return None


def differ(graph: Graph, found: Searched) -> bool:
    """Whether equal layers are decided otherwise."""
    layers = [node for node in graph.nodes if node.op == "aten.linear.default"]
    return len({found.assignment.choice(node).label for node in layers}) > 1


def a_case(rng: random.Random, large: bool) -> tuple[Graph, ClusterSpec]:
    """Equal layers, which fold, on one axis; or two meshes, one with an axis across nodes."""
    if large:
        graph = graph_of(3, rng.choice([6, 12]), rng.choice([6, 24]))
        return graph, random_cluster(rng, (rng.choice([2, 3]),))
    return graph_of(1, rng.choice([4, 8]), rng.choice([4, 16])), random_cluster(rng, (2, 2))


def limited(rng: random.Random, spec: ClusterSpec, tried: list[Problem]) -> tuple[ClusterSpec, float]:
    """The cluster with memory between what the minimum-memory and what the fastest plan needs, at some share of the
    way.
    """
    least, most = least_peak_and_fastest(tried)
    share = rng.choice([0.0, 0.0, rng.random(), rng.random(), 1.0, -0.02])
    return with_memory(spec, max(1, int(least + share * (most if share < 0 else most - least)))), share


@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_folded_is_unfolded_is_brute_force(start: int) -> None:
    """However much memory there is; within limits see test_one_space.py."""
    different = 0
    for seed in range(start, start + CHUNK):
        rng = random.Random(seed)
        graph, spec = a_case(rng, large=seed % 4 > 0)
        expected = brute_force(problems(graph, spec, spec.device.usable_bytes), spec)
        for folding in (True, False):
            found = searched(graph, spec, folding, Pins(recompute="none"))
            assert found is not None and found.status == "optimal" and found.gap == 0, f"seed {seed}"
            assert found.evaluation.time_s == pytest.approx(expected, rel=2e-6), f"seed {seed}"
            certificate = certify(found.assignment, found.evaluation.time_s)
            assert certificate.holds and certificate.objective_s == pytest.approx(expected, rel=2e-6), f"seed {seed}"
        different += differ(graph, found)
    assert different, "equal layers never differed"


def test_where_everything_fits_recomputing_is_not_looked_at_and_could_not_be_better() -> None:
    """With room for the fullest assignment, the best of all is the best without recomputation."""
    for seed in range(4):
        rng = random.Random(seed)
        graph, spec = a_case(rng, large=True)
        free = problems(graph, spec, None)
        expected = brute_force(problems_with_recomputation(graph, spec, None), spec)
        most = max(map(most_bytes, free))
        for problem in free:
            _, peak = sums(problem)
            assert int(peak.max()) <= most_bytes(problem)
            assert evaluate(problem, (0,) * len(problem.vertices)).peak_bytes <= most_bytes(problem)
        found = search(graph, with_memory(spec, most), whole(), Training())
        assert found.status == "optimal" and not found.assignment.recompute, f"seed {seed}"
        assert found.evaluation.time_s == pytest.approx(expected, rel=2e-6), f"seed {seed}"


def test_no_plan_needs_more_than_there_is() -> None:
    found_any = 0
    for seed in range(0, 80, 4):
        rng = random.Random(seed)
        graph, spec = a_case(rng, large=False)
        spec, _ = limited(rng, spec, problems(graph, spec, None))
        found = searched(graph, spec, True, Pins(recompute="none"))
        assert found is None or usage(found.assignment).peak_bytes <= spec.device.usable_bytes, f"seed {seed}"
        found_any += found is not None
    assert found_any
