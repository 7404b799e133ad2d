"""Splits backward into gradients of inputs, at once, and gradients of weights, later (zero bubble).

Where a way back to the inputs has side ways to weights alone, what arrives is kept. The second part runs each such node
once more, as far as its side ways begin, and then all of these together, so that weights which were gathered in one
call are reduced in one. Where side ways of several nodes meet before they reach weights, such as those of a value that
is made of weights alone and read by many, the second part is a backward of its own from all of these nodes. Found as
:mod:`torch.distributed.pipelining` finds it (zero bubble: Qi et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Starts = tuple[tuple[Tensor | GradientEdge, Tensor], ...]
"""Where backward begins, and the gradients there."""


@dataclass(frozen=True)
class Later:
    """What the second part needs.

    Attributes:
        sides: the side ways of each node that has any.
        arrived: the gradients that came to each of these.
        apart: where backward began on ways that lead to no input.
        weights: all of them.
    """

    sides: dict[Node, tuple[GradientEdge, ...]]
    arrived: dict[Node, tuple[Tensor | None, ...]]
    apart: Starts
    weights: tuple[Tensor, ...]

    def run(self) -> None:
        """Add the gradients of the weights to their ``grad``."""
        arrived = {node: starts for node, came in self.arrived.items() if (starts := _starts(node, came))}
        if self._meet():
            self._add([*self.apart, *(start for starts in arrived.values() for start in starts)], fixed=True)
            return
        begun = [*self.apart]
        for node, starts in arrived.items():
            ways, (edges, gradients) = self.sides[node], zip(*starts, strict=True)
            found = torch.autograd.grad(edges, ways, gradients, retain_graph=True, allow_unused=True)
            begun += [(way, gradient) for way, gradient in zip(ways, found, strict=True) if gradient is not None]
        self._add(begun)

    def _add(self, starts: Sequence[tuple[Tensor | GradientEdge, Tensor]], fixed: bool = False) -> None:
        """From ``starts`` to the weights; ``fixed``: nodes pass on what arrived before, not what comes from others."""
        if not starts:
            return
        came = self.arrived if fixed else {}
        handles = [node.register_prehook(lambda _, kept=kept: kept) for node, kept in came.items()]
        try:
            edges, gradients = zip(*starts, strict=True)
            torch.autograd.backward(edges, gradients, inputs=self.weights)
        finally:
            for handle in handles:
                handle.remove()

    def _meet(self) -> bool:
        """Whether side ways of several nodes lead to the beginning of one: then a node cannot run without others."""
        ends, seen = {end.node for ways in self.sides.values() for end in ways}, set[Node]()
        for ways in self.sides.values():
            passed, waiting = set[Node](), [end.node for end in ways]
            while waiting:
                node = waiting.pop()
                if node not in passed:
                    passed.add(node)
                    waiting += [following for following, _ in node.next_functions if following is not None]
            if not seen.isdisjoint(passed & ends):
                return True
            seen |= passed & ends
        return False


def _starts(node: Node, came: Sequence[Tensor | None]) -> Starts:
    """What came to a node, as a beginning."""
    return tuple((GradientEdge(node, i), gradient) for i, gradient in enumerate(came) if gradient is not None)


def backward_of_inputs(
    starts: Starts, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], Later]:
    """The gradients of ``inputs``, and what is left to do for ``weights``; both are leaves of the autograd graph."""
    from torch.distributed.pipelining._backward import construct_reverse_graph, reverse_closure

    reverse = construct_reverse_graph([_node(start) for start, _ in starts])
    reaching, _ = reverse_closure([_node(t) for t in inputs], set(), reverse)
    aside, leaving = reverse_closure([_node(weight) for weight in weights], reaching, reverse)
    meeting = [(start, gradient) for start, gradient in starts if _node(start) in reaching]
    apart = tuple((start, gradient) for start, gradient in starts if _node(start) not in reaching)
    sides = {
        node: tuple(GradientEdge(way, i) for way, i in node.next_functions if way in aside and way is not None)
        for node in leaving
    }
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    handles = [node.register_prehook(lambda came, node=node: arrived.__setitem__(node, came)) for node in sides]
    try:
        found: tuple[Tensor | None, ...] = (None,) * len(inputs)
        if meeting:
            starting, gradients = zip(*meeting, strict=True)
            found = torch.autograd.grad(starting, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return found, Later(sides, arrived, apart, tuple(weights))


def _node(tensor: Tensor | GradientEdge) -> Node:
    """Where a gradient of a tensor arrives."""
    return tensor.node if isinstance(tensor, GradientEdge) else torch.autograd.graph.get_gradient_edge(tensor).node
