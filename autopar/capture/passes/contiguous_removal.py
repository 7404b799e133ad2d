"""Contiguous removal: ``aten.contiguous`` leaves the graph, for how memory is ordered depends on what captured it.

What follows then lies otherwise in memory, and other views have to copy; both are seen again here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.export import ExportedProgram

from autopar.capture.repeats.markers import LEAVE
from autopar.graph.aten import values_of
from autopar.graph.local_arguments import RESHAPES
from autopar.graph.tensors import storage_of

CONTIGUOUS = torch.ops.aten.contiguous.default


def contiguous_removal(exported: ExportedProgram) -> ExportedProgram:
    """Leave out every ``contiguous()``; ``meta["val"]`` of what follows says how that lies then."""
    graph = exported.graph
    moved: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is CONTIGUOUS and len(node.args) == 1 and not node.kwargs:
            (value,) = node.all_input_nodes
            if node in moved or storage_of(node.meta["val"]) != storage_of(value.meta["val"]):
                moved.update(node.users)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        elif node in moved and _moves(node):
            moved.update(node.users)
    return exported


def _moves(node: fx.Node) -> bool:
    """Whether a node whose operands lie otherwise now gives results that do; notes how."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == LEAVE.namespace:
        return False
    try:
        with torch.no_grad():
            found = _emitted(node)
    except RuntimeError:  # what cannot read memory in this order fails where it runs
        return False
    operands = {storage_of(each) for other in node.all_input_nodes for each in values_of(other, other.meta["val"])}
    before, after = values_of(node, node.meta["val"]), values_of(node, found)
    if all(a.stride() == b.stride() and storage_of(a) not in operands for a, b in zip(after, before, strict=True)):
        return False
    node.meta["val"] = found
    return True


def _emitted(node: fx.Node) -> Any:
    """The results of a node, as it is emitted, of what its operands are."""
    args, kwargs = pytree.tree_map_only(fx.Node, lambda other: other.meta["val"], (node.args, node.kwargs))
    if str(node.target).removeprefix("aten.") in RESHAPES:
        return args[0].reshape(node.meta["val"].shape)
    return node.target(*args, **kwargs)  # type: ignore[operator]
