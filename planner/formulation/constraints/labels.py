"""Labels: which dims of which values run along the batch, the sequence and whatever else an axis may be for.

A label starts at some dims and spreads through every operator that keeps the factor, so that one name finds the same
work all over a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from planner.formulation.decisions import DecisionGraph
from planner.formulation.strategies import factor_at, tensors_of
from planner.ir.graph import Graph, Node, Ref
from planner.ir.layout import Shard
from planner.ops import OPS, attends
from planner.ops.sharding_rule import AxisStrategy, Rule, find

Place = tuple[int, int]
"""A dim, and how many strips of it are sharded alike."""
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Labels:
    """Which dims of which values are of a label; values that share a decision share them.

    Attributes:
        places: of the values that stand for others.
        standing_for: the value that stands for one.
    """

    places: Mapping[Ref, Collection[Place]]
    standing_for: Callable[[Ref], Ref]
    _parts: dict[str, frozenset[tuple[str, int]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, ref: Ref) -> Collection[Place]:
        """The dims of a value."""
        return self.places.get(self.standing_for(ref), ())

    def parts(self, node: Node, rule: Rule) -> frozenset[tuple[str, int]]:
        """The (factor, strips) of an operator that run along labelled dims of its tensors."""
        if node.name not in self._parts:
            tensors = ((dims, self.of(ref)) for ref, dims in tensors_of(node, rule))
            self._parts[node.name] = frozenset(_parts(rule, tensors))
        return self._parts[node.name]


RUNNING_MODELS = "running_members"
"""The buffer of an array of models that says which are trained, one for each."""
LabelsOf = Callable[[str], Labels]
KEYS = (1, 2)
"""The operands of attention that are keys and values."""


class RuledNode(NamedTuple):
    """An operator, and the values that it reads and makes, each by the one that stands for it, with factors of dims."""

    node: Node
    rule: Rule
    tensors: tuple[tuple[Ref, Dims], ...]


class DistinctOperators:
    """The operators of one instance of each block, and of each way to enter it: no more of them in deeper models."""

    def __init__(self, decision_graph: DecisionGraph):
        self.graph, self.rules = decision_graph.graph, decision_graph.rules
        self.standing_for = decision_graph.variables.representative
        each = ((node, self.rules[node.name]) for node in decision_graph.distinct)
        self.operators = tuple(
            RuledNode(node, rule, tuple((self.standing_for(ref), dims) for ref, dims in tensors_of(node, rule)))
            for node, rule in each
        )


@dataclass(frozen=True)
class Label:
    """A kind of dim.

    Attributes:
        starts: the dims of values that are of it by themselves.
        word: what errors and reports call it.
        missing: why a model may have none, and the way out.
        remedy: what to do where no dim of it divides; ``longer`` is the next length that does.
    """

    starts: Callable[[DistinctOperators], Iterator[tuple[Ref, Place]]]
    word: str = ""
    missing: str = ""
    remedy: str = "change the pin"


def at_factors(factors: Callable[[Node, Rule], set[str]]) -> Callable[..., Iterator[tuple[Ref, Place]]]:
    """A label that starts at these factors of operators."""

    def starts(distinct: DistinctOperators) -> Iterator[tuple[Ref, Place]]:
        for node, rule, tensors in distinct.operators:
            for factor in factors(node, rule):
                for ref, dims in tensors:
                    if place := find(dims, factor, rule.sizes):
                        yield ref, place

    return starts


def of_rows(label: str) -> Callable[..., Iterator[tuple[Ref, Place]]]:
    """A label that starts where rows of the op table say so."""

    def factors(node: Node, rule: Rule) -> set[str]:
        row = OPS.get(node.op)
        return {row.labels.get(label, "")} & rule.sizes.keys() if row is not None else set()

    return at_factors(factors)


def _samples(distinct: DistinctOperators) -> Iterator[tuple[Ref, Place]]:
    """Dim 0 of every input."""
    for leaf in distinct.graph.applying("input"):
        shape = leaf.results[0].shape
        if shape and shape[0] > 1:
            yield distinct.standing_for(Ref(leaf.name)), (0, 1)


def _models(distinct: DistinctOperators) -> Iterator[tuple[Ref, Place]]:
    """Dim 0 of the buffer in which an array says which of its models are trained."""
    for leaf in distinct.graph.applying("buffer"):
        if leaf.target == RUNNING_MODELS:
            yield distinct.standing_for(Ref(leaf.name)), (0, 1)


def of_weights(factors: Callable[[Node, Rule, frozenset[str]], set[str]]) -> Callable[..., Iterator[tuple[Ref, Place]]]:
    """A label that starts at these factors of operators, given those of the weight that they contract with, if any."""

    def starts(distinct: DistinctOperators) -> Iterator[tuple[Ref, Place]]:
        nodes = (node for node, _, _ in distinct.operators)
        weights = weight_factors(distinct.graph, distinct.rules, nodes)
        return at_factors(lambda node, rule: factors(node, rule, weights.get(node.name, frozenset())))(distinct)

    return starts


def _tokens(node: Node, rule: Rule, weight: frozenset[str]) -> set[str]:
    """What the weight of a product lacks."""
    return set(rule.sizes.keys() - weight) if weight else set()


def _stream(node: Node, rule: Rule, weight: frozenset[str]) -> set[str]:
    """Tokens, and what norms run over."""
    return _tokens(node, rule, weight) | (_normed(rule) if normalizes(node) else set())


LABELS = {
    "models": Label(
        _models,
        "models",
        missing="shards the models of an array, and this is none: make one with autopar.array, or leave out 'model'",
        remedy="change the pin",
    ),
    "batch": Label(_samples, "batch"),
    "context": Label(
        of_rows("context"),
        "sequence",
        missing="shards the query sequence of F.scaled_dot_product_attention, and the model never calls it: write "
        "attention with it (Transformers: attn_implementation='sdpa'), or leave out 'context'",
        remedy="change the pin, or pad the sequence to {longer}",
    ),
    "expert": Label(
        of_rows("expert"),
        "expert dim",
        missing="shards experts, and the model has none that are known as such: write them with autopar.experts, or "
        "leave out 'expert'",
        remedy="change the pin",
    ),
    "expert features": Label(
        of_rows("expert features"),
        "hidden features of experts",
        missing="shards each expert, and the model has none that are known as such: write them with autopar.experts, "
        "or leave out 'expert_tensor'",
        remedy="change the pin",
    ),
    "table": Label(
        of_rows("table"),
        "slabs of embedding tables",
        missing="holds slabs of embedding tables, and no table lies in one: see docs/tables.md for which may, or leave "
        "out 'table'",
        remedy="place the tables on as many ranks, or change the pin",
    ),
    "stream": Label(of_weights(_stream)),
    "tokens": Label(of_weights(_tokens)),
    "features": Label(of_weights(lambda node, rule, weight: {*weight})),
}
"""``models`` are those of an array, ``context`` is the query sequence of attention, ``expert`` what experts are stacked
along, ``expert features`` what each has between its products; ``tokens`` are the batch and, however attention is
written, the sequence, ``features`` what weights have, such as the hidden dim and heads; ``stream`` is what norms take
and give."""


def label_blocks(decision_graph: DecisionGraph, label: str) -> Labels:
    """Which dims of which values are of one of :data:`LABELS`."""
    distinct = DistinctOperators(decision_graph)
    found: dict[Ref, dict[Place, None]] = {}
    for ref, place in LABELS[label].starts(distinct):
        found.setdefault(ref, {})[place] = None
    if not found:
        return Labels(found, distinct.standing_for)
    beside: dict[Ref, list[int]] = {}
    for number, (_, _, tensors) in enumerate(distinct.operators):
        for ref, _ in tensors:
            beside.setdefault(ref, []).append(number)
    places: dict[object, list[tuple[int, Place]]] = {}
    waiting = set(range(len(distinct.operators)))
    while waiting:
        for number in (*range(len(distinct.operators)), *reversed(range(len(distinct.operators)))):
            if number not in waiting:
                continue
            waiting.remove(number)
            _, rule, tensors = distinct.operators[number]
            key = (id(rule), *(tuple(found.get(ref, ())) for ref, _ in tensors))
            if key not in places:
                places[key] = _labelled_places(rule, tensors, found)
            for tensor, place in places[key]:
                ref = tensors[tensor][0]
                labelled = found.setdefault(ref, {})
                if place not in labelled:
                    labelled[place] = None
                    waiting.update(beside[ref])
    return Labels(found, distinct.standing_for)


def _labelled_places(
    rule: Rule, tensors: Iterable[tuple[Ref, Dims]], places: Mapping[Ref, Collection[Place]]
) -> list[tuple[int, Place]]:
    """Where an operator carries a label: (tensor, (dim, strips)), tensors numbered operands first."""
    along = _parts(rule, ((dims, places.get(ref, ())) for ref, dims in tensors))
    return [
        (tensor, (place[0], place[1] * outer))
        for factor, outer in along
        if factor not in rule.whole
        for tensor, (_, dims) in enumerate(tensors)
        if (place := find(dims, factor, rule.sizes))
    ]


def sharded_parts(rule: Rule, strategy: AxisStrategy) -> set[tuple[str, int]]:
    """The (factor, strips) that a strategy shards: one, and in a way that has a name perhaps more."""
    found = {(strategy.factor, strategy.outer)}
    if strategy.way.name:
        pairs = zip((*rule.operands, *rule.results), (*strategy.operands, *strategy.results), strict=True)
        parts = (factor_at(dims[t.dim], t.outer, rule) for dims, t in pairs if isinstance(t, Shard))
        found |= {part for part in parts if part is not None}
    return found


def _parts(rule: Rule, tensors: Iterable[tuple[Dims, Collection[Place]]]) -> set[tuple[str, int]]:
    each = (factor_at(dims[dim], cut, rule) for dims, places in tensors for dim, cut in places)
    return {part for part in each if part is not None}


def normalizes(node: Node) -> bool:
    """Whether an operator is a norm of every token, or part of one."""
    row = OPS.get(node.op)
    return row is not None and row.normalizes


def _normed(rule: Rule) -> set[str]:
    """The factors that a norm runs over, which its ranks must know of one another, or which its result lacks."""
    kept = {factor for dim in rule.results[0] for factor in dim} - rule.whole - rule.ways.keys()
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


def weight_factors(graph: Graph, rules: Mapping[str, Rule], nodes: Iterable[Node]) -> dict[str, frozenset[str]]:
    """Those of some operators that contract with a parameter -> the factors of that parameter."""
    found: dict[str, frozenset[str]] = {}
    for node in nodes:
        row = OPS.get(node.op)
        if row is None or (not row.contracts and row.looks_up != "rows"):
            continue
        rule = rules[node.name]
        factors = frozenset(
            factor
            for ref, dims in zip(node.inputs, rule.operands, strict=True)
            if len(dims) > 1 and _is_weight(graph, ref)
            for dim in dims
            for factor in dim
            if factor not in rule.whole
        )
        if factors:
            found[node.name] = factors
    return found


def _is_weight(graph: Graph, ref: Ref) -> bool:
    """Whether a value is a parameter, or a view of one."""
    maker = graph.by_name[ref.node]
    row = OPS.get(maker.op)
    is_view = row is not None and row.view and ref.index == 0 and bool(maker.inputs)
    return maker.op == "param" or (is_view and _is_weight(graph, maker.inputs[0]))
