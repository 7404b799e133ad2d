"""Attention whose queries are sharded along the sequence: the pieces that a rank runs, what they move and need.

The runtime takes its pieces from here (:func:`autopar.runtime.layers.attention`), and prices are those of the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.ir.graph import Node, TensorType
from planner.ops.attention import QUERY, RING, ROWS, is_causal
from planner.ops.sharding_rule import AxisStrategy


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


UNSHARDED = QueryShards()
"""Every rank has all queries."""


def query_shards(node: Node, ways: Iterable[tuple[AxisStrategy, int]]) -> QueryShards:
    """How ranks share the queries of an operator, if it is attention.

    Args:
        ways: to run it, with the ranks of each axis.
    """
    if node.op not in ROWS:
        return UNSHARDED
    shared = [(strategy, size) for strategy, size in ways if strategy.factor == QUERY]
    ranks, ring = (math.prod(size for s, size in shared if s.sharded in which) for which in ((RING, QUERY), (RING,)))
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
