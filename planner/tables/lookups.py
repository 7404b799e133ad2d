"""Finds the embedding tables of a model that may be placed: its look-ups, as operators of its graph."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from planner.ir.graph import Graph, Node
from planner.ops import OPS
from planner.ops.embedding import MEAN, SUM
from planner.tables.embedding_table import EmbeddingTable


@dataclass(frozen=True)
class TableLookup:
    """The only look-up in a table.

    Attributes:
        table: called as its parameter.
        node: the name of the operator.
        batch: samples.
        is_mean: whether bags are averaged, not summed.
    """

    table: EmbeddingTable
    node: str
    batch: int
    is_mean: bool


def lookups(graph: Graph) -> tuple[TableLookup, ...]:
    """The look-ups in tables that are read by nothing else, of ids ``[batch]`` or ``[batch, n]`` that no parameter
    reaches.

    An embedding makes of each id a bag of its own, an embedding bag of each row one bag. Of several batches it is that
    with the most ids; look-ups that skip padding, weigh ids or take maxima are decided as any other operator.
    """
    found: dict[int, list[TableLookup]] = defaultdict(list)
    for node in graph.applying(*(op for op, row in OPS.items() if row.bags)):
        if (lookup := _lookup(graph, node)) is not None:
            found[lookup.batch].append(lookup)
    return tuple(max(found.values(), key=lambda each: sum(x.table.lookups(x.batch) for x in each), default=[]))


def _lookup(graph: Graph, node: Node) -> TableLookup | None:
    weight, ids = node.inputs[:2]
    leaf, (shape, dtype) = graph.by_name[weight.node], (graph.type_of(ids).shape, graph.type_of(ids).dtype)
    is_bag = OPS[node.op].bags == "rows"
    is_whole = node["padding_idx"] == -1 and node["starts"] is None and node["per_sample_weights"] is None
    is_plain = is_whole and node["mode"] in (None, SUM, MEAN) and not node["sparse"] and not node["scale_grad_by_freq"]
    is_alone = leaf.op == "param" and len(graph.users[weight]) == 1
    if (
        not (is_plain and is_alone)
        or len(shape) not in (1, 2)
        or dtype != "int64"
        or graph.follows_from_parameters(ids)
    ):
        return None
    weights, (batch, count) = leaf.results[0], (shape[0], shape[1] if len(shape) == 2 else 1)
    pooling, bags = (count, 1) if is_bag else (1, count)
    rows, features = weights.shape
    table = EmbeddingTable(leaf.target, rows, features, pooling, bags=bags, item_bytes=weights.item_bytes)
    return TableLookup(table, node.name, batch, is_bag and node["mode"] == MEAN)
