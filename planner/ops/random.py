"""Rows of operators that draw random numbers.

Ranks that hold different slices draw differently, ranks that hold the same values (or terms of one sum)
draw the same: see :class:`autopar.runtime.spmd.random_state.RandomState`.
"""

from __future__ import annotations

from functools import partial

from planner.ir.graph import Node, TensorType
from planner.ops.sharding_rule import Rule
from planner.ops.signature import letters, rows, signature
from planner.ops.table import Row

Operands = tuple[TensorType, ...]


def elementwise(node: Node, operands: Operands) -> Rule:
    """``x[..] -> y[..]``, each element drawn on its own."""
    names = letters(len(node.results[0].shape))
    return signature(node, operands, [names] * len(operands), [names] * len(node.results))


def dropout(node: Node, operands: Operands) -> Rule:
    """``x[..] -> mask * x / (1 - p)``: linear, given the mask."""
    names = letters(len(node.results[0].shape))
    return signature(node, operands, [names], [names], linear=[{0}])


def feature_dropout(node: Node, operands: Operands) -> Rule:
    """``x[n, c, spatial..]``: one draw per channel, so the spatial dims stay whole."""
    names = letters(len(node.results[0].shape))
    return signature(node, operands, [names], [names], whole=names[2:], linear=[{0}])


def multinomial(node: Node, operands: Operands) -> Rule:
    """``weights[n.., v] -> draws[n.., sample]``."""
    lead = letters(len(operands[0].shape) - 1)
    return signature(node, operands, [[*lead, "v"]], [[*lead, "sample"]], whole=("v", "sample"))


def created(node: Node, operands: Operands) -> Rule:
    """No operand says how the result is laid out: every rank draws all of it."""
    names = letters(len(node.results[0].shape))
    return signature(node, operands, [], [names], whole=names)


def mask(node: Node, operands: Operands) -> tuple[str, ...]:
    """Backward needs the mask, if anything is dropped."""
    return () if node["p"] == 0 else ("mask",)


ELEMENTWISE = """
    bernoulli bernoulli.p rand_like randn_like randint_like randint_like.low_dtype
    normal_functional exponential uniform normal.Tensor_float
"""

dropping = partial(Row, random=True, drops="p", kernel="random")

ROWS: dict[str, Row] = {
    **rows(ELEMENTWISE, Row(elementwise, random=True, kernel="random")),
    **rows("rand randn randint randint.low randperm", Row(created, random=True, kernel="random", resize="given")),
    **rows("dropout", dropping(dropout, saves=mask, passes=(0,))),
    **rows("native_dropout", dropping(elementwise, saves=("out1",))),
    **rows("alpha_dropout", dropping(elementwise, saves=mask)),
    **rows("feature_dropout", dropping(feature_dropout, saves=mask)),
    **rows("multinomial", Row(multinomial, random=True)),
}
