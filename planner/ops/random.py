"""Rows of operators that draw random numbers.

Ranks that hold different slices draw differently, ranks that hold the same values (or terms of one sum)
draw the same: see :class:`autopar.runtime.random.RandomState`.
"""

from __future__ import annotations

from planner.graph import Node, TensorType
from planner.ops.factors import spanned, without_ones
from planner.ops.table import Row
from planner.rules import Rule


@without_ones
def _elementwise(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``x[..] -> y[..]``, each element drawn on its own."""
    sizes, dims = spanned("d", node.results[0].shape)
    return Rule(sizes=sizes, operands=(dims,) * len(operands), results=(dims,) * len(node.results))


@without_ones
def _dropout(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``x[..] -> mask * x / (1 - p)``: linear, given the mask."""
    rule = _elementwise(node, operands)
    return Rule(rule.sizes, rule.operands, rule.results, linear=(frozenset({0}),))


@without_ones
def _feature_dropout(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``x[n, c, spatial..]``: one draw per channel, so the spatial dims stay whole."""
    rule = _elementwise(node, operands)
    whole = frozenset(rule.sizes) - {"d0", "d1"}
    return Rule(rule.sizes, rule.operands, rule.results, whole=whole, linear=(frozenset({0}),))


@without_ones
def _multinomial(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``weights[n.., v] -> draws[n.., sample]``."""
    shape = operands[0].shape
    sizes, rows = spanned("n", shape[:-1])
    sizes |= {"v": shape[-1], "sample": node.results[0].shape[-1]}
    return Rule(
        sizes=sizes,
        operands=((*rows, ("v",)),),
        results=((*rows, ("sample",)),),
        whole=frozenset({"v", "sample"}),
    )


@without_ones
def _created(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """No operand says how the result is laid out: every rank draws all of it."""
    rule = _elementwise(node, operands)
    return Rule(rule.sizes, (), rule.results, whole=frozenset(rule.sizes))


_ELEMENTWISE = (
    "aten.bernoulli.default", "aten.bernoulli.p", "aten.rand_like.default", "aten.randn_like.default",
    "aten.randint_like.default", "aten.randint_like.low_dtype", "aten.normal_functional.default",
    "aten.exponential.default", "aten.uniform.default", "aten.normal.Tensor_float",
)  # fmt: skip
_CREATED = (
    "aten.rand.default", "aten.randn.default", "aten.randint.default", "aten.randint.low", "aten.randperm.default",
)  # fmt: skip

ROWS: dict[str, Row] = {
    **{op: Row(_elementwise, random=True) for op in _ELEMENTWISE},
    **{op: Row(_created, random=True) for op in _CREATED},
    "aten.dropout.default": Row(_dropout, saves=("out0",), random=True),
    "aten.native_dropout.default": Row(_elementwise, saves=("out1",), random=True),
    "aten.alpha_dropout.default": Row(_elementwise, saves=("out0",), random=True),
    "aten.feature_dropout.default": Row(_feature_dropout, saves=("out0",), random=True),
    "aten.multinomial.default": Row(_multinomial, random=True),
}
