"""Rows of look-ups in tables: embeddings, and embedding bags, which pool what they look up."""

from __future__ import annotations

from dataclasses import replace

from planner.ir.graph import Node, TensorType
from planner.ir.layout import I
from planner.ops.sharding_rule import FactorWay, Inner, Rule
from planner.ops.signature import letters, rows, signature, static_int
from planner.ops.table import Row

Operands = tuple[TensorType, ...]
SUM, MEAN, MAX = range(3)
"""How bags are pooled, numbered as torch does."""


def embedding(node: Node, operands: Operands) -> Rule:
    """``weight[v, h], ids[..] -> y[.., h]``.

    A sharded vocabulary leaves zeros for the ids of other ranks: the result is partial, by the masked
    local form (:func:`autopar.runtime.layers.vocab_embedding`).
    """
    index = letters(len(operands[1].shape))
    counts_globally = node["scale_grad_by_freq"] or node["sparse"]
    whole = ["v", "h", *index] if counts_globally else ()
    rule = signature(node, operands, [["v", "h"], index], [[*index, "h"]], whole=whole, linear=[{0}])
    return replace(rule, ways={"v": (FactorWay(),)} if "v" in rule.sizes else {})


def embedding_bag(node: Node, operands: Operands) -> Rule:
    """``weight[v, h], ids[b, l], scales[b, l] -> y[b, h]``, or ``weight, ids[n], starts[b], scales[n] -> y[b, h]``.

    Bags that are rows of a matrix are sharded as the batch is. Of bags one behind the other each rank takes its slice
    of all ids, whatever bags these are of, and has terms of the bags' sums. Rows of the table are sharded as those of
    an embedding (:func:`autopar.runtime.layers.sharded_embedding_bag`). A mean is the sum over its count: of ids that
    are sharded and may be padding, ranks count theirs and add up. A maximum is no sum: the ranks that share the rows
    agree on the largest element and on the place of the id that has it, the first of several, and all have the result.
    """
    mode, has_padding = static_int(node["mode"]), node["padding_idx"] != -1
    in_rows = node["starts"] is None
    ids = ["b", "l"] if in_rows else ["n"]
    ins = [["v", "h"], ids, *([] if in_rows else [["b"]])]
    scales = [len(ins)] if node["per_sample_weights"] is not None else []
    ins += [ids for _ in scales]
    whole: set[str] = {MEAN: {"l"}, MAX: {"l", "n"}}.get(mode, set()) | (set() if in_rows else {"b"})
    if node["scale_grad_by_freq"]:
        whole |= {"v", "h", "b", "l", "n"}
    linear = [] if mode == MAX else [{0}, *({place} for place in scales)]
    rule = signature(node, operands, ins, [["b", "h"]], whole=whole, linear=linear)
    ways = {"v": FactorWay()}
    if mode == MAX:
        pooled = tuple(name for name in ("b", "h") if name in rule.sizes)
        largest = Inner("all_reduce", pooled, operands[0].item_bytes)
        ways["v"] = FactorWay(results={0: I}, inner=(largest, replace(largest, item_bytes=8)))
    if not in_rows:
        bags = tuple(name for name in ("b",) if name in rule.sizes)
        counts = (Inner("all_reduce", bags, 8),) if mode == MEAN and has_padding else ()
        ways["n"] = FactorWay(inner=counts)
    return replace(rule, ways={name: (each,) for name, each in ways.items() if name in rule.sizes})


def embedding_slabs(node: Node, operands: Operands) -> Rule:
    """``slabs[slab, r, h], indices[b, slab, c], starts[slab, t] -> y[b, slab, t, h]``.

    Slabs hold whole tables: to shard them is to give tables to ranks. Inside a slab rows and features may be sharded,
    by axes that are left, as those of an embedding bag (:func:`autopar.runtime.layers.row_sharded_slabs`).
    """
    ins = [["slab", "r", "h"], ["b", "slab", "c"], ["slab", "t"]]
    rule = signature(node, operands, ins, [["b", "slab", "t", "h"]], whole=["c", "t"], linear=[{0}])
    return replace(rule, ways={"r": (FactorWay(),)} if "r" in rule.sizes else {})


def checked_ids(node: Node, operands: Operands) -> Rule:
    """``ids[b, c] -> ids[b, c]``; which table the ids of a column are of is told by their number."""
    return signature(node, operands, [["b", "c"]], [["b", "c"]], whole=["c"])


def _saves(node: Node, operands: Operands) -> tuple[str, ...]:
    """Ids and starts; which ids have the maxima, numbers beside the bags; the table, where scales are trained."""
    found = [f"in{place}" for place in range(1, len(operands))]
    trains_scales = node["per_sample_weights"] is not None and operands[-1].grad
    return (*(["in0"] if trains_scales else []), *found, *(["out0"] if node["mode"] == MAX else []))


ROWS: dict[str, Row] = {
    **rows("embedding", Row(embedding, saves=("in1",), kernel="embedding", looks_up="rows", bags="ids")),
    "autopar.embedding_bag.default": Row(embedding_bag, saves=_saves, kernel="embedding", looks_up="rows", bags="rows"),
    "autopar.embedding_slabs.default": Row(
        embedding_slabs, saves=("in1", "in2"), kernel="embedding", looks_up="rows", labels={"table": "slab"}
    ),
    "autopar.checked_ids.default": Row(checked_ids, kernel="copy"),
}
