"""Assertion removal: what the model asserts of its values was true of shapes, and leaves the graph."""

from __future__ import annotations

from torch.export import ExportedProgram


def assertion_removal(exported: ExportedProgram) -> ExportedProgram:
    """Leave out assertions."""
    graph = exported.graph
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and "_assert" in str(node.target) and not node.users:
            graph.erase_node(node)
    return exported
