"""The search against exhaustive enumeration: same optimum, folded or not, under random clusters and limits."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster import ClusterSpec, Device, Level, PeakFlops
from planner.cost import CostModel
from planner.errors import InfeasibleError, PinError
from planner.fold import fold, fold_off
from planner.formulate import Space, Training, rules_of
from planner.graph import Graph, Node, Ref, TensorType
from planner.layout import Mesh
from planner.pins import Pins
from planner.problem import Problem, evaluate
from planner.search import search
from planner.solve import solve


def chain(layers: int, width: int = 8, batch: int = 8, relu: bool = True) -> Graph:
    """``mean(linear(relu(... linear(x))))``: the smallest model with weights, a chain and a loss."""
    nodes = [Node("x", "input", (), (TensorType((batch, width), "float32"),), target="x")]
    value = Ref("x")
    for i in range(layers):
        weight = f"w{i}"
        nodes.append(
            Node(weight, "param", (), (TensorType((width, width), "float32", True),), target=f"layers.{i}.weight")
        )
        result = (TensorType((batch, width), "float32", True),)
        args = (("input", value), ("weight", Ref(weight)), ("bias", None))
        nodes.append(Node(f"linear{i}", "aten.linear.default", args, result, path=f"layers.{i}"))
        value = Ref(f"linear{i}")
        if relu:
            nodes.append(Node(f"relu{i}", "aten.relu.default", (("self", value),), result, path=f"layers.{i}"))
            value = Ref(f"relu{i}")
    nodes.append(
        Node("loss", "aten.mean.default", (("self", value), ("dtype", None)), (TensorType((), "float32", True),))
    )
    return Graph(tuple(nodes), (Ref("loss"),))


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


def exhaustive(problem: Problem) -> float:
    """The least time over every assignment that fits; ``inf`` when none does."""
    best = math.inf
    for choices in itertools.product(*(range(v.choices) for v in problem.vertices)):
        found = evaluate(problem, choices)
        if found.feasible:
            best = min(best, found.time_s)
    return best


rates = st.fixed_dictionaries(
    {
        "flops": st.floats(1e7, 1e11),
        "bandwidth": st.floats(1e6, 1e10),
        "latency": st.floats(1e-8, 1e-3),
    }
)


@given(rates, st.booleans(), st.floats(0.3, 1.2))
@settings(max_examples=25, deadline=None)
def test_the_solver_finds_the_optimum_of_exhaustive_enumeration(rates, folded, share):
    graph = chain(1, relu=False)
    whole = problem_of(graph, cluster(**rates), Mesh.of(all=2), None, folded)
    free = solve(whole)
    limit = int(evaluate(whole, free.choices).peak_bytes * share)
    problem = problem_of(graph, cluster(**rates), Mesh.of(all=2), limit, folded)
    expected, answer = exhaustive(problem), solve(problem)
    if math.isinf(expected):
        assert answer.status == "infeasible"
    else:
        assert answer.status == "optimal"
        assert answer.objective_s == pytest.approx(expected, rel=1e-6)
        assert answer.objective_s == evaluate(problem, answer.choices).time_s


@given(rates, st.integers(2, 5), st.sampled_from([2, 4]), st.sampled_from([8, 32, 256]))
@settings(max_examples=40, deadline=None)
def test_the_folded_optimum_is_the_unfolded_one(rates, layers, devices, width):
    graph = chain(layers, width=width)
    spec = cluster(devices, **rates)
    folded = search(graph, spec, Pins(), Training())
    unfolded = search(graph, spec, Pins(), Training(), folding=False)
    assert folded.status == unfolded.status == "optimal"
    assert folded.evaluation.time_s == pytest.approx(unfolded.evaluation.time_s, rel=1e-6)


def test_equal_layers_may_alternate():
    """Column, then row, then column: better than any one decision for all layers, and folded again by twos."""
    graph = chain(6, width=1024, batch=64)
    found = search(graph, cluster(2, flops=1e10, bandwidth=1e9), Pins.parse({"tensor": 2}), Training())
    labels = [found.assignment.choice(node).label for node in graph.nodes if node.op == "aten.linear.default"]
    assert len(set(labels)) == 2
    assert labels[0] != labels[1] == labels[3]


def test_nothing_fits_says_by_how_much_and_what_would():
    with pytest.raises(InfeasibleError, match=r"can use 1,000 bytes.*needs [\d,]+, [\d,]+ too many.*What would fit"):
        search(chain(4), cluster(memory=1000), Pins(), Training())


def test_pins_reach_the_search():
    found = search(chain(3), cluster(4), Pins.parse({"data": 2, "tensor": 2}), Training())
    assert found.assignment.space.mesh.names == ("data", "tensor")
    with pytest.raises(PinError, match="batch of 8"):
        search(chain(3), cluster(3), Pins.parse({"data": 3}), Training())
    with pytest.raises(PinError, match="never calls it"):
        search(chain(3), cluster(2), Pins.parse({"context": 2}), Training())


def test_a_plan_does_not_depend_on_the_time_of_day():
    first, second = (search(chain(4), cluster(4), Pins(), Training()) for _ in range(2))
    assert first.assignment.chosen == second.assignment.chosen
