"""Row of the embedding look-up."""

from __future__ import annotations

from planner.graph import Node, TensorType
from planner.ops.factors import spanned, without_ones
from planner.ops.table import Row
from planner.rules import Rule, Special


@without_ones
def _embedding(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``weight[v, h], ids[..] -> y[.., h]``.

    A sharded vocabulary leaves zeros for the ids of other ranks: the result is partial, by the masked
    local form (:func:`autopar.runtime.layers.vocab_embedding`).
    """
    weight, ids = operands
    sizes, index = spanned("i", ids.shape)
    sizes |= {"v": weight.shape[0], "h": weight.shape[1]}
    global_counts = node["scale_grad_by_freq"] or node["sparse"]
    return Rule(
        sizes=sizes,
        operands=((("v",), ("h",)), index),
        results=((*index, ("h",)),),
        whole=frozenset(sizes) if global_counts else frozenset(),
        linear=(frozenset({0}),),
        special={"v": Special()},
    )


ROWS: dict[str, Row] = {"aten.embedding.default": Row(_embedding, saves=("in1",))}
