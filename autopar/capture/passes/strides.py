"""Works out strides of emitted values, and writes the copies that matrix products make of transposed operands into the
graph.

``aten.contiguous`` leaves the graph: how memory is ordered depends on the device that captured. What follows then lies
otherwise, and other views have to copy; both are seen again here.

A linear layer whose first operand is no matrix of rows in memory, such as the transposed batch in
``nn.MultiheadAttention``, copies it on its own, and saves the copy for backward. Written into the graph the copy is a
value as any other: it is counted, may leave the device, and is recomputed where its block recomputes. The product then
is one kernel with the bias, and not a product and a sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from autopar.capture.repeats.markers import LEAVE
from autopar.graph.aten import values_of
from autopar.graph.local_arguments import RESHAPES

CONTIGUOUS = torch.ops.aten.contiguous.default
LINEAR = torch.ops.aten.linear.default


def drop_contiguous(graph: fx.Graph) -> None:
    """Leave out every ``contiguous()``; ``meta["val"]`` of what follows says how that lies then."""
    moved: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is CONTIGUOUS and len(node.args) == 1 and not node.kwargs:
            (value,) = node.all_input_nodes
            if node in moved or not _is_same(node.meta["val"], value.meta["val"]):
                moved.update(node.users)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        elif node in moved and _moves(node):
            moved.update(node.users)


def copy_for_products(graph: fx.Graph) -> None:
    """Write the copies that linear layers make of their first operand into the graph."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not LINEAR:
            continue
        rows = node.all_input_nodes[0]
        value = rows.meta["val"]
        if value.dim() < 3 or _memory(value.reshape(-1, value.shape[-1])) == _memory(value):
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(CONTIGUOUS, (rows,))
        copy.meta = {**node.meta, "val": value.clone(memory_format=torch.contiguous_format)}
        node.args = (copy, *node.args[1:])


def _moves(node: fx.Node) -> bool:
    """Whether a node whose operands lie otherwise now gives results that do; notes how."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == LEAVE.namespace:
        return False
    try:
        with torch.no_grad():
            found = _emitted(node)
    except RuntimeError:  # what cannot read memory in this order fails where it runs
        return False
    operands = {_memory(each) for other in node.all_input_nodes for each in values_of(other, other.meta["val"])}
    before, after = values_of(node, node.meta["val"]), values_of(node, found)
    if all(a.stride() == b.stride() and _memory(a) not in operands for a, b in zip(after, before, strict=True)):
        return False
    node.meta["val"] = found
    return True


def _emitted(node: fx.Node) -> Any:
    """The results of a node, as it is emitted, of what its operands are."""
    args, kwargs = pytree.tree_map_only(fx.Node, lambda other: other.meta["val"], (node.args, node.kwargs))
    if str(node.target).removeprefix("aten.") in RESHAPES:
        return args[0].reshape(node.meta["val"].shape)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _is_same(a: Tensor, b: Tensor) -> bool:
    return _memory(a) == _memory(b)


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
