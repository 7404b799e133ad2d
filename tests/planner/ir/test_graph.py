"""Graphs: which values a training step differentiates, and what copies of nodes are."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest

from planner.formulation.decisions import DecisionGraph
from planner.formulation.strategies import rules_of
from planner.ir.folding import fold
from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.ir.node_table import Nodes
from planner.plan.document.fingerprint import fingerprint
from tests.planner.plans import residual_mlp

WIDE, SCALAR = TensorType((4, 4), "float32", grad=True), TensorType((), "float32", grad=True)
WEIGHT = Node("w", "param", (), (WIDE,))
READER = Node("x", "aten.relu.default", (("self", Ref("w")),), (WIDE,))


def graph(*outputs: str) -> Graph:
    """``w -> x -> loss`` and, aside, ``x -> side``."""
    nodes = (
        WEIGHT,
        READER,
        Node("side", "aten.neg.default", (("self", Ref("x")),), (WIDE,)),
        Node("loss", "aten.mean.default", (("self", Ref("x")),), (SCALAR,)),
    )
    return Graph(nodes, tuple(Ref(name) for name in outputs))


def test_gradients_flow_from_the_loss_alone() -> None:
    assert graph("side", "loss").roots == (1,)
    assert set(graph("side", "loss").differentiated) == {Ref("loss"), Ref("x"), Ref("w")}


def test_without_a_loss_every_output_may_be_a_root() -> None:
    assert graph("side", "x").roots == (0, 1)
    assert Ref("side") in graph("side", "x").differentiated


def test_a_graph_without_gradients_has_no_root() -> None:
    fixed = TensorType((4,), "float32")
    assert Graph((Node("x", "input", (), (fixed,)),), (Ref("x"),)).roots == ()


def with_copies(graph: Graph) -> Graph:
    """The graph with every operator a copy of the first that is like it."""
    firsts: dict[object, Node] = {}
    nodes = []
    for node in graph.nodes:
        first = firsts.setdefault((node.op, node.results), node)
        is_copy = first is not node and not node.is_leaf
        nodes.append(first.copy(node.name, node.inputs, node.path) if is_copy else node)
    return replace(graph, nodes=tuple(nodes))


def unwritten(graph: Graph) -> tuple[Graph, dict[int, Node]]:
    """The graph with nothing but its columns, and the nodes that are made from then on."""
    made: dict[int, Node] = {}
    return replace(graph, nodes=Nodes(graph.columns, range(len(graph.nodes)), made)), made


def test_copies_are_nodes_like_others() -> None:
    graph = residual_mlp(layers=4)
    copied = with_copies(graph)
    assert any(node.first is not node for node in copied.nodes)
    for other in (copied, unwritten(copied)[0]):
        other.check()
        assert other == graph
        assert fold(other) == fold(graph)
        assert fingerprint(other) == fingerprint(graph)
        assert other.differentiated == graph.differentiated
        assert other.users == graph.users


def test_a_fingerprint_tells_where_an_argument_has_its_tensor_and_what_is_updated() -> None:
    def reading(*indices: Ref | None) -> Graph:
        index = Node("i", "input", (), (TensorType((4,), "int64"),))
        picked = Node("x", "aten.index.Tensor", (("self", Ref("w")), ("indices", indices)), (WIDE,))
        return Graph((WEIGHT, index, picked), (Ref("x"),))

    rows, columns = reading(Ref("i")), reading(None, Ref("i"))
    updated = replace(rows, updates=(("mean", Ref("x")),))
    assert len({fingerprint(each) for each in (rows, columns, updated)}) == 3


def test_operators_that_say_the_same_of_equal_tensors_have_one_rule() -> None:
    index = Node("i", "input", (), (TensorType((4,), "int64"),))

    def said(name: str, *items: object) -> Node:
        return Node(name, "own.pick.default", (("self", Ref("w")), ("items", items)), (WIDE,))

    nodes = (
        said("x", Ref("i"), 1),
        said("again", Ref("i"), 1),
        said("other", Ref("i"), 2),
        said("before", 1, Ref("i")),
    )
    rules = rules_of(Graph((WEIGHT, index, *nodes), (Ref("x"),)))
    assert [name for name in ("again", "other", "before") if rules[name] is rules["x"]] == ["again"]


def test_copies_are_made_where_they_are_asked_for() -> None:
    graph, made = unwritten(with_copies(residual_mlp(layers=60)))
    graph.check()
    fingerprint(graph)
    folded = fold(graph)
    assert len(folded.kinds[-2]) >= 58
    DecisionGraph(folded, rules_of(graph, folded)).survey()
    written = {graph.columns.names[place] for place in made if not graph.columns.is_leaf[place]}
    whole = {node.name for kind in folded.kinds for node in kind[0].block.span}
    assert len(written) < 6 * len(whole) < len(graph.operators)
    node = graph.operators[-1]
    assert graph.by_name[node.name] is node is graph.nodes[-1]


def test_nodes_say_how_many_they_are() -> None:
    lazy, made = unwritten(with_copies(residual_mlp(layers=60)))
    before, (first, second, third, fourth, fifth, *_, last) = dict(made), lazy.columns.names
    size = f"{len(lazy.nodes):,}"
    assert len(lazy.nodes) > 400 and repr(lazy.nodes) == f"<{size} nodes: {first}, {second}, {third}, ..., {last}>"
    assert repr(lazy.nodes[:5]) == f"<5 nodes: {first}, {second}, {third}, ..., {fifth}>"
    assert repr(lazy.nodes[:4]) == f"<4 nodes: {first}, {second}, {third}, {fourth}>"
    assert repr(lazy.nodes[:0]) == "<0 nodes>"
    assert made == before


def test_some_values_are_a_set() -> None:
    values = graph("side", "loss").differentiated
    assert Ref("x") in values and Ref("side") not in values and Ref("nothing") not in values
    assert len(values) == 3 and set(values) == {Ref("loss"), Ref("x"), Ref("w")}
    assert values.isdisjoint([Ref("side")]) and not values.isdisjoint([Ref("side"), Ref("w")])
    assert Ref("w", 1) not in values and Ref("x", -1) not in values, "these are no results, whatever is next to them"
    assert values & {Ref("w"), Ref("side")} == {Ref("w")}
    assert {Ref("w"), Ref("side")} - values == {Ref("side")}
    assert values | {Ref("side")} == {Ref("loss"), Ref("x"), Ref("w"), Ref("side")}


def test_nodes_by_name_are_all_there_before_they_are_made() -> None:
    lazy, made = unwritten(with_copies(residual_mlp(layers=3)))
    names = list(lazy.columns.names)
    assert names[-1] in lazy.by_name and "nothing" not in lazy.by_name
    assert lazy.by_name.get(names[0]) is made[0] and lazy.by_name.get("nothing") is None
    assert len(made) == 1
    assert list(lazy.by_name) == list(lazy.by_name.keys()) == names and len(lazy.by_name) == len(names)
    assert dict(lazy.by_name) == {node.name: node for node in lazy.nodes}
    with pytest.raises(KeyError):
        lazy.by_name["nothing"]


def test_a_part_of_the_nodes_is_a_graph_of_its_own() -> None:
    whole = graph("x", "loss")
    part = Graph(whole.all[: len(whole.nodes) - 1], whole.outputs[:1])
    part.check()
    assert whole.nodes[-1].name not in part.by_name
    assert part == Graph(tuple(part.nodes), part.outputs) and part.operators == tuple(
        node for node in part.nodes if not node.is_leaf
    )
    assert part.all != tuple(range(len(part.nodes)))
    with pytest.raises(AssertionError, match="which is not defined before it"):
        replace(whole, nodes=whole.operators).check()


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ((WEIGHT, WEIGHT), "two nodes are called w"),
        ((READER, WEIGHT), "x reads w, which is not defined before it"),
        ((READER,), "x reads w, which is not defined before it"),
        ((WEIGHT, Node("x", "aten.relu.default", (("self", Ref("w", 1)),), (WIDE,))), "x reads missing result w.1"),
        ((WEIGHT, Node("x", "aten.relu.default", (("self", Ref("w", -1)),), (WIDE,))), "x reads missing result w.-1"),
    ],
)
def test_a_graph_that_is_none_is_refused(nodes: tuple[Node, ...], why: str) -> None:
    with pytest.raises(AssertionError, match=f"^{why}$"):
        Graph(nodes, ()).check()


@pytest.mark.parametrize(
    ("ref", "why"), [(Ref("y"), "output y is not defined"), (Ref("w", 1), "output w.1 is a missing result")]
)
def test_an_output_that_is_none_is_refused(ref: Ref, why: str) -> None:
    for graph in (Graph((WEIGHT, READER), (ref,)), Graph((WEIGHT, READER), (), (("running", ref),))):
        with pytest.raises(AssertionError, match=f"^{why}$"):
            graph.check()


def test_a_copy_has_the_arguments_of_its_first_on_its_own_inputs() -> None:
    first = Node("cat", "aten.cat.default", (("tensors", (Ref("a"), Ref("b", 1))), ("dim", 1)), (WIDE,), "layers.0")
    copy = first.copy("cat_1", (Ref("c", 2), Ref("d")), "layers.1")
    again = copy.copy("cat_2", (Ref("e"), Ref("f")), "layers.2")
    assert copy == Node("cat_1", first.op, (("tensors", (Ref("c", 2), Ref("d"))), ("dim", 1)), (WIDE,), "layers.1")
    assert again["tensors"] == (Ref("e"), Ref("f"))
    assert copy.first is again.first is first.first is first
    with pytest.raises(AttributeError, match="'Node' object has no attribute 'argument'"):
        _ = copy.argument  # type: ignore[attr-defined]


def test_networkx_sees_what_reads_what() -> None:
    graph = residual_mlp(layers=2)
    seen = graph.digraph()
    assert nx.is_directed_acyclic_graph(seen)
    assert {(a, b) for a, b in seen.edges} == {(ref.node, node.name) for node in graph.nodes for ref in node.inputs}
    assert [seen.nodes[node.name]["op"] for node in graph.nodes] == [node.op for node in graph.nodes]
