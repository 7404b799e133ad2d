"""Overwrite removal: what is written over a whole tensor stands for it."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram


def overwrite_removal(exported: ExportedProgram) -> ExportedProgram:
    """Replace what is written over a whole tensor by what was written: torch has no derivative of ``aten.copy``."""
    graph, aten = exported.graph, torch.ops.aten
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.copy.default:
            continue
        source, want = node.args[1], node.meta["val"]
        for target, args, kwargs, is_needed in (
            (aten._to_copy.default, (), {"dtype": want.dtype}, source.meta["val"].dtype != want.dtype),
            (aten.expand.default, (list(want.shape),), {}, source.meta["val"].shape != want.shape),
        ):
            if is_needed:
                with graph.inserting_before(node):
                    made = graph.call_function(target, (source, *args), kwargs)
                made.meta.update(node.meta, val=target(source.meta["val"], *args, **kwargs))
                source = made
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    return exported
