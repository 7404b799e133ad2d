"""Attention whose queries are sharded along the sequence: the pieces that a rank runs, what they move and need.

The runtime takes its pieces from here (:func:`autopar.runtime.layers.attention`), and prices are those of the same.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.ir.graph import Node, TensorType
from planner.ops.attention import OURS, QUERY, RINGS, ROWS, ZIGZAGS, Sight, is_causal, sight, trains_mask
from planner.ops.sharding_rule import AxisStrategy

Span = tuple[range, range]
"""Queries and keys, numbered run after run."""
LEAST = 128
"""Queries that a kernel takes at once, where a window holds fewer."""


@dataclass(frozen=True)
class SeenPart:
    """What some queries see of some keys, as a kernel takes it: all of both, query ``i`` keys ``0..i`` of as many
    (``is_square``), or a ``band``.

    Attributes:
        queries, keys: numbered run after run.
        band: how far the first of the keys lies before the first of the queries: of a window that does not hold all.
    """

    queries: slice
    keys: slice
    is_square: bool = False
    band: int | None = None

    @property
    def form(self) -> tuple[int, int, bool]:
        """What kernels are told apart by: queries, keys, and whether half of the pairs are skipped."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start, self.is_square


def pieces(starts: Sequence[int], run: int, firsts: Sequence[int], keys: int, seen: Sight) -> Iterator[SeenPart]:
    """What some queries see of some keys.

    Args:
        starts, run: the places in the sequence of runs of queries, ascending, and how long each is.
        firsts, keys: likewise of runs of keys.
    """
    if seen.window is not None:
        yield from _bands(starts, run, firsts, keys, seen.window)
        return
    every = range(len(starts) * run), range(len(firsts) * keys)
    squares, wholes = [], list[Span]()
    if not seen.causal:
        wholes.append(every)
    elif (run, *starts) == (keys, *firsts):
        squares.append(every)
    else:
        for (row, start), (column, first) in itertools.product(enumerate(starts), enumerate(firsts)):
            at, to, last = row * run - start, column * keys - first, first + keys
            among = range(max(start, first), min(start + run, last))
            if among:
                rows = range(at + among.start, at + among.stop)
                squares.append((rows, range(to + among.start, to + among.stop)))
                wholes.append((rows, range(to + first, to + among.start)))
            wholes.append((range(at + max(start, last), at + start + run), range(to + first, to + last)))
        wholes = _joined(_joined([span for span in wholes if all(span)], 0), 1)
    for is_square, spans in ((True, squares), (False, wholes)):
        for rows, columns in spans:
            yield SeenPart(slice(rows.start, rows.stop), slice(columns.start, columns.stop), is_square)


def _bands(starts: Sequence[int], run: int, firsts: Sequence[int], keys: int, window: int) -> Iterator[SeenPart]:
    """As many queries at a time as the window is long, with the keys that any of them sees."""
    step = max(window, LEAST)
    for (row, start), (column, first) in itertools.product(enumerate(starts), enumerate(firsts)):
        at, to = row * run - start, column * keys - first
        for begin in range(start, start + run, step):
            low, high = max(first, begin - window + 1), min(first + keys, start + run, begin + step)
            rows = range(max(begin, low), min(begin + step, start + run, high + window - 1))
            if low < high and rows:
                is_square = rows == range(low, high) and len(rows) <= window
                sees_all = high - 1 <= rows.start and rows.stop - 1 - low < window
                yield SeenPart(
                    slice(at + rows.start, at + rows.stop),
                    slice(to + low, to + high),
                    is_square,
                    None if is_square or sees_all else rows.start - low,
                )


def sent_keys(ranks: int, keys: int, window: int | None) -> list[tuple[int, int]]:
    """How many keys each rank of a ring passes on before each step but the first, the last ones of a rank's; and before
    how many steps so many.

    Args:
        keys: of each rank.
    """
    back = (ranks - 1) * keys if window is None else min(window - 1, (ranks - 1) * keys)
    whole = int(back) // int(keys)
    return [(sent, times) for sent, times in ((keys, whole), (back - whole * keys, 1)) if sent and times]


def _joined(spans: list[Span], along: int) -> list[Span]:
    """Those put together that follow one another along queries (0) or keys (1) and are alike in the other."""
    found = list[Span]()
    for span in sorted(spans, key=lambda each: (each[1 - along].start, each[1 - along].stop, each[along].start)):
        before = found[-1] if found else span
        if before[1 - along] == span[1 - along] and before[along].stop == span[along].start:
            joined = range(before[along].start, span[along].stop)
            found[-1] = (joined, span[1]) if along == 0 else (span[0], joined)
        else:
            found.append(span)
    return found


def zigzag(rank: int, ranks: int, length: int) -> tuple[int, int]:
    """Where the two runs of a rank begin, of the ``2 * ranks`` of a sequence, so that all see as much of a causal mask:
    the first half of its own part, and the second of its mirror image's.
    """
    run = length // (2 * ranks)
    early, late = sorted((2 * rank, 2 * (ranks - rank) - 1))
    return early * run, late * run


@dataclass(frozen=True)
class QueryShards:
    """How ranks share the queries of attention.

    Attributes:
        ranks: that share them.
        strips: of the sequence, of each of which every rank has a part.
        ring: how many of these ranks share the keys, too, which then go around; 1: keys are whole.
        is_zigzag: each meets an early and a late part of the sequence.
    """

    ranks: int = 1
    strips: int = 1
    ring: int = 1
    is_zigzag: bool = False

    @staticmethod
    def of(parts: Mapping[str, int], strips: int = 1) -> QueryShards:
        """
        Args:
            parts: how many ranks share each factor of attention, and how many do in each way.
        """
        ring = next((parts[way] for way in RINGS if way in parts), 1)
        return QueryShards(parts.get(QUERY, 1), strips, ring, any(way in parts for way in ZIGZAGS))

    @property
    def busiest(self) -> float:
        """What the last rank has of the pairs of a causal mask over the average: it sees the most."""
        return 1.0 if self.is_zigzag else 1 + (self.ranks - 1) / (self.ranks * self.strips)

    def is_in_pieces(self, node: Node) -> bool:
        """Whether it runs piece by piece: not where all that a rank sees are whole rows."""
        return self.ring > 1 or (self.ranks > 1 and is_causal(node)) or node.op == OURS

    def load(self, node: Node) -> float:
        """What the busiest rank has of the pairs that an operator meets over the average."""
        if self.ranks == 1 or not is_causal(node):
            return 1.0
        if (seen := sight(node)).window is None:
            return self.busiest
        length = node.results[0].shape[-2]
        before = length - length // (self.ranks * self.strips)
        return self.ranks * self.strips * (1 - seen.pairs(before) / seen.pairs(length))

    def pieces(self, queries: int, keys: int, seen: Sight) -> Counter[tuple[int, int, bool]]:
        """How often the last rank meets so many queries with so many keys, causally or not.

        Args:
            queries, keys: that it has.
            seen: what it sees.
        """
        return _forms(self, queries, keys, seen)


def _forms(shards: QueryShards, queries: int, keys: int, seen: Sight) -> Counter[tuple[int, int, bool]]:
    """See :meth:`QueryShards.pieces`. Of a ring's blocks of keys that lie alike to the queries one is looked at; sizes
    may be symbols (:mod:`planner.base.symbolic_int`), with which pieces grow where no window bounds them.
    """
    length, strip = queries * shards.ranks, queries * shards.ranks // shards.strips
    run, columns = queries // shards.strips, keys
    starts = [(number + 1) * strip - run for number in range(shards.strips)]
    if shards.is_zigzag:
        run, starts = queries // 2, [*zigzag(shards.ranks - 1, shards.ranks, length)]
    if shards.is_zigzag and shards.ring > 1:
        columns = keys // 2
    found = Counter[tuple[int, int, bool]]()
    for block, times in _unlike(shards, int(keys), tuple(map(int, starts)), int(run), seen.window):
        firsts = [block * keys] if columns is keys else [*zigzag(block, shards.ring, length)]
        for part in pieces(starts, run, firsts, columns, seen):
            found[part.form] += times
    if seen.window is not None:
        return found
    q, k = int(queries), int(keys)
    return Counter({(queries * n // q, keys * m // k, square): times for (n, m, square), times in found.items()})


@lru_cache(maxsize=4096)
def _unlike(
    shards: QueryShards, keys: int, starts: tuple[int, ...], run: int, window: int | None
) -> list[tuple[int, int]]:
    """A ring's blocks of keys that lie otherwise to the queries than all before, and how many lie like each."""
    columns, firsts = keys, np.arange(shards.ring).reshape(-1, 1) * keys
    if shards.is_zigzag and shards.ring > 1:
        length = keys * shards.ring
        columns, firsts = keys // 2, np.array([zigzag(block, shards.ring, length) for block in range(shards.ring)])
    behind = columns + (0 if window is None else window - 1)
    lies = (firsts[:, :, None] - np.array(starts)).clip(-behind, run).reshape(len(firsts), -1)
    _, places, counts = np.unique(lies, axis=0, return_index=True, return_counts=True)
    return [*zip(places.tolist(), counts.tolist(), strict=True)]


UNSHARDED = QueryShards()
"""Every rank has all queries."""


def query_shards(node: Node, ways: Iterable[tuple[AxisStrategy, int]]) -> QueryShards:
    """How ranks share the queries of an operator, if it is attention.

    Args:
        ways: to run it, with the ranks of each axis.
    """
    if node.op not in ROWS:
        return UNSHARDED
    parts, strips = dict[str, int](), 1
    for strategy, size in ways:
        if strategy.factor == QUERY:
            strips = max(strips, strategy.outer)
            for name in {QUERY, strategy.sharded}:
                parts[name] = parts.get(name, 1) * size
    return QueryShards.of(parts, strips)


def merged_bytes(node: Node, shapes: Sequence[tuple[int, ...]], shards: QueryShards, scores: bool) -> tuple[int, int]:
    """Bytes that go through memory to merge the results of pieces, and in backward to add up their gradients.

    Both are sums in float32 at the least, which are read and written once for each piece. Keys and values are put
    together before they are sent, and their gradients added to those that come.

    Args:
        shapes: of its operands on one rank.
        scores: there are scores of each piece, over which ten operators pass forward, sixteen backward.
    """
    query, key, value = (math.prod(shape) for shape in shapes[:3])
    queries, keys = shapes[0][-2], shapes[1][-2]
    item = node.results[0].item_bytes
    each = 2 * max(item, 4) + item
    met, window = shards.pieces(queries, keys, sight(node)), sight(node).window
    rows, columns = (sum(times * piece[at] for piece, times in met.items()) for at in (0, 1))
    out, sent = (
        query // shapes[0][-1] * shapes[2][-1],
        sum(each * times for each, times in sent_keys(shards.ring, keys, window)) * (key + value) // keys,
    )
    forward = each * out * rows // queries + 2 * item * sent
    backward = each * (query * rows // queries + (key + value) * columns // keys)
    backward += (2 * item + 5 * max(item, 4)) * sent
    if scores:
        each = max(item, 4) * query // shapes[0][-1] // queries * sum(n * m * times for (n, m, _), times in met.items())
        forward, backward = forward + 10 * each, backward + 16 * each
    if shards.is_zigzag:  # a half is copied to be sent, and both are put together
        kv = key + value if shards.ring > 1 else 0
        forward += 3 * item * (query + out + kv)
        backward += 3 * item * (2 * query + 2 * out + 2 * kv)
    return forward, backward


def scratch_bytes(
    node: Node, types: Sequence[TensorType], sizes: Sequence[int], shards: QueryShards, scores: bool
) -> tuple[int, int]:
    """What attention in pieces needs while it runs, forward and backward, besides its tensors and their gradients.

    Forward a sum over all pieces, which becomes the result, one of the next, and that weighed; keys and values that are
    here and that come; in backward their gradients: of its own, of those here, and those that come. In zigzag order all
    of that is of tensors in that order, in backward results and their gradients too.

    Args:
        types: of operands.
        sizes: bytes of operands, then results, on one rank.
        scores: those of a piece are there while it runs, twice, backward with what was dropped, and with a soft cap,
            once more each, so with a mask that is trained, and copies of what it reads, keys for every head.
    """
    (query, key, value), out, goes = sizes[:3], sizes[len(types)], shards.ring > 1
    item = node.results[0].item_bytes
    wide = max(1, 4 // item)
    mask = sum(size // each.item_bytes for size, each in zip(sizes[3 : len(types)], types[3:], strict=True))
    queries, keys, depth = types[0].shape[-2] // shards.ranks, types[1].shape[-2] // shards.ring, types[0].shape[-1]
    window, come = sight(node).window, key + value if goes else 0
    if window is not None and goes:
        come = come * max([each for each, _ in sent_keys(shards.ring, keys, window)], default=0) // keys
    held = 2 * come + mask * item // shards.ring
    forward, backward = held + 2 * wide * out, held + wide * (query + key + value + 2 * come)
    if shards.is_zigzag:
        entered = query + (key + value if goes else 0)
        forward, backward = forward + entered, backward + entered + 2 * out
    largest = max(n * m for n, m, _ in shards.pieces(queries, keys, sight(node)))
    if window is not None:  # how far back keys are, which of these are seen, and the mask that says so
        forward, backward = forward + (10 + item) * largest, backward + (10 + item) * largest
    if scores:
        each = wide * query // depth // queries * largest
        copies = wide * (query + query // depth // queries * keys * (depth + types[2].shape[-1]))
        copies *= 1 if wide == 1 else 2  # in what they are computed in, and side by side
        trains = trains_mask(types)
        besides = 2 + bool(node["dropout_p"]) + bool(node["softcap"]) + trains
        backward += wide * mask * item * (trains and wide > 1)  # else the sum is the gradient
        forward, backward = forward + 2 * each + copies, backward + besides * each + copies
    return forward, backward
