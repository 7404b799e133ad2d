"""Every way to run each operator on each axis of a mesh, and every way to store each parameter.

A :class:`Choice` fixes, for one operator, the axis strategy on each mesh axis, and with it the layout
of every operand and result. Choices follow mechanically from the factor rules; nothing here knows an
operator by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.ir.folding import Folded
from planner.ir.graph import Graph, Node, Ref, TensorType, static
from planner.ir.layout import I, Layout, LocalType, Mesh, R, Shard, local_shape
from planner.ops import OPS
from planner.ops.sharding_rule import AxisStrategy, Inner, Rule, axis_strategies, find

Strips = Mapping[int, frozenset[int]]
"""Dim of a value -> the strip counts above 1 that it may be cut into."""
Cuts = Mapping[Ref, Strips]
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

    def shares(self, mesh: Mesh) -> dict[str, int]:
        """How many ranks, or micro-batches, share each factor that is sharded, and how many do so in a named way."""
        found: dict[str, int] = {}
        for axis, strategy in zip(mesh.axes, self.axes, strict=True):
            for name in {strategy.factor, strategy.sharded} if strategy.factor else ():
                found[name] = found.get(name, 1) * axis.size
        return found


def rule_of(graph: Graph, node: Node) -> Rule:
    """The node's factor rule; operators without a row get one in which nothing can be sharded."""
    operands = graph.input_types(node)
    row = OPS.get(node.op)
    if row is None:
        return opaque_rule(operands, node.results)
    rule = row.rule(node, operands)
    rule.check(tuple(t.shape for t in operands), tuple(t.shape for t in node.results))
    return rule


def rules_of(graph: Graph, folded: Folded | None = None) -> dict[str, Rule]:
    """The factor rule of every operator of the graph; those of equal blocks are found once if it is ``folded``."""
    cache: dict[object, Rule] = {}
    found: dict[str, Rule] = {}
    kinds = [[instance.block.span for instance in kind] for kind in folded.kinds] if folded else [[graph.operators]]
    for node in (node for first, *_ in kinds for node in first):
        arguments = tuple((name, static(value)) for name, value in node.args)
        repeats = tuple(node.inputs.index(ref) for ref in node.inputs)
        key = (node.op, arguments, repeats, graph.input_types(node), node.results)
        if key not in cache:
            cache[key] = rule_of(graph, node)
        found[node.name] = cache[key]
    for first, *others in kinds:
        rules = [found[name] for name in first.names]
        for other in others:
            found.update(zip(other.names, rules, strict=True))
    return found


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


class _FactorPlaces:
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


class Dataflow:
    """The values of a graph, numbered, and the operators that touch them: where may values be cut into strips?

    A cut is born where a dim is made of several factors (a merged batch*sequence, a fused 3*heads*size)
    and the parts before it cannot be sharded themselves, or are sharded apart; it then travels through
    every operator that keeps the factor. A cut survives only at values that some operator can both
    produce and consume cut.

    Args:
        operators: rule, operands and results of each, in topological order.

    Attributes:
        refs: the value of each number.
        uses: for each value, the operators that touch it: numbers of their tensors, the places of their factors, which
            tensor it is.
        produced: for each value, whether an operator produces it.
    """

    def __init__(self, operators: Iterable[tuple[Rule, tuple[Ref, ...], tuple[Ref, ...]]]):
        self.refs: list[Ref] = []
        self.uses: list[list[tuple[list[int], _FactorPlaces, int]]] = []
        self.produced: list[bool] = []
        self._cuts: dict[object, Cuts] = {}
        numbers: dict[Ref, int] = {}
        places: dict[int, _FactorPlaces] = {}
        for rule, operands, results in operators:
            if id(rule) not in places:
                places[id(rule)] = _FactorPlaces(rule)
            values: list[int] = []
            for place, ref in enumerate((*operands, *results)):
                value = numbers.setdefault(ref, len(numbers))
                if value == len(self.refs):
                    self.refs.append(ref)
                    self.uses.append([])
                    self.produced.append(place >= len(operands))
                values.append(value)
                self.uses[value].append((values, places[id(rule)], place))

    def on(self, sizes: tuple[int, ...]) -> Cuts:
        """Where values may be cut on a mesh of these sizes."""
        born = self.born(sizes)
        if born not in self._cuts:
            self._cuts[born] = self.cuts(born)
        return self._cuts[born]

    def born(self, sizes: tuple[int, ...]) -> frozenset[tuple[int, int, int]]:
        """Cuts (value, dim, strips) at factors that lie behind others in a dim, where an axis may shard them."""
        return frozenset(cut for cut, length in self._behind if any(length % size == 0 for size in sizes if size > 1))

    @cached_property
    def _behind(self) -> tuple[tuple[tuple[int, int, int], int], ...]:
        """Every cut at a factor that lies behind others in a dim, with the factor's size."""
        found: dict[tuple[tuple[int, int, int], int], None] = {}
        for value, uses in enumerate(self.uses):
            for _, places, place in uses:
                rule = places.rule
                for dim, factors in enumerate(places.dims[place]):
                    for factor in factors[1:]:
                        if factor not in rule.whole:
                            at = find(places.dims[place], factor, rule.sizes)
                            assert at is not None
                            found[(value, dim, at[1]), rule.sizes[factor]] = None
        return tuple(found)

    def same_cuts(self, value: int, dim: int, strips: int) -> Iterator[tuple[int, int, int]]:
        """The same cut, as (value, dim, strips), in all tensors of the operators that touch a value."""
        for values, places, place in self.uses[value]:
            found = places.cut(place, dim, strips)
            if found is not None:
                factor, outer = found
                for other, other_dim, major in places.of[factor]:
                    yield values[other], other_dim, major * outer

    def cuts(self, born: frozenset[tuple[int, int, int]]) -> Cuts:
        """Where values may be cut, for each value and dim, given the cuts that are born."""
        cuts: _NumberedCuts = {}
        for value, dim, count in sorted(born):
            cuts.setdefault((value, dim), set()).add(count)
        _spread(cuts, self)
        _drop_dead(cuts, self)
        found: dict[Ref, dict[int, frozenset[int]]] = {}
        for (value, dim), strips in cuts.items():
            if strips:
                found.setdefault(self.refs[value], {})[dim] = frozenset(strips)
        return found


_NumberedCuts = dict[tuple[int, int], set[int]]


def _spread(cuts: _NumberedCuts, dataflow: Dataflow) -> None:
    """Carry every cut along its factor through all operators."""
    waiting = [(*key, strips) for key, values in cuts.items() for strips in values]
    while waiting:
        value, dim, strips = waiting.pop()
        for other, other_dim, same in dataflow.same_cuts(value, dim, strips):
            have = cuts.setdefault((other, other_dim), set())
            if same > 1 and same not in have:
                have.add(same)
                waiting.append((other, other_dim, same))


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


def _drop_dead(cuts: _NumberedCuts, dataflow: Dataflow) -> None:
    """Remove cuts that the producer cannot make or no consumer can take, until none is left."""
    waiting = {(*key, strips): None for key, values in cuts.items() for strips in values}
    while waiting:
        value, dim, strips = waiting.popitem()[0]
        if _is_alive(value, dim, strips, cuts, dataflow):
            continue
        cuts[value, dim].discard(strips)
        for other, other_dim, same in dataflow.same_cuts(value, dim, strips):
            if same in cuts.get((other, other_dim), ()):
                waiting[other, other_dim, same] = None


def _is_alive(value: int, dim: int, strips: int, cuts: _NumberedCuts, dataflow: Dataflow) -> bool:
    """Whether the producer of a value, if it has one, makes the cut and some consumer takes it."""
    made, taken = not dataflow.produced[value], False
    for values, places, place in dataflow.uses[value]:
        consumes = place < places.operands
        if taken if consumes else made:
            continue
        found = places.cut(place, dim, strips)
        if found is None or not _alive_elsewhere(*found, consumes, values, places, cuts, dataflow.produced):
            continue
        made, taken = made or not consumes, taken or consumes
    return made and taken


def _alive_elsewhere(
    factor: str,
    outer: int,
    consumes: bool,
    values: list[int],
    places: _FactorPlaces,
    cuts: _NumberedCuts,
    produced: list[bool],
) -> bool:
    """Whether the operator's other side (its results for an operand, its activations for a result) keeps the cut."""
    others = [
        (values[place], dim, major * outer)
        for place, dim, major in places.of[factor]
        if (place >= places.operands if consumes else place < places.operands and produced[values[place]])
    ]
    return not others or any(strips == 1 or strips in cuts.get((value, dim), ()) for value, dim, strips in others)


Ways = list[tuple[AxisStrategy, tuple[LocalType, ...]]]
"""Strategies of an operator on one axis, with the local types of its operands, then results."""


def axis_ways(
    graph: Graph,
    node: Node,
    rule: Rule,
    mesh: Mesh,
    strips: tuple[Strips, ...],
    allow: Allow | None,
    known: dict[object, Ways],
) -> list[Ways]:
    """Every way to run ``node`` on each axis of ``mesh``.

    Args:
        strips: for each operand, then result: where it may be cut.
        allow: keeps an axis strategy (node, axis index, strategy); an axis on which it keeps nothing
            may still be computed in full on every rank. Without it all are kept but what is streamed.
        known: what was found before, of operators with the same rules; is added to.
    """
    cut, found = tuple(frozenset(cuts.items()) for cuts in strips), []
    for position, axis in enumerate(mesh.axes):
        key = id(rule), axis.size, cut
        if key not in known:
            known[key] = _ways(rule, axis.size, (*graph.input_types(node), *node.results), strips)
        every = known[key]
        kept = [e for e in every if (not e[0].way.streamed if allow is None else allow(node, position, e[0]))]
        found.append(kept or [each for each in every if each[0].kind in ("invariant", "replicate")])
    return found


def _ways(rule: Rule, size: int, tensors: tuple[TensorType, ...], strips: tuple[Strips, ...]) -> Ways:
    """Every way to run an operator on one axis of ``size`` ranks."""
    outers: dict[str, set[int]] = {}
    for cuts, dims in zip(strips, (*rule.operands, *rule.results), strict=True):
        for dim, counts in cuts.items():
            for cut in counts:
                found = factor_at(dims[dim], cut, rule)
                if found:
                    outers.setdefault(found[0], set()).add(found[1])
    every = axis_strategies(rule, size, {f: frozenset(o) for f, o in outers.items()})
    if not any(t.grad for t in tensors):
        every = [s for s in every if s.kind != "invariant"]
    ways = [(s, _resting((*s.operands, *s.results), tensors)) for s in every]
    return [each for each in ways if _are_known(each[1], strips)]


def _resting(types: tuple[LocalType, ...], tensors: tuple[TensorType, ...]) -> tuple[LocalType, ...]:
    """Without a gradient I and R are one type, written R."""
    return tuple(R if t == I and not tensor.grad else t for t, tensor in zip(types, tensors, strict=True))


def _are_known(types: tuple[LocalType, ...], strips: tuple[Strips, ...]) -> bool:
    """Whether every shard is of a whole dim or of strips that survive along the graph."""
    shards = [(t, cuts) for t, cuts in zip(types, strips, strict=True) if isinstance(t, Shard)]
    return all(t.outer == 1 or t.outer in cuts.get(t.dim, ()) for t, cuts in shards)


def leaf_layouts(node: Node, mesh: Mesh, strips: Strips) -> list[Layout]:
    """How a leaf may be stored: parameters whole (I) or sharded, inputs whole or split along dim 0, buffers whole."""
    tensor = node.results[0]
    whole: LocalType = I if tensor.grad else R
    types: list[LocalType] = [whole]
    if node.op == "param":
        types += shards_of(tensor, strips)
    elif node.op == "input":
        types += [shard for shard in shards_of(tensor, {}) if shard.dim == 0]
    return [
        layout
        for layout in itertools.product(types, repeat=len(mesh.axes))
        if local_shape(tensor.shape, layout, mesh.sizes) is not None and not _crosses(layout)
    ]


def _crosses(layout: Layout) -> bool:
    """Whether two axes cut one dim in strips, which stored tensors (as DTensors) cannot express."""
    shards = [t for t in layout if isinstance(t, Shard)]
    return any(a.dim == b.dim and max(a.outer, b.outer) > 1 for a, b in itertools.combinations(shards, 2))


def shards_of(tensor: TensorType, strips: Strips) -> list[Shard]:
    """Every shard type worth considering for a value."""
    return [
        Shard(dim, outer)
        for dim, size in enumerate(tensor.shape)
        if size > 1
        for outer in sorted(strips.get(dim, frozenset()) | {1})
    ]
