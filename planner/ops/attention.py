"""Row of scaled dot-product attention (a flash kernel: scores are never stored)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.ir.graph import Node, TensorType
from planner.ir.layout import Shard
from planner.ops.sharding_rule import MECHANICAL, AxisStrategy, FactorWay, Inner, Rule
from planner.ops.signature import letters, rows, signature
from planner.ops.table import Row

RING = "query.ring"
"""The way to shard queries in which keys are sharded, too, and go around the ranks in a ring."""
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
    if "query" not in rule.sizes:
        return rule
    ways = MECHANICAL, *_ring(node, operands, rule)
    return replace(rule, ways={"query": ways}) if node["is_causal"] or len(ways) > 1 else rule


def _ring(node: Node, operands: tuple[TensorType, ...], rule: Rule) -> tuple[FactorWay, ...]:
    """Queries, keys and values sharded alike: keys and values go around, in backward once more, and their gradients
    with them, summed in float32 at the least.
    """
    if no_ring(node, operands):
        return ()
    key, value = operands[1:3]
    factors = tuple(factor for dim in rule.operands[1][:-1] for factor in dim)
    sent = Inner("send", factors, key.item_bytes, key.shape[-1] + value.shape[-1], shared=(RING,), around=True)
    again, wide = replace(sent, phase="backward"), max(sent.item_bytes, 4)
    along = {place: Shard(len(operands[place].shape) - 2) for place in (1, 2)}
    return (FactorWay("ring", along, inner=(sent, again, replace(again, item_bytes=wide))),)


def no_ring(node: Node, operands: tuple[TensorType, ...]) -> str:
    """Why keys and values of an attention cannot go around in a ring; empty where they can."""
    query, key, value, *masks = operands
    if node["dropout_p"]:
        return f"drops weights of keys (dropout_p={node['dropout_p']}), and no kernel that merges says which"
    if any(mask.grad for mask in masks):
        return "has a mask that is trained, whose gradient no kernel gives without all scores"
    if query.shape[-2] != key.shape[-2] and node["is_causal"]:
        return f"is causal over {query.shape[-2]} queries and {key.shape[-2]} keys; in a ring there are as many of both"
    if len(query.shape) > 4 or key.shape[:-2] != value.shape[:-2] or query.shape[:-3] != key.shape[:-3]:
        return "repeats some operands along dims of others; in a ring all have the same batch, and at most 4 dims"
    return "" if key.shape[-2] > 1 else "has one key"


def is_causal(node: Node) -> bool:
    """Whether an operator is attention that leaves out what comes later, which kernels need not compute."""
    return dict(node.args).get("is_causal") is True


def pieces(starts: Sequence[int], run: int, first: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """What some queries see of some keys, as kernels take it: all of both, or query ``i`` keys ``0..i`` of as many.

    Args:
        starts, run: the places in the sequence of runs of queries, and how long each is.
        first, keys: the place of the first key, and how many follow one another.
        causal: queries see keys at their own place and before; otherwise all.

    Yields:
        Queries, numbered run after run; keys; whether query ``i`` of these sees keys ``0..i`` alone.
    """
    if not causal:
        yield slice(0, len(starts) * run), slice(0, keys), False
        return
    for number, start in enumerate(starts):
        at, last = number * run - start, first + keys
        among = range(max(start, first), min(start + run, last))
        if among:
            rows = slice(at + among.start, at + among.stop)
            yield rows, slice(among.start - first, among.stop - first), True
            if among.start > first:
                yield rows, slice(0, among.start - first), False
        if start + run > last:
            yield slice(at + max(start, last), at + start + run), slice(0, keys), False


@dataclass(frozen=True)
class QueryShards:
    """How ranks share the queries of attention.

    Attributes:
        ranks: that share them.
        strips: of the sequence, of each of which every rank has a part.
        ring: how many of these ranks share the keys, too, which then go around; 1: keys are whole.
    """

    ranks: int = 1
    strips: int = 1
    ring: int = 1

    @property
    def busiest(self) -> float:
        """What the last rank has of the pairs of a causal mask over the average: it sees the most."""
        return 1 + (self.ranks - 1) / (self.ranks * self.strips)

    def is_in_pieces(self, node: Node) -> bool:
        """Whether it runs piece by piece: not where all that a rank sees are whole rows, nor where it drops some."""
        return self.ring > 1 or (self.ranks > 1 and is_causal(node) and not node["dropout_p"])

    def load(self, node: Node) -> float:
        """What the busiest rank has of the pairs that an operator meets over the average."""
        if self.ranks == 1 or not is_causal(node):
            return 1.0
        return self.busiest if self.is_in_pieces(node) else 2.0  # what drops some has a mask, and meets all

    def pieces(self, queries: int, keys: int, causal: bool) -> Counter[tuple[int, int, bool]]:
        """How often the last rank meets so many queries with so many keys, causally or not.

        Args:
            queries, keys: that it has.
        """
        run, strip = queries // self.strips, queries * self.ranks // self.strips
        starts = [(number + 1) * strip - run for number in range(self.strips)]
        found = Counter[tuple[int, int, bool]]()
        for block in range(self.ring):
            for queries_, keys_, is_square in pieces(starts, run, block * keys, keys, causal):
                found[queries_.stop - queries_.start, keys_.stop - keys_.start, is_square] += 1
        return found


def query_shards(node: Node, ways: Iterable[tuple[AxisStrategy, int]]) -> QueryShards:
    """How ranks share the queries of an operator, if it is attention.

    Args:
        ways: to run it, with the ranks of each axis.
    """
    if node.op not in ROWS:
        return UNSHARDED
    shared = [(strategy, size) for strategy, size in ways if strategy.factor == "query"]
    ranks, ring = (math.prod(size for s, size in shared if s.sharded in which) for which in ((RING, "query"), (RING,)))
    return QueryShards(ranks, max((s.outer for s, _ in shared), default=1), ring)


def merged_bytes(node: Node, shapes: Sequence[tuple[int, ...]], shards: QueryShards) -> tuple[int, int]:
    """Bytes that go through memory to merge the results of pieces, and in backward to add up their gradients.

    Both are sums in float32 at the least, which are read and written once for each piece. Keys and values are put
    together before they are sent, and their gradients added to those that come.

    Args:
        shapes: of its operands on one rank.
    """
    query, key, value = (math.prod(shape) for shape in shapes[:3])
    queries, keys = shapes[0][-2], shapes[1][-2]
    item = node.results[0].item_bytes
    each = 2 * max(item, 4) + item
    met = shards.pieces(queries, keys, is_causal(node))
    rows, columns = (sum(times * piece[at] for piece, times in met.items()) for at in (0, 1))
    out, sent = query // shapes[0][-1] * shapes[2][-1], (shards.ring - 1) * (key + value)
    backward = each * (query * rows // queries + (key + value) * columns // keys)
    return each * out * rows // queries + 2 * item * sent, backward + (2 * item + 5 * max(item, 4)) * sent


def scratch_bytes(
    node: Node, types: Sequence[TensorType], sizes: Sequence[int], shards: QueryShards
) -> tuple[int, int]:
    """What attention in pieces needs while it runs, forward and backward, besides its tensors and their gradients.

    Forward a sum over all pieces, which becomes the result, one of the next, and that weighed; keys and values that are
    here and that come; in backward their gradients: of its own, of those here, and those that come.

    Args:
        types: of operands.
        sizes: bytes of operands, then results, on one rank.
    """
    (query, key, value), out, goes = sizes[:3], sizes[len(types)], shards.ring > 1
    wide = max(1, 4 // node.results[0].item_bytes)
    mask = sum(size // each.item_bytes for size, each in zip(sizes[3 : len(types)], types[3:], strict=True))
    held = (2 * (key + value) if goes else 0) + mask * node.results[0].item_bytes // shards.ring
    return held + 2 * wide * out, held + wide * (query + (key + value) * (3 if goes else 1))


def shares_heads(node: Node, strategy: AxisStrategy) -> bool:
    """Whether ranks share the heads of attention."""
    return node.op in ROWS and strategy.factor in HEADS


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

UNSHARDED = QueryShards()
"""Every rank has all queries."""
