"""Row of scaled dot-product attention (a flash kernel: scores are never stored)."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.ir.graph import Node, TensorType
from planner.ops.sharding_rule import FactorWay, Rule
from planner.ops.signature import letters, rows, signature
from planner.ops.table import Row


def attention(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``q[.., h, query, d], k[.., h, key, d], v[.., h, key, e], mask[.., query, key] -> y[.., h, query, e]``.

    With grouped queries the heads of ``q`` are ``(kv, group)`` and those of ``k`` and ``v`` are ``(kv,)``.
    A causal mask counts rows from the start of the whole sequence, so a sharded query needs the local form
    (:func:`autopar.runtime.layers.attention`).
    """
    q, k, _, *mask = operands
    batch = letters(max(0, len(node.results[0].shape) - 3))
    kv = ["kv"][: max(0, len(k.shape) - 2)]
    heads, sizes = kv, {}
    if node["enable_gqa"]:
        heads, sizes = ["kv group"], {"kv": k.shape[-3]}

    def own(tensor: TensorType, *labels: str) -> list[str]:
        aligned = labels[len(labels) - len(tensor.shape) :]
        return ["" if size == 1 else label for label, size in zip(aligned, tensor.shape, strict=True)]

    rule = signature(
        node,
        operands,
        [
            own(q, *batch, *heads, "query", "d"),
            own(k, *batch, *kv, "key", "d"),
            own(operands[2], *batch, *kv, "key", "e"),
            *(own(m, *batch, *heads, "query", "key") for m in mask),
        ],
        [own(node.results[0], *batch, *heads, "query", "e")],
        sizes=sizes,
        whole=("key", "d", "e"),
        linear=[{2}],
    )
    offset_rows = node["is_causal"] and "query" in rule.sizes
    return replace(rule, ways={"query": (FactorWay(strided=True),)}) if offset_rows else rule


def is_causal(node: Node) -> bool:
    """Whether an operator is attention that leaves out what comes later, which kernels need not compute."""
    return dict(node.args).get("is_causal") is True


def attention_flops(node: Node, operands: tuple[TensorType, ...], rule: Rule) -> int:
    """Two products over every (query, key) pair; a causal mask leaves half of the pairs."""
    pairs = math.prod(size for factor, size in rule.sizes.items() if factor not in ("d", "e"))
    flops = 2 * pairs * (rule.sizes.get("d", 1) + rule.sizes.get("e", 1))
    return flops // 2 if node["is_causal"] else flops


def saves(node: Node, operands: tuple[TensorType, ...]) -> tuple[str, ...]:
    """A flash kernel keeps operands and result; with dropout, or a mask that is trained, CPUs have none and keep
    scores.
    """
    is_plain = not node["dropout_p"] and not any(mask.grad for mask in operands[3:])
    return ("in0", "in1", "in2", "out0", "rows", *(() if is_plain else ("scores",)))


ROWS: dict[str, Row] = {
    **rows(
        "scaled_dot_product_attention",
        Row(
            attention,
            attention_flops,
            saves=saves,
            random=True,
            drops="dropout_p",
            kernel="attention",
            labels={"context": "query"},
        ),
    ),
}
