"""What operators pass over in memory, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.ops.memory_traffic import MemoryTraffic, added_places, traffic

X = TensorType((8, 64), "bfloat16", True)


def of(op: str, *operands: TensorType, results: tuple[TensorType, ...] = (X,), **options: Any) -> MemoryTraffic:
    """The traffic of one operator over values of its own."""
    shares, on_cpu = options.pop("shares", ()), options.pop("on_cpu", False)
    leaves = [Node(f"v{i}", "input", (), (tensor,)) for i, tensor in enumerate(operands)]
    args = (*((f"x{i}", Ref(leaf.name)) for i, leaf in enumerate(leaves)), *options.items())
    node = Node("it", op if op.startswith("autopar.") else f"aten.{op}", args, results, shares=shares)
    return traffic(Graph((*leaves, node), (Ref("it"),)), node, on_cpu=on_cpu)


def vector(size: int = 64) -> TensorType:
    return TensorType((size,), "bfloat16", True)


TABLE = TensorType((1000, 64), "bfloat16", True)
IDS, PAIRS = TensorType((8,), "int64"), TensorType((8, 2), "int64")
PASSES = {
    # Gradient and what was saved are read, the operand's gradient is written.
    "gelu.default": (of("gelu.default", X), [1, 1], [2, 1], [0, 0]),
    "softmax.int": (of("softmax.int", X, dim=-1), [1, 1], [1, 2], [0, 0]),
    # A mask has one byte where an element has two; on the host it is a tensor like the operand.
    "dropout": (of("dropout.default", X, p=0.1, train=True), [1.5, 1], [1.5, 1], [0, 0]),
    "dropout on the host": (of("dropout.default", X, p=0.1, train=True, on_cpu=True), [2, 1], [2, 1], [0, 0]),
    "dropout of nothing": (of("dropout.default", X, p=0.1, train=False, shares=(0,)), [0, 0], [0, 0], [0, 0]),
    # What is passed on is free; what was repeated is summed.
    "add": (of("add.Tensor", X, X), [1, 1, 1], [0, 0, 0], [0, 0, 0]),
    "add a vector": (of("add.Tensor", X, vector()), [1, 1, 1], [0, 1, 1], [0, 0, 0]),
    # Each operand's gradient is a product, the vector's as large as the result before it is summed.
    "mul": (of("mul.Tensor", X, X), [1, 1, 1], [2, 2, 2], [0, 0, 0]),
    "mul by a vector": (of("mul.Tensor", X, vector()), [1, 1, 1], [2, 2, 4], [0, 0, 0]),
    # One pass for the operand, one for weight and bias together.
    "layer_norm": (of("layer_norm.default", X, vector(), vector()), [1, 1, 1, 1], [3, 1, 1, 2], [0, 0, 0, 0]),
    # Two products; the bias takes a pass of its own over the gradient.
    "linear": (of("linear.default", X, X, vector(8)), [1, 1, 1, 1], [2, 2, 2, 2], [0, 0, 1, 1]),
    # Views are free until a gradient comes back: a part's goes into zeros, all parts' are joined, repeats are summed.
    "view": (of("view.default", X), [0, 0], [0, 0], [0, 0]),
    "slice": (of("slice.Tensor", X, results=(vector(),)), [0, 0], [0, 0], [1, 2]),
    "split": (of("split.Tensor", X, results=(vector(), vector()), dim=0), [0, 0, 0], [0, 0, 0], [1, 1, 1]),
    "expand": (of("expand.default", vector()), [0, 0], [0, 0], [1, 1]),
    # A view that copies hands its gradient on.
    "reshape": (of("reshape.default", X, shares=(-1,)), [1, 1], [0, 0], [0, 0]),
    "without a gradient": (of("gelu.default", X, results=(TensorType((8, 64), "bfloat16"),)), [1, 1], [0, 0], [0, 0]),
    # Eight rows are read; the gradient is as large as the table.
    "look-up": (of("embedding.default", TABLE, IDS), [0, 1, 2], [1, 1, 1], [0, 0, 0]),
    "bags of two": (of("autopar.embedding_bag.default", TABLE, PAIRS, mode=0), [0, 1, 3], [1, 1, 1], [0, 0, 0]),
    "unknown": (of("house.strange", X), [1, 1], [2, 2], [0, 0]),
}


@pytest.mark.parametrize(("found", "forward", "backward", "besides"), PASSES.values(), ids=PASSES)
def test_passes(found: MemoryTraffic, forward: list[float], backward: list[float], besides: list[float]) -> None:
    assert (list(found.forward), list(found.backward), list(found.besides)) == (forward, backward, besides)
    assert found.runs == any(forward) and bool(found.starts) == any(besides)


def test_a_loss_writes_and_reads_its_log_softmax() -> None:
    """Forward reads scores and writes log-probabilities; backward fills a gradient, reads it and them, writes one."""
    loss = TensorType((), "float32", True)
    found = of("cross_entropy_loss.default", X, TensorType((8,), "int64"), results=(loss,))
    assert found.forward[0] == 2 and found.backward[0] == 4


def test_a_gradient_is_added_where_others_read_on() -> None:
    """Every reader but the last adds to what is there: two reads and a write; parameters are counted elsewhere."""
    x, w = Node("x", "input", (), (X,)), Node("w", "param", (), (X,))
    square = Node("square", "aten.mul.Tensor", (("a", Ref("x")), ("b", Ref("x"))), (X,))
    scaled = Node("scaled", "aten.mul.Tensor", (("a", Ref("x")), ("b", Ref("w"))), (X,))
    graph = Graph((x, w, square, scaled), (Ref("square"), Ref("scaled")))
    assert added_places(graph, square, frozenset({Ref("x"), Ref("w")})) == (0, 1)
    assert added_places(graph, square, frozenset()) == (0,)
    assert added_places(graph, scaled, frozenset({Ref("w")})) == ()
    found = traffic(graph, square, (0, 1))
    assert found.besides == (3, 3, 0) and found.starts == 2
