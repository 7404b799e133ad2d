"""How the ranks of a context axis attend to one another's keys: pin ``context_kind``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.base.errors import PinError
from planner.formulation.constraints.pins import ContextKind
from planner.formulation.constraints.roles import ranks_sharing
from planner.ir.graph import Graph, Node, TensorType
from planner.ir.layout import Mesh
from planner.ops import attends
from planner.ops.attention import HEADS, QUERY, RING, ZIGZAG, ZIGZAG_RING, no_ring, no_zigzag
from planner.ops.sharding_rule import Rule


@dataclass(frozen=True)
class Sharded:
    """A kind in which queries are sharded.

    Attributes:
        way: of the operator.
        refusal: says why an attention cannot be run so.
        instead: what to pin then.
    """

    way: str
    refusal: Callable[[Node, tuple[TensorType, ...]], str] = lambda node, operands: ""
    instead: str = ""


SHARDED: Mapping[ContextKind, Sharded] = {
    "gather": Sharded(QUERY),
    "zigzag_gather": Sharded(ZIGZAG, no_zigzag, "'gather'"),
    "ring": Sharded(RING, no_ring, "'gather'"),
    "zigzag": Sharded(ZIGZAG_RING, no_zigzag, "'ring' or 'gather'"),
}


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
            if kind is not None and kind in SHARDED:
                _check(kind, node, graph.input_types(node), rule, ranks)
            if kind == "ulysses" and not heads:
                count = node.results[0].shape[-3] if len(node.results[0].shape) > 2 else 1
                kv = rule.sizes.get("kv", 1)
                grouped = f", in groups that share {kv} heads of keys and values" if kv < count else ""
                raise _refused(
                    kind, node, f"has {count} heads{grouped}, which {ranks} ranks do not divide: change pin 'context', "
                    "pin 'gather' or 'ring', or leave out 'context_kind'",
                )  # fmt: skip
            if kind is None:
                found[node.name] = frozenset([*heads, *(each.way for each in SHARDED.values())])
            else:
                found[node.name] = frozenset([SHARDED[kind].way] if kind in SHARDED else heads[:1])
    return found


def _check(kind: ContextKind, node: Node, operands: tuple[TensorType, ...], rule: Rule, ranks: int) -> None:
    """Refuse what cannot be run in a kind in which queries are sharded."""
    sharded = SHARDED[kind]
    if why := sharded.refusal(node, operands):
        raise _refused(kind, node, f"{why}: pin {sharded.instead}, or leave out 'context_kind'")
    multiple = ranks * next(way.multiple for way in rule.ways_of(QUERY) if way.named(QUERY) == sharded.way)
    length = rule.sizes[QUERY]
    if length % multiple:
        raise _refused(
            kind, node, f"has {length} queries, of which {ranks} ranks do not have {multiple // ranks} equal parts "
            f"each: pad the sequence to {-(-length // multiple) * multiple}, or pin {sharded.instead}",
        )  # fmt: skip


def _refused(kind: ContextKind, node: Node, why: str) -> PinError:
    return PinError(f"pin 'context_kind' is {kind!r}, but attention {node.path or node.name!r} {why}")
