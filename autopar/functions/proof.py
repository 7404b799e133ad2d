"""Proof: along which dims a Function may be cut, by following a cut through its forward and backward.

A *supposition* gives operands local types on one mesh axis: a slice along a dim, or terms of a sum, or the same on all
ranks. The op table says of every operator of the joint graph what that makes of its results. It holds if it is carried
to every result, and from the gradients that results so laid out have to the gradients that the operands must have: of
what is a slice, the same slice; of what all ranks hold, terms of a sum. An operator that no rule lets pass refutes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.functions.joint import Joint
from autopar.graph.local_arguments import local_call
from autopar.runtime.layers import CONTRACTED, LOCAL_FORMS
from planner.formulation.strategies import factor_at, rule_of, tensors_of
from planner.ir.graph import Graph, Node, Ref
from planner.ir.layout import LocalType, Mark, P, R, Shard
from planner.ops.sharding_rule import Rule, find, shard_factor

ZERO = Mark("Z")
"""The local type of a constant 0: the same on all ranks, and terms of a sum as well."""

_FILLED = frozenset(f"aten.{name}.default" for name in ("full", "zeros", "ones", "scalar_tensor"))
"""Operators whose result is the same in every element, so that any slice of it is one of its own."""

_ZEROS = frozenset({"aten.zeros_like.default", "aten.new_zeros.default"})
"""Operators that take nothing from their operand but its kind, and give zeros."""


class Refuted(Exception):
    """A supposition that does not hold; says where."""


@dataclass(frozen=True)
class Followed:
    """A supposition that holds.

    Attributes:
        operands, results: their local types.
        shards: every value of the joint graph that is a slice.
    """

    operands: tuple[LocalType, ...]
    results: tuple[LocalType, ...]
    shards: Mapping[Ref, Shard]


class Proof:
    """Follows suppositions through some joint graphs of one Function, which differ in the gradients that are given."""

    def __init__(self, joints: Iterable[Joint]):
        self._all = [_One(joint) for joint in joints]

    def follow(self, supposed: Mapping[int, LocalType]) -> Followed:
        """Follow a supposition; operands that it does not name are what they must be.

        Raises:
            Refuted: it does not hold.
        """
        first, *others = [one.follow(supposed) for one in self._all]
        for other in others:
            if (other.operands, other.results) != (first.operands, first.results):
                raise Refuted("it depends on which results gradients come to")
        return first

    def cuts(self, place: int, dim: int) -> list[int]:
        """Into how many strips a dim of an operand may have to be cut."""
        return self._all[0].cuts(place, dim)


class _One:
    """One joint graph, with the rule of every operator."""

    def __init__(self, joint: Joint):
        self.joint, self.graph = joint, joint.graph
        self.operators = [node for node in self.graph.nodes if not node.is_leaf]
        self.rules: dict[str, Rule] = {node.name: rule_of(self.graph, node) for node in self.operators}
        self.touching: dict[Ref, list[Node]] = {}
        for node in self.operators:
            for ref, _ in tensors_of(node, self.rules[node.name]):
                self.touching.setdefault(ref, []).append(node)
        pairs = [
            *zip(joint.operands, joint.gradients, strict=True),
            *zip(joint.results, joint.given, strict=True),
        ]
        self.alike: dict[Ref, list[Ref]] = {}
        for a, b in pairs:
            if b is not None:
                self.alike.setdefault(a, []).append(b)
                self.alike.setdefault(b, []).append(a)

    def cuts(self, place: int, dim: int) -> list[int]:
        """Products of factors that lie before others in dims of an operand's size."""
        size = self.graph.type_of(self.joint.operands[place]).shape[dim]
        found = {1}
        for node in self.operators:
            rule = self.rules[node.name]
            for ref, dims in tensors_of(node, rule):
                for length, factors in zip(self.graph.type_of(ref).shape, dims, strict=True):
                    major = 1
                    for factor in factors[:-1] if length == size else ():
                        major *= rule.sizes[factor]
                        found.add(major)
        return sorted(found - {size})

    def follow(self, supposed: Mapping[int, LocalType]) -> Followed:
        """See :meth:`Proof.follow`."""
        joint = self.joint
        start = {joint.operands[place]: t for place, t in supposed.items() if isinstance(t, Shard)}
        shards = self._spread(start)
        types: dict[Ref, LocalType] = {}
        for place, ref in enumerate(joint.operands):
            types[ref] = shards.get(ref, supposed.get(place, R))
        for leaf in self.graph.leaves:
            if leaf.op == "const":
                types[Ref(leaf.name)] = ZERO if leaf.name in joint.zeros else R
        given = {ref: result for ref, result in zip(joint.given, joint.results, strict=True) if ref is not None}
        for node in self.operators:
            for ref in node.inputs:
                if ref not in types:  # a gradient: all of forward is known by now
                    types[ref] = _gradient(types[given[ref]])
            for index, result in enumerate(self._results(node, types, shards)):
                types[Ref(node.name, index)] = result
        for place, (gradient, operand) in enumerate(zip(joint.gradients, joint.operands, strict=True)):
            if gradient is None:
                continue
            have = types[gradient] if gradient in types else _gradient(types[given[gradient]])
            want = _gradient(types[operand])
            if have not in (want, ZERO):
                raise Refuted(f"the gradient of operand {place} comes out as {have}, not {want}")
        results = tuple(R if types[ref] == ZERO else types[ref] for ref in joint.results)
        for ref, result in zip(joint.results, results, strict=True):
            if result == P and not self.graph.type_of(ref).dtype.startswith(("float", "bfloat", "complex")):
                raise Refuted("a result that is not floating would come out as terms of a sum")
        return Followed(tuple(types[ref] for ref in joint.operands), results, shards)

    def _spread(self, start: Mapping[Ref, Shard]) -> dict[Ref, Shard]:
        """Carry slices along factors through all operators, to and fro."""
        found, waiting = dict(start), list(start)
        while waiting:
            ref = waiting.pop()
            for node in self.touching.get(ref, ()):
                for other, local_type in self._beside(node, found):
                    if not isinstance(local_type, Shard):
                        continue
                    if other not in found:
                        found[other] = local_type
                        waiting.append(other)
                    elif found[other] != local_type:
                        raise Refuted(f"{node.op} would cut a value twice")
            for other in self.alike.get(ref, ()):
                if other not in found:
                    found[other] = found[ref]
                    waiting.append(other)
                elif found[other] != found[ref]:
                    raise Refuted("a value and its gradient would be cut along different dims")
        return found

    def _beside(self, node: Node, shards: Mapping[Ref, Shard]) -> list[tuple[Ref, LocalType]]:
        """The local types of all tensors of an operator of which some are slices."""
        if node.op in _FILLED:
            return []
        rule = self.rules[node.name]
        tensors = tensors_of(node, rule)
        cuts = set()
        for ref, dims in tensors:
            if ref in shards:
                shard = shards[ref]
                cut = factor_at(dims[shard.dim], shard.outer, rule)
                if cut is None or cut[0] in rule.whole or (cut[1] > 1 and not rule.may_stride(cut[0])):
                    raise Refuted(f"{node.op} needs dim {shard.dim} as a whole")
                cuts.add(cut)
        if len(cuts) > 1:
            raise Refuted(f"{node.op} is cut along two dims")
        ((factor, outer),) = cuts
        if _needs_others(node, rule, factor):
            raise Refuted(f"{node.op} has to ask the other ranks")
        strategy = shard_factor(rule, factor, outer)
        return [(ref, t) for (ref, _), t in zip(tensors, (*strategy.operands, *strategy.results), strict=True)]

    def _results(self, node: Node, types: Mapping[Ref, LocalType], shards: Mapping[Ref, Shard]) -> list[LocalType]:
        """What an operator makes of operands so laid out."""
        rule, count = self.rules[node.name], len(node.inputs)
        refs = [*node.inputs, *(Ref(node.name, i) for i in range(len(node.results)))]
        if node.op in _FILLED:
            zero = node.op == "aten.zeros.default" or 0 in (node["fill_value"], node["s"])
            return [shards.get(ref, ZERO if zero else R) for ref in refs[count:]]
        if any(ref in shards for ref in refs):
            wanted = [t for _, t in self._beside(node, shards)]
            for ref, want in zip(node.inputs, wanted, strict=False):
                if types[ref] not in (want, ZERO) or (types[ref] == ZERO and isinstance(want, Shard)):
                    raise Refuted(f"{node.op} finds {types[ref]} where it needs {want}")
            return wanted[count:]
        have = [types[ref] for ref in node.inputs]
        if node.op in _ZEROS:
            return [ZERO]
        if P not in have:
            is_zero = any(linear and all(have[place] == ZERO for place in linear) for linear in rule.linear)
            return [ZERO if is_zero else R] * len(node.results)
        for linear in rule.linear:
            inside = all(t in (P, ZERO) for i, t in enumerate(have) if i in linear)
            if inside and all(t != P for i, t in enumerate(have) if i not in linear):
                return [P] * len(node.results)
        raise Refuted(f"{node.op} is not linear in terms of a sum")


def _gradient(local_type: LocalType) -> LocalType:
    """The local type of a value's gradient."""
    if isinstance(local_type, Shard):
        return local_type
    return R if local_type == P else P


def _needs_others(node: Node, rule: Rule, factor: str) -> bool:
    """Whether an operator's local form communicates, or counts what all ranks have, where a factor is sharded."""
    if factor in rule.special and rule.special[factor].inner:
        return True
    form = LOCAL_FORMS.get(node.op)
    if form is None:
        return False
    contracted = find(rule.results[0], factor, rule.sizes) is None
    return any(factor in factors or (factors == (CONTRACTED,) and contracted) for factors in form.groups.values())


# ---- are slices run by the same operators? ---------------------------------------------------------------------------


def difference(whole: Joint, part: Joint, cuts: Iterable[tuple[Mapping[Ref, Shard], int]]) -> str:
    """How the joint graph of slices differs from that of the whole, cut: ``""`` if only in sizes that are cut.

    Python may have decided on a size, or computed with one (``/ x.shape[0]``), which no graph shows.

    Args:
        cuts: slices of the values of ``whole``, and how many ranks cut each.
    """
    cuts = list(cuts)
    if [n.op for n in whole.graph.nodes] != [n.op for n in part.graph.nodes]:
        return "it runs other operators on slices"
    for there, here in zip(whole.graph.nodes, part.graph.nodes, strict=True):
        shapes = [_cut(whole.graph, Ref(there.name, i), cuts) for i in range(len(there.results))]
        if shapes != [t.shape for t in here.results]:
            return f"{there.op} makes {[t.shape for t in here.results]} of slices, where {shapes} are due"
        operands = [t.shape for t in part.graph.input_types(here)]
        if _static(there, operands, shapes, whole) != _static(here, operands, shapes, part):
            return f"{there.op} gets other arguments for slices, so it knows of a size"
    return ""


def _cut(graph: Graph, ref: Ref, cuts: Iterable[tuple[Mapping[Ref, Shard], int]]) -> tuple[int, ...]:
    shape = list(graph.type_of(ref).shape)
    for shards, ranks in cuts:
        if ref in shards:
            shape[shards[ref].dim] //= ranks
    return tuple(shape)


def _static(node: Node, operands: list[Any], results: list[Any], joint: Joint) -> dict[str, Any]:
    """The arguments of an operator on slices, with values by number."""
    args = dict(node.args)
    if not node.is_leaf:
        args = local_call(joint.targets[node.name], args, operands, results)[1]
    if node.op in _FILLED:
        args.pop("size", None)
    return {name: _numbered(value, joint.graph) for name, value in args.items()}


def _numbered(value: Any, graph: Graph) -> Any:
    if isinstance(value, Ref):
        return "value", graph.position[value.node], value.index
    return tuple(_numbered(v, graph) for v in value) if isinstance(value, (tuple, list)) else value
