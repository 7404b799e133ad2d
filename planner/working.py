"""Working: the bytes that an operator needs for itself while it runs, beside what is held all the time.

``(Node, bytes of its tensors) -> bytes``. What it saves for backward is held, and so are parameters; its other operands
and results are not, nor are gradients. A sum over ranks is made out of place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph import Graph, Node
from planner.layout import Layout, P, R
from planner.ops import OPS, saved_places


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
        forward = sum(sizes[place] for place in self.forward)
        backward = sum(sizes[place] for place in self.backward)
        if self.works:
            backward += self.works * max(sizes[place] for place in self.like)
        sums = [sizes[place] for place in self.terms if P in layouts[place]]
        sums += [sizes[place] for place in self.summed if R in layouts[place]]
        return max(forward, backward, 2 * max(sums, default=0))

    def parameter_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of its parameters on one rank."""
        return sum(sizes[place] for place in self.parameters)


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
    passed = row.passes if row is not None and not saved else ()
    of = [(tensor.shape, tensor.dtype) for tensor in (*types, *results)]
    alike = {place for place in passed if of[place] == of[count]}
    return Working(
        forward=tuple(place for place in (*places.values(), *made) if place not in stored and place not in saved),
        backward=(*terms, *(place for place in summed if place not in alike)),
        terms=tuple(made),
        summed=tuple(place for place in summed if place not in stored),
        works=row.works if row is not None and flows else 0,
        like=tuple({0: None, count: None}),
        parameters=tuple(sorted(stored)),
    )
