"""How the ranks of a context axis attend to one another's keys: pin ``context_kind``."""

from __future__ import annotations

from collections.abc import Mapping

from planner.base.errors import PinError
from planner.formulation.constraints.pins import ContextKind
from planner.formulation.constraints.roles import ranks_sharing
from planner.ir.graph import Graph, Node
from planner.ir.layout import Mesh
from planner.ops import attends
from planner.ops.attention import HEADS, QUERY, RING, no_ring
from planner.ops.sharding_rule import Rule


def ways_to_attend(
    kind: ContextKind | None, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh
) -> Mapping[str, frozenset[str]]:
    """The ways in which a pin lets the context axis shard each attention whose queries its ranks divide.

    Heads are shared where it is left to the search, too (Ulysses: Jacobs et al. 2023): queries, keys and values are
    then resharded from the sequence to heads, and what comes of them back.

    Raises:
        PinError: an attention cannot be run so.
    """
    ranks, found = ranks_sharing(mesh, "context"), dict[str, frozenset[str]]()
    for node in graph.operators if ranks > 1 else ():
        rule = rules[node.name]
        if attends(node.op) and rule.sizes.get(QUERY, 1) % ranks == 0:
            heads = [factor for factor in HEADS if rule.sizes.get(factor, 1) % ranks == 0]
            if kind == "ring" and (why := no_ring(node, graph.input_types(node))):
                raise _refused(kind, node, f"{why}: pin 'gather', or leave out 'context_kind'")
            if kind == "ulysses" and not heads:
                count = node.results[0].shape[-3] if len(node.results[0].shape) > 2 else 1
                kv = rule.sizes.get("kv", 1)
                grouped = f", in groups that share {kv} heads of keys and values" if kv < count else ""
                raise _refused(
                    kind, node, f"has {count} heads{grouped}, which {ranks} ranks do not divide: change pin 'context', "
                    "pin 'gather' or 'ring', or leave out 'context_kind'",
                )  # fmt: skip
            ways = {"gather": [QUERY], "ring": [RING], "ulysses": heads[:1]}
            found[node.name] = frozenset([QUERY, RING, *heads] if kind is None else ways[kind])
    return found


def _refused(kind: ContextKind, node: Node, why: str) -> PinError:
    return PinError(f"pin 'context_kind' is {kind!r}, but attention {node.path or node.name!r} {why}")
