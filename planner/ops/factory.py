"""Operators that make constant tensors.

Without a tensor operand there is nothing that says how to lay the result out: it is made whole on every
rank (cutting a copy into slices is free). ``new_*`` take nothing from their operand but dtype and device:
a result of the operand's shape is laid out as the operand is; any other is made whole, whatever the
operand's layout.
"""

from __future__ import annotations

from dataclasses import replace

from planner.ir.graph import Node, TensorType
from planner.ir.layout import R
from planner.ops.elementwise import pointwise
from planner.ops.sharding_rule import FactorWay, Rule
from planner.ops.signature import letters, rows, signature
from planner.ops.table import Row

Operands = tuple[TensorType, ...]


def whole(node: Node, operands: Operands) -> Rule:
    """The same constant on every rank."""
    names = [letters(len(result.shape)) for result in node.results]
    return signature(node, operands, (), names, whole={name for row in names for name in row})


def like_operand(node: Node, operands: Operands) -> Rule:
    """Laid out as the operand, if of its shape; else the same on every rank."""
    (operand,), (result,) = operands, node.results
    if operand.shape == result.shape:
        return pointwise(node, operands)
    lent = [f"other{i}" for i in range(len(operand.shape))]
    names = letters(len(result.shape))
    rule = signature(node, operands, [lent], [names], whole=names)
    return replace(
        rule, ways={name: (FactorWay(results={0: R}, strided=True),) for name in rule.sizes.keys() - rule.whole}
    )


FACTORIES = """
    empty.memory_format empty_permuted empty_strided eye eye.m full linspace
    logspace ones scalar_tensor tril_indices triu_indices zeros hann_window hamming_window
"""
NEW = "new_empty new_empty_strided new_full new_ones new_zeros"

ROWS: dict[str, Row] = {
    **rows("arange arange.start arange.start_step", Row(whole, numbers="counted", resize="given")),
    **rows(FACTORIES, Row(whole, resize="given")),
    **rows(NEW, Row(like_operand, resize="given")),
}
