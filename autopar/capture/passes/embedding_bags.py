"""Embedding bags: each look-up that adds up, averages or takes maxima of bags becomes one operator with one result.

Torch's returns three tensors more, whose shapes depend on the kernel, and always has its bags one behind the other.
Bags of one size, as ``nn.EmbeddingBag`` makes them of a matrix of ids, become the rows of a matrix again, so that they
are sharded along the batch as its ids are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from autopar.capture.constant_propagation import evaluate
from autopar.graph.program import module_path
from autopar.operators.embedding_bag import embedding_bag
from planner.base.errors import CaptureError

aten = torch.ops.aten
SPARSE = {aten.embedding.default: 4, aten.embedding_bag.padding_idx: 5}
"""Which argument of a look-up asks for sparse gradients."""


def embedding_bags(exported: ExportedProgram) -> ExportedProgram:
    """Put the operator in.

    Raises:
        CaptureError: something other than the bags is read, or a table, also of an embedding, has sparse gradients.
    """
    graph = exported.graph
    for node in graph.nodes:
        if SPARSE.get(node.target) in range(len(node.args)) and node.args[SPARSE[node.target]]:
            raise CaptureError(
                f"the gradient of the table in {module_path(node) or 'the model'} is sparse, and ranks add up dense "
                "ones: make its module with sparse=False"
            )
    bags = [n for n in graph.nodes if n.op == "call_function" and n.target is aten.embedding_bag.padding_idx]
    constants = evaluate(graph, [node.args[2] for node in bags], {})
    for node in bags:
        used = {user.args[1]: user for user in node.users if user.target is operator.getitem and user.users}
        if used.keys() - {0}:
            raise CaptureError(f"module {module_path(node) or '(root)'} reads more of an embedding bag than its bags")
        offsets = constants.small.get(constants.first[node.args[2]])
        with graph.inserting_before(node):
            result = _one_result(graph, node, _size(node, offsets))
        if used:
            used[0].replace_all_uses_with(result)
        for user in list(node.users):
            graph.erase_node(user)
        graph.erase_node(node)
    return exported


def _size(node: fx.Node, offsets: torch.Tensor | None) -> int | None:
    """The size of all bags, if they have one."""
    ids, starts = (node.args[place].meta["val"].shape[0] for place in (1, 2))  # type: ignore[union-attr]
    bags = starts - bool(node.args[7])
    if offsets is None or not bags or ids % bags:
        return None
    size = ids // bags
    return size if torch.equal(offsets.flatten(), torch.arange(starts) * size) else None


def _one_result(graph: fx.Graph, node: fx.Node, size: int | None) -> fx.Node:
    """The call of the operator, behind what its arguments take."""
    weight, ids, starts, by_frequency, mode, _, scales, has_end, padding = node.args
    bags = starts.meta["val"].shape[0] - bool(has_end)  # type: ignore[union-attr]

    def call(op: Callable[..., Any], *args: Any) -> fx.Node:
        made = graph.call_function(op, args)
        made.meta = {**node.meta, "val": op(*fx.node.map_arg(args, lambda n: n.meta["val"]))}
        return made

    begins: fx.Node | None = None
    if size is not None:
        ids = call(aten.view.default, ids, [bags, size])
        scales = None if scales is None else call(aten.view.default, scales, [bags, size])
    else:  # the last offset may be that of no bag
        begins = call(aten.slice.Tensor, starts, 0, 0, bags) if has_end else starts  # type: ignore[assignment]
    if padding is None:
        padding = -1
    elif padding < 0:  # type: ignore[operator]
        padding += weight.meta["val"].shape[0]  # type: ignore[union-attr]
    return call(embedding_bag, weight, ids, begins, scales, mode, padding, by_frequency)
