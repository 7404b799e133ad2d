"""Split: backward in two parts, gradients of what came in at once, gradients of weights later.

Where a way back to the inputs has side ways to weights alone, what arrives is kept. The second part runs each such node
once more, as far as its side ways begin, and then all of these together, so that weights which were gathered in one
call are reduced in one. Found as :mod:`torch.distributed.pipelining` finds it (zero bubble: Qi et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

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
        starts, running = [*self.apart], list[Node]()

        def pass_on(came: tuple[Tensor | None, ...], node: Node) -> tuple[Tensor | None, ...] | None:
            """What comes along other ways is not of the node that runs, and goes no further."""
            return None if node in running else tuple(None if g is None else torch.zeros_like(g) for g in came)

        stops = (end.node for ways in self.sides.values() for end in ways if end.node.next_functions)
        handles = [node.register_prehook(partial(pass_on, node=node)) for node in {*self.sides, *stops}]
        try:
            for node, came in self.arrived.items():
                ways, running[:] = self.sides[node], [node]
                there = [(GradientEdge(node, i), gradient) for i, gradient in enumerate(came) if gradient is not None]
                edges, gradients = zip(*there, strict=True)
                found = torch.autograd.grad(edges, ways, gradients, retain_graph=True, allow_unused=True)
                starts += [(way, gradient) for way, gradient in zip(ways, found, strict=True) if gradient is not None]
        finally:
            for handle in handles:
                handle.remove()
        if starts:
            beginning, gradients = zip(*starts, strict=True)
            torch.autograd.backward(beginning, gradients, inputs=self.weights)


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
