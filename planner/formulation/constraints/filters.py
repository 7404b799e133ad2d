"""Which strategies and storage layouts the pins and micro-batches leave on a mesh.

What the axes of a recipe shard and store says :data:`planner.formulation.constraints.roles.ROLES`; which dims of which
values that is says :data:`planner.formulation.constraints.labels.LABELS`.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Mapping

from planner.base.errors import PinError
from planner.formulation.batch_norm import check_batch_norm, is_by_micro_batch
from planner.formulation.constraints.context import ways_to_attend
from planner.formulation.constraints.grids import check_features
from planner.formulation.constraints.labels import (
    LABELS,
    Labels,
    LabelsOf,
    makes_keys,
    normalizes,
    sharded_parts,
    weight_factors,
)
from planner.formulation.constraints.pins import FREE_AXES, Pins
from planner.formulation.constraints.roles import REST, ROLES, WEIGHTS, Role, described, ranks_sharing, sharing
from planner.formulation.constraints.zero import check_zero, way_of, ways_of
from planner.formulation.node_options import AllowLeaf
from planner.formulation.strategies import Allow
from planner.ir.graph import Graph, Node, Ref
from planner.ir.layout import MICRO, Axis, I, Layout, Mesh, R, Shard
from planner.ops import OPS
from planner.ops.sharding_rule import AxisStrategy, FactorWay, Inner, Rule, axis_strategies, shard_factor


def filters(
    pins: Pins, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, labels: LabelsOf
) -> tuple[Allow | None, AllowLeaf | None]:
    """The strategies and storage layouts that the pins, and micro-batches, keep on ``mesh``.

    Axes have the roles that they are named for only where the pins give sizes: those of a mesh that was searched are
    named for what they turned out to do (:mod:`planner.search.axis_names`).

    Args:
        labels: :func:`planner.formulation.constraints.labels.label_blocks` of this graph, by label.

    Raises:
        PinError: the recipe does not apply to the model, or a size does not divide.
    """
    if pins.batch_norm is not None:
        check_batch_norm(graph, rules)
    if not pins.sizes and not pins.layers and mesh.micro_batches == 1:
        return (lambda *_: True) if pins.streamed else None, None
    names = mesh.names
    # Without a pinned size, an axis of whatever name is free: that of a further program, see planner/plan/further.py.
    roles = [ROLES.get(name) if pins.sizes else None for name in names]
    shards = {"batch", *(label for role in roles if role is not None for label in role.labels)}
    weighted: Mapping[str, frozenset[str]] = {}
    if pins.whole_experts is not None:
        shards |= {"expert", "expert features"}
    if WEIGHTS in shards:
        weighted = weight_factors(graph, rules, graph.operators)
        shards |= {label for role in roles if role is not None for label in role.activations}
        shards = shards - {WEIGHTS} | {"context"} | ({"stream"} if pins.sequence_parallel is False else set())
    dims = {label: labels(label) for label in shards}
    if pins.sizes:
        _check_recipe(pins, graph, mesh, rules, dims)
        if "features" in dims:
            check_features(mesh, rules, graph, dims["features"])
        _check_weights(pins, mesh, rules, weighted)
    _check_layers(pins, graph, rules, mesh)
    pinned = {glob: {node.name for node in pinned_operators(graph, glob)} for glob in pins.layers}
    check_zero(pins.zero, graph)
    attend = ways_to_attend(pins.context_kind, graph, rules, mesh)

    def labelled(node: Node, strategy: AxisStrategy, labels: Labels) -> bool:
        rule = rules[node.name]
        return not sharded_parts(rule, strategy).isdisjoint(labels.parts(node, rule))

    experts = set()
    if pins.whole_experts is not None:
        features = dims["expert features"]
        experts = {name for name in weighted if features.parts(graph.by_name[name], rules[name])}

    def has(node: Node, labels: Labels, size: int) -> bool:
        """Whether the operator can shard a labelled factor ``size`` ways."""
        rule = rules[node.name]
        return any(
            rule.sizes[factor] % (outer * size) == 0
            and factor not in rule.whole
            and (outer == 1 or rule.may_stride(factor))
            for factor, outer in labels.parts(node, rule)
        )

    def allow(node: Node, axis: int, strategy: AxisStrategy) -> bool:
        for glob, wanted in pins.layers.items():
            if node.name in pinned[glob] and names[axis] in wanted:
                return str(strategy) == wanted[names[axis]]
        if strategy.way.streamed and not pins.streamed:
            return False
        role, size = roles[axis], mesh.axes[axis].size
        if names[axis] == MICRO:
            if has(node, dims["batch"], size):
                apart = pins.batch_norm is not None and is_by_micro_batch(rules[node.name], strategy)
                return labelled(node, strategy, dims["batch"]) and (apart or all(map(_micro_batched, strategy.inner)))
            return not strategy.factor
        if role is None:
            return True
        if role.shards == WEIGHTS and node.name in experts:
            shared = dims["expert" if pins.whole_experts else "expert features"]
            return labelled(node, strategy, shared) and not labelled(node, strategy, dims["batch"])
        others = (each for each in roles if each is not None and each.is_alone and each is not role)
        if any(labelled(node, strategy, dims[each.shards]) for each in others):
            return False
        if role.shards == "context" and node.name in attend:
            return strategy.sharded in attend[node.name][role.name]
        if role.shards != WEIGHTS:
            if strategy.way.streamed:  # shards a weight
                return False
            for label in role.labels:
                if has(node, dims[label], ranks_sharing(mesh, label)):
                    may_be_whole = label == "context" and not strategy.factor and makes_keys(graph, node)
                    return may_be_whole or labelled(node, strategy, dims[label])
            return not strategy.factor
        holds = node.name in weighted
        streams = dims["stream"].parts(node, rules[node.name]) if "stream" in dims and not holds else ()
        if labelled(node, strategy, dims["batch"]) or any(strategy.factor == factor for factor, _ in streams):
            return False
        kept = [] if holds else [label for label in role.activations if has(node, dims[label], size)]
        if kept:
            kept = kept[:1] if normalizes(node) else kept
            return any(labelled(node, strategy, dims[label]) for label in kept)
        if strategy.way.streamed:
            along = labelled(node, strategy, dims["context"])
            return holds and strategy.factor in weighted[node.name] and not (along and pins.sequence_parallel is False)
        if labelled(node, strategy, dims["context"]):  # how attention goes along the sequence the context axis says
            return pins.sequence_parallel is not False and not holds and node.name not in attend
        if pins.sequence_parallel and normalizes(node) and has(node, dims["context"], size):
            return False
        return not holds or strategy.factor in weighted[node.name]

    def allow_leaf(node: Node, layout: Layout) -> bool:
        if node.op == "input":
            shape = node.results[0].shape
            has_batch = bool(shape) and shape[0] > 1
            return all(
                role is None or t == (Shard(0) if "batch" in role.labels and has_batch else R)
                for role, t in zip(roles, layout, strict=True)
            )
        if node.op != "param":
            return True
        way = way_of(pins.zero, node.target or node.name)
        for role, t in zip(roles, layout, strict=True):
            own = dims[role.shards].of(Ref(node.name)) if role is not None and role.is_alone else ()
            if own and not (isinstance(t, Shard) and (t.dim, t.outer) in own):
                return False
            if role is not None and not own and not _may_store(role, t == I, way):
                return False
        return True

    return allow, allow_leaf if pins.sizes else None


def _may_store(role: Role, is_whole: bool, way: int | None) -> bool:
    """Whether an axis may store a parameter so; ``way``: what pin ``zero`` says of it."""
    if role.parameters == "zero" and way is not None:
        return is_whole == (way == 0)
    if role.parameters == "sharded":
        return not is_whole
    return is_whole or role.parameters != "whole"


def _micro_batched(call: Inner) -> bool:
    """Whether an operator can run on one micro-batch after the other: all it asks of the others is one number, such as
    how many tokens a loss is averaged over, which is known before the step.
    """
    return call.kind == "all_reduce" and not call.factors and call.count == 1


def _check_recipe(pins: Pins, graph: Graph, mesh: Mesh, rules: Mapping[str, Rule], dims: Mapping[str, Labels]) -> None:
    """Refuse sizes that the dims that they share do not divide."""
    parts = ranks_sharing(mesh, "batch")
    inputs = {leaf.target: leaf.results[0].shape for leaf in graph.leaves if leaf.op == "input"}
    if parts > 1 and inputs and all(shape[:1] in ((), (1,)) for shape in inputs.values()):
        raise PinError(
            f"{described('batch', mesh.names)} is {parts}, but the batch is 1 in {' and '.join(map(repr, inputs))}, so "
            "that all ranks would compute the same: give a global batch that it divides, or pin 'tensor' or 'context'"
        )
    for leaf in graph.leaves:
        shape = leaf.results[0].shape
        if leaf.op == "input" and shape and shape[0] > 1 and shape[0] % parts:
            raise PinError(
                f"{described('batch', mesh.names)} is {parts} but input {leaf.target!r} has a batch of {shape[0]}, "
                "which it does not divide: change the pin or the global batch"
            )
    shared = {ROLES[name].shards for name in mesh.names if name in ROLES}
    wanted = [
        (which, ranks_sharing(mesh, which), described(which, mesh.names), "is {ranks}")
        for which in LABELS
        if which in shared and which != "batch"
    ]
    if pins.whole_experts is not None:
        each, experts = pins.sizes.get("tensor", 1), pins.sizes.get("expert", 1)
        wanted.append(("expert features", 1 if pins.whole_experts else each, "pin 'expert_tensor'", "is {ranks}"))
        if pins.whole_experts:
            beside = f"pin 'tensor' {each}" + f" and pin 'expert' {experts}" * (experts > 1)
            told = f"is 1 beside {beside}, so that {{ranks}} ranks share whole experts,"
            wanted.append(("expert", each * experts, "pin 'expert_tensor'", told))
    for which, ranks, pinned, told in wanted:
        label = LABELS[which]
        lengths = {
            rules[node.name].sizes[factor]
            for node in graph.operators
            for factor, outer in dims[which].parts(node, rules[node.name])
            if outer == 1
        }
        if not lengths:
            raise PinError(f"{pinned} {label.missing}")
        if all(length % ranks for length in lengths):
            remedy = label.remedy.format(longer=-(-min(lengths) // ranks) * ranks)
            raise PinError(
                f"{pinned} {told.format(ranks=ranks)} but the {label.word} has length {min(lengths)}, which it does "
                f"not divide: {remedy}"
            )


def pinned_operators(graph: Graph, glob: str) -> list[Node]:
    """The operators that a pin by module is about: matrix products, or, where there are none, look-ups in tables."""
    nodes = [node for node in graph.nodes if not node.is_leaf and fnmatch.fnmatchcase(node.path, glob)]
    rows = [(node, row) for node in nodes if (row := OPS.get(node.op)) is not None]
    products = [node for node, row in rows if row.contracts]
    return products or [node for node, row in rows if row.looks_up == "rows"]


def _check_layers(pins: Pins, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh) -> None:
    """Refuse pins by module that pin nothing: no such module, axis or strategy, or a size that does not divide."""
    for glob, wanted in pins.layers.items():
        nodes = [node for node in graph.nodes if not node.is_leaf and fnmatch.fnmatchcase(node.path, glob)]
        if not nodes:
            paths = sorted({node.path for node in graph.nodes if node.path})
            near = difflib.get_close_matches(glob, paths, n=3, cutoff=0.4)
            names = near or paths[:3]
            hint = f"; {'close' if near else 'there'} are: {', '.join(map(repr, names))}" if names else ""
            raise PinError(f"pin 'layers': no module matches {glob!r}{hint}")
        products = pinned_operators(graph, glob)
        if not products:
            raise PinError(
                f"pin 'layers': {glob!r} holds no matrix product and no look-up, and only these can be pinned"
            )
        for name, strategy in wanted.items():
            if name not in mesh.names:
                if pins.sizes or name not in FREE_AXES:
                    raise PinError(
                        f"pin 'layers', {glob!r}: there is no axis {name!r}; the mesh has {', '.join(mesh.names)}"
                        + _axis_missed(name, mesh)
                    )
                continue
            for node in products:
                _check_strategy(glob, rules[node.name], mesh.axes[mesh.names.index(name)], strategy)


def _axis_missed(name: str, mesh: Mesh) -> str:
    """How to pin an axis that the mesh lacks, where there is such."""
    role, pinned = ROLES.get(name), {ROLES[axis].pin for axis in mesh.names if axis in ROLES}
    if role is None or name in pinned:
        return ""
    return f": pin {role.pin!r} as a grid that has it" if role.pin else f": pin {name!r} above 1 too"


def _check_strategy(glob: str, rule: Rule, axis: Axis, wanted: str) -> None:
    """Refuse what is none of the ways to run an operator, or does not go into the ranks of an axis."""
    way, _, text = wanted.partition("/")
    factor, strips = way.partition(".")[0], int(text) if text.isdecimal() else 0
    lengths: dict[str, int] = {}
    for name in (name for name in rule.sizes if name not in rule.whole):
        for each in rule.ways_of(name):
            may_cut = name == factor and each.strided and strips > 1 and rule.sizes[name] % strips == 0
            for outer in (1, strips) if may_cut else (1,):
                lengths[str(shard_factor(rule, name, outer, each))] = _divided(rule, name, outer, each)
    whole, where = [str(each) for each in axis_strategies(rule, 1)], f"pin 'layers', {glob!r}, axis {axis.name!r}"
    if wanted not in (*lengths, *whole):
        known = ", ".join(f"{label} ({length})" for label, length in lengths.items())
        raise PinError(
            f"{where}: there is no strategy {wanted!r}; {f'shard one of the factors {known}, or ' if known else ''}"
            f"pin {' or '.join(map(repr, whole))}"
        )
    if lengths.get(wanted, axis.size) % axis.size:
        raise PinError(
            f"{where}: {wanted} has size {lengths[wanted]}, which {axis.size} ranks do not divide: pin another factor, "
            "or another size of the axis"
        )


def _divided(rule: Rule, factor: str, strips: int, way: FactorWay) -> int:
    """What the ranks that shard strips of a factor so must divide: their size, and those of dims sharded with them."""
    sides = (rule.operands, way.operands), (rule.results, way.results)
    others = ((dims[place], t) for dims, types in sides for place, t in types.items() if isinstance(t, Shard))
    sizes = (math.prod(rule.sizes[name] for name in dims[t.dim]) // t.outer for dims, t in others)
    return math.gcd(rule.sizes[factor] // strips, *sizes)


def _check_weights(pins: Pins, mesh: Mesh, rules: Mapping[str, Rule], weighted: Mapping[str, frozenset[str]]) -> None:
    """Refuse recipes that would shard no weight at all."""
    roles = [ROLES[name] for name in mesh.names if name in ROLES]
    if ways_of(pins.zero) & {1, 2, 3} and mesh.size > 1 and not any(r.parameters == "zero" for r in roles):
        raise PinError(
            f"pin 'zero' is {pins.zero}; it says how the {REST} axis stores parameters, and the other pins leave no "
            f"{REST} axis, nor one of a sequence: leave out or lower one of them, or 'zero'"
        )
    found = sorted({rules[name].sizes[factor] for name, factors in weighted.items() for factor in factors})
    shown = f"the sizes of the weights, {', '.join(map(str, found))}" if found else "no weight: the model has none"
    for axis in mesh.axes:
        if axis.name in sharing(WEIGHTS) and axis.size > 1 and all(size % axis.size for size in found):
            pin, name = ROLES[axis.name].pin, f"{axis.name!r} is {axis.size}"
            told = f"pin {pin!r}: axis {name}" if pin else f"pin {name}"
            raise PinError(f"{told}, which divides none of {shown}: pin another size")
