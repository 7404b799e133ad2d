"""Working: the bytes that an operator needs for itself while it runs, beside what is held all the time.

``(Node, bytes of its tensors) -> bytes``. What it saves for backward is held, and so are parameters; its other operands
and results are not, nor are gradients. A sum over ranks is made out of place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.graph import Graph, Node
from planner.layout import Layout, P, R
from planner.ops import OPS, passed_places, saved_places

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Working:
    """The tensors of an operator that are not held, as places among its operands, then results; each tensor once.

    Attributes:
        forward: what is there while it runs.
        backward: what has a gradient of its own that is there while its backward runs.
        terms: results that may be terms of a sum.
        summed: operands whose gradients may be.
        works: so many more tensors, as large as the larger of those at ``like``, its backward needs.
        parameters: operands that are parameters or buffers.
    """

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    terms: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()
    works: int = 0
    like: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()

    def bytes(self, sizes: Sequence[int], layouts: Sequence[Layout]) -> int:
        """Bytes at the fullest of its moments: forward, backward, a tensor beside its sum over ranks.

        Args:
            sizes: of its tensors on one rank.
            layouts: of the same.
        """
        terms, whole = ([[local_type in layout] for layout in layouts] for local_type in (P, R))
        return int(self.bytes_of_each(np.array(sizes, np.int64)[:, None], np.array(terms), np.array(whole))[0])

    def bytes_of_each(self, sizes: Ints, is_term: Mask, is_whole: Mask) -> Ints:
        """The same for many ways to lay its tensors out.

        Args:
            sizes: by tensor and way.
            is_term, is_whole: by tensor and way, whether it is partial, and whether it is replicated, on some axis.
        """
        nothing = np.zeros(sizes.shape[1], np.int64)
        backward = sum((sizes[place] for place in self.backward), nothing)
        if self.works:
            backward = backward + self.works * sizes[list(self.like)].max(axis=0)
        fullest = np.maximum(sum((sizes[place] for place in self.forward), nothing), backward)
        for places, is_summed in ((self.terms, is_term), (self.summed, is_whole)):
            for place in places:
                fullest = np.maximum(fullest, 2 * sizes[place] * is_summed[place])
        return fullest


def working(graph: Graph, node: Node) -> Working:
    """What an operator needs while it runs; a view needs nothing."""
    row, types = OPS.get(node.op), graph.input_types(node)
    if row is not None and row.view:
        return Working()
    count, results = len(types), node.results
    places = {ref: place for place, ref in reversed([*enumerate(node.inputs)])}
    stored = {place for ref, place in places.items() if graph.by_name[ref.node].op in ("param", "buffer")}
    flows = any(tensor.grad for tensor in results)
    saved = saved_places(node, types) if flows else ()
    shares = node.shares or (-1,) * len(results)
    made = [count + i for i, shared in enumerate(shares) if shared < 0]
    terms = [count + i for i, tensor in enumerate(results) if tensor.grad]
    summed = [place for place in places.values() if flows and types[place].grad]
    passed = passed_places(node, types)
    return Working(
        forward=tuple(place for place in (*places.values(), *made) if place not in stored and place not in saved),
        backward=(*terms, *(place for place in summed if place not in passed)),
        terms=tuple(made),
        summed=tuple(place for place in summed if place not in stored),
        works=row.works if row is not None and flows else 0,
        like=tuple({0: None, count: None}),
        parameters=tuple(sorted(stored)),
    )
