"""Finds positions past the end of a position table, where a model would fail though all shapes agree."""

from __future__ import annotations

from planner.base.errors import InputError
from planner.ir.graph import Graph, Ref
from planner.ops import OPS


def check_positions(graph: Graph) -> None:
    """Refuse a model that looks up more positions than a table has.

    Raises:
        InputError: names the table, its rows, and the position.
    """
    for node in graph.applying(*(op for op, row in OPS.items() if row.looks_up == "rows")):
        table = graph.by_name[node.inputs[0].node]
        (rows, *_), indices = graph.type_of(node.inputs[0]).shape, node["indices"]
        last = _last(graph, indices) if isinstance(indices, Ref) else None
        if last is not None and last >= rows:
            raise InputError(
                f"{node.path or 'the model'} looks up position {last} in {table.target or table.name}, which has "
                f"{rows} rows (0 to {rows - 1}): give example inputs of a shorter sequence, or a model with more"
            )


def _last(graph: Graph, ref: Ref) -> int | None:
    """The largest of numbers that are counted, known from how they are made; ``None`` where they are not."""
    node, past = graph.by_name[ref.node], 0
    while (numbers := row.numbers if (row := OPS.get(node.op)) else "") != "counted":
        if len(node.inputs) != 1 or not numbers:
            return None
        if numbers == "added":
            other, alpha = node["other"], node["alpha"]
            if not isinstance(other, int) or not isinstance(alpha, int):
                return None
            past += other * alpha
        node = graph.by_name[node.inputs[0].node]
    start, end, step = node["start"] or 0, node["end"], node["step"] or 1
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(step, int)) or step < 1 or end <= start:
        return None
    return range(start, end, step)[-1] + past
