"""In-place arithmetic: ``x /= y`` on a value that nothing else lies in becomes ``x = x / y``.

Functionalization would come to the same, but traces the whole graph anew, which takes as long as capture itself, and
writes how memory was ordered into it.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import cast

import torch
from torch import fx
from torch.export import ExportedProgram

from autopar.graph.tensors import storage_of


def in_place_arithmetic(exported: ExportedProgram) -> ExportedProgram:
    """Write what is done in place to a value of the graph's own as a new value, where no view of it is alive."""
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            _rewrite(module.graph)
    return exported


def _rewrite(graph: fx.Graph) -> None:
    lie_in = defaultdict[int, set[fx.Node]](set)  # what is written to is not told from what comes of it
    for node in graph.nodes:
        if _is_tensor(node) and _functional(node) is None:
            lie_in[storage_of(node.meta["val"])].add(node)
    for node in list(graph.nodes):
        functional = _functional(node)
        if functional is None or not isinstance(written := node.args[0], fx.Node):
            continue
        if written.op != "call_function" or not _is_tensor(written):
            continue
        if not lie_in[storage_of(written.meta["val"])] <= {written}:  # another value would be written to as well
            continue
        args, kwargs = torch.utils._pytree.tree_map_only(
            fx.Node, lambda other: other.meta["val"], (node.args, node.kwargs)
        )
        with torch.no_grad():
            value = functional(*args, **kwargs)
        if (value.shape, value.dtype) != (written.meta["val"].shape, written.meta["val"].dtype):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(functional, node.args, node.kwargs)
        made.meta = {**node.meta, "val": value}
        written.replace_all_uses_with(made, delete_user_cb=partial(_is_after, node))
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _is_after(node: fx.Node, other: fx.Node) -> bool:
    return node < other


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _functional(node: fx.Node) -> torch._ops.OpOverload | None:
    """The operator that gives as a new value what a node writes to its first operand, and to nothing else."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.partition("::")[2]
    written = [argument.name for argument in target._schema.arguments if argument.is_write]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if written != ["self"] or not name.endswith("_") or packet is None:
        return None
    return cast(torch._ops.OpOverload | None, getattr(packet, target._overloadname, None))
