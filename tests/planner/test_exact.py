"""Exactness: folded search, unfolded search and brute force agree, on random clusters, however tight memory is.

Brute force adds up every assignment of the unfolded problem of every mesh, and knows nothing of folds, bounds or
solvers.
"""

from __future__ import annotations

import functools
import math
import random

import numpy as np
import pytest

from planner.cluster import ClusterSpec, Device, Level, PeakFlops
from planner.cost import CostModel
from planner.errors import InfeasibleError
from planner.fold import fold_off
from planner.formulate import Space, Training, rules_of
from planner.graph import Graph
from planner.mesh import candidate_meshes
from planner.pins import Pins
from planner.problem import Problem, evaluate
from planner.search import Searched, search
from tests.planner.test_search import chain

CASES = 200
CHUNK = 20


def random_cluster(rng: random.Random, levels: tuple[int, ...]) -> ClusterSpec:
    def rate(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    network = tuple(
        Level(name=f"l{i}", size=size, latency_s=rate(1e-8, 1e-4), bandwidth_bytes_per_s=rate(1e6, 1e10))
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


def problems(graph: Graph, spec: ClusterSpec, limit_bytes: int | None) -> list[Problem]:
    """The unfolded problem of every mesh."""
    cost, rules, folded = CostModel(spec), rules_of(graph), fold_off(graph)
    meshes = candidate_meshes(spec, max_axes=2)
    return [Space(folded, mesh, cost, Training(), rules).problem(limit_bytes) for mesh in meshes]


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


def brute_force(graph: Graph, spec: ClusterSpec) -> float:
    """The least step time of any assignment on any mesh that fits; infinite if none does."""
    best = math.inf
    for problem in problems(graph, spec, spec.device.usable_bytes):
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


def least_peak_and_fastest(graph: Graph, spec: ClusterSpec) -> tuple[int, int]:
    """The least peak of any assignment, and the peak of the fastest."""
    found = [sums(problem) for problem in problems(graph, spec, None)]
    least = min(int(peak[np.isfinite(time)].min()) for time, peak in found)
    fastest = min((float(time.min()), int(peak.flat[time.argmin()])) for time, peak in found)
    return least, max(least, fastest[1])


def searched(graph: Graph, spec: ClusterSpec, folding: bool) -> Searched | None:
    try:
        return search(graph, spec, Pins(), Training(), folding=folding)
    except InfeasibleError:
        return None


def differ(graph: Graph, found: Searched) -> bool:
    """Whether equal layers are decided otherwise."""
    layers = [node for node in graph.nodes if node.op == "aten.linear.default"]
    return len({found.assignment.choice(node).label for node in layers}) > 1


@pytest.mark.parametrize("start", range(0, CASES, CHUNK))
def test_folded_is_unfolded_is_brute_force(start: int) -> None:
    tight_and_different = 0
    for seed in range(start, start + CHUNK):
        rng = random.Random(seed)
        if seed % 4:  # equal layers, which fold, on one axis
            graph, spec = (
                graph_of(3, rng.choice([6, 12]), rng.choice([6, 24])),
                random_cluster(rng, (rng.choice([2, 3]),)),
            )
        else:  # two meshes, one with an axis across nodes
            graph = graph_of(1, rng.choice([4, 8]), rng.choice([4, 16]))
            spec = random_cluster(rng, (2, 2))
        least, most = least_peak_and_fastest(graph, spec)
        share = rng.choice([0.0, 0.0, rng.random(), rng.random(), 1.0, -0.02])
        spec = with_memory(spec, max(1, int(least + share * (most if share < 0 else most - least))))
        expected = brute_force(graph, spec)
        folded, unfolded = (searched(graph, spec, folding) for folding in (True, False))
        if math.isinf(expected):
            assert folded is None and unfolded is None, f"seed {seed}: nothing fits"
            continue
        assert folded is not None and unfolded is not None, f"seed {seed}: something fits"
        for found in (folded, unfolded):
            assert found.status == "optimal" and found.gap == 0, f"seed {seed}"
            assert found.evaluation.time_s == pytest.approx(expected, rel=2e-6), f"seed {seed}"
            assert found.evaluation.peak_bytes <= spec.device.usable_bytes, f"seed {seed}"
        tight_and_different += share < 1.0 and differ(graph, folded)
    assert tight_and_different, "no limit of these made equal layers differ"
