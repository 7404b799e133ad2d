"""Aliasing: whether an operator's result shares the storage of an operand, so that both are one allocation."""

from __future__ import annotations

from planner.ir.graph import Node
from planner.ops import OPS


def shares(node: Node) -> tuple[int, ...]:
    """For each result the operand whose memory it shares, -1 for none; nothing if it shares none."""
    row = OPS.get(node.op)
    found = node.shares or ((0,) * len(node.results) if row is not None and row.view and node.inputs else ())
    return found if any(shared >= 0 for shared in found) else ()
