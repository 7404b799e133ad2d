"""What of a model must divide by degrees of parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from planner.formulation.strategies import rule_of
from planner.ir.folding import fold
from planner.ir.graph import Graph, Node
from planner.ir.layers import Layers
from planner.ops import OPS, attends


@dataclass(frozen=True)
class ModelSizes:
    """What of a model must divide by degrees; 0: it has none, or that is not known.

    Attributes:
        batch, sequence: of the example.
        layers: blocks that are alike.
        heads, key_value_heads: of attention, the fewest.
        experts: of each mixture, the fewest.
    """

    batch: int = 0
    sequence: int = 0
    layers: int = 0
    heads: int = 0
    key_value_heads: int = 0
    experts: int = 0


def model_sizes(graph: Graph) -> ModelSizes:
    """What of a model must divide by degrees of parallelism."""
    inputs = [leaf.results[0].shape for leaf in graph.leaves if leaf.op == "input"]
    rules = [rule_of(graph, node) for node in graph.operators if attends(node.op)]
    shared = [(node, OPS[node.op].labels.get("expert", "")) for node in graph.operators if node.op in OPS]
    experts = [rule_of(graph, node).sizes.get(factor, 0) for node, factor in shared if factor]
    heads = [(rule.sizes.get("kv", 0), rule.sizes.get("group", 1)) for rule in rules if rule.sizes.get("kv")]
    projected = [count for node in graph.operators if attends(node.op) if (count := _projected_heads(graph, node))]
    folded = fold(graph)
    numbers: dict[str, list[int]] = {}
    for number, instance in enumerate(folded.instances):
        numbers.setdefault(folded.names[instance.kind], []).append(number)
    layers = Layers.of(numbers)
    return ModelSizes(
        batch=inputs[0][0] if inputs and inputs[0] else 0,
        sequence=inputs[0][1] if inputs and len(inputs[0]) > 1 and heads else 0,
        layers=0 if layers.pieces else len(layers.numbers),
        heads=min((kv * group for kv, group in heads), default=0),
        key_value_heads=min((*projected, *(kv for kv, _ in heads)), default=0),
        experts=min(experts, default=0),
    )


def _projected_heads(graph: Graph, node: Node) -> int:
    """Heads of keys as an attention's keys are projected, before they are repeated for all queries; 0: not seen."""
    query, key = graph.type_of(node.inputs[0]).shape, graph.type_of(node.inputs[1]).shape
    if len(query) < 3:
        return 0
    near, seen = [graph.by_name[node.inputs[1].node]], set[str]()
    while near:
        made = near.pop(0)
        if _projects(made):
            features = made.results[0].shape[-1]
            return features // key[-1] if features % key[-1] == 0 and features <= query[-3] * key[-1] else 0
        near += [graph.by_name[ref.node] for ref in made.inputs if ref.node not in seen]
        seen.update(ref.node for ref in made.inputs)
    return 0


def _projects(node: Node) -> bool:
    row = OPS.get(node.op)
    return row is not None and row.kernel == "linear"
