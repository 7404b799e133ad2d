"""Linear copies: the copies that linear layers make of their first operand are written into the graph.

A linear layer whose first operand is no matrix of rows in memory, such as the transposed batch in
``nn.MultiheadAttention``, copies it on its own, and saves the copy for backward. Written into the graph the copy is a
value as any other: it is counted, may leave the device, and is recomputed where its block recomputes. The product then
is one kernel with the bias, and not a product and a sum.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from autopar.graph.tensors import storage_of

CONTIGUOUS = torch.ops.aten.contiguous.default
LINEAR = torch.ops.aten.linear.default


def linear_copies(exported: ExportedProgram) -> ExportedProgram:
    """Write the copies that linear layers make of their first operand into the graph."""
    graph = exported.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not LINEAR:
            continue
        rows = node.all_input_nodes[0]
        value = rows.meta["val"]
        if value.dim() < 3 or storage_of(value.reshape(-1, value.shape[-1])) == storage_of(value):
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(CONTIGUOUS, (rows,))
        copy.meta = {**node.meta, "val": value.clone(memory_format=torch.contiguous_format)}
        node.args = (copy, *node.args[1:])
    return exported
