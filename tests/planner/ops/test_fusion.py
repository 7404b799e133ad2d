"""Kernels of a compiled block and what they pass over, counted by hand; inductor's own are in tests/autopar/ops."""

from __future__ import annotations

import pytest

from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.ops.fusion import Fused, fuse, joins

X, WIDE, VECTOR = (TensorType(shape, "bfloat16", True) for shape in ((64, 32), (64, 128), (32,)))
UP, DOWN = TensorType((128, 32), "bfloat16", True), TensorType((32, 128), "bfloat16", True)


def node(name: str, op: str, *operands: str, result: TensorType = X, **options: object) -> Node:
    args = (*((f"x{i}", Ref(operand)) for i, operand in enumerate(operands)), *options.items())
    return Node(name, f"aten.{op}", args, (result,))


def leaf(name: str, op: str, kind: TensorType) -> Node:
    return Node(name, op, (), (kind,))


BLOCK = (
    node("before", "add.Tensor", "x", "mixed"),
    node("norm", "layer_norm.default", "before", "scale", "shift", normalized_shape=(32,)),
    node("up", "linear.default", "norm", "w_up", result=WIDE),
    node("cube", "pow.Tensor_Scalar", "up", exponent=3, result=WIDE),
    node("bent", "tanh.default", "cube", result=WIDE),
    node("down", "linear.default", "bent", "w_down"),
    node("after", "add.Tensor", "before", "down"),
)
LEAVES = (
    leaf("x", "input", X),
    leaf("mixed", "input", X),
    leaf("scale", "param", VECTOR),
    leaf("shift", "param", VECTOR),
    leaf("w_up", "param", UP),
    leaf("w_down", "param", DOWN),
)
GRAPH = Graph((*LEAVES, *BLOCK), (Ref("after"),))


@pytest.fixture(scope="module")
def fused() -> Fused:
    return fuse(GRAPH, BLOCK, [Ref("after")])


def total(fused: Fused, phase: str) -> dict[TensorType, float]:
    """Passes over all tensors of a type, of what is fused."""
    found: dict[TensorType, float] = {}
    for each in BLOCK:
        traffic = fused.traffic[each.name]
        if traffic.fused is not None:
            kinds = (*GRAPH.input_types(each), *each.results)
            for kind, passes in zip(kinds, getattr(traffic, phase), strict=True):
                found[kind] = found.get(kind, 0) + passes
    return found


def test_what_streams_joins_what_reads_it(fused: Fused) -> None:
    """The first sum is made again where the last one needs it: nothing else would have to write it."""
    assert [sorted(kernel.operators) for kernel in fused.kernels] == [
        ["before", "norm"],
        ["bent", "cube"],
        ["after", "before"],
    ]
    assert [kernel.roots for kernel in fused.kernels] == [("norm",), ("bent",), ("after",)]


def test_forward(fused: Fused) -> None:
    """Norm: two operands and the weights are read, one is written. Activation: read and written. Last sum: 3 and 1."""
    assert total(fused, "forward") == {X: 3 + 4, WIDE: 2, VECTOR: 2}


def test_backward(fused: Fused) -> None:
    """Norm: the gradient of its result, that of the block's result, both operands of the sum; one gradient for both of
    these is written. Its weights: a kernel that reads the gradient and both operands. Activation: gradient and operand
    are read, and one is written. The last sum passes its gradient on.
    """
    assert fused.backward == 3
    assert total(fused, "backward") == {X: 5 + 3, WIDE: 3, VECTOR: 0}


def test_kernels_begin_once(fused: Fused) -> None:
    begun = [fused.traffic[each.name].fused or (0, 0) for each in BLOCK]
    assert [sum(each) for each in zip(*begun, strict=True)] == [3, 3]


def test_products_stay_as_they_are(fused: Fused) -> None:
    assert fused.traffic["up"].fused is None and fused.traffic["up"].forward == (1, 1, 1)


def test_what_reads_many_tensors_is_not_made_again() -> None:
    """A sum of six that two kernels of different sizes need is written, and read by both."""
    leaves = [leaf(f"v{i}", "input", X) for i in range(6)]
    sums = [node("s1", "add.Tensor", "v0", "v1")]
    sums += [node(f"s{i}", "add.Tensor", f"s{i - 1}", f"v{i}") for i in range(2, 6)]
    row = TensorType((64,), "bfloat16", True)
    ends = (node("rows", "sum.dim_IntList", "s5", result=row, dim=[-1]), node("twice", "mul.Tensor", "s5", "v0"))
    nodes = (*sums, *ends)
    found = fuse(Graph((*leaves, *nodes), (Ref("rows"), Ref("twice"))), nodes, [Ref("rows"), Ref("twice")])
    assert "s5" in {root for kernel in found.kernels for root in kernel.roots}


@pytest.mark.parametrize(
    ("op", "how"),
    [
        ("gelu.default", "each"),
        ("dropout.default", "each"),
        ("softmax.int", "rows"),
        ("linear.default", ""),
        ("scaled_dot_product_attention.default", ""),
        ("embedding.default", ""),
        ("sort.default", ""),
        ("strange.default", ""),
    ],
)
def test_joins(op: str, how: str) -> None:
    assert joins(node("it", op, "x")) == how
