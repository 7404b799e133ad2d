"""Plans at other sizes against models captured at these sizes: every shape, call, byte and second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import sympy
import torch

from autopar.driver.plan import plan_traced
from autopar.driver.trace import Traced, trace
from planner.analysis.prediction import Prediction, predict
from planner.base.errors import PlanError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.certificate import Decided
from planner.formulation.constraints.pins import Pins
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import fold, relabel
from planner.ir.graph import Graph
from planner.plan.plan import Plan
from planner.solve.problem import evaluate
from tests.autopar.models import BATCH, LENGTH, MODELS

SEQUENCES = ["gpt2", "llama", "bert", "encoder", "shared-layers"]
BATCHES = ["mlp", "functional-gpt", "vit", "resnet", "t5", "unknown-op"]
PINS: list[dict[str, Any]] = [
    {"data": 4, "recompute": "selective"},
    {"data": 2, "tensor": 2, "zero": 3, "sequence_parallel": True},
]
LARGER = {"batch": 3 * BATCH, "sequence": 2 * LENGTH}


@cache
def captured(name: str, batch: int | None = None, sequence: int | None = None) -> Traced:
    """A model, captured with inputs of another batch and sequence length."""
    model, inputs = MODELS[name].build()
    return trace(model, None, {key: resized(tensor, batch, sequence) for key, tensor in inputs.items()})


def resized(tensor: torch.Tensor, batch: int | None, sequence: int | None) -> torch.Tensor:
    shape = [batch or tensor.shape[0], *tensor.shape[1:]]
    if len(shape) > 1 and sequence is not None:
        shape[1] = sequence
    return torch.zeros(shape, dtype=tensor.dtype)


def planned(name: str, pin: Mapping[str, Any], cluster: ClusterSpec | None = None) -> Plan:
    return _planned(name, tuple(pin.items()), cluster or ClusterSpec.local(4))


@cache
def _planned(name: str, pin: tuple[tuple[str, Any], ...], cluster: ClusterSpec) -> Plan:
    return plan_traced(captured(name), cluster, Pins.parse(dict(pin)), Training())


def repriced(assignment: Assignment, graph: Graph) -> Prediction:
    """The same decisions for a graph that was captured."""
    planned = assignment.space
    folded = relabel(fold(graph), [instance.kind for instance in planned.folded.instances])
    space = Space(folded, planned.mesh, planned.cost, planned.training, rules_of(graph))
    there = replace(assignment, space=space)
    problem = Decided(there, space.decision_graph).problem(None, there.recompute)
    return predict(there, evaluate(problem, (0,) * len(problem.vertices)).time_s)


def at(formula: sympy.Expr, sizes: Mapping[Any, int]) -> sympy.Expr:
    """What a formula comes to, with all sizes at once."""
    return formula.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})


def check(name: str, pin: Mapping[str, Any], **sizes: int) -> None:
    """A plan at other sizes is the same plan of the model captured there."""
    plan = planned(name, pin)
    graph = captured(name, **sizes).graph
    scale = plan._sizes.scale(batch="batch" in sizes, sequence="sequence" in sizes)
    scaled = scale.assignment(sizes.get("batch", 0), sizes.get("sequence", 0))
    shapes = [(node.name, node.op, node.results) for node in graph.nodes]
    assert [(node.name, node.op, node.results) for node in scaled.space.graph.nodes] == shapes
    found, expected = plan.at(**sizes), repriced(scaled, graph)
    assert found.step_time_s == pytest.approx(expected.step_time_s, rel=1e-9)
    assert found.time_s == pytest.approx(expected.time_s, rel=1e-9)
    assert replace(found, step_time_s=0, time_s={}) == replace(expected, step_time_s=0, time_s={})
    formulas = plan.formulas
    numbers = {formulas.batch: sizes.get("batch", BATCH), formulas.sequence: sizes.get("sequence", LENGTH)}
    assert at(formulas.peak_bytes, numbers) == found.peak_bytes
    assert float(at(formulas.step_time_s, numbers)) == pytest.approx(found.step_time_s, rel=1e-9)


@pytest.mark.parametrize("name, pin", [*zip(BATCHES, cycle(PINS), strict=False)], ids=str)
def test_at_another_batch(name, pin):
    check(name, pin, batch=LARGER["batch"])


@pytest.mark.parametrize("pin", PINS, ids=str)
@pytest.mark.parametrize("name", SEQUENCES)
def test_at_another_batch_and_sequence_length(name, pin):
    check(name, pin, **LARGER)


@pytest.mark.parametrize("pin", [{"expert": 4}, {"expert": 2, "tensor": 2}], ids=str)
def test_tokens_that_go_to_experts(pin):
    check("qwen3-moe", pin, **LARGER)


@pytest.mark.parametrize("moved", ["batch", "sequence"])
@pytest.mark.parametrize("name", ["encoder", "llama"])
def test_one_size_moves(name, moved):
    check(name, {**PINS[1], "recompute": "full"}, **{moved: LARGER[moved]})


def test_what_is_gathered_again_moves_with_the_sizes():
    check("gpt2", {"context": 4, "context_kind": "ulysses", "recompute": "resharded"}, **LARGER)


@pytest.mark.parametrize("name", ["llama", "shared-layers"])
def test_what_the_search_picks_itself(name):
    check(name, {}, **LARGER)


@pytest.mark.parametrize(
    "name, more",
    [("llama", {"recompute": "full"}), ("shared-layers", {"recompute": "full"}), ("llama", {"zero": 3})],
    ids=str,
)
def test_formulas_micro_batched(name, more):
    plan = planned(name, {"pipeline": 2, "micro_batches": 4, "data": 2, "schedule": "1f1b", **more})
    formulas, there = plan.formulas, plan.at(**LARGER)
    numbers = {formulas.batch: LARGER["batch"], formulas.sequence: LARGER["sequence"], formulas.micro_batches: 4}
    assert at(formulas.peak_bytes, numbers) == there.peak_bytes
    as_planned = {formulas.batch: BATCH, formulas.sequence: LENGTH, formulas.micro_batches: 4}
    assert formulas.planned == as_planned
    assert float(at(formulas.step_time_s, as_planned)) == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    formulas.check(12)
    there = plan.at(batch=3 * BATCH, micro_batches=12)  # micro-batches as large as planned
    numbers = {formulas.batch: 3 * BATCH, formulas.sequence: LENGTH, formulas.micro_batches: 12}
    assert at(formulas.peak_bytes, numbers) == there.peak_bytes
    assert float(at(formulas.step_time_s, numbers)) == pytest.approx(there.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    "name, why",
    [
        ("t5", "dim 1 of the inputs has several sizes"),
        ("functional-gpt", rf"aten\.add\.Tensor in .*, the fixed size {LENGTH} meets the sequence"),
        ("vit", r"aten\.conv2d\.default in .*, the fixed size 3 meets the sequence"),
        ("mlp", "dim 1 of the inputs has several sizes"),
    ],
)
def test_what_cannot_be_followed_is_refused(name, why):
    plan = planned(name, PINS[0])
    with pytest.raises(PlanError, match=why):
        plan.at(sequence=2 * LENGTH)


@pytest.mark.parametrize("ask, other", [("batch", "sequence"), ("sequence", "batch")])
def test_the_largest_that_fits_a_language_model(ask, other):
    cluster = ClusterSpec.local(4, memory_bytes="24 MiB")
    plan = planned("llama", {"data": 2, "tensor": 2}, cluster)
    limit, elsewhere = cluster.device.usable_bytes, {other: LARGER[other]}
    most = plan.max_batch(**elsewhere) if ask == "batch" else plan.max_sequence(**elsewhere)
    peaks = []
    for size in range(most, most + 5):
        try:
            peaks.append(plan.at(**{ask: size}, **elsewhere).peak_bytes)
        except PlanError:
            assert size % 2
    assert peaks[0] <= limit < min(peaks[1:])
