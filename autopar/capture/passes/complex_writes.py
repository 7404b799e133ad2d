"""Complex writes: what a model writes into a part of a complex tensor is written into its real and imaginary parts.

Functional operators that replace a slice have no gradients of complex numbers in torch; in place they have. Spectral
convolutions (FNO) fill a spectrum of zeros so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

aten = torch.ops.aten
WRITES = (aten.slice_scatter.default, aten.select_scatter.default)
"""Replace a part along a dim, their third argument, of the first operand by the second."""


def complex_writes(exported: ExportedProgram) -> ExportedProgram:
    """Replace parts of complex tensors as parts of real ones, which have a last dim of two more."""
    graph = exported.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in WRITES and node.meta["val"].is_complex():
            whole, part, *rest = node.args
            dim = rest[0] if rest else 0
            with graph.inserting_before(node):
                real = [_call(graph, node, aten.view_as_real.default, each) for each in (whole, part)]
                written = _call(graph, node, node.target, *real, dim % node.meta["val"].dim(), *rest[1:])
                found = _call(graph, node, aten.view_as_complex.default, written)
            node.replace_all_uses_with(found)
            graph.erase_node(node)
    return exported


def _call(graph: fx.Graph, like: fx.Node, op: Any, *args: Any) -> fx.Node:
    made = graph.call_function(op, args)
    made.meta = {**like.meta, "val": op(*fx.node.map_arg(args, lambda n: n.meta["val"]))}
    return made
