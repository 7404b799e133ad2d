"""Selects which results a block saves for backward, in a few levels between all and none.

Of each distinct block that repeats one result after another is discarded, always the one that takes the fewest seconds
to recompute for the bytes that it leaves free: with all that must be recomputed to make it, and all that must be held
for that, such as what it is made from. What runs again at one level runs again at the next, so each level takes longer
than the one before however the block is laid out. Of the sets on the way, those are levels at which mixing others would
take longest: the corners of the convex front of seconds over bytes. Hardly anything is gained by giving up what is
small, so that the last level may keep a little more than ``full``.

Seconds and bytes are those of one device that has the whole batch: what differs between operators is the rate, their
arithmetic per byte, and that is about the same on every mesh. What a mesh communicates is left out; the search prices
every level on every mesh as it is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from planner.base.errors import PinError
from planner.cost.kernels import kernel_of
from planner.cost.model import CostModel
from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.backward_slice import Backward
from planner.formulation.remat.levels import Level, Levels
from planner.formulation.resharding import passes
from planner.ir.graph import Node, Ref
from planner.ir.layout import Axis
from planner.ops import OPS
from planner.ops.aliasing import shares
from planner.ops.attention import is_causal
from planner.ops.saved_tensors import is_own, own_bytes, saved_tensors
from planner.ops.table import WHOLE

MOST = 3
"""So many levels a block has between keeping everything and keeping nothing."""
SMALL = 1e-3
"""Results of at most this share of what a block holds are always kept, such as the scale of a norm of each token."""
SHARD_BYTES = 2**25
"""A shard whose gathering is priced: large, so that what a call takes however small it is does not weigh."""
WORTH = 0.02
"""A level is left out if without it at most this share of the seconds to make everything again is lost."""


@dataclass(frozen=True)
class Point:
    """A set of results that a block keeps, the seconds to make the others again, and the bytes held for backward."""

    level: Level
    seconds: float
    held_bytes: int


def with_levels_between(levels: Levels, decision_graph: DecisionGraph, cost: CostModel) -> Levels:
    """The same with levels that are found for every kind of block instead of ``selective`` and ``full``.

    What leaves the most bytes free for its seconds goes first, whatever block it is of. So does ``resharded``, where
    gathering takes fewer seconds than the first results that are recomputed; elsewhere it is part of recomputing them.
    """
    moves = [move for move in levels.moves if move[1] not in ("resharded", "selective", "full")]
    dear: list[tuple[float, int, Level]] = []
    for kind in (kind for kind, level in levels.moves if level == "full"):
        points = corners(decision_graph, kind, cost)
        slopes: list[tuple[float, int, Level]] = [
            (_slope(some, next_), kind, next_.level) for some, next_ in pairwise(points)
        ]
        again_s = gathering_s(cost)
        if decision_graph.blocks.again(kind, "resharded").as_made and all(again_s < slope for slope, *_ in slopes):
            slopes.insert(0, (again_s, kind, "resharded"))
        dear += slopes
    return Levels(levels.first, (*moves, *((kind, level) for _, kind, level in sorted(dear, key=lambda each: each[0]))))


def keeping(levels: Levels, decision_graph: DecisionGraph, globs: Sequence[str]) -> Levels:
    """The same where every block that would begin at ``full`` keeps the results of some modules.

    Args:
        globs: of module paths, with ``*`` and ``?``.

    Raises:
        PinError: no operator of these blocks lies in such a module.
    """
    first, paths = list(levels.first), []
    for kind in (kind for kind, level in enumerate(levels.first) if level == "full"):
        nodes = decision_graph.blocks.backward(kind).nodes
        found = can_keep(decision_graph.blocks.backward(kind))
        kept = (at for at in found if any(fnmatchcase(nodes[at].path, each) for each in globs))
        first[kind] = tuple(kept) or "full"
        paths += [nodes[at].path for at in found]
    if not any(isinstance(level, tuple) for level in first):
        known = ", ".join(map(repr, dict.fromkeys(paths))) or "none: no block repeats"
        raise PinError(
            f"pin 'recompute' keeps the results of {', '.join(map(repr, globs))}, but no module of blocks that repeat "
            f"is called so; their modules: {known}"
        )
    return Levels(tuple(first), levels.moves)


def corners(decision_graph: DecisionGraph, kind: int, cost: CostModel) -> list[Point]:
    """From keeping everything to keeping nothing, the levels of a kind of block that are worth having."""
    front: list[Point] = []
    for point in _Block(decision_graph, kind, cost).points():
        if front and point.held_bytes >= front[-1].held_bytes:
            continue
        while len(front) > 1 and _slope(front[-2], front[-1]) >= _slope(front[-1], point):
            front.pop()
        front.append(point)
    while len(front) > 2:
        gains = [_gain_s(*three) for three in zip(front, front[1:], front[2:], strict=False)]
        if len(gains) <= MOST and min(gains) >= WORTH * front[-1].seconds:
            break
        del front[1 + gains.index(min(gains))]
    return front


def gathering_s(cost: CostModel) -> float:
    """Seconds for each byte that is left free where shards are kept and gathered again, on the quickest links."""
    level = cost.cluster.levels[0]
    if level.size == 1:
        return math.inf
    called_s = cost.collective_s("all_gather", Axis(level.name, level.size, 1), SHARD_BYTES)
    moved = passes("S>R", "forward", 0)
    copied_s = cost.compute_s(0.0, SHARD_BYTES * (moved.before + moved.after * level.size), "float32")
    return (called_s + copied_s) / (SHARD_BYTES * (level.size - 1))


def _slope(some: Point, fewer: Point) -> float:
    """Seconds for each byte that is left free."""
    return (fewer.seconds - some.seconds) / max(1, some.held_bytes - fewer.held_bytes)


def _gain_s(before: Point, point: Point, after: Point) -> float:
    """Seconds by which a mix of two levels that holds as much as the one between takes longer."""
    return before.seconds + _slope(before, after) * (before.held_bytes - point.held_bytes) - point.seconds


def can_keep(backward: Backward) -> list[int]:
    """The operators of a block whose results may be kept or not, by position: views go with what they are views of."""
    return [at for at, node in enumerate(backward.nodes) if OPS.get(node.op) is not None and not shares(node)]


@dataclass(frozen=True)
class _State:
    """What it comes to that some operators' results may be kept; those of ``needed`` are, since backward needs them."""

    needed: frozenset[int]
    seconds: float
    held_bytes: int


class _Block:
    """One kind of block, whose results are discarded one after another."""

    def __init__(self, decision_graph: DecisionGraph, kind: int, cost: CostModel):
        self.graph, self.backward = decision_graph.graph, decision_graph.blocks.backward(kind)
        self.seconds = [_forward_s(decision_graph, node, cost) for node in self.backward.nodes]

    def points(self) -> list[Point]:
        """The sets on the way from keeping everything to keeping nothing."""
        kept = frozenset(can_keep(self.backward))
        now = self._state(kept)
        large = [at for at in kept if self._size(at) > SMALL * now.held_bytes]
        points, waiting = [Point("gathered", now.seconds, now.held_bytes)], [(0.0, at) for at in sorted(large)]
        while waiting:
            _, at = heapq.heappop(waiting)
            if at not in now.needed:
                continue
            rate, less, then = self._without(at, kept, now)
            if waiting and rate > waiting[0][0]:
                heapq.heappush(waiting, (rate, at))
                continue
            for new in sorted((then.needed - now.needed).intersection(large)):
                heapq.heappush(waiting, (0.0, new))
            kept, now = less, then
            points.append(Point(tuple(sorted(now.needed)) or "full", now.seconds, now.held_bytes))
        return points

    def _without(self, at: int, kept: frozenset[int], now: _State) -> tuple[float, frozenset[int], _State]:
        """Seconds for each byte that giving up a result leaves free, what may be kept then, and what that comes to.

        What it is made from may be kept instead, or be discarded too.
        """
        less = kept - {at}
        instead = then = self._state(less)
        some = less
        while then.needed - now.needed:
            less = less - then.needed | now.needed & less
            then = self._state(less)
        ways = [(self._rate(now, then), less, then), (self._rate(now, instead), some, instead)]
        return min(ways, key=lambda way: way[0])

    def _rate(self, now: _State, then: _State) -> float:
        freed = now.held_bytes - then.held_bytes
        return (then.seconds - now.seconds) / freed if freed > 0 else math.inf

    def _state(self, kept: frozenset[int]) -> _State:
        backward = self.backward
        found = backward.again(tuple(kept))
        origins = {backward.origin(at, place) for at, places in enumerate(found.kept) for place in places}
        held = sum(self._bytes(ref) for ref in origins if self.graph.by_name[ref.node].op != "param")
        for at in range(len(backward.nodes)):
            if at not in found.drawing:
                held += self._own_bytes(at)
        needed = frozenset(at for at, _ in found.sources) | backward.draws
        return _State(needed & kept, math.fsum(self.seconds[at] for at in found.operators), held)

    def _own_bytes(self, at: int) -> int:
        """What an operator keeps besides operands and results; what is no value of the block counts as it is, else as
        an operand does.
        """
        node = self.backward.nodes[at]
        types, row = self.graph.input_types(node), OPS.get(node.op)
        if row is not None and row.anew:
            kept = (saved for saved in saved_tensors(node, types, False, WHOLE) if is_own(saved))
            sizes = [tensor.size_bytes for tensor in (*types, *node.results)]
            return sum(own_bytes(saved, node, types, sizes, False, WHOLE) for saved in kept)
        return sum(self._bytes(self.backward.tensors[at][place]) for place in self.backward.own_places(at))

    def _size(self, at: int) -> int:
        return sum(tensor.size_bytes for tensor in self.backward.nodes[at].results)

    def _bytes(self, ref: Ref) -> int:
        return self.graph.type_of(ref).size_bytes


def _forward_s(decision_graph: DecisionGraph, node: Node, cost: CostModel) -> float:
    """Seconds of an operator forward, on one device that has all of it."""
    row, operands = OPS.get(node.op), decision_graph.graph.input_types(node)
    traffic = decision_graph.blocks.traffic(node, on_cpu=cost.cluster.on_cpu)
    if not traffic.runs:
        return 0.0
    flops = 0.0 if row is None else row.flops(node, operands, decision_graph.rules[node.name])
    dtype = node.results[0].dtype if node.results else "float32"
    kernel = kernel_of(node.op, [each.shape for each in operands], causal=is_causal(node))
    sizes = [tensor.size_bytes for tensor in (*operands, *node.results)]
    moved = sum(times * size for times, size in zip(traffic.forward, sizes, strict=True))
    return cost.compute_s(flops, moved, dtype, kernel=kernel, known_by=sum(sizes))
