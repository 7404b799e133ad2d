"""Helpers: a small model as a planner graph, a cluster that is the same everywhere, and their plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from planner.analysis.pipeline.staged import Staged
from planner.analysis.prediction import predict, predict_micro_batched
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.context import with_ulysses
from planner.formulation.constraints.filters import filters
from planner.formulation.constraints.labels import label_blocks
from planner.formulation.constraints.pins import Pins
from planner.formulation.decisions import DecisionGraph
from planner.formulation.node_options import AllowLeaf
from planner.formulation.remat.levels import ALONE, LEVELS, Level, Levels, named_by_kind
from planner.formulation.strategies import Allow
from planner.formulation.training import Training
from planner.ir.folding import Folded, fold_off
from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.ir.layout import Mesh
from planner.ops.sharding_rule import Rule
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, Search, describe
from planner.search.search import search

WHOLE = {"pipeline": 1, "micro_batches": 1}
"""Pins that leave one forward and one backward, for what is not about pipelines and micro-batches."""
GOLDEN = Path(__file__).parent / "golden"


def filtered(pins: Pins, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh) -> tuple[Allow | None, AllowLeaf | None]:
    """What pins keep of a graph whose blocks are not known."""
    return filters(pins, graph, rules, mesh, partial(label_blocks, DecisionGraph(fold_off(graph), rules)))


def cluster(devices: int = 4, memory: int | str = "1 GiB") -> ClusterSpec:
    """CPU processes with figures that do not depend on the machine."""
    return ClusterSpec.local(devices, memory_bytes=memory, cores=2)


class Build:
    """Writes a graph down in float32, node by node; operators and parameters have gradients."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.shapes: dict[Ref, tuple[int, ...]] = {}

    def _add(self, node: Node) -> Ref:
        self.nodes.append(node)
        self.shapes[Ref(node.name)] = node.results[0].shape
        return Ref(node.name)

    def leaf(self, name: str, *shape: int, op: str = "input", target: str = "") -> Ref:
        return self._add(Node(name, op, (), (TensorType(shape, "float32", op == "param"),), target=target or name))

    def call(self, name: str, op: str, /, *shape: int, path: str = "", **args: object) -> Ref:
        """An ATen operator, one of ours, or of another house."""
        full = op if op.startswith(("house.", "autopar.")) else f"aten.{op}"
        return self._add(Node(name, full, tuple(args.items()), (TensorType(shape, "float32", True),), path=path))

    def linear(self, name: str, value: Ref, width: int, path: str = "", has_bias: bool = False) -> Ref:
        """A linear layer with parameters of its own."""
        *rows, columns = self.shapes[value]
        weight = self.leaf(f"{name}_w", width, columns, op="param", target=f"{path}.weight")
        bias = self.leaf(f"{name}_b", width, op="param", target=f"{path}.bias") if has_bias else None
        return self.call(name, "linear.default", *rows, width, path=path, input=value, weight=weight, bias=bias)

    def tokens(self, name: str, *shape: int) -> Ref:
        """An input of token numbers."""
        return self._add(Node(name, "input", (), (TensorType(shape, "int64", False),), target=name))

    def embedding(self, name: str, tokens: Ref, vocab: int, width: int, path: str = "") -> Ref:
        """An embedding with a table of its own."""
        table = self.leaf(f"{name}_w", vocab, width, op="param", target=f"{path}.weight")
        shape = *self.shapes[tokens], width
        return self.call(name, "embedding.default", *shape, path=path, weight=table, indices=tokens)

    def relu(self, name: str, value: Ref, path: str = "") -> Ref:
        return self.call(name, "relu.default", *self.shapes[value], path=path, self=value)

    def add(self, name: str, value: Ref, other: Ref, path: str = "") -> Ref:
        return self.call(name, "add.Tensor", *self.shapes[value], path=path, self=value, other=other, alpha=1)

    def graph(self, *outputs: Ref) -> Graph:
        return Graph(tuple(self.nodes), outputs)

    def mean(self, value: Ref) -> Graph:
        """The graph whose loss is the mean of a value."""
        return self.graph(self.call("loss", "mean.default", self=value, dtype=None))


def residual_mlp(
    layers: int = 3, width: int = 256, batch: int = 512, strange: bool = False, early: bool = False
) -> Graph:
    """``mean(head(h + down(relu(up(h))) ...))`` with ``h = stem(x)``: weights, biases, residuals, repeats and a loss.

    ``strange`` adds an operator that no table knows; with ``early`` every layer also adds the stem's result.
    """
    b = Build()
    value = stem = b.linear("stem", b.leaf("x", batch, width), width, "stem", has_bias=True)
    for i in range(layers):
        path = f"layers.{i}"
        if early:
            value = b.add(f"early{i}", value, stem, path)
        hidden = b.relu(f"relu{i}", b.linear(f"up{i}", value, 4 * width, f"{path}.up", has_bias=True), path)
        value = b.add(f"add{i}", value, b.linear(f"down{i}", hidden, width, f"{path}.down", has_bias=True), path)
    if strange:
        value = b.call("strange", "house.strange.default", batch, width, path="odd", self=value)
    return b.mean(b.linear("head", value, 64, "head", has_bias=True))


def named(folded: Folded, levels: Sequence[Level] = LEVELS, alone: Sequence[Level] = ALONE) -> Levels:
    """Levels of all blocks that repeat, and of all that do not."""
    return named_by_kind(folded, [(levels, alone)] * len(folded.kinds))


def whole(pin: Mapping[str, Any] | None = None) -> Pins:
    """Pins, with :data:`WHOLE` unless they say something of pipelines or micro-batches, and model data on the device
    unless they say where.
    """
    pin = pin or {}
    return Pins.parse({"offload": "none", **({} if {*WHOLE} & pin.keys() else WHOLE), **pin})


def plan_of(graph: Graph, spec: ClusterSpec | None = None, pin: Mapping[str, Any] | None = None) -> Plan:
    """Plan a graph as :func:`autopar.plan` plans a model, with seconds that are always the same; see :func:`whole`."""
    spec = spec or cluster()
    found = search(graph, spec, whole(pin), Training())
    candidates, pins = tuple(candidate.facts() for candidate in found.candidates), Pins.parse(pin)
    return written(found.assignment, found.evaluation.time_s, with_ulysses(pins, graph, spec), candidates, found.staged)


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
