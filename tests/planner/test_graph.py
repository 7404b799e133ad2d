"""Graphs: which values a training step differentiates."""

from __future__ import annotations

from planner.graph import Graph, Node, Ref, TensorType

WIDE, SCALAR = TensorType((4, 4), "float32", grad=True), TensorType((), "float32", grad=True)


def graph(*outputs: str) -> Graph:
    """``w -> x -> loss`` and, aside, ``x -> side``."""
    nodes = (
        Node("w", "param", (), (WIDE,)),
        Node("x", "aten.relu.default", (("self", Ref("w")),), (WIDE,)),
        Node("side", "aten.neg.default", (("self", Ref("x")),), (WIDE,)),
        Node("loss", "aten.mean.default", (("self", Ref("x")),), (SCALAR,)),
    )
    return Graph(nodes, tuple(Ref(name) for name in outputs))


def test_gradients_flow_from_the_loss_alone() -> None:
    assert graph("side", "loss").roots == (1,)
    assert graph("side", "loss").differentiated == {Ref("loss"), Ref("x"), Ref("w")}


def test_without_a_loss_every_output_may_be_a_root() -> None:
    assert graph("side", "x").roots == (0, 1)
    assert Ref("side") in graph("side", "x").differentiated


def test_a_graph_without_gradients_has_no_root() -> None:
    fixed = TensorType((4,), "float32")
    assert Graph((Node("x", "input", (), (fixed,)),), (Ref("x"),)).roots == ()
