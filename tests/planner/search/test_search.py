"""The search: what it may leave out, stops for, repeats and refuses; that it is exact, ``test_optimum`` says."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.base.errors import InfeasibleError, InputError
from planner.cost.cluster import ClusterSpec, Device, Level, PeakFlops
from planner.cost.model import CostModel
from planner.formulation.constraints.mesh_candidates import candidate_meshes
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import fold, fold_off
from planner.ir.graph import Graph
from planner.ir.layout import Mesh
from planner.search.search import search
from planner.solve.choices import solve
from planner.solve.problem import Problem
from tests.planner.plans import Build, whole


def chain(layers: int, width: int = 8, batch: int = 8, relu: bool = True) -> Graph:
    """``mean(linear(relu(... linear(x))))``: the smallest model with weights, a chain and a loss."""
    b = Build()
    value = b.leaf("x", batch, width)
    for i in range(layers):
        value = b.linear(f"linear{i}", value, width, f"layers.{i}")
        value = b.relu(f"relu{i}", value, f"layers.{i}") if relu else value
    return b.mean(value)


def cluster(
    devices: int = 2, flops: float = 1e9, bandwidth: float = 1e8, latency: float = 1e-6, memory: int = 2**30
) -> ClusterSpec:
    return ClusterSpec(
        name="test",
        device=Device(
            kind="test",
            memory_bytes=memory,
            peak_flops_per_s=PeakFlops(float32=flops),
            memory_bandwidth_bytes_per_s=1e9,
            launch_overhead_s=1e-7,
            reserve_fraction=0.0,
        ),
        levels=(Level(name="node", size=devices, latency_s=latency, bandwidth_bytes_per_s=bandwidth),),
        backend="nccl",
    )


def problem_of(graph: Graph, spec: ClusterSpec, mesh: Mesh, limit: int | None, folded: bool) -> Problem:
    folds = fold(graph) if folded else fold_off(graph)
    return Space(folds, mesh, CostModel(spec), Training(), rules_of(graph)).problem(limit)


rates = st.fixed_dictionaries(
    {
        "flops": st.floats(1e7, 1e11),
        "bandwidth": st.floats(1e6, 1e10),
        "latency": st.floats(1e-8, 1e-3),
    }
)


def test_equal_layers_may_alternate():
    """Column, then row, then column: better than any one decision for all layers, and folded again by twos."""
    graph = chain(6, width=1024, batch=64)
    found = search(graph, cluster(2, flops=1e10, bandwidth=1e9), whole({"tensor": 2}), Training())
    labels = [found.assignment.choice(node).label for node in graph.nodes if node.op == "aten.linear.default"]
    assert len(set(labels)) == 2
    assert labels[0] != labels[1] == labels[3]


def test_the_excess_is_enough():
    with pytest.raises(InfeasibleError) as caught:
        search(chain(3), cluster(2, memory=1000), whole(), Training())
    enough = 1000 + caught.value.excess_bytes
    found = search(chain(3), cluster(2, memory=enough), whole(), Training())
    assert found.memory is not None and found.memory.peak_bytes <= enough


@given(rates)
@settings(max_examples=5, deadline=None)
def test_three_axes_are_never_worse_and_each_essentially_different_mesh_is_tried_once(rates):
    graph, spec = chain(1, width=16, batch=16), cluster(8, **rates)
    two, three = (search(graph, spec, whole(), Training(), max_axes=axes) for axes in (2, 3))
    assert len(two.candidates) == 2 and len(three.candidates) == 3
    assert {c.mesh.sizes for c in three.candidates} == {(8,), (2, 4), (2, 2, 2)}
    assert three.status == "optimal"
    assert three.evaluation.time_s <= two.evaluation.time_s * (1 + 1e-6)


@given(rates, st.sampled_from([4, 6, 8, 12]))
@settings(max_examples=15, deadline=None)
def test_what_is_bounded_away_could_not_have_been_better(rates, devices):
    graph, spec = chain(2, width=24, batch=24), cluster(devices, **rates)
    found = search(graph, spec, whole(), Training(), folding=False)
    assert found.status == "optimal" and found.gap == 0
    assert {c.mesh.sizes for c in found.candidates} == {mesh.sizes for mesh in candidate_meshes(spec)}
    for candidate in found.candidates:
        alone = solve(problem_of(graph, spec, candidate.mesh, None, folded=False))
        assert alone.status == "optimal"
        assert candidate.bound_s <= alone.objective_s * (1 + 1e-6)
        assert found.evaluation.time_s <= alone.objective_s * (1 + 1e-6)
        if candidate.status == "optimal":
            assert candidate.objective_s == pytest.approx(alone.objective_s, rel=2e-6)


def test_unbalanced_meshes_are_bounded_away_by_their_work_alone():
    """A batch of 16 on 64 devices with no other size to divide: most meshes leave devices with more than their part."""
    graph = chain(2, width=17, batch=16)
    spec = cluster(64, flops=1e6, bandwidth=1e12, latency=1e-9)
    found = search(graph, spec, whole(), Training())
    proofs = {candidate.mesh.sizes: candidate.proof for candidate in found.candidates}
    assert proofs[(8, 8)] == "work"
    assert 16 in found.assignment.space.mesh.sizes


def test_a_time_limit_leaves_a_plan_and_a_bound():
    graph = chain(6, width=1024, batch=64)
    found = search(graph, cluster(8), whole(), Training(), time_limit_s=1e-6)
    assert found.evaluation.feasible
    best = search(graph, cluster(8), whole(), Training()).evaluation.time_s
    bound = found.evaluation.time_s * (1 - found.gap)
    assert bound <= best * (1 + 1e-6) <= found.evaluation.time_s * (1 + 2e-6)
    assert (found.status == "optimal") == (found.gap == 0)


@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
def test_a_time_limit_that_is_none(limit):
    with pytest.raises(InputError, match=r"time_limit_s is .*more than 0"):
        search(chain(1), cluster(), whole(), Training(), time_limit_s=limit)


@pytest.mark.parametrize("gap", [-0.1, 1.0, math.nan, "0.1", True])
def test_a_gap_that_is_none(gap):
    with pytest.raises(InputError, match=r"gap is .*at least 0 and below 1"):
        search(chain(1), cluster(), whole(), Training(), gap=gap)


@pytest.mark.parametrize("axes", [0, 4, True, 2.0, "2"])
def test_axes_of_which_there_are_no_so_many(axes):
    with pytest.raises(InputError, match=r"max_axes is .*: 1, 2 or 3"):
        search(chain(1), cluster(), whole(), Training(), max_axes=axes)


def test_a_proof_may_leave_a_gap():
    """What it leaves is told, and no plan is below it."""
    graph, spec = chain(6, width=1024, batch=64), cluster(8)
    needed = search(graph, spec, whole(), Training()).peak_bytes
    tight = spec.model_copy(update={"device": spec.device.model_copy(update={"memory_bytes": needed - 1})})
    best, found = (search(graph, tight, whole(), Training(), gap=gap) for gap in (0.0, 0.3))
    assert best.gap <= found.gap <= 0.3
    assert found.bound_s <= best.evaluation.time_s * (1 + 1e-6) <= found.evaluation.time_s * (1 + 2e-6)
    assert best.peak_bytes < needed


def test_a_model_that_computes_nothing():
    b = Build()
    with pytest.raises(InputError, match="has no operators"):
        search(b.graph(b.leaf("x", 8, 8)), cluster(1), whole(), Training())


def test_devices_that_nothing_divides_by():
    """Each does all the work, which takes as long as on one."""
    on_one, on_seven = (search(chain(2), cluster(devices), whole(), Training()) for devices in (1, 7))
    assert on_seven.status == "optimal"
    assert on_seven.evaluation.time_s == pytest.approx(on_one.evaluation.time_s, rel=1e-9)
    assert search(chain(2, width=7), cluster(7), whole(), Training()).status == "optimal"


def test_an_interrupt_ends_the_search_and_the_next_is_unharmed():
    def interrupt(_: str) -> None:
        signal.raise_signal(signal.SIGINT)

    before = search(chain(3), cluster(4), whole(), Training())
    with pytest.raises(KeyboardInterrupt):
        search(chain(3), cluster(4), whole(), Training(), progress=interrupt)
    assert search(chain(3), cluster(4), whole(), Training()).assignment.chosen == before.assignment.chosen


def test_a_plan_does_not_depend_on_the_process_or_its_hash_seed():
    """The whole plan of a model whose layers alternate, but for its seconds, from two processes."""
    code = (
        "from tests.planner.search.test_search import *\n"
        "from planner.plan.plan import describe, Search\n"
        "from planner.analysis.prediction import predict\n"
        "found = search(chain(4, width=64, batch=64), cluster(8, memory=80_000), whole(), Training())\n"
        "candidates = tuple(candidate.facts() for candidate in found.candidates)\n"
        "cost = found.evaluation\n"
        "plan = describe(found.assignment, {}, {}, predict(found.assignment, cost.time_s),\n"
        "                Search(found.status, found.gap, {}, candidates))\n"
        "print(plan.to_dict())"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4711")
    ]
    assert texts[0] and len(set(texts)) == 1
