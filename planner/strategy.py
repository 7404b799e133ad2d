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
    cuts: dict[tuple[Ref, int], set[int]] = {}
    nodes = [node for node in graph.nodes if node.name in rules]
    tensors = {node.name: tensors_of(node, rules[node.name]) for node in nodes}
    for node in nodes:
        rule = rules[node.name]
        for ref, dims in tensors[node.name]:
            for dim, factors in enumerate(dims):
                for factor in factors[1:]:
                    if factor in rule.whole:
                        continue
                    found = find(dims, factor, rule.sizes)
                    assert found is not None
                    if any(rule.sizes[factor] % size == 0 for size in sizes if size > 1):
                        cuts.setdefault((ref, dim), set()).add(found[1])
    changed = bool(cuts)
    while changed:
        changed = False
        for node in (*nodes, *reversed(nodes)):
            rule = rules[node.name]
            shared: dict[str, set[int]] = {}
            for ref, dims in tensors[node.name]:
                for dim, _ in enumerate(dims):
                    for cut in cuts.get((ref, dim), ()):
                        part = factor_at(dims[dim], cut, rule)
                        if part:
                            shared.setdefault(part[0], set()).add(part[1])
            for factor_name, outers in shared.items():
                if not rule.may_stride(factor_name):
                    continue
                for ref, dims in tensors[node.name]:
                    found = find(dims, factor_name, rule.sizes)
                    if found is None:
                        continue
                    wanted = {found[1] * outer for outer in outers} - {1}
                    have = cuts.setdefault((ref, found[0]), set())
                    if not wanted <= have:
                        have |= wanted
                        changed = True
    _drop_dead(cuts, nodes, tensors, rules)
    return {key: frozenset(values) for key, values in cuts.items() if values}


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


def _drop_dead(
    cuts: dict[tuple[Ref, int], set[int]],
    nodes: list[Node],
    tensors: dict[str, list[tuple[Ref, tuple[tuple[str, ...], ...]]]],
    rules: Mapping[str, Rule],
) -> None:
    """Remove cuts that the producer cannot make or no consumer can take, until none is left."""
    produced = {Ref(node.name, i) for node in nodes for i in range(len(node.results))}
    while True:
        made: set[tuple[Ref, int, int]] = set()
        taken: set[tuple[Ref, int, int]] = set()
        for node in nodes:
            rule, operands = rules[node.name], len(node.inputs)
            for place, (ref, dims) in enumerate(tensors[node.name]):
                for dim, factors in enumerate(dims):
                    for cut in cuts.get((ref, dim), ()):
                        factor = factor_at(factors, cut, rule)
                        if factor is None or not rule.may_stride(factor[0]):
                            continue
                        if _alive_elsewhere(factor, place, tensors[node.name], operands, rule, cuts, produced):
                            (made if place >= operands else taken).add((ref, dim, cut))
        dead = [
            (ref, dim, cut)
            for (ref, dim), values in cuts.items()
            for cut in values
            if (ref in produced and (ref, dim, cut) not in made) or (ref, dim, cut) not in taken
        ]
        if not dead:
            return
        for ref, dim, cut in dead:
            cuts[ref, dim].discard(cut)


def _alive_elsewhere(
    factor: tuple[str, int],
    place: int,
    tensors: list[tuple[Ref, tuple[tuple[str, ...], ...]]],
    operands: int,
    rule: Rule,
    cuts: Mapping[tuple[Ref, int], set[int]],
    produced: set[Ref],
) -> bool:
    """Whether the other side of the operator (results of an operand, activations of a result) keeps the cut."""
    name, outer = factor
    others = tensors[operands:] if place < operands else [t for t in tensors[:operands] if t[0] in produced]
    holding = [(ref, found) for ref, dims in others if (found := find(dims, name, rule.sizes))]
    if not holding:
        return True
    return any(found[1] * outer == 1 or found[1] * outer in cuts.get((ref, found[0]), ()) for ref, found in holding)


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
    """Whether two axes cut one dim in different strips, which stored tensors (as DTensors) cannot express."""
    shards = [t for t in layout if isinstance(t, Shard)]
    return any(a.dim == b.dim and a.outer != b.outer for a, b in itertools.combinations(shards, 2))


def shards_of(ref: Ref, tensor: TensorType, cuts: Cuts) -> list[Shard]:
    """Every shard type worth considering for a value."""
    return [
        Shard(dim, outer)
        for dim, size in enumerate(tensor.shape)
        if size > 1
        for outer in sorted(cuts.get((ref, dim), frozenset()) | {1})
    ]
