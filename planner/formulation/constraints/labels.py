"""Labels: which dims of which values run along the batch, the sequence and whatever else an axis may be for.

A label starts at some dims and spreads through every operator that keeps the factor, so that one name finds the same
work all over a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from planner.formulation.strategies import factor_at, tensors_of
from planner.ir.graph import Graph, Node, Ref
from planner.ops import OPS, attends
from planner.ops.sharding_rule import Rule, find

Place = tuple[int, int]
"""A dim, and how many strips of it are sharded alike."""
Labels = Mapping[Ref, Mapping[Place, str]]
LabelsOf = Callable[[str], Labels]
KEYS = (1, 2)
"""The operands of attention that are keys and values."""


@dataclass(frozen=True)
class Label:
    """A kind of dim.

    Attributes:
        starts: the dims of values that are of it by themselves.
        word: what errors and reports call it.
        missing: why a model may have none, and the way out.
        remedy: what to do where no dim of it divides.
    """

    starts: Callable[[Graph, Mapping[str, Rule]], Iterator[tuple[Ref, Place]]]
    word: str = ""
    missing: str = ""
    remedy: str = "change the pin"


def at_factors(factors: Callable[[Node, Rule], set[str]]) -> Callable[..., Iterator[tuple[Ref, Place]]]:
    """A label that starts at these factors of operators."""

    def starts(graph: Graph, rules: Mapping[str, Rule]) -> Iterator[tuple[Ref, Place]]:
        for node in graph.nodes:
            if node.name in rules:
                rule = rules[node.name]
                for factor in factors(node, rule):
                    for ref, dims in tensors_of(node, rule):
                        if place := find(dims, factor, rule.sizes):
                            yield ref, place

    return starts


def _samples(graph: Graph, rules: Mapping[str, Rule]) -> Iterator[tuple[Ref, Place]]:
    """Dim 0 of every input."""
    for leaf in graph.leaves:
        shape = leaf.results[0].shape
        if leaf.op == "input" and shape and shape[0] > 1:
            yield Ref(leaf.name), (0, 1)


def _queries(node: Node, rule: Rule) -> set[str]:
    """The query factor of attention."""
    return {*rule.operands[0][-2][:1]} if attends(node.op) else set()


def _tokens(graph: Graph, rules: Mapping[str, Rule]) -> Iterator[tuple[Ref, Place]]:
    """What norms run over, and what the parameter of a product lacks."""
    products = weight_factors(graph, rules)

    def factors(node: Node, rule: Rule) -> set[str]:
        lacked = rule.sizes.keys() - products[node.name] if node.name in products else set()
        return lacked | (_normed(rule) if normalizes(node) else set())

    return at_factors(factors)(graph, rules)


LABELS = {
    "batch": Label(_samples, "batch"),
    "context": Label(
        at_factors(_queries),
        "sequence",
        missing="shards the query sequence of F.scaled_dot_product_attention, and the model never calls it: write "
        "attention with it (Transformers: attn_implementation='sdpa'), or leave out 'context'",
        remedy="change the pin or pad the sequence",
    ),
    "stream": Label(_tokens),
}
"""``context`` is the query sequence of attention; ``stream`` is the batch and, however attention is written, the
sequence."""


def label_dims(graph: Graph, rules: Mapping[str, Rule], label: str) -> Labels:
    """Which dims of which values are of one of :data:`LABELS`.

    Returns:
        value -> {(dim, strips): label}.
    """
    found: dict[Ref, dict[Place, str]] = {}
    for ref, place in LABELS[label].starts(graph, rules):
        found.setdefault(ref, {})[place] = label
    nodes = [node for node in graph.nodes if node.name in rules]
    refs = {node.name: [ref for ref, _ in tensors_of(node, rules[node.name])] for node in nodes}
    beside: dict[Ref, list[str]] = {}
    for name, each in refs.items():
        for ref in each:
            beside.setdefault(ref, []).append(name)
    places: dict[object, list[tuple[int, Place]]] = {}
    waiting = set(refs)
    while waiting:
        for node in (*nodes, *reversed(nodes)):
            if node.name not in waiting:
                continue
            waiting.remove(node.name)
            key = (id(rules[node.name]), *(tuple(found.get(ref, ())) for ref in refs[node.name]))
            if key not in places:
                places[key] = _labelled_places(node, rules[node.name], found)
            for tensor, place in places[key]:
                ref = refs[node.name][tensor]
                labels = found.setdefault(ref, {})
                if place not in labels:
                    labels[place] = label
                    waiting.update(beside[ref])
    return found


def _labelled_places(node: Node, rule: Rule, labels: Labels) -> list[tuple[int, Place]]:
    """Where an operator carries a label: (tensor, (dim, strips)), tensors numbered operands first."""
    return [
        (tensor, (place[0], place[1] * outer))
        for factor, outer in labelled_parts(node, rule, labels)
        if factor not in rule.whole
        for tensor, (_, dims) in enumerate(tensors_of(node, rule))
        if (place := find(dims, factor, rule.sizes))
    ]


def labelled_parts(node: Node, rule: Rule, labels: Labels) -> set[tuple[str, int]]:
    """The (factor, strips) of an operator that run along labelled dims of its tensors."""
    found = set()
    for ref, dims in tensors_of(node, rule):
        for dim, cut in labels.get(ref, {}):
            part = factor_at(dims[dim], cut, rule)
            if part is not None:
                found.add(part)
    return found


def normalizes(node: Node) -> bool:
    """Whether an operator is a norm of every token, or part of one."""
    row = OPS.get(node.op)
    return row is not None and row.normalizes


def _normed(rule: Rule) -> set[str]:
    """The factors that a norm runs over."""
    kept = {factor for dim in rule.results[0] for factor in dim} - rule.whole
    return set(rule.sizes) - kept


def makes_keys(graph: Graph, node: Node) -> bool:
    """Whether what an operator without a product makes is read by attention alone, as keys or values.

    Attention takes these whole, so that they may be whole earlier: before they are repeated for every query head.
    """
    seen, waiting = {node.name}, [node]
    left = {ref.node for ref in graph.leaving}
    while waiting:
        maker = waiting.pop()
        row = OPS.get(maker.op)
        if row is None or row.contracts or maker.name in left:
            return False
        readers = [each for index in range(len(maker.results)) for each in graph.users.get(Ref(maker.name, index), ())]
        if not readers:
            return False
        for reader, place in readers:
            if attends(reader.op):
                if place not in KEYS:
                    return False
            elif reader.name not in seen:
                seen.add(reader.name)
                waiting.append(reader)
    return True


def weight_factors(graph: Graph, rules: Mapping[str, Rule]) -> dict[str, frozenset[str]]:
    """Operators that contract with a parameter -> the factors of that parameter."""
    found: dict[str, frozenset[str]] = {}
    roots: dict[Ref, str] = {}
    for node in graph.nodes:
        if node.op == "param":
            roots[Ref(node.name)] = node.name
            continue
        row = OPS.get(node.op)
        if row is not None and row.view and node.inputs and node.inputs[0] in roots:
            roots[Ref(node.name)] = roots[node.inputs[0]]
        if row is None or node.name not in rules:
            continue
        if not row.contracts and row.looks_up != "rows":
            continue
        rule = rules[node.name]
        factors = frozenset(
            factor
            for ref, dims in zip(node.inputs, rule.operands, strict=True)
            if ref in roots and len(dims) > 1
            for dim in dims
            for factor in dim
            if factor not in rule.whole
        )
        if factors:
            found[node.name] = factors
    return found
