"""Split: backward in two parts, gradients of what came in at once, gradients of weights later.

Where the way back from a weight first meets the way back to the inputs, what arrives is kept; the second part goes from
there to the weights alone. Found as :mod:`torch.distributed.pipelining` finds it (zero bubble: Qi et al., 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        groups: weights with the nodes at which their ways leave those of the inputs.
        arrived: the gradients that came to each node.
        apart: where backward began on ways that lead to no input.
        weights: all of them.
    """

    groups: tuple[tuple[tuple[Tensor, ...], tuple[Node, ...]], ...]
    arrived: dict[Node, tuple[Tensor | None, ...]]
    apart: Starts
    weights: tuple[Tensor, ...]

    def run(self) -> None:
        """Add the gradients of the weights to their ``grad``."""
        for weights, nodes in self.groups:
            came = [(GradientEdge(node, i), g) for node in nodes for i, g in enumerate(self.arrived[node])]
            self._add(weights, tuple((edge, g) for edge, g in came if g is not None), nodes if len(nodes) > 1 else ())
        self._add(self.weights, self.apart)

    def _add(self, weights: Sequence[Tensor], starts: Starts, fixed: Sequence[Node] = ()) -> None:
        """From ``starts`` to ``weights``; ``fixed`` nodes pass on what arrived before, not what comes from others."""
        if not starts:
            return
        handles = [node.register_prehook(lambda _, kept=self.arrived[node]: kept) for node in fixed]
        try:
            starting, gradients = zip(*starts, strict=True)
            torch.autograd.backward(starting, gradients, retain_graph=True, inputs=weights)
        finally:
            for handle in handles:
                handle.remove()


def backward_of_inputs(
    starts: Starts, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], Later]:
    """The gradients of ``inputs``, and what is left to do for ``weights``; both are leaves of the autograd graph."""
    from torch.distributed.pipelining._backward import construct_reverse_graph, reverse_closure

    of_weight, entries = {_node(weight): weight for weight in weights}, [_node(t) for t in inputs]
    reverse = construct_reverse_graph([_node(start) for start, _ in starts])
    reaching, _ = reverse_closure(entries, set(), reverse)
    meeting = [(start, gradient) for start, gradient in starts if _node(start) in reaching]
    apart = tuple((start, gradient) for start, gradient in starts if _node(start) not in reaching)
    groups = _joined((node, reverse_closure([node], reaching, reverse)[1]) for node in of_weight)
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    nodes = {node for _, leaving in groups for node in leaving}
    handles = [node.register_prehook(lambda came, node=node: arrived.__setitem__(node, came)) for node in nodes]
    try:
        found: tuple[Tensor | None, ...] = (None,) * len(inputs)
        if meeting:
            starting, gradients = zip(*meeting, strict=True)
            found = torch.autograd.grad(starting, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    grouped = tuple(
        (tuple(of_weight[node] for node in of), tuple(node for node in leaving if node in arrived))
        for of, leaving in groups
    )
    return found, Later(grouped, arrived, apart, tuple(weights))


def _joined(ways: Iterable[tuple[Node, set[Node]]]) -> list[tuple[list[Node], set[Node]]]:
    """Weights with the nodes at which their ways leave those of the inputs; what shares one is one group.

    So that each gradient is found once: torch's own ``get_param_groups`` leaves two groups that a third weight joins
    beside each other, with that weight in both.
    """
    found: list[tuple[list[Node], set[Node]]] = []
    for weight, leaving in ways:
        same = [group for group in found if not group[1].isdisjoint(leaving)]
        found = [group for group in found if group[1].isdisjoint(leaving)]
        if leaving:
            of = [node for group in same for node in group[0]]
            found.append(([*of, weight], leaving.union(*(nodes for _, nodes in same))))
    return found


def _node(tensor: Tensor | GradientEdge) -> Node:
    """Where a gradient of a tensor arrives."""
    return tensor.node if isinstance(tensor, GradientEdge) else torch.autograd.graph.get_gradient_edge(tensor).node
