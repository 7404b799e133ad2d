"""Batch norms of micro-batches: normalised by the statistics of each, and which buffers one leaves to the next.

Batch norm normalises by the mean and the variance of the batch. Those of the global batch are not known before all
micro-batches have come as far (``docs/decisions.md``), so a pin must ask for those of each micro-batch. Its running
statistics then go from one micro-batch to the next, as where a model is called on one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.base.errors import PinError
from planner.formulation.assignment import Assignment
from planner.ir.graph import Graph, Node
from planner.ops.sharding_rule import AxisStrategy, Rule

COUNTER = "num_batches_tracked"
"""The buffer in which torch's batch norms count their updates, beside their running statistics."""


def may_be_by_micro_batch(rule: Rule) -> bool:
    """Whether an operator normalises by statistics of the batch, which may be those of a micro-batch."""
    return any(way.by_micro_batch for ways in rule.ways.values() for way in ways)


def is_by_micro_batch(rule: Rule, strategy: AxisStrategy) -> bool:
    """Whether a strategy on the axis of micro-batches finds statistics of each by itself."""
    return strategy.outer == 1 and any(way.by_micro_batch for way in rule.ways_of(strategy.factor))


def check_batch_norm(graph: Graph, rules: Mapping[str, Rule]) -> None:
    """Refuse to normalise by micro-batches where nothing normalises by batches, or more than that follows from them.

    Raises:
        PinError: there is no such batch norm; or an operator reads its statistics, or the model returns them.
    """
    norms = [node for node in graph.operators if may_be_by_micro_batch(rules[node.name])]
    if not norms:
        raise PinError(
            "pin 'batch_norm' says how batch norms normalise in training, and the model has none that does so: leave "
            "it out"
        )
    names = {node.name for node in norms}
    for node in graph.operators:
        for ref in node.inputs:
            if ref.node in names and ref.index and node.name not in names:
                raise PinError(
                    f"pin 'batch_norm' is 'micro_batch', but {node.name} ({node.op}) reads the statistics of "
                    f"{_place(graph.by_name[ref.node])}, which are others in every micro-batch: take that out of the "
                    "forward, or leave out the pin and plan without micro-batches"
                )
    for ref in graph.outputs:
        if ref.node in names and ref.index:
            raise PinError(
                f"pin 'batch_norm' is 'micro_batch', but the model returns the statistics of "
                f"{_place(graph.by_name[ref.node])}, which are others in every micro-batch: read them from the module "
                "after the step"
            )


def normalizes_by_micro_batch(assignment: Assignment) -> bool:
    """Whether a batch norm takes statistics of each micro-batch by itself."""
    space = assignment.space
    return space.mesh.micro_batches > 1 and any(
        is_by_micro_batch(space.rules[node.name], assignment.choice(node).axes[0]) for node in space.graph.operators
    )


def carried(assignment: Assignment) -> dict[int, str]:
    """The updates of buffers that each micro-batch leaves to the next, by their position among what leaves the model
    -> name of the leaf.
    """
    graph, mesh, rules = assignment.space.graph, assignment.space.mesh, assignment.space.rules
    leaves = {leaf.target: leaf.name for leaf in graph.leaves if leaf.op == "buffer"}
    positions = {buffer: position for position, (buffer, _) in enumerate(graph.updates, len(graph.outputs))}
    found: dict[int, str] = {}
    if mesh.micro_batches == 1:
        return found
    for buffer, ref in graph.updates:
        node = graph.by_name[ref.node]
        if node.is_leaf or not is_by_micro_batch(rules[node.name], assignment.choice(node).axes[0]):
            continue
        counter = ".".join((*buffer.split(".")[:-1], COUNTER))
        found |= {positions[name]: leaves[name] for name in (buffer, counter) if name in positions}
    return found


def _place(norm: Node) -> str:
    return norm.path or norm.name
