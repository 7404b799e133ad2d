"""Constants: what is worked out compressed, or in parts, is what the graph computes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, fx

from autopar.capture.constant_propagation import Constants, Limits, Unknown, compressed, evaluate, ordered

aten = torch.ops.aten
TINY = Limits(small=8, part=4)


class Builder:
    """A graph and, beside it, what every node computes; the graph's nodes say that they are on the meta device."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.plain: dict[fx.Node, Tensor] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        device = "device" in {argument.name for argument in target._schema.arguments}
        node = self.graph.call_function(target, args, {**kwargs, "device": torch.device("meta")} if device else kwargs)
        values = fx.node.map_arg((args, kwargs), self.plain.__getitem__)
        return self.keep(node, target(*values[0], **values[1]))

    def leaf(self, name: str, value: Tensor) -> fx.Node:
        return self.keep(self.graph.placeholder(name), value)

    def keep(self, node: fx.Node, value: Tensor) -> fx.Node:
        self.plain[node] = value
        node.meta["val"] = torch.empty_like(value, device="meta")
        return node

    def evaluate(self, *roots: fx.Node, limits: Limits | None = None, **tensors: Tensor) -> Constants:
        return evaluate(self.graph, roots, tensors, limits)


def assembled(constants: Constants, node: fx.Node) -> Tensor:
    """A value from its parts."""
    shape = node.meta["val"].shape
    found = torch.empty(shape, dtype=node.meta["val"].dtype)
    rows, columns = ((1,) * 2 + tuple(shape))[-2:]
    for window, data in constants.parts(node, rows, columns):
        part = window.cut(found)
        part.copy_(data.expand_as(part))
    return found


# ---- any constant graph ------------------------------------------------------------------------------------

POINTWISE = [
    aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor, aten.eq.Tensor, aten.ne.Tensor, aten.add.Tensor,
    aten.sub.Tensor, aten.mul.Tensor, aten.__and__.Tensor, aten.__or__.Tensor, aten.maximum.default,
]  # fmt: skip


@st.composite
def constant_graphs(draw: Callable[..., Any]) -> Builder:
    """Graphs of arange, fills and what masks are made of, over dims of 1 to 5."""
    b = Builder()
    nodes = [
        b.call(aten.arange.start_step, draw(st.integers(-3, 3)), 20, draw(st.integers(4, 20))),
        b.call(aten.full.default, draw(st.lists(st.integers(1, 5), max_size=3)), draw(st.integers(-2, 2))),
        b.call(aten.full.default, [3, 3], draw(st.sampled_from([0.0, -torch.inf]))),
    ]
    for _ in range(draw(st.integers(1, 12))):
        made = draw(st.sampled_from(STEPS))(b, draw, draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes)))
        if made is not None and made.meta["val"].numel() < 2000:
            nodes.append(made)
    return b


def pointwise(b: Builder, draw: Any, x: fx.Node, y: fx.Node) -> fx.Node | None:
    target = draw(st.sampled_from(POINTWISE))
    if target in (aten.__and__.Tensor, aten.__or__.Tensor) and any(b.plain[n].is_floating_point() for n in (x, y)):
        return None
    if target is aten.sub.Tensor and torch.bool in (b.plain[x].dtype, b.plain[y].dtype):
        return None
    try:
        return b.call(target, x, y)
    except RuntimeError:
        return None  # shapes that do not broadcast


def unsqueeze(b: Builder, draw: Any, x: fx.Node, y: fx.Node) -> fx.Node:
    return b.call(aten.unsqueeze.default, x, draw(st.integers(0, b.plain[x].dim())))


def squeeze(b: Builder, draw: Any, x: fx.Node, y: fx.Node) -> fx.Node:
    return b.call(aten.squeeze.default, x)


def flat(b: Builder, draw: Any, x: fx.Node, y: fx.Node) -> fx.Node:
    return b.call(aten.reshape.default, x, [-1])


def expand(b: Builder, draw: Any, x: fx.Node, y: fx.Node) -> fx.Node:
    sizes = [draw(st.integers(1, 4)) if size == 1 else -1 for size in b.plain[x].shape]
    return b.call(aten.expand.default, x, [draw(st.integers(1, 3))] * draw(st.integers(0, 1)) + sizes)


def along(b: Builder, draw: Any, x: fx.Node, y: fx.Node) -> fx.Node | None:
    dim = b.plain[x].dim()
    if not dim:
        return None
    at = draw(st.integers(-dim, dim - 1))
    size = b.plain[x].shape[at]
    kind = draw(st.sampled_from(["cumsum", "diff", "slice", "select", "flip", "cat", "transpose"]))
    if kind == "cumsum":
        return None if b.plain[x].is_floating_point() else b.call(aten.cumsum.default, x, at)
    if kind == "diff":
        return b.call(aten.diff.default, x, 1, at, b.call(aten.slice.Tensor, x, at, 0, 1))
    if kind == "slice":
        return b.call(aten.slice.Tensor, x, at, draw(st.integers(0, size - 1)), 2**63 - 1, draw(st.integers(1, 2)))
    if kind == "select":
        return b.call(aten.select.int, x, at, draw(st.integers(-size, size - 1)))
    if kind == "flip":
        return b.call(aten.flip.default, x, [at])
    if kind == "cat":
        return b.call(aten.cat.default, [x, x], at)
    return b.call(aten.transpose.int, x, at, draw(st.integers(-dim, dim - 1)))


def index(b: Builder, draw: Any, x: fx.Node, y: fx.Node) -> fx.Node | None:
    indices: list[fx.Node | None] = []
    for size in b.plain[x].shape:
        shape = draw(st.sampled_from([[], [2], [2, 1], [1, 3], [1]]))
        picked = b.call(aten.full.default, shape, draw(st.integers(-size, size - 1)))
        varied = b.call(aten.remainder.Scalar, b.call(aten.arange.default, 3), size)
        indices.append(draw(st.sampled_from([None, picked, varied])))
    while indices and indices[-1] is None:
        indices.pop()
    try:
        return b.call(aten.index.Tensor, x, indices) if indices else None
    except IndexError:
        return None  # indices that do not broadcast


def triangle(b: Builder, draw: Any, x: fx.Node, y: fx.Node) -> fx.Node | None:
    target = draw(st.sampled_from([aten.tril.default, aten.triu.default]))
    return b.call(target, x, draw(st.integers(-3, 3))) if b.plain[x].dim() >= 2 else None


def fill(b: Builder, draw: Any, x: fx.Node, y: fx.Node) -> fx.Node:
    if draw(st.booleans()):
        return b.call(aten.ones_like.default, x, dtype=draw(st.sampled_from([None, torch.bool])))
    return b.call(aten.to.dtype, x, torch.bool)


def where(b: Builder, draw: Any, x: fx.Node, y: fx.Node) -> fx.Node | None:
    condition = b.call(aten.gt.Scalar, x, 0)
    try:
        return b.call(aten.where.self, condition, x, y)
    except RuntimeError:
        return None


STEPS = [pointwise, pointwise, pointwise, unsqueeze, squeeze, flat, expand, along, index, triangle, fill, where]


@settings(max_examples=300, deadline=None)
@given(constant_graphs())
def test_compressed_values_are_the_plain_values(b: Builder):
    constants = b.evaluate(*b.plain)
    for node, plain in b.plain.items():
        if node in constants:
            torch.testing.assert_close(assembled(constants, node), plain, rtol=0, atol=0, equal_nan=True)
        else:
            assert plain.is_floating_point() or any(b.plain[n].is_floating_point() for n in node.all_input_nodes)


@settings(max_examples=300, deadline=None)
@given(constant_graphs())
def test_values_in_parts_are_the_plain_values(b: Builder):
    constants = b.evaluate(*b.plain, limits=TINY)
    for node, plain in b.plain.items():
        if node in constants and len(constants.large) > 0:
            try:
                found = assembled(constants, node)
            except Unknown:
                continue  # a single row and column may be too large over many batches
            torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)


# ---- one by one ----------------------------------------------------------------------------------------------


def causal(b: Builder, size: int, batch: int = 1) -> fx.Node:
    rows = b.call(aten.unsqueeze.default, b.call(aten.arange.default, size), 1)
    mask = b.call(aten.ge.Tensor, rows, b.call(aten.arange.default, size))
    return b.call(aten.expand.default, mask, [batch, 1, size, size])


def test_repetitions_take_no_memory():
    b = Builder()
    mask = causal(b, 8, batch=512)
    constants = b.evaluate(mask)
    assert constants.small[mask].shape == (1, 1, 8, 8)


def test_large_values_go_by_parts():
    b = Builder()
    mask = causal(b, 7, batch=3)
    constants = b.evaluate(mask, limits=TINY)
    assert mask in constants.large
    sizes = {tuple(data.shape) for _, data in constants.parts(mask, 7, 7)}
    assert (1, 1, 1, 1) in sizes, "parts that are one value should be held as one"
    assert torch.equal(assembled(constants, mask), b.plain[mask])


def test_effort_is_limited():
    b = Builder()
    mask = causal(b, 64)
    constants = b.evaluate(mask, limits=Limits(small=64, part=4, effort=100))
    assert mask in constants
    with pytest.raises(Unknown):
        list(constants.parts(mask, 64, 64))


def test_equal_values_are_worked_out_once():
    b = Builder()
    masks = [causal(b, 8) for _ in range(5)]
    constants = b.evaluate(*masks)
    assert len({constants.first[mask] for mask in masks}) == 1
    assert len(constants.small) == 4
    assert all(mask in constants for mask in masks)


def test_fills_of_different_shapes_are_not_equal():
    b = Builder()
    x, y = b.leaf("x", torch.zeros(2, 3)), b.leaf("y", torch.zeros(4))
    ones = [b.call(aten.ones_like.default, n) for n in (x, y)]
    constants = b.evaluate(*ones)
    assert [tuple(constants.small[node].shape) for node in ones] == [(1, 1), (1,)]


def test_what_an_input_decides_has_no_value():
    b = Builder()
    x = b.leaf("x", torch.arange(3))
    y = b.call(aten.add.Tensor, x, 1)
    assert y not in b.evaluate(y)
    assert y in b.evaluate(y, x=torch.arange(3))


@pytest.mark.parametrize(
    "make",
    [
        lambda b: b.call(aten.rand.default, [3]),
        lambda b: b.call(aten.empty.memory_format, [3], dtype=torch.int64),
        lambda b: b.call(aten.exp.default, b.call(aten.full.default, [3], 2.0)),
        lambda b: b.call(aten.to.dtype, b.call(aten.full.default, [3], 1.5), torch.int64),
        lambda b: b.call(aten.argsort.default, b.call(aten.ones.default, [3])),
        lambda b: b.call(aten.view.dtype, b.call(aten.full.default, [3], 2), torch.float64),
        lambda b: b.call(aten.bucketize.Tensor, *[b.call(aten.arange.default, 3)] * 2),
        lambda b: b.call(aten.add.Tensor, *[b.call(aten.full.default, [3], 0.1)] * 2, alpha=0.3),
    ],
    ids=["random", "uninitialized", "rounded", "float to integer", "ties", "bits", "no rule", "rounded twice"],
)  # fmt: skip
def test_what_devices_may_not_agree_on_has_no_value(make: Callable[[Builder], fx.Node]):
    b = Builder()
    node = make(b)
    assert node not in b.evaluate(node)


def test_a_model_that_would_stop_is_left_alone():
    b = Builder()
    node = b.graph.call_function(aten.index.Tensor, (b.call(aten.arange.default, 3), [b.call(aten.arange.default, 9)]))
    node.meta["val"] = torch.empty(9, dtype=torch.int64, device="meta")
    assert node not in b.evaluate(node)


@given(
    st.sampled_from([operator.le, operator.lt, operator.ge, operator.gt]),
    st.lists(st.integers(-3, 3), min_size=1, max_size=4),
    st.lists(st.integers(-3, 3), min_size=1, max_size=4),
)
def test_ordered_compares(compare: Callable[[Tensor, Tensor], Tensor], left: list[int], right: list[int]):
    a, b = torch.tensor(left).unsqueeze(1), torch.tensor(right)
    found, expected = ordered(compare, a, b), compare(a, b)
    assert torch.equal(found.expand_as(expected), expected)
    if expected.all() or not expected.any():
        assert found.numel() == 1


def test_ordered_takes_no_range_of_nan():
    values = torch.tensor([torch.nan, 1.0])
    assert ordered(torch.le, values, torch.tensor([2.0])).tolist() == [False, True]


def test_compressed_keeps_what_varies():
    varies = torch.arange(3).expand(2, 3)
    assert compressed(varies).shape == (1, 3)
    assert compressed(torch.tensor([[1, 1], [1, 2]])).shape == (2, 2)
