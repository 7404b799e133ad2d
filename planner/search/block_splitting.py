"""Splits blocks into smaller ones, so that a pipeline has enough places to be cut at.

``Folded -> Folded``. Folding finds blocks by repetition alone, so that a model whose layers are all unlike is a single
block. Where a pipeline is wanted, what does not repeat is therefore cut into pieces that each have a share of the
model's work, where the fewest bytes cross. Where stages still outnumber the blocks everything is, down to operators:
layers that repeat too, all instances alike.

More blocks are more boundaries, and no other decisions: the operators, leaves and values are those of the coarser
blocks. Where the seams are follows from the graph alone, and fewer of them are always the first of more, so that a
number of blocks names them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product

import numpy as np
from numpy.typing import NDArray

from planner.ir.folding import STORED, Folded, split
from planner.ir.graph import Graph, Node, Ref
from planner.ir.repetition import module_paths, shared_path
from planner.ops import OPS
from planner.ops.sharding_rule import Rule

SHARE = 1 / 32
"""What does not repeat is cut while both pieces have this share of the model's work."""
SHARES = (*(SHARE / 2**halvings for halvings in range(11)), 0.0)
"""The same for all blocks, one after the other, while there are fewer than needed."""
EXCESS = 2
"""A good place is crossed by so many times the bytes at the wider end of its piece at most, so that it is not within
attention, nor where a hidden layer is wide; and both parts read parameters, so that a loss stays with its logits."""
FLOPS_PER_BYTE = 200
"""So many operations take an accelerator about as long as to pass over one byte of its memory."""


def finer(folded: Folded, rules: Mapping[str, Rule], least: int = 0) -> Folded:
    """Blocks that do not repeat cut at good places; and all blocks, until there are at least so many, if there can be.

    Args:
        rules: the factor rule of every operator.
        least: blocks that are needed.
    """
    cutting = _Cutting(folded, rules)
    cutting.cut([kind for kind, instances in enumerate(folded.kinds) if len(instances) == 1], SHARE)
    for share, only_good in product(SHARES, (True, False)):
        cutting.cut(range(len(folded.kinds)), share, only_good, least)
    return split(folded, cutting.places) if cutting.places else folded


@dataclass(frozen=True)
class _Places:
    """The places between the nodes of a block; place ``i`` lies before node ``i``.

    Attributes:
        crossing: bytes that cross each, in the instance with most; infinite at an end of the model.
        depth: how deep in modules each lies.
        weights: how many parameters are read before it.
        is_open: whether a block may end there.
    """

    crossing: NDArray[np.float64]
    depth: NDArray[np.int64]
    weights: NDArray[np.int64]
    is_open: NDArray[np.bool_]


class _Cutting:
    """Blocks on the way to smaller ones.

    Attributes:
        places: where kinds are cut so far: (kind, position).
    """

    def __init__(self, folded: Folded, rules: Mapping[str, Rule]):
        self.places: list[tuple[int, int]] = []
        self._folded, self._kinds = folded, folded.kinds
        blocks = [instances[0].block for instances in self._kinds]
        works = ([_work(folded.graph, node, rules[node.name]) for node in block.nodes] for block in blocks)
        self._done = [np.cumsum([0.0, *each]) for each in works]
        self._total = sum(float(done[-1]) * len(each) for done, each in zip(self._done, self._kinds, strict=True))
        self._count = len(folded.instances)
        self._pieces = [[(0, len(done) - 1)] for done in self._done]
        self._known: dict[int, _Places] = {}

    def cut(self, kinds: Iterable[int], share: float, only_good: bool = True, least: float = math.inf) -> None:
        """Cut the heaviest piece of some kinds, one after the other, until there are enough blocks or no more places.

        Args:
            share: of the model's work, that both parts have at least.
            only_good: see :data:`EXCESS`.
            least: blocks that are enough.
        """
        if self._count >= least:
            return
        waiting = [self._weighed(kind, piece) for kind in kinds for piece in self._pieces[kind]]
        heapq.heapify(waiting)
        while waiting and self._count < least:
            lightness, kind, (low, high) = heapq.heappop(waiting)
            place = self._best(kind, low, high, share, only_good) if -lightness >= 2 * share * self._total else None
            if place is not None:
                self.places.append((kind, place))
                self._count += len(self._kinds[kind])
                self._pieces[kind].remove((low, high))
                for part in ((low, place), (place, high)):
                    self._pieces[kind].append(part)
                    heapq.heappush(waiting, self._weighed(kind, part))

    def _weighed(self, kind: int, piece: tuple[int, int]) -> tuple[float, int, tuple[int, int]]:
        """A piece with what makes heavier ones come first."""
        done = self._done[kind]
        return float(done[piece[0]] - done[piece[1]]), kind, piece

    def _best(self, kind: int, low: int, high: int, share: float, only_good: bool) -> int | None:
        """The place to cut a piece: where the fewest bytes cross, rather between modules than in one, and near the
        middle of its work.
        """
        inside, done, places = slice(low + 1, high), self._done[kind], self._places(kind)
        crossing, less = places.crossing[inside], np.minimum(done[inside] - done[low], done[high] - done[inside])
        fits = places.is_open[inside] & (less > 0) & (less >= share * self._total)
        if only_good:
            weights = places.weights
            fits &= crossing <= EXCESS * max(places.crossing[low], places.crossing[high])
            fits &= (weights[inside] > weights[low]) & (weights[inside] < weights[high])
        at = np.flatnonzero(fits)
        if not at.size:
            return None
        return low + 1 + int(at[np.lexsort((-less[at], places.depth[inside][at], crossing[at]))[0]])

    def _places(self, kind: int) -> _Places:
        if kind not in self._known:
            block, by_name = self._kinds[kind][0].block, self._folded.graph.by_name
            size = len(block.span) + 1
            starts = [at for at, each in zip(self._starts, self._folded.instances, strict=False) if each.kind == kind]
            reads = [sum(by_name[ref.node].op == "param" for ref in node.inputs) for node in block.nodes]
            is_open = np.ones(size, bool)
            for first, last in _own_reads(self._folded, kind):
                is_open[first + 1 : last + 1] = False
            self._known[kind] = _Places(
                np.max([self._crossing[start : start + size] for start in starts], axis=0),
                self._depth[starts[0] : starts[0] + size],
                np.cumsum([0, *reads]),
                is_open,
            )
        return self._known[kind]

    @cached_property
    def _starts(self) -> list[int]:
        """The first node of every instance, and where the last one ends."""
        return list(accumulate((len(instance.block.span) for instance in self._folded.instances), initial=0))

    @cached_property
    def _nodes(self) -> list[Node]:
        return [node for instance in self._folded.instances for node in instance.block.nodes]

    @cached_property
    def _depth(self) -> NDArray[np.int64]:
        """Before each node, how much of their module paths the nodes on both sides share."""
        return np.array([0, *(len(shared_path(pair)) for pair in pairwise(module_paths(self._nodes))), 0])

    @cached_property
    def _crossing(self) -> NDArray[np.float64]:
        """Before each node, the bytes of what earlier nodes made and it or later ones read; infinite at both ends."""
        position = {node.name: at for at, node in enumerate(self._nodes)}
        change = np.zeros(len(self._nodes) + 1)
        for at, node in enumerate(self._nodes):
            for index, kind in enumerate(node.results):
                readers = self._folded.graph.users.get(Ref(node.name, index), ())
                last = max((position[reader.name] for reader, _ in readers), default=at)
                change[at + 1] += kind.size_bytes
                change[last + 1] -= kind.size_bytes
        found = np.cumsum(change)
        found[[0, -1]] = math.inf
        return found


def _own_reads(folded: Folded, kind: int) -> Iterator[tuple[int, int]]:
    """First and last node of a repeated block that read the same parameter or buffer of its own: blocks of one kind
    share a leaf that several of them read, so that these stay together.
    """
    first, *others = (instance.block for instance in folded.kinds[kind])
    for place, ref in enumerate(first.inputs):
        if folded.graph.by_name[ref.node].op in STORED and any(other.inputs[place] != ref for other in others):
            readers = [at for at, node in enumerate(first.nodes) if ref in node.inputs]
            yield readers[0], readers[-1]


def _work(graph: Graph, node: Node, rule: Rule) -> float:
    """An operator's work in operations, on any accelerator about; views have none."""
    row, operands = OPS.get(node.op), graph.input_types(node)
    if row is not None and row.view:
        return 0.0
    moved = sum(tensor.size_bytes for tensor in (*operands, *node.results))
    return (0 if row is None else row.flops(node, operands, rule)) + FLOPS_PER_BYTE * moved
