"""The search: what it may leave out, stops for, repeats and refuses; that it is exact, ``test_optimum`` says."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner.search.branch_and_bound
from planner.analysis.memory import usage
from planner.base.errors import ClusterError, InfeasibleError, InputError
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
from planner.solve.problem import Problem, evaluate
from tests.planner.plans import Build, residual_mlp, whole
from tests.planner.plans import cluster as local


@contextlib.contextmanager
def by_the_sum_alone():
    """No plan is found to need more memory than the sum says, nor less."""
    nothing = SimpleNamespace(peak_at="", peak_bytes=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.search.branch_and_bound.usage", lambda assignment: nothing)
        patch.setattr("planner.search.memory_fitting.fastest_that_fits", lambda minimal, usable_bytes: None)
        patch.setattr("planner.search.memory_fitting.LEAST_HEADROOM", math.inf)
        yield


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


def test_the_excess_is_just_enough():
    with pytest.raises(InfeasibleError) as caught:
        search(chain(3), cluster(2, memory=1000), whole(), Training())
    enough = 1000 + caught.value.excess_bytes
    found = search(chain(3), cluster(2, memory=enough), whole(), Training())
    assert found.memory is not None and found.memory.peak_bytes == enough
    with pytest.raises(InfeasibleError):
        search(chain(3), cluster(2, memory=enough - 1), whole(), Training())


@given(rates)
@settings(max_examples=5, deadline=None)
def test_three_axes_are_never_worse_and_each_essentially_different_mesh_is_tried_once(rates):
    graph, spec = chain(1, width=16, batch=16), cluster(8, **rates)
    two, three = (search(graph, spec, whole(), Training(), max_axes=axes) for axes in (2, 3))
    assert len(two.candidates) == 2 and len(three.candidates) == 3
    assert {c.mesh.sizes for c in three.candidates} == {(8,), (2, 4), (2, 2, 2)}
    assert three.status == "optimal"
    assert three.evaluation.time_s <= two.evaluation.time_s * (1 + 1e-6)


@given(rates, st.sampled_from([4, 6, 8, 12]), st.floats(0.5, 1.1))
@settings(max_examples=15, deadline=None)
def test_what_is_bounded_away_could_not_have_been_better(rates, devices, share):
    graph = chain(2, width=24, batch=24)
    spec = cluster(devices, **rates)
    free = search(graph, spec, whole(), Training(), folding=False)
    limit = int(free.evaluation.peak_bytes * share)
    spec = spec.model_copy(update={"device": spec.device.model_copy(update={"memory_bytes": limit})})
    try:
        with by_the_sum_alone():
            found = search(graph, spec, whole(), Training(), folding=False)
    except InfeasibleError:
        return
    assert found.status == "optimal" and found.gap == 0
    assert {c.mesh.sizes for c in found.candidates} == {mesh.sizes for mesh in candidate_meshes(spec)}
    for candidate in found.candidates:
        alone = solve(problem_of(graph, spec, candidate.mesh, limit, folded=False))
        assert alone.status in ("optimal", "infeasible")
        truth = alone.objective_s if alone.status == "optimal" else math.inf
        assert candidate.bound_s <= truth * (1 + 1e-6)
        assert found.evaluation.time_s <= truth * (1 + 1e-6)
        assert (candidate.status == "infeasible") <= math.isinf(truth)
        if candidate.status == "optimal":
            assert candidate.objective_s == pytest.approx(truth, rel=2e-6)


def test_unbalanced_meshes_are_bounded_away_by_their_work_alone():
    """A batch of 16 on 64 devices with no other size to divide: most meshes leave devices with more than their part."""
    graph = chain(2, width=17, batch=16)
    spec = cluster(64, flops=1e6, bandwidth=1e12, latency=1e-9)
    found = search(graph, spec, whole(), Training())
    proofs = {candidate.mesh.sizes: candidate.proof for candidate in found.candidates if candidate.status != "optimal"}
    assert proofs[(64,)] == proofs[(2, 32)] == "work"
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
    """What it leaves is told, and no plan is below it; without a gap nothing is left."""
    graph, spec = chain(6, width=1024, batch=64), cluster(8)
    needed = search(graph, spec, whole(), Training()).evaluation.peak_bytes
    tight = spec.model_copy(update={"device": spec.device.model_copy(update={"memory_bytes": int(0.97 * needed)})})
    with by_the_sum_alone():
        best, found = (search(graph, tight, whole(), Training(), gap=gap) for gap in (0.0, 0.3))
    assert best.status == "optimal" and best.gap == 0
    assert 0 < found.gap <= 0.3 and found.status == "feasible"
    assert found.bound_s <= best.evaluation.time_s * (1 + 1e-6) <= found.evaluation.time_s * (1 + 2e-6)


def test_a_plan_takes_the_room_that_it_has_when_it_is_followed():
    """The sum counts all gradients beside all activations; followed, one leaves as the other comes."""
    graph, spec = chain(6, width=1024, batch=64), cluster(8)
    needed = search(graph, spec, whole(), Training()).evaluation.peak_bytes
    memory = int(0.99 * needed)
    tight = spec.model_copy(update={"device": spec.device.model_copy(update={"memory_bytes": memory})})
    with by_the_sum_alone():
        first = search(graph, tight, whole(), Training())
    found = search(graph, tight, whole(), Training())
    assert found.evaluation.time_s < first.evaluation.time_s * 0.999
    assert found.evaluation.peak_bytes > memory  # by the sum
    assert found.memory is not None and found.memory.peak_bytes <= memory
    assert found.bound_s <= found.evaluation.time_s


def test_devices_that_nothing_divides_by():
    with pytest.raises(ClusterError, match=r"7 devices of 'test' cannot share this model.*\(8\).*divisor in common"):
        search(chain(2), cluster(7), whole(), Training())
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


def test_a_plan_that_more_memory_would_not_make_faster_is_searched_once(monkeypatch):
    limits, once = [], planner.search.branch_and_bound.branch_and_bound

    def counted(context, *rest):
        limits.append(context.limit_bytes)
        return once(context, *rest)

    monkeypatch.setattr("planner.search.memory_fitting.branch_and_bound", counted)
    assert search(chain(3), cluster(4), whole(), Training()).status == "optimal"
    assert len(limits) == 1


def test_what_a_search_with_less_memory_proves_is_not_said_of_all(monkeypatch):
    """A plan found after the limit was lowered keeps the first bound, whatever is proved of plans with less memory."""
    graph, spec = residual_mlp(1, 64, 64), local(2, "4 GiB")
    usable = int(0.95 * search(graph, spec, whole(), Training()).evaluation.peak_bytes)
    device = spec.device.model_copy(update={"memory_bytes": usable, "reserve_fraction": 0.0})
    first, bounds = planner.search.branch_and_bound.branch_and_bound, []

    def noted(context, *rest):
        found = first(context, *rest)
        bounds.append((context.limit_bytes, getattr(found, "bound_s", math.inf)))
        return found

    def needs_more(assignment):
        """Plans near the limit need more than their sum."""
        found, (_, sums) = usage(assignment), (None, by_sum(assignment))
        return replace(found, peak_bytes=int(1.3 * sums) if sums > 0.97 * usable else sums)

    def by_sum(assignment):
        return evaluate(assignment.space.problem(None, assignment.recompute), choices_of(assignment)).peak_bytes

    def choices_of(assignment):
        return tuple(
            assignment.space.options[variable].index(assignment.chosen[variable])
            for variable in assignment.space.variables
        )

    monkeypatch.setattr("planner.search.memory_fitting.branch_and_bound", noted)
    monkeypatch.setattr("planner.search.branch_and_bound.usage", needs_more)
    found = search(graph, spec.model_copy(update={"device": device}), whole(), Training())
    assert len(bounds) > 2 and bounds[1][0] < usable
    assert found.bound_s <= bounds[0][1] * (1 + 1e-9)
