"""How the ranks of a context axis attend to one another's keys: pin ``context_kind``.

Those of an axis ``ulysses`` share heads (Jacobs et al. 2023): queries, keys and values are resharded from the sequence
to heads, and what comes of them back. Beside a context axis that makes a hybrid (Fang and Zhao 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from planner.base.errors import PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import ContextKind, Pins
from planner.formulation.constraints.roles import sharing
from planner.formulation.strategies import rule_of
from planner.ir.graph import Graph, Node, TensorType
from planner.ir.layout import Mesh
from planner.ops import attends
from planner.ops.attention import HEADS, QUERY, RING, RINGS, ZIGZAG, ZIGZAG_RING, no_ring, no_zigzag, sight
from planner.ops.sharding_rule import Rule


@dataclass(frozen=True)
class Sharded:
    """A kind in which queries are sharded.

    Attributes:
        ways: to shard those of an operator.
        refusal: says why an attention cannot be run so.
        instead: what to pin then.
        even: the kind of those whose ranks all have as much in the order in which tokens are.
    """

    ways: tuple[str, ...]
    refusal: Callable[[Node, tuple[TensorType, ...]], str] = lambda node, operands: ""
    instead: str = ""
    even: ContextKind | None = None


SHARDED: Mapping[ContextKind, Sharded] = {
    "gather": Sharded((QUERY,)),
    "zigzag_gather": Sharded((ZIGZAG,), no_zigzag, "'gather'", "gather"),
    "ring": Sharded((RING,), no_ring, "'gather'"),
    "zigzag": Sharded((ZIGZAG_RING,), no_zigzag, "'ring' or 'gather'", "ring"),
    "hybrid": Sharded(RINGS, no_ring, "'ulysses' or 'gather'"),
}


def with_ulysses(pins: Pins, graph: Graph, cluster: ClusterSpec) -> Pins:
    """Pins of a hybrid that say how many of its ranks share heads, where that is left open: as many as lie in one node
    beside the tensor axis, and divide what that leaves of the heads of every attention, so that a ring is left.

    Raises:
        PinError: there are none.
    """
    if pins.context_kind != "hybrid" or "ulysses" in pins.sizes:
        return pins
    ranks, tensor, node = pins.sizes["context"], pins.sizes.get("tensor", 1), cluster.levels[0].size
    inside = node // tensor if node % tensor == 0 else 1
    rules = [rule_of(graph, each) for each in graph.operators if attends(each.op)]
    parts = [part for part in range(2, ranks) if ranks % part == 0 == inside % part]
    shared = [part for part in parts if all(_are_shared(rule, part, tensor) for rule in rules)]
    if not shared:
        counts = sorted({rule.sizes.get("kv", 1) * rule.sizes.get("group", 1) for rule in rules})
        raise PinError(
            f"pin 'context_kind' is 'hybrid', but of the {ranks} ranks of pin 'context' no part can share heads and "
            f"leave a ring: one that divides {ranks}, what {tensor} ranks of tensor parallelism leave of the {node} "
            f"devices of a node, and of the {' and '.join(map(str, counts))} heads of attention. Change pin 'context', "
            "pin 'ulysses' and 'context' by themselves, or 'context_kind' 'zigzag' or 'ring'"
        )
    return replace(pins, sizes={**pins.sizes, "context": ranks // shared[-1], "ulysses": shared[-1]})


def ways_to_attend(
    kind: ContextKind | None, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh
) -> Mapping[str, Mapping[str, frozenset[str]]]:
    """The ways in which pins let each axis of a sequence shard each attention whose queries their ranks divide.

    Raises:
        PinError: an attention cannot be run so.
    """
    sizes = {axis.name: axis.size for axis in mesh.axes if axis.name in sharing("context")}
    ranks, found = math.prod(sizes.values()), dict[str, dict[str, frozenset[str]]]()
    for node in graph.operators if ranks > 1 else ():
        rule = rules[node.name]
        if attends(node.op) and rule.sizes.get(QUERY, 1) % ranks == 0:
            found[node.name] = {
                name: frozenset(
                    _heads_to_share(kind, node, rule, name, size)
                    if "ulysses" in (name, kind)
                    else _ways_of_queries(kind, node, graph.input_types(node), rule, size)
                )
                for name, size in sizes.items()
            }
    return found


def _heads_to_share(kind: ContextKind | None, node: Node, rule: Rule, name: str, ranks: int) -> list[str]:
    """What the ranks of an axis can share of the heads of an attention."""
    found = _heads(rule, ranks)
    if not found:
        count = node.results[0].shape[-3] if len(node.results[0].shape) > 2 else 1
        kv = rule.sizes.get("kv", 1)
        grouped = f", in groups that share {kv} heads of keys and values" if kv < count else ""
        pinned, others = f"pin {name!r} is {ranks}", "leave it out"
        if name != "ulysses":
            pinned, others = f"pin 'context_kind' is {kind!r}", "pin 'gather' or 'ring', or leave out 'context_kind'"
            part = max(part for part in range(1, ranks) if ranks % part == 0 and _heads(rule, part))
            others = f"pin 'ulysses' {part} and 'context' {ranks // part}, {others}" if part > 1 else others
        raise PinError(
            f"{pinned}, but attention {node.path or node.name!r} has {count} heads{grouped}, which {ranks} ranks do "
            f"not divide: change pin {name!r}, {others}"
        )
    return found


def _are_shared(rule: Rule, part: int, tensor: int) -> bool:
    """Whether so many ranks can share heads beside those of a tensor axis, if these can share them at all."""
    tensor = tensor if _heads(rule, tensor) else 1
    shares = ((part * tensor, 1), (1, part * tensor), (part, tensor), (tensor, part))
    return any(rule.sizes.get("kv", 1) % kv == 0 == rule.sizes.get("group", 1) % group for kv, group in shares)


def _heads(rule: Rule, ranks: int) -> list[str]:
    return [factor for factor in HEADS if rule.sizes.get(factor, 1) % ranks == 0]


def _ways_of_queries(
    kind: ContextKind | None, node: Node, operands: tuple[TensorType, ...], rule: Rule, ranks: int
) -> list[str]:
    """How the ranks of an axis may attend, heads shared where it is left to the search."""
    if kind is None:
        return [*_heads(rule, ranks), *(way for each in SHARDED.values() for way in each.ways)]
    sharded, length = SHARDED[kind], rule.sizes[QUERY]
    if sharded.even is not None and sight(node).window is not None:
        return _ways_of_queries(sharded.even, node, operands, rule, ranks)
    refused = f"pin 'context_kind' is {kind!r}, but attention {node.path or node.name!r}"
    if why := sharded.refusal(node, operands):
        raise PinError(f"{refused} {why}: pin {sharded.instead}, or leave out 'context_kind'")
    parts = min(way.multiple for way in rule.ways_of(QUERY) if way.named(QUERY) in sharded.ways)
    if length % (multiple := parts * ranks):
        raise PinError(
            f"{refused} has {length} queries, of which {ranks} ranks do not have {parts} equal parts each: pad the "
            f"sequence to {-(-length // multiple) * multiple}, or pin {sharded.instead}"
        )
    if RING in sharded.ways and (keys := rule.sizes.get("key", 1)) % ranks:
        raise PinError(
            f"{refused} has {keys} keys, which {ranks} ranks do not divide: pad what it attends to to "
            f"{-(-keys // ranks) * ranks}, or pin {sharded.instead}"
        )
    return [*sharded.ways]
