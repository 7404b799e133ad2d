"""Detaches the operands of a Function to which its backward gives no gradient, so that a plan expects none."""

from __future__ import annotations

import torch
from torch import fx

from autopar.functions.carry import carried_by
from autopar.functions.describe import describe, operands_of
from autopar.graph.aten import tensor_type, values_of


def cut_ungraded(graph: fx.Graph) -> None:
    """Detach, in a traced graph, the operands of Functions for which backward returns ``None``.

    Raises:
        CaptureError: operands or results are not what was declared.
    """
    for node in list(graph.nodes):
        carried = carried_by(node.target)
        if carried is None or node.meta.get("no_grad"):
            continue
        tensors = [arg for arg in node.args if isinstance(arg, fx.Node)]
        trained = [tensor.meta["val"].is_floating_point() for tensor in tensors]
        results = [tensor_type(node.name, value, True) for value in values_of(node, node.meta["val"])]
        for place in describe(carried, operands_of(node, trained), results).ungraded:
            with graph.inserting_before(node):
                cut = graph.call_function(torch.ops.aten.detach.default, (tensors[place],))
            cut.meta.update(node.meta, val=tensors[place].meta["val"].detach())
            node.update_arg(place, cut)
