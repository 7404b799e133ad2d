"""Finds what is known of an operator by its name: its row, and what follows from that for one application of it.

The rows of all families become one table, :data:`OPS`.
"""

from __future__ import annotations

from typing import Any

from planner.ir.graph import Node, TensorType
from planner.ops import (
    attention,
    contraction,
    convolution,
    elementwise,
    embedding,
    experts,
    factory,
    function,
    indexing,
    loss,
    normalization,
    random,
    reduction,
    reshape,
)
from planner.ops.table import Row

FAMILIES = (
    elementwise,
    reshape,
    reduction,
    indexing,
    factory,
    contraction,
    attention,
    experts,
    normalization,
    loss,
    embedding,
    convolution,
    random,
)


class Table(dict[str, Row]):
    """Rows by operator. All Functions share one (:mod:`planner.ops.function`), which their names do not stand for."""

    def __missing__(self, op: str) -> Row:
        if op in self:
            return function.ROW
        raise KeyError(op)

    def get(self, op: str, default: Any = None) -> Row | None:  # type: ignore[override]
        """The row of an operator, ``default`` where it has none."""
        return function.ROW if op.startswith(function.PREFIX) else super().get(op, default)

    def __contains__(self, op: object) -> bool:
        return str(op).startswith(function.PREFIX) or super().__contains__(op)


OPS = Table({op: row for family in FAMILIES for op, row in family.ROWS.items()})


def attends(op: str) -> bool:
    """Whether an operator is attention."""
    row = OPS.get(op)
    return row is not None and row.kernel == "attention"


def drops(node: Node) -> str:
    """The argument that says what share of elements an operator sets to 0 at random; empty where it drops none."""
    row = OPS.get(node.op)
    rate = "dropout_p" if row is None else row.drops
    return rate if rate and node[rate] else ""


def saved_places(node: Node, operands: tuple[TensorType, ...], *, own: bool = False) -> tuple[int, ...]:
    """Which tensors backward of an operator needs, as places among its operands, then results.

    An operator without a row may need them all.

    Args:
        own: count what it keeps besides these, where that is large, like its first operand; and what it never lets go.
    """
    row, first = OPS.get(node.op), len(operands)
    count = first + len(node.results)
    if row is None:
        return tuple(range(count))
    places: dict[int, None] = {}
    for saved in (*row.saved(node, operands), *(function.holds(node) if own else ())):
        if (place := saved.among(first)) is not None:
            places[place] = None
        elif own and saved.kind in ("own", "mask", "between"):
            places[0] = None
        elif own and (kept := function.kept(saved, node)) is not None and kept[1] >= 1:
            places[kept[0]] = None
    return tuple(place for place in places if place < count)


def passed_places(node: Node, operands: tuple[TensorType, ...]) -> tuple[int, ...]:
    """Operands whose gradient is the result's itself, not a new tensor: of its shape and dtype, nothing being saved."""
    row = OPS.get(node.op)
    if row is None or not node.results or row.saved(node, operands):
        return ()
    of = [(tensor.shape, tensor.dtype) for tensor in operands]
    result = node.results[0].shape, node.results[0].dtype
    return tuple(place for place in row.passes if place < len(of) and of[place] == result)
