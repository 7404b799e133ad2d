"""Rows of attention: torch's (a flash kernel: scores are never stored), and ours, with windows and soft caps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.ir.graph import Node, TensorType
from planner.ir.layout import Shard
from planner.ops.sharding_rule import MECHANICAL, AxisStrategy, FactorWay, Inner, Rule
from planner.ops.signature import letters, rows, signature
from planner.ops.table import Row

QUERY = "query"
"""The factor that is the query sequence, and the way to shard it in which keys are whole."""
RING = "query.ring"
"""The way to shard queries in which keys are sharded, too, and go around the ranks in a ring."""
ZIGZAG = "query.zigzag"
"""As :data:`QUERY`, where each rank meets an early and a late part of the sequence, for which it exchanges half of its
queries: of a causal mask all ranks then have as much."""
ZIGZAG_RING = "query.zigzag_ring"
"""As :data:`RING`, likewise."""
QUERY_WAYS = {
    QUERY: "keys gathered",
    ZIGZAG: "keys gathered, zigzag order",
    RING: "ring attention",
    ZIGZAG_RING: "ring attention, zigzag order",
}
"""Every way to shard queries, in words."""
RINGS, ZIGZAGS = (RING, ZIGZAG_RING), (ZIGZAG, ZIGZAG_RING)
OURS = "autopar.attention.default"
"""Attention with windows and soft caps, which runs in pieces on one device, too."""
HEADS = ("kv", "group")
"""Factors: heads of keys and values, and heads of queries that share one."""


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
            own(q, *batch, *heads, QUERY, "d"),
            own(k, *batch, *kv, "key", "d"),
            own(operands[2], *batch, *kv, "key", "e"),
            *(own(m, *batch, *heads, QUERY, "key") for m in mask),
        ],
        [own(node.results[0], *batch, *heads, QUERY, "e")],
        sizes=sizes,
        whole=("key", "d", "e"),
        linear=[{2}],
    )
    if QUERY not in rule.sizes:
        return rule
    ways = MECHANICAL, *_named_ways(node, operands, rule)
    return replace(rule, ways={QUERY: ways}) if node["is_causal"] or len(ways) > 1 else rule


def _named_ways(node: Node, operands: tuple[TensorType, ...], rule: Rule) -> tuple[FactorWay, ...]:
    """Keys and values sharded as queries are: they go around, in backward once more, and their gradients with them,
    summed in float32 at the least. In zigzag order half of what is sharded is exchanged with a partner before, and half
    of what comes of it after.
    """
    if no_ring(node, operands):
        return ()
    (query, key, value), result, window = operands[:3], node.results[0], sight(node).window
    rows, columns = (tuple(factor for dim in rule.operands[at][:-1] for factor in dim) for at in (0, 1))
    kv, depths = key.shape[-1] + value.shape[-1], (query.shape[-1], result.shape[-1])
    along = {place: Shard(len(operands[place].shape) - 2) for place in (1, 2)}

    def around(way: str) -> tuple[Inner, ...]:
        sent = Inner("send", columns, key.item_bytes, kv, shared=(way,), around=True, reach=window and window - 1)
        again = replace(sent, phase="backward")
        return sent, again, replace(again, item_bytes=max(again.item_bytes, 4))

    ring = FactorWay("ring", along, inner=around(RING), alone=() if window is None else (QUERY,))
    if no_zigzag(node, operands):
        return (ring,)
    half = Inner("send", rows, query.item_bytes, parts=2)
    counts = {"forward": depths, "backward": (depths[0] + 2 * depths[1], depths[0])}  # query; query, result, gradient
    halves = tuple(replace(half, phase=phase, count=count) for phase in counts for count in counts[phase])
    keys = Inner("send", columns, key.item_bytes, kv, shared=(ZIGZAG_RING,), parts=2)
    back = replace(keys, phase="backward")
    zigzag = FactorWay("zigzag", inner=halves, alone=(QUERY,), multiple=2)
    return (
        ring,
        zigzag,
        replace(zigzag, name="zigzag_ring", operands=along, inner=(*around(ZIGZAG_RING), *halves, keys, back, back)),
    )


def no_zigzag(node: Node, operands: tuple[TensorType, ...]) -> str:
    """Why queries of an attention are not put in zigzag order; empty where they can be."""
    if not is_causal(node) and len(operands) > 3:
        return (
            "has a mask as a tensor, of which a plan does not know what it hides (models make one of attention_mask and"
            " of position_ids: leave these out where no text is padded or packed)"
        )
    if not is_causal(node):
        return "is not causal, so that all ranks have as much in the order in which tokens are"
    if window := sight(node).window:
        return f"sees {window} keys back, so that all ranks but the first have as much in the order in which tokens are"
    return no_ring(node, operands)


def no_ring(node: Node, operands: tuple[TensorType, ...]) -> str:
    """Why keys and values of an attention cannot go around in a ring; empty where they can."""
    query, key, value, *_ = operands
    if query.shape[-2] != key.shape[-2] and node["is_causal"]:
        return f"is causal over {query.shape[-2]} queries and {key.shape[-2]} keys; in a ring there are as many of both"
    if len(query.shape) > 4 or key.shape[:-2] != value.shape[:-2] or query.shape[:-3] != key.shape[:-3]:
        return "repeats some operands along dims of others; in a ring all have the same batch, and at most 4 dims"
    return "" if key.shape[-2] > 1 else "has one key"


def is_causal(node: Node) -> bool:
    """Whether an operator is attention that leaves out what comes later, which kernels need not compute."""
    return dict(node.args).get("is_causal") is True


@dataclass(frozen=True)
class Sight:
    """What queries see of keys: those at their own place and before, if it is ``causal``, and of these, if there is a
    ``window``, so many, their own included.
    """

    causal: bool
    window: int | None = None

    def pairs(self, queries: int) -> int:
        """Of the first ``queries`` of a causal attention and the keys that they see, half of the square without
        window.
        """
        window = queries if self.window is None else min(self.window, queries)
        return window * queries - window * window // 2


def sight(node: Node) -> Sight:
    """What queries of an attention see, as far as that is known without its mask."""
    args = dict(node.args)
    window = args.get("window")
    return Sight(args.get("is_causal") is True, window if isinstance(window, int) else None)


def has_scores(node: Node, operands: Sequence[TensorType], on_cpu: bool) -> bool:
    """Whether scores of a piece of an attention are there while it runs."""
    drops, softcap = node["dropout_p"], node["softcap"]
    return needs_scores(node.results[0].dtype, on_cpu, drops, softcap, trains_mask(operands))


def needs_scores(dtype: str, on_cpu: bool, dropout_p: object, softcap: object, trains: bool) -> bool:
    """Whether torch has no kernel for pieces of such attention that does without scores.

    Args:
        trains: its mask has a gradient, which is that of scores.
    """
    return trains or softcap is not None or bool(dropout_p if on_cpu else dtype == "float64")


def trains_mask(operands: Sequence[TensorType]) -> bool:
    """Whether the mask of an attention has a gradient, as a bias by relative positions."""
    return any(mask.grad for mask in operands[3:])


def shares_heads(node: Node, strategy: AxisStrategy) -> bool:
    """Whether ranks share the heads of attention."""
    return node.op in ROWS and strategy.factor in HEADS


def attention_flops(node: Node, operands: tuple[TensorType, ...], rule: Rule) -> int:
    """Two products over every (query, key) pair; a causal mask leaves half of the pairs, a window fewer."""
    pairs = math.prod(size for factor, size in rule.sizes.items() if factor not in ("d", "e"))
    flops = 2 * pairs * (rule.sizes.get("d", 1) + rule.sizes.get("e", 1))
    if (seen := sight(node)).window is None:
        return flops // 2 if seen.causal else flops
    queries = node.results[0].shape[-2]
    return flops * seen.pairs(queries) // queries**2


def saves(node: Node, operands: tuple[TensorType, ...]) -> tuple[str, ...]:
    """A flash kernel keeps operands and result; with dropout, or a mask that is trained, CPUs have none and keep
    scores.
    """
    trains = trains_mask(operands)
    scores = ("scores",) if trains or node["dropout_p"] else ()
    return ("in0", "in1", "in2", *(("in3",) * trains), "out0", "rows", *scores)


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
            labels={"context": QUERY},
        ),
    ),
    OURS: Row(
        attention,
        attention_flops,
        saves=("in0", "in1", "in2", "out0", "rows"),
        random=True,
        drops="dropout_p",
        kernel="attention",
        labels={"context": QUERY},
    ),
}
