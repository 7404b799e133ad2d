"""Row of scaled dot-product attention (a flash kernel: scores are never stored)."""

from __future__ import annotations

import math

from planner.graph import Node, TensorType
from planner.ops.factors import aligned, spanned, without_ones
from planner.ops.table import Row
from planner.rules import Dims, Rule, Special


@without_ones
def _attention(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``q[b.., h, query, d], k[b.., h, key, d], v[b.., h, key, e], mask[.., query, key] -> y[b.., h, query, e]``.

    With grouped queries the head dim of ``q`` is ``(kv, group)`` and that of ``k`` and ``v`` is
    ``(kv,)``. A causal mask counts rows from the start of the whole sequence, so a sharded query needs
    the local form (:func:`autopar.runtime.layers.attention`); it holds for one contiguous strip only.
    """
    q, k, v, *mask = operands
    *outer, query, e = node.results[0].shape
    sizes, batch = spanned("b", tuple(outer[:-1]))
    kv_head: Dims = (("kv",),) if outer else ()
    q_head = kv_head
    if node["enable_gqa"]:
        q_head = (("kv", "group"),)
        sizes |= {"kv": k.shape[-3], "group": q.shape[-3] // k.shape[-3]}
    elif outer:
        sizes["kv"] = outer[-1]
    sizes |= {"query": query, "key": k.shape[-2], "d": q.shape[-1], "e": e}
    scores: Dims = (*batch, *q_head, ("query",), ("key",))
    return Rule(
        sizes=sizes,
        operands=(
            aligned(q.shape, (*batch, *q_head, ("query",), ("d",)), sizes),
            aligned(k.shape, (*batch, *kv_head, ("key",), ("d",)), sizes),
            aligned(v.shape, (*batch, *kv_head, ("key",), ("e",)), sizes),
            *(aligned(m.shape, scores, sizes) for m in mask),
        ),
        results=((*batch, *q_head, ("query",), ("e",)),),
        whole=frozenset({"key", "d", "e"}),
        linear=(frozenset({2}),),
        special={"query": Special(strided=True)} if node["is_causal"] else {},
    )


def _attention_flops(node: Node, operands: tuple[TensorType, ...], rule: Rule) -> int:
    """Two products over every (query, key) pair; a causal mask leaves half of the pairs."""
    pairs = math.prod(size for factor, size in rule.sizes.items() if factor not in ("d", "e"))
    flops = 2 * pairs * (rule.sizes.get("d", 1) + rule.sizes.get("e", 1))
    return flops // 2 if node["is_causal"] else flops


ROWS: dict[str, Row] = {
    "aten.scaled_dot_product_attention.default": Row(
        _attention, _attention_flops, saves=("in0", "in1", "in2", "out0"), random=True
    ),
}
