"""Embedding bags: a look-up that adds up, averages or takes maxima of bags becomes the operators that it is made of.

As one operator it returns three tensors more, whose shapes depend on the kernel, and its bags are told by offsets into
all ids. Taken apart, it is a look-up as any other: its table is sharded along vocabulary or features, and bags of one
size, as ``nn.EmbeddingBag`` makes them of a matrix of ids, along the batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from autopar.capture.constant_propagation import evaluate

aten = torch.ops.aten
SUM, MEAN, MAX = range(3)


def embedding_bags(exported: ExportedProgram) -> ExportedProgram:
    """Take embedding bags apart; maxima of bags of several sizes, or of some ids of a bag, are left as they are."""
    graph = exported.graph
    bags = [n for n in graph.nodes if n.op == "call_function" and n.target is aten.embedding_bag.padding_idx]
    constants = evaluate(graph, [node.args[2] for node in bags], {})
    for node in bags:
        offsets = constants.small.get(constants.first[node.args[2]])
        used = {user.args[1]: user for user in node.users if user.target is operator.getitem and user.users}
        size = _size(node, offsets)
        if used.keys() != {0}:
            continue
        if node.args[4] == MAX and (size is None or _padding(node) is not None):
            _without_end(graph, node)
            continue
        with graph.inserting_before(node):
            result = _apart(graph, node, size)
        used[0].replace_all_uses_with(result)
        for user in list(node.users):
            graph.erase_node(user)
        graph.erase_node(node)
    return exported


def _without_end(graph: fx.Graph, node: fx.Node) -> None:
    """Leave out the last offset, where it is that of no bag: kernels and shapes know it differently."""
    weight, ids, starts, *options = node.args
    if not options[4]:
        return
    assert isinstance(starts, fx.Node)
    with graph.inserting_before(node):
        begins = graph.call_function(aten.slice.Tensor, (starts, 0, 0, starts.meta["val"].shape[0] - 1))
    begins.meta = {**node.meta, "val": starts.meta["val"][:-1]}
    node.args = (weight, ids, begins, *options[:4], False, *options[5:])
    node.meta["val"] = node.target(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))  # type: ignore[operator]


def _padding(node: fx.Node) -> int | None:
    """The id that is left out of bags."""
    padding: Any = node.args[8]
    return padding if padding is None or padding >= 0 else padding + node.args[0].meta["val"].shape[0]  # type: ignore[union-attr]


def _size(node: fx.Node, offsets: torch.Tensor | None) -> int | None:
    """The size of all bags, if they have one."""
    ids, starts = (node.args[place].meta["val"].shape[0] for place in (1, 2))  # type: ignore[union-attr]
    bags = starts - bool(node.args[7])
    if offsets is None or not bags or ids % bags:
        return None
    size = ids // bags
    return size if torch.equal(offsets.flatten(), torch.arange(starts) * size) else None


def _apart(graph: fx.Graph, node: fx.Node, size: int | None) -> fx.Node:
    """The bags of a look-up, ``[bags, features]``."""
    weight, ids, starts, by_frequency, mode, sparse, weights, has_end, _ = node.args
    padding = _padding(node)

    def call(op: Callable[..., Any], *args: Any) -> fx.Node:
        made = graph.call_function(op, args)
        made.meta = {**node.meta, "val": op(*fx.node.map_arg(args, lambda n: n.meta["val"]))}
        return made

    found = call(aten.embedding.default, weight, ids, -1 if padding is None else padding, by_frequency, sparse)
    dtype, features = found.meta["val"].dtype, found.meta["val"].shape[1]
    kept = None if padding is None else call(aten.to.dtype, call(aten.ne.Scalar, ids, padding), dtype)
    for scale in (weights, kept):
        if scale is not None:
            found = call(aten.mul.Tensor, found, call(aten.unsqueeze.default, scale, 1))
    bags = starts.meta["val"].shape[0] - bool(has_end)  # type: ignore[union-attr]
    if size is not None:

        def in_bags(values: fx.Node, *rest: int) -> fx.Node:
            return call(aten.view.default, values, [bags, size, *rest])

        if mode == MAX:
            return call(operator.getitem, call(aten.max.dim, in_bags(found, features), 1), 0)
        if mode == MEAN and kept is None:
            return call(aten.mean.dim, in_bags(found, features), [1])
        total = call(aten.sum.dim_IntList, in_bags(found, features), [1])
        counts = call(aten.sum.dim_IntList, in_bags(kept), [1]) if mode == MEAN and kept is not None else None
    else:
        begins = call(aten.slice.Tensor, starts, 0, 0, bags)
        places = call(aten.cumsum.default, call(aten.ones_like.default, ids), 0)  # from 1: begins before are its bag's
        bag = call(aten.sub.Tensor, call(aten.bucketize.Tensor, places, begins), 1)

        def in_bags(values: fx.Node, *rest: int) -> fx.Node:
            return call(aten.index_add.default, call(aten.new_zeros.default, values, [bags, *rest]), 0, bag, values)

        total = in_bags(found, features)
        ones = kept or call(aten.new_ones.default, found, [ids.meta["val"].shape[0]])  # type: ignore[union-attr]
        counts = in_bags(ones) if mode == MEAN else None
    if counts is None:
        return total
    return call(aten.div.Tensor, total, call(aten.unsqueeze.default, call(aten.clamp_min.default, counts, 1), 1))
