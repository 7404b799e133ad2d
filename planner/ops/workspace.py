"""Workspace: the bytes that an operator needs only while it runs.

``(Node, bytes of its tensors) -> bytes``. What it saves for backward is held, and so are parameters; its other operands
and results are not, nor are gradients. A sum over ranks is made out of place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.ir.graph import Graph, Node
from planner.ir.layout import Layout, P, R
from planner.ops import OPS, passed_places, saved_places
from planner.ops.function import works

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

    def moments(self, sizes: Sequence[int], layouts: Sequence[Layout]) -> tuple[int, ...]:
        """Bytes at each moment that may be the fullest: forward, backward, a tensor beside its sum over ranks.

        Args:
            sizes: of its tensors on one rank.
            layouts: of the same.
        """
        is_term, is_whole = ([local_type in layout for layout in layouts] for local_type in (P, R))
        return (0, *self._moments(sizes, is_term, is_whole))

    def bytes_of_each(self, sizes: Ints, is_term: Mask, is_whole: Mask) -> Ints:
        """Bytes at the fullest of these moments, for many ways to lay its tensors out.

        Args:
            sizes: by tensor and way.
            is_term, is_whole: by tensor and way, whether it is partial, and whether it is replicated, on some axis.
        """
        fullest = np.zeros(sizes.shape[1], np.int64)
        for moment in self._moments(sizes, is_term, is_whole):
            fullest = np.maximum(fullest, moment)
        return fullest

    def _moments(self, sizes: Any, is_term: Any, is_whole: Any) -> Iterator[Any]:
        """Of numbers or arrays."""
        yield sum(sizes[place] for place in self.forward)
        backward = sum(sizes[place] for place in self.backward)
        yield backward
        for place in self.like if self.works else ():
            yield backward + self.works * sizes[place]
        for place in self.terms:
            yield 2 * sizes[place] * is_term[place]
        for place in self.summed:
            yield 2 * sizes[place] * is_whole[place]


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
        works=row.works + works(node) if row is not None and flows else 0,
        like=tuple({0: None, count: None}),
        parameters=tuple(sorted(stored)),
    )
