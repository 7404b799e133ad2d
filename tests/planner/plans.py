"""Helpers: a small model as a planner graph, a cluster that is the same everywhere, and their plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.analysis.pipeline.staged import Staged
from planner.analysis.prediction import predict, predict_micro_batched
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, Search, describe
from planner.search.search import search

GOLDEN = Path(__file__).parent / "golden"


def cluster(devices: int = 4, memory: int | str = "1 GiB") -> ClusterSpec:
    """CPU processes with figures that do not depend on the machine."""
    return ClusterSpec.local(devices, memory_bytes=memory, cores=2)


def residual_mlp(
    layers: int = 3, width: int = 256, batch: int = 512, strange: bool = False, early: bool = False
) -> Graph:
    """``mean(head(h + down(relu(up(h))) ...))`` with ``h = stem(x)``: weights, biases, residuals, repeats and a loss.

    ``strange`` adds an operator that no table knows; with ``early`` every layer also adds the stem's result.
    """
    nodes: list[Node] = []

    def leaf(name: str, op: str, shape: tuple[int, ...], target: str) -> Ref:
        nodes.append(Node(name, op, (), (TensorType(shape, "float32", op == "param"),), target=target))
        return Ref(name)

    def call(name: str, op: str, shape: tuple[int, ...], path: str, **args: object) -> Ref:
        nodes.append(Node(name, op, tuple(args.items()), (TensorType(shape, "float32", True),), path=path))
        return Ref(name)

    def linear(name: str, value: Ref, rows: int, columns: int, path: str) -> Ref:
        weight = leaf(f"{name}_w", "param", (columns, rows), f"{path}.weight")
        bias = leaf(f"{name}_b", "param", (columns,), f"{path}.bias")
        return call(name, "aten.linear.default", (batch, columns), path, input=value, weight=weight, bias=bias)

    value = stem = linear("stem", leaf("x", "input", (batch, width), "x"), width, width, "stem")
    for i in range(layers):
        if early:
            value = call(f"early{i}", "aten.add.Tensor", (batch, width), f"layers.{i}", self=value, other=stem, alpha=1)
        up = linear(f"up{i}", value, width, 4 * width, f"layers.{i}.up")
        hidden = call(f"relu{i}", "aten.relu.default", (batch, 4 * width), f"layers.{i}", self=up)
        down = linear(f"down{i}", hidden, 4 * width, width, f"layers.{i}.down")
        value = call(
            f"add{i}", "aten.add.Tensor", (batch, width), f"layers.{i}", self=value, other=down, alpha=1
        )  # fmt: skip
    if strange:
        value = call("strange", "house.strange.default", (batch, width), "odd", self=value)
    value = linear("head", value, width, 64, "head")
    call("loss", "aten.mean.default", (), "", self=value, dtype=None)
    return Graph(tuple(nodes), (Ref("loss"),))


def plan_of(graph: Graph, spec: ClusterSpec | None = None, pin: Mapping[str, Any] | None = None) -> Plan:
    """Plan a graph as :func:`autopar.plan` plans a model, with seconds that are always the same."""
    pins = Pins.parse(pin)
    found = search(graph, spec or cluster(), pins, Training())
    candidates = tuple(candidate.facts() for candidate in found.candidates)
    return written(found.assignment, found.evaluation.time_s, pins, candidates, found.staged)


def written(
    assignment: Assignment,
    time_s: float,
    pins: Pins | None = None,
    candidates: tuple[Any, ...] = (),
    staged: Staged | None = None,
) -> Plan:
    """An assignment as a plan."""
    predicted = predict(assignment, time_s) if staged is None else predict_micro_batched(assignment, staged)
    seconds = {"capture": 1.0, "fold": 0.25, "solve": 0.5}
    facts = model_facts(assignment.space.graph, "ResidualMLP")
    return describe(
        assignment, facts, (pins or Pins()).to_dict(), predicted, Search("optimal", 0.0, seconds, candidates), staged
    )


def unwrapped(text: object) -> str:
    """A text without its line breaks."""
    return " ".join(str(text).split())


def check_golden(name: str, text: str) -> None:
    """Compare with a file of ``golden/``; with ``UPDATE_GOLDEN=1`` in the environment, write it."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    assert text == expected, f"{path} differs; if the change is wanted, run this test with UPDATE_GOLDEN=1"
