"""The op table: what the planner knows of each ATen operator."""

from planner.ops.table import Row

OPS: dict[str, Row] = {}

__all__ = ["OPS", "Row"]
