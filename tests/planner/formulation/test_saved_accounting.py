"""Who pays for what is kept, block by block, against a plain walk over the whole graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.levels import Amount, Recompute, pareto_frontier
from planner.ir.folding import Folded, fold, relabel
from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.ops import saved_places
from planner.ops.aliasing import shares
from tests.planner.plans import named, residual_mlp

WHOLE, PART = TensorType((4, 4), "float32", True), TensorType((2, 4), "float32", True)
MASK = TensorType((4, 4), "float32")
# Operator -> its operator in the graph, how many values it reads, its result, and whose memory that shares.
STEPS = {
    "product": ("aten.mm.default", 1, WHOLE, ()),
    "relu": ("aten.relu.default", 1, WHOLE, ()),
    "silu": ("aten.silu.default", 1, WHOLE, ()),
    "mul": ("aten.mul.Tensor", 2, WHOLE, ()),
    "add": ("aten.add.Tensor", 2, WHOLE, ()),
    "dropout": ("aten.dropout.default", 1, WHOLE, (-1,)),
    "view": ("aten.view.default", 1, WHOLE, (0,)),
    "copy": ("aten.reshape.default", 1, WHOLE, (-1,)),
    "slice": ("aten.slice.Tensor", 1, PART, (0,)),
    "split": ("aten.split.Tensor", 1, PART, (0, 0)),
    "strange": ("house.strange.default", 2, WHOLE, ()),
}


@dataclass(frozen=True)
class Step:
    """One operator: ``-k`` reads the k-th last value, whichever layer made it; a word reads what all layers share."""

    word: str
    reads: tuple[int | str, ...]


def graph_of(unit: tuple[Step, ...], layers: int, kept: frozenset[int]) -> Graph:
    """A stem, and the unit so many times; the last values of some layers leave the model."""
    nodes = [
        Node("ids", "input", (), (WHOLE,)),
        Node("mask", "input", (), (MASK,)),
        Node("shared", "param", (), (WHOLE,)),
        Node("table", "aten.silu.default", (("x", Ref("ids")),), (WHOLE,)),
        Node("stem", "aten.relu.default", (("x", Ref("table")),), (WHOLE,)),
    ]
    values, outputs = [Ref("table"), Ref("stem")], []
    for layer in range(layers):
        for number, step in enumerate(unit):
            op, count, result, shares = STEPS[step.word]
            name = f"n{layer}.{number}"
            refs = [Ref(r) if isinstance(r, str) else values[max(r, -len(values))] for r in step.reads[:count]]
            if step.word == "product":
                nodes.append(Node(f"w{layer}.{number}", "param", (), (WHOLE,), target=f"layers.{layer}.{number}"))
                refs.append(Ref(nodes[-1].name))
            results = (result,) * max(1, len(shares))
            args = tuple((f"x{i}", ref) for i, ref in enumerate(refs))
            nodes.append(Node(name, op, args, results, path=f"layers.{layer}", shares=shares))
            values += [Ref(name, index) for index in range(len(results))]
        if layer in kept:
            outputs.append(values[-1])
    graph = Graph(tuple(nodes), (*outputs, values[-1]))
    graph.check()
    return graph


def walked(decision_graph: DecisionGraph, recompute: Recompute) -> dict[str, tuple[int, ...]]:
    """Which tensors each operator pays for, operator by operator over the whole graph."""
    graph = decision_graph.graph
    root: dict[Ref, Ref] = {}
    whole: dict[Ref, Ref] = {}
    paid: set[Ref] = set()
    charges: dict[str, tuple[int, ...]] = {}

    def is_paid(ref: Ref) -> bool:
        return ref in paid or graph.by_name[ref.node].op == "param" or (ref in whole and is_paid(whole[ref]))

    for node in graph.nodes:
        if node.is_leaf:
            continue
        results = [Ref(node.name, index) for index in range(len(node.results))]
        is_view = node.op == "aten.view.default"
        for ref, place in zip(results, node.shares or ((0,) if is_view else (-1,)) * len(results), strict=True):
            if place >= 0:
                viewed = node.inputs[place]
                is_part = graph.type_of(ref).numel < graph.type_of(viewed).numel
                (whole if is_part else root)[ref] = root.get(viewed, viewed)
        number, at = decision_graph.blocks.seat[node.name]
        kind, nth = decision_graph.blocks.numbers[number]
        level, types = recompute.level(kind, nth), graph.input_types(node)
        saved, all_ = saved_places(node, types), saved_places(node, types, own=True)
        kept: tuple[int, ...] = all_ if any(tensor.grad for tensor in node.results) else ()
        if level != "none":
            again = decision_graph.blocks.again(kind, level)
            own = () if at in again.drawing else tuple(place for place in all_ if place not in saved)
            kept = (*again.kept[at], *own)
        mine = []
        for place in kept:
            tensor = (*node.inputs, *results)[place]
            if not is_paid(root.get(tensor, tensor)):
                paid.add(root.get(tensor, tensor))
                mine.append(place)
        charges[node.name] = tuple(mine)
    return charges


def check(folded: Folded, recompute: Recompute) -> None:
    decision_graph = DecisionGraph(folded, {})
    expected = walked(decision_graph, recompute)
    assert {name: decision_graph.blocks.charge(folded.graph.by_name[name], recompute) for name in expected} == expected
    blocks, apart = decision_graph.blocks, Counter[tuple[int, int, int]]()
    charged: dict[object, Counter[tuple[int, ...]]] = {}
    for number, instance in enumerate(folded.instances):
        kind, nth = blocks.numbers[number]
        level = recompute.level(kind, nth)
        for at, name in enumerate(instance.block.span.names):
            as_made = blocks.again(kind, level).needed_as_made[at] if level != "none" else ()
            apart.update((kind, at, place) for place in expected[name] if place in as_made)
            rest = tuple(place for place in expected[name] if place not in as_made)
            charged.setdefault(("op", kind, at), Counter())[rest] += 1
    assert blocks.charged(recompute) == charged
    assert blocks.charged_as_made(recompute) == apart


reads = st.lists(st.integers(-12, -1) | st.sampled_from(("mask", "shared", "table", "stem")), min_size=2, max_size=2)
steps = st.builds(lambda word, reads: Step(word, tuple(reads)), st.sampled_from(sorted(STEPS)), reads)
units = st.lists(steps, min_size=3, max_size=12).map(lambda unit: (Step("product", (-1,)), *unit))


@settings(max_examples=200)
@given(units, st.integers(2, 8), st.sets(st.integers(0, 7), max_size=1), st.data())
def test_blocks_pay_what_a_walk_over_the_graph_says(
    unit: tuple[Step, ...], layers: int, kept: set[int], data: st.DataObject
) -> None:
    folded = fold(graph_of(unit, layers, frozenset(kept)))
    if data.draw(st.booleans()):
        count = len(folded.instances)
        folded = relabel(folded, data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    amounts = []
    for instances in folded.kinds:
        ends = sorted(data.draw(st.lists(st.integers(0, len(instances)), min_size=3, max_size=3)))
        rows = [at for at, node in enumerate(instances[0].block.nodes) if not shares(node)]
        some = tuple(sorted(data.draw(st.sets(st.sampled_from(rows))))) if rows else ()
        level = data.draw(st.sampled_from(["selective", some]))
        amounts.append(Amount.of({"full": ends[0], level: ends[1] - ends[0], "gathered": ends[2] - ends[1]}))
    event(f"folded: {len(folded.kinds) < len(folded.instances)}")
    check(folded, Recompute(tuple(amounts)))


def chain_of(layers: int, crossing: bool) -> Graph:
    """Layers that hand on what they make, and with ``crossing`` two values, in turn; a tail that reads of both.

    Each is ``c = 2 tanh(c w)``, ``a, b = b, a``. Without crossing the tail reads the ``c`` of every layer.
    """
    nodes = [Node("ids", "input", (), (WHOLE,))]
    nodes += [Node(name, "aten.add.Tensor", (("x", Ref("ids")), ("y", Ref("ids"))), (WHOLE,)) for name in "abc"]
    a, b, c, made = Ref("a"), Ref("b"), Ref("c"), []
    for layer in range(layers):
        path = f"layers.{layer}"
        nodes.append(Node(f"w{layer}", "param", (), (WHOLE,), target=f"{path}.w"))
        steps = [
            ("m", "aten.mm.default", (c, Ref(f"w{layer}")), ()),
            ("t", "aten.tanh.default", (Ref(f"m{layer}"),), ()),
            ("c", "aten.add.Tensor", (Ref(f"t{layer}"), Ref(f"t{layer}")), ()),
            *([("ab", "aten.broadcast_tensors.default", (a, b), (1, 0))] if crossing else []),
        ]
        for name, op, reads, places in steps:
            args = tuple((f"x{place}", ref) for place, ref in enumerate(reads))
            results = (WHOLE,) * max(1, len(places))
            nodes.append(Node(f"{name}{layer}", op, args, results, path=path, shares=places))
        c = Ref(f"c{layer}")
        made.append(c)
        a, b = (Ref(f"ab{layer}", 0), Ref(f"ab{layer}", 1)) if crossing else (a, b)
    for place, ref in enumerate([a, Ref("a"), c] if crossing else made):
        nodes.append(Node(f"end{place}", "aten.silu.default", (("x", ref),), (WHOLE,), path="tail"))
    graph = Graph(tuple(nodes), tuple(Ref(node.name) for node in nodes if node.path == "tail"))
    graph.check()
    return graph


@pytest.mark.parametrize("crossing", [False, True])
@pytest.mark.parametrize("layers", [6, 7])
def test_layers_that_hand_values_on_or_are_read_by_the_last(layers: int, crossing: bool) -> None:
    folded = fold(chain_of(layers, crossing))
    assert max(map(len, folded.kinds)) >= layers - 1
    check(folded, Recompute())


def test_equal_blocks_are_walked_once_for_each_way_to_find_them() -> None:
    folded = fold(residual_mlp(layers=40))
    decision_graph = DecisionGraph(folded, {})
    for step in pareto_frontier(folded, named(folded)):
        decision_graph.blocks.charged(step)
    assert sum(decision_graph.blocks._charges._goes_on) >= 37, "one layer after another"
    # The layers at four levels, and the first of them, whose value the stem makes; the stem and the head.
    assert (
        len(
            {
                paid
                for step in pareto_frontier(folded, named(folded))
                for paid in decision_graph.blocks._charges.of(step)
            }
        )
        <= 14
    )
