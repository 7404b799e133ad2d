"""Row of the embedding look-up."""

from __future__ import annotations

from dataclasses import replace

from planner.ir.graph import Node, TensorType
from planner.ops.sharding_rule import Rule, Special
from planner.ops.signature import letters, rows, signature
from planner.ops.table import Row


def embedding(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``weight[v, h], ids[..] -> y[.., h]``.

    A sharded vocabulary leaves zeros for the ids of other ranks: the result is partial, by the masked
    local form (:func:`autopar.runtime.layers.vocab_embedding`).
    """
    index = letters(len(operands[1].shape))
    counts_globally = node["scale_grad_by_freq"] or node["sparse"]
    whole = ["v", "h", *index] if counts_globally else ()
    rule = signature(node, operands, [["v", "h"], index], [[*index, "h"]], whole=whole, linear=[{0}])
    return replace(rule, special={"v": (Special(),)} if "v" in rule.sizes else {})


ROWS: dict[str, Row] = {
    **rows("embedding", Row(embedding, saves=("in1",), kernel="embedding", looks_up="rows")),
}
