"""The op table: what the planner knows of each ATen operator."""

from planner.ops import (
    attention,
    contraction,
    convolution,
    elementwise,
    embedding,
    factory,
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
    normalization,
    loss,
    embedding,
    convolution,
    random,
)

OPS: dict[str, Row] = {op: row for family in FAMILIES for op, row in family.ROWS.items()}

__all__ = ["FAMILIES", "OPS", "Row"]
