"""Replaces an index that asks for everything in order by a view.

Libraries that write masks as functions of positions look a padding mask up at ``[arange(batch), .., arange(keys)]``.
As a lookup it could ask for any sample, so that every rank would need the mask of the whole batch, and no
micro-batch could do with its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from autopar.capture.constant_propagation import evaluate

INDEX = torch.ops.aten.index.Tensor
UNSQUEEZE = torch.ops.aten.unsqueeze.default


def identity_indexing(exported: ExportedProgram) -> ExportedProgram:
    """Replace lookups of every element in its place by a view; what made the indices is left as dead code."""
    graph = exported.graph
    lookups = [node for node in graph.nodes if node.op == "call_function" and node.target is INDEX]
    asked = {index for node in lookups for index in _indices(node)}
    constants = evaluate(graph, list(asked), {})
    for node in lookups:
        values = [constants.small.get(constants.first[index]) for index in _indices(node)]
        places = _places(node, values)
        if places is not None:
            value = node.args[0]
            assert isinstance(value, fx.Node)
            for dim in range(node.meta["val"].dim() - value.meta["val"].dim() + len(places)):
                if dim not in places:
                    value = _unsqueezed(graph, node, value, dim)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    return exported


def _indices(node: fx.Node) -> list[fx.Node]:
    """The indices of a lookup in its first dims; none where it leaves one of these out."""
    given = node.args[1]
    assert isinstance(given, (list, tuple))
    found = [index for index in given if isinstance(index, fx.Node)]
    return found if len(found) == len(given) else []


def _places(node: fx.Node, values: list[Tensor | None]) -> list[int] | None:
    """For each index, the dim of the result along which it counts; ``None`` unless all count, in order, and nothing
    repeats what is found.

    Args:
        values: of the indices, compressed (:mod:`autopar.capture.constant_propagation`), where they are known.
    """
    source, result = node.args[0], node.meta["val"]
    assert isinstance(source, fx.Node)
    sizes = source.meta["val"].shape
    picked = result.dim() - len(sizes) + len(values)
    found: list[int] = []
    for size, value in zip(sizes, values, strict=False):
        if value is None or value.dtype == torch.bool or value.numel() != size or size == 1:
            return None
        place = picked - value.dim() + next(dim for dim, length in enumerate(value.shape) if length > 1)
        if place <= (found[-1] if found else -1) or not torch.equal(value.flatten(), torch.arange(size)):
            return None
        found.append(place)
    repeats = any(result.shape[dim] > 1 for dim in range(picked) if dim not in found)
    return found if found and not repeats else None


def _unsqueezed(graph: fx.Graph, before: fx.Node, value: fx.Node, dim: int) -> fx.Node:
    with graph.inserting_before(before):
        view = graph.call_function(UNSQUEEZE, (value, dim))
    view.meta = {**before.meta, "val": value.meta["val"].unsqueeze(dim)}
    return view
