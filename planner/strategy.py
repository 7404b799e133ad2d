"""Strategies: every way to run each operator on a whole mesh, and every way to store each leaf.

A :class:`Choice` fixes, for one operator, the axis strategy on each mesh axis, and with it the layout
of every operand and result. Choices follow mechanically from the factor rules; nothing here knows an
operator by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from planner.graph import Graph, Node, Ref, TensorType
from planner.layout import I, Layout, LocalType, Mesh, R, Shard, local_shape
from planner.ops import OPS
from planner.rules import AxisStrategy, Inner, Rule, axis_strategies, find

Cuts = Mapping[tuple[Ref, int], frozenset[int]]
Allow = Callable[[Node, int, AxisStrategy], bool]


@dataclass(frozen=True)
class Choice:
    """One way to run an operator: the strategy on each axis, and the layouts that follow."""

    axes: tuple[AxisStrategy, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    label: str

    @property
    def inner(self) -> tuple[tuple[int, Inner], ...]:
        """Collectives of the operator's own local form, with the axis each runs on."""
        return tuple((axis, inner) for axis, strategy in enumerate(self.axes) for inner in strategy.inner)


def rule_of(graph: Graph, node: Node) -> Rule:
    """The node's factor rule; operators without a row get one in which nothing can be sharded."""
    operands = graph.input_types(node)
    row = OPS.get(node.op)
    if row is None:
        return opaque_rule(operands, node.results)
    rule = row.rule(node, operands)
    rule.check(tuple(t.shape for t in operands), tuple(t.shape for t in node.results))
    return rule


def opaque_rule(operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> Rule:
    """No factor to shard: the operator is computed in full on every rank."""
    sizes: dict[str, int] = {}
    tensors = []
    for t, tensor in enumerate((*operands, *results)):
        dims = []
        for d, size in enumerate(tensor.shape):
            if size != 1:
                sizes[f"t{t}d{d}"] = size
            dims.append((f"t{t}d{d}",) if size != 1 else ())
        tensors.append(tuple(dims))
    return Rule(sizes, tuple(tensors[: len(operands)]), tuple(tensors[len(operands) :]), whole=frozenset(sizes))


def find_cuts(graph: Graph, rules: Mapping[str, Rule], sizes: tuple[int, ...]) -> Cuts:
    """Where tensors may be cut into strips: for each (value, dim), the strip counts above 1 worth trying.

    A cut is born where a dim is made of several factors (a merged batch*sequence, a fused 3*heads*size)
    and the parts before it cannot be sharded themselves, or are sharded apart; it then travels through
    every operator that keeps the factor. A cut survives only at values that some operator can both
    produce and consume cut.
    """
    wires = _Wires(graph, rules)
    cuts = _born(wires, sizes)
    _spread(cuts, wires)
    _drop_dead(cuts, wires)
    return {(wires.refs[value], dim): frozenset(strips) for (value, dim), strips in cuts.items() if strips}


class _Seats:
    """Where the factors of a rule sit in its tensors (operands, then results); made once per distinct rule."""

    def __init__(self, rule: Rule):
        self.rule, self.operands, self.dims = rule, len(rule.operands), (*rule.operands, *rule.results)
        self.of = {
            factor: [(place, *at) for place, dims in enumerate(self.dims) if (at := find(dims, factor, rule.sizes))]
            for factor in rule.sizes
            if rule.may_stride(factor)
        }
        """Factor that may be cut -> (tensor, dim, product of the factors major to it in that dim)."""
        self._cut: dict[tuple[int, int, int], tuple[str, int] | None] = {}

    def cut(self, place: int, dim: int, strips: int) -> tuple[str, int] | None:
        """The factor that a cut of a tensor falls in and the strips within it; ``None`` if that cannot be."""
        key = place, dim, strips
        if key not in self._cut:
            found = factor_at(self.dims[place][dim], strips, self.rule)
            self._cut[key] = found if found is not None and found[0] in self.of else None
        return self._cut[key]


class _Wires:
    """A graph as numbered values.

    Attributes:
        refs: the value of each number.
        uses: for each value, the operators that touch it: numbers of their tensors, their seats, which tensor it is.
        produced: for each value, whether an operator produces it.
    """

    def __init__(self, graph: Graph, rules: Mapping[str, Rule]):
        self.refs: list[Ref] = []
        self.uses: list[list[tuple[list[int], _Seats, int]]] = []
        self.produced: list[bool] = []
        numbers: dict[Ref, int] = {}
        seats: dict[int, _Seats] = {}
        for node in graph.nodes:
            rule = rules.get(node.name)
            if rule is None:
                continue
            if id(rule) not in seats:
                seats[id(rule)] = _Seats(rule)
            values = []
            for place, ref in enumerate((*node.inputs, *(Ref(node.name, i) for i in range(len(node.results))))):
                value = numbers.setdefault(ref, len(numbers))
                if value == len(self.refs):
                    self.refs.append(ref)
                    self.uses.append([])
                    self.produced.append(place >= len(node.inputs))
                values.append(value)
                self.uses[value].append((values, seats[id(rule)], place))


_NumberedCuts = dict[tuple[int, int], set[int]]


def _born(wires: _Wires, sizes: tuple[int, ...]) -> _NumberedCuts:
    """Cuts at factors that lie behind others in a dim, where an axis may shard them."""
    cuts: _NumberedCuts = {}
    for value, uses in enumerate(wires.uses):
        for _, seats, place in uses:
            rule = seats.rule
            for dim, factors in enumerate(seats.dims[place]):
                for factor in factors[1:]:
                    if factor not in rule.whole and any(rule.sizes[factor] % size == 0 for size in sizes if size > 1):
                        found = find(seats.dims[place], factor, rule.sizes)
                        assert found is not None
                        cuts.setdefault((value, dim), set()).add(found[1])
    return cuts


def _spread(cuts: _NumberedCuts, wires: _Wires) -> None:
    """Carry every cut along its factor through all operators."""
    waiting = [(*key, strips) for key, values in cuts.items() for strips in values]
    while waiting:
        value, dim, strips = waiting.pop()
        for values, seats, place in wires.uses[value]:
            found = seats.cut(place, dim, strips)
            if found is None:
                continue
            factor, outer = found
            for other, other_dim, major in seats.of[factor]:
                have = cuts.setdefault((values[other], other_dim), set())
                if major * outer > 1 and major * outer not in have:
                    have.add(major * outer)
                    waiting.append((values[other], other_dim, major * outer))


def tensors_of(node: Node, rule: Rule) -> list[tuple[Ref, tuple[tuple[str, ...], ...]]]:
    """Operands, then results, with the factors of their dims."""
    results = [Ref(node.name, i) for i in range(len(node.results))]
    return list(zip((*node.inputs, *results), (*rule.operands, *rule.results), strict=True))


def factor_at(dim: tuple[str, ...], cut: int, rule: Rule) -> tuple[str, int] | None:
    """The factor of ``dim`` that a cut into ``cut`` strips falls in, and the strips within that factor."""
    major = 1
    for factor in dim:
        if major <= cut < major * rule.sizes[factor]:
            return (factor, cut // major) if cut % major == 0 and rule.sizes[factor] % (cut // major) == 0 else None
        major *= rule.sizes[factor]
    return None


def _drop_dead(cuts: _NumberedCuts, wires: _Wires) -> None:
    """Remove cuts that the producer cannot make or no consumer can take, until none is left."""
    waiting = {(*key, strips): None for key, values in cuts.items() for strips in values}
    while waiting:
        value, dim, strips = waiting.popitem()[0]
        if _is_alive(value, dim, strips, cuts, wires):
            continue
        cuts[value, dim].discard(strips)
        for values, seats, place in wires.uses[value]:
            found = seats.cut(place, dim, strips)
            if found is None:
                continue
            factor, outer = found
            for other, other_dim, major in seats.of[factor]:
                if major * outer in cuts.get((values[other], other_dim), ()):
                    waiting[values[other], other_dim, major * outer] = None


def _is_alive(value: int, dim: int, strips: int, cuts: _NumberedCuts, wires: _Wires) -> bool:
    """Whether the producer of a value, if it has one, makes the cut and some consumer takes it."""
    made, taken = not wires.produced[value], False
    for values, seats, place in wires.uses[value]:
        consumes = place < seats.operands
        if taken if consumes else made:
            continue
        found = seats.cut(place, dim, strips)
        if found is None or not _alive_elsewhere(*found, consumes, values, seats, cuts, wires.produced):
            continue
        made, taken = made or not consumes, taken or consumes
    return made and taken


def _alive_elsewhere(
    factor: str, outer: int, consumes: bool, values: list[int], seats: _Seats, cuts: _NumberedCuts, produced: list[bool]
) -> bool:
    """Whether the operator's other side (its results for an operand, its activations for a result) keeps the cut."""
    others = [
        (values[place], dim, major * outer)
        for place, dim, major in seats.of[factor]
        if (place >= seats.operands if consumes else place < seats.operands and produced[values[place]])
    ]
    return not others or any(strips == 1 or strips in cuts.get((value, dim), ()) for value, dim, strips in others)


def op_choices(
    graph: Graph, node: Node, rule: Rule, mesh: Mesh, cuts: Cuts, allow: Allow | None = None
) -> list[Choice]:
    """Every way to run ``node`` on ``mesh`` whose local shapes are even, without repeats.

    Args:
        allow: keeps an axis strategy (node, axis index, strategy); an axis on which it keeps nothing
            may still be computed in full on every rank.
    """
    outers: dict[str, set[int]] = {}
    for ref, dims in tensors_of(node, rule):
        for dim, factors in enumerate(dims):
            for cut in cuts.get((ref, dim), ()):
                found = factor_at(factors, cut, rule)
                if found:
                    outers.setdefault(found[0], set()).add(found[1])
    operand_types = graph.input_types(node)
    differentiated = any(t.grad for t in (*operand_types, *node.results))
    per_axis = []
    for position, axis in enumerate(mesh.axes):
        every = axis_strategies(rule, axis.size, {f: frozenset(o) for f, o in outers.items()})
        if not differentiated:
            every = [s for s in every if s.kind != "invariant"]
        kept = [s for s in every if allow is None or allow(node, position, s)]
        per_axis.append(kept or [s for s in every if s.kind in ("invariant", "replicate")])
    seen, choices = set(), []
    shards = [frozenset(shards_of(ref, t, cuts)) for ref, t in _typed(graph, node)]
    for axes in itertools.product(*per_axis):
        operands = tuple(_resting((s.operands[i] for s in axes), t) for i, t in enumerate(operand_types))
        results = tuple(_resting((s.results[i] for s in axes), t) for i, t in enumerate(node.results))
        inner = tuple(s.inner for s in axes)
        if (operands, results, inner) in seen:
            continue
        seen.add((operands, results, inner))
        tensors = zip((*operand_types, *node.results), (*operands, *results), strict=True)
        if all(_holds(t, layout, known, mesh) for (t, layout), known in zip(tensors, shards, strict=True)):
            label = " ".join(f"{a.name}:{s}" for a, s in zip(mesh.axes, axes, strict=True))
            choices.append(Choice(tuple(axes), operands, results, label))
    return choices


def _typed(graph: Graph, node: Node) -> list[tuple[Ref, TensorType]]:
    results = [Ref(node.name, i) for i in range(len(node.results))]
    return [(ref, graph.type_of(ref)) for ref in (*node.inputs, *results)]


def _holds(tensor: TensorType, layout: Layout, shards: frozenset[Shard], mesh: Mesh) -> bool:
    """Whether a tensor can have a layout: even local shapes, and only cuts that survive along the graph."""
    known = all(t in shards for t in layout if isinstance(t, Shard))
    return known and local_shape(tensor.shape, layout, mesh.sizes) is not None


def _resting(types: Iterable[LocalType], tensor: TensorType) -> Layout:
    """Without a gradient I and R are one type, written R."""
    return tuple(R if t == I and not tensor.grad else t for t in types)


def leaf_layouts(node: Node, mesh: Mesh, cuts: Cuts) -> list[Layout]:
    """How a leaf may be stored: parameters whole (I) or sharded, inputs whole or split along dim 0, buffers whole."""
    tensor = node.results[0]
    whole: LocalType = I if tensor.grad else R
    types: list[LocalType] = [whole]
    if node.op == "param":
        types += shards_of(Ref(node.name), tensor, cuts)
    elif node.op == "input" and tensor.shape:
        types.append(Shard(0))
    return [
        layout
        for layout in itertools.product(types, repeat=len(mesh.axes))
        if local_shape(tensor.shape, layout, mesh.sizes) is not None and not _crosses(layout)
    ]


def _crosses(layout: Layout) -> bool:
    """Whether two axes cut one dim in strips, which stored tensors (as DTensors) cannot express."""
    shards = [t for t in layout if isinstance(t, Shard)]
    return any(a.dim == b.dim and max(a.outer, b.outer) > 1 for a, b in itertools.combinations(shards, 2))


def shards_of(ref: Ref, tensor: TensorType, cuts: Cuts) -> list[Shard]:
    """Every shard type worth considering for a value."""
    return [
        Shard(dim, outer)
        for dim, size in enumerate(tensor.shape)
        if size > 1
        for outer in sorted(cuts.get((ref, dim), frozenset()) | {1})
    ]
