"""Which strategies and storage layouts the pins and micro-batches leave on a mesh.

A recipe speaks of the batch and of the query sequence; :func:`label_dims` finds which dims of which values these are.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping

from planner.base.errors import PinError
from planner.formulation.constraints.mesh_candidates import BATCH, batch_ranks
from planner.formulation.constraints.pins import FREE_AXES, SIZES, Pins
from planner.formulation.constraints.zero import check_zero, way_of, ways_of
from planner.formulation.node_options import AllowLeaf
from planner.formulation.strategies import Allow, factor_at, tensors_of
from planner.ir.graph import Graph, Node, Ref
from planner.ir.layout import MICRO, Axis, I, Layout, Mesh, R, Shard
from planner.ops import OPS
from planner.ops.sharding_rule import AxisStrategy, Inner, Rule, find
from planner.ops.table import contraction_flops

ATTENTION = "aten.scaled_dot_product_attention.default"

Labels = Mapping[Ref, Mapping[tuple[int, int], str]]
LabelsOf = Callable[[str], Labels]


def label_dims(graph: Graph, rules: Mapping[str, Rule], label: str) -> Labels:
    """Which dims of which values run along the batch or the query sequence.

    ``batch`` starts at dim 0 of every input, ``context`` at attention's query factor, ``stream`` at what norms run over
    and at what the parameter of a product lacks: the batch and, however attention is written, the sequence. All spread
    through every operator that keeps the factor.

    Returns:
        value -> {(dim, strips): label}.
    """
    found: dict[Ref, dict[tuple[int, int], str]] = {}
    if label == "batch":
        for leaf in graph.leaves:
            shape = leaf.results[0].shape
            if leaf.op == "input" and shape and shape[0] > 1:
                found[Ref(leaf.name)] = {(0, 1): label}
    nodes = [node for node in graph.nodes if node.name in rules]
    if label == "stream":
        starts = {name: rules[name].sizes.keys() - factors for name, factors in _weighted(graph, rules).items()}
        starts |= {node.name: _normed(rules[node.name]) for node in nodes if node.op in _NORMS}
        for name, factors in starts.items():
            for ref, dims in tensors_of(graph.by_name[name], rules[name]):
                there = (find(dims, factor, rules[name].sizes) for factor in factors)
                found.setdefault(ref, {}).update((place, label) for place in there if place)
    refs = {node.name: [ref for ref, _ in tensors_of(node, rules[node.name])] for node in nodes}
    beside: dict[Ref, list[str]] = {}
    for name, each in refs.items():
        for ref in each:
            beside.setdefault(ref, []).append(name)
    places: dict[object, list[tuple[int, tuple[int, int]]]] = {}
    waiting = set(refs)
    while waiting:
        for node in (*nodes, *reversed(nodes)):
            if node.name not in waiting:
                continue
            waiting.remove(node.name)
            key = (id(rules[node.name]), *(tuple(found.get(ref, ())) for ref in refs[node.name]))
            if key not in places:
                places[key] = _labelled_places(node, rules[node.name], found, label)
            for tensor, place in places[key]:
                ref = refs[node.name][tensor]
                labels = found.setdefault(ref, {})
                if place not in labels:
                    labels[place] = label
                    waiting.update(beside[ref])
    return found


def _labelled_places(node: Node, rule: Rule, labels: Labels, label: str) -> list[tuple[int, tuple[int, int]]]:
    """Where an operator carries a label: (tensor, (dim, strips)), tensors numbered operands first."""
    parts = {part for part in labelled_parts(node, rule, labels) if part[0] not in rule.whole}
    if label == "context" and node.op == ATTENTION and rule.operands[0][-2]:
        parts.add((rule.operands[0][-2][0], 1))
    return [
        (tensor, (place[0], place[1] * outer))
        for factor, outer in parts
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


def filters(
    pins: Pins, graph: Graph, rules: Mapping[str, Rule], mesh: Mesh, labels: LabelsOf | None = None
) -> tuple[Allow | None, AllowLeaf | None]:
    """The strategies and storage layouts that the pins, and micro-batches, keep on ``mesh``.

    Args:
        labels: :func:`label_dims` of this graph by label, where it is known already.

    Raises:
        PinError: the recipe does not apply to the model, or a size does not divide.
    """
    if not pins.sizes and not pins.layers and mesh.micro_batches == 1:
        return None, None
    names = mesh.names
    labels = labels or (lambda label: label_dims(graph, rules, label))
    batch = labels("batch")
    context = labels("context") if {"context", "tensor"} & set(names) else {}
    stream = labels("stream") if pins.sequence_parallel is False and "tensor" in names else {}
    _check_recipe(pins, graph, mesh, context)
    weighted = _weighted(graph, rules) if "tensor" in names else {}
    _check_weights(pins, mesh, rules, weighted)
    _check_layers(pins, graph, rules, mesh)
    check_zero(pins.zero, graph)

    def labelled(node: Node, strategy: AxisStrategy, labels: Labels) -> bool:
        return (strategy.factor, strategy.outer) in labelled_parts(node, rules[node.name], labels)

    def has(node: Node, labels: Labels, size: int) -> bool:
        """Whether the operator can shard a labelled factor ``size`` ways."""
        rule = rules[node.name]
        return any(
            rule.sizes[factor] % (outer * size) == 0
            and factor not in rule.whole
            and (outer == 1 or rule.may_stride(factor))
            for factor, outer in labelled_parts(node, rule, labels)
        )

    def allow(node: Node, axis: int, strategy: AxisStrategy) -> bool:
        for glob, wanted in pins.layers.items():
            row = OPS.get(node.op)
            contracts = row is not None and row.flops is contraction_flops
            if contracts and names[axis] in wanted and fnmatch.fnmatchcase(node.path, glob):
                return str(strategy) == wanted[names[axis]]
        if names[axis] in (MICRO, *BATCH, "context"):
            along = context if names[axis] == "context" else batch
            if has(node, along, batch_ranks(mesh) if names[axis] in BATCH else mesh.axes[axis].size):
                return labelled(node, strategy, along) and (
                    names[axis] != MICRO or all(map(_micro_batched, strategy.inner))
                )
            return not strategy.factor
        if names[axis] == "tensor":
            streams = labelled_parts(node, rules[node.name], stream) if node.name not in weighted else ()
            if labelled(node, strategy, batch) or any(strategy.factor == factor for factor, _ in streams):
                return False
            if labelled(node, strategy, context):
                return pins.sequence_parallel is not False and node.name not in weighted
            if pins.sequence_parallel and node.op in _NORMS and has(node, context, mesh.axes[axis].size):
                return False
            if node.name in weighted:
                return strategy.factor in weighted[node.name]
        return True

    def allow_leaf(node: Node, layout: Layout) -> bool:
        if node.op == "input":
            wanted = {**dict.fromkeys(BATCH, Shard(0)), "context": R, "tensor": R}
            shape = node.results[0].shape
            return all(
                name not in wanted or t == (wanted[name] if shape and shape[0] > 1 else R)
                for name, t in zip(names, layout, strict=True)
            )
        if node.op != "param":
            return True
        way = way_of(pins.zero, node.target or node.name)
        for name, local_type in zip(names, layout, strict=True):
            if name in ("replicate", "context") and local_type != I:
                return False
            if name == "data" and way is not None and (local_type == I) != (way == 0):
                return False
        return True

    return allow, allow_leaf


def _micro_batched(call: Inner) -> bool:
    """Whether an operator can run on one micro-batch after the other: all it asks of the others is one number, such as
    how many tokens a loss is averaged over, which is known before the step.
    """
    return call.kind == "all_reduce" and not call.factors and call.count == 1


_NORMS = frozenset(
    {"aten.layer_norm.default", "aten.rms_norm.default", "aten.native_layer_norm.default", "aten.mean.dim"}
)


def _normed(rule: Rule) -> set[str]:
    """The factors that a norm runs over."""
    kept = {factor for dim in rule.results[0] for factor in dim} - rule.whole
    return set(rule.sizes) - kept


def _weighted(graph: Graph, rules: Mapping[str, Rule]) -> dict[str, frozenset[str]]:
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
        embeds = node.op == "aten.embedding.default"
        if row.flops is not contraction_flops and not embeds:
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


def _check_recipe(pins: Pins, graph: Graph, mesh: Mesh, context: Labels) -> None:
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    parts = batch_ranks(mesh)
    pinned = f"the product of pins {' and '.join(map(repr, BATCH))}" if "replicate" in sizes else "pin 'data'"
    for leaf in graph.leaves:
        shape = leaf.results[0].shape
        if leaf.op == "input" and shape and shape[0] > 1 and shape[0] % parts:
            raise PinError(
                f"{pinned} is {parts} but input {leaf.target!r} has a batch of {shape[0]}, which it does not divide: "
                "change the pin or the global batch"
            )
    if sizes.get("context", 1) > 1:
        lengths = {
            graph.type_of(ref).shape[dim] for ref, dims in context.items() for dim, strips in dims if strips == 1
        }
        if not lengths:
            raise PinError(
                "pin 'context' shards the query sequence of F.scaled_dot_product_attention, and the model never calls "
                "it: write attention with it (Transformers: attn_implementation='sdpa'), or leave out 'context'"
            )
        if all(length % sizes["context"] for length in lengths):
            raise PinError(
                f"pin 'context' is {sizes['context']} but the sequence has length {min(lengths)}, which it does not "
                "divide: change the pin or pad the sequence"
            )


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
        products = [node for node in nodes if (row := OPS.get(node.op)) and row.flops is contraction_flops]
        if not products:
            raise PinError(f"pin 'layers': {glob!r} holds no matrix product, and only these can be pinned")
        for name, strategy in wanted.items():
            if name not in mesh.names:
                if pins.sizes or name not in FREE_AXES:
                    raise PinError(
                        f"pin 'layers', {glob!r}: there is no axis {name!r}; the mesh has {', '.join(mesh.names)}"
                        + (f": pin {name!r} above 1 too" if name in SIZES else "")
                    )
                continue
            for node in products:
                _check_strategy(glob, rules[node.name], mesh.axes[mesh.names.index(name)], strategy)


def _check_strategy(glob: str, rule: Rule, axis: Axis, strategy: object) -> None:
    factor = str(strategy).partition("/")[0]
    if factor in ("invariant", "replicate", "partial"):
        return
    sizes = {name: size for name, size in rule.sizes.items() if name not in rule.whole}
    if factor not in sizes:
        known = ", ".join(f"{name} ({size})" for name, size in sizes.items())
        raise PinError(
            f"pin 'layers', {glob!r}, axis {axis.name!r}: there is no strategy {strategy!r}; shard one of the factors "
            f"{known}, or pin 'invariant' or 'replicate'"
        )
    if sizes[factor] % axis.size:
        raise PinError(
            f"pin 'layers', {glob!r}, axis {axis.name!r}: {strategy} has size {sizes[factor]}, which {axis.size} ranks "
            "do not divide: pin another factor, or another size of the axis"
        )


def _check_weights(pins: Pins, mesh: Mesh, rules: Mapping[str, Rule], weighted: Mapping[str, frozenset[str]]) -> None:
    """Refuse recipes that would shard no weight at all."""
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    if ways_of(pins.zero) & {1, 2, 3} and mesh.size > 1 and "data" not in mesh.names:
        raise PinError(
            f"pin 'zero' is {pins.zero}; it says how the data axis stores parameters, and the other pins leave no data "
            "axis: leave out or lower one of them, or 'zero'"
        )
    tensor = sizes.get("tensor", 1)
    found = sorted({rules[name].sizes[factor] for name, factors in weighted.items() for factor in factors})
    if tensor > 1 and not any(size % tensor == 0 for size in found):
        shown = f"the sizes of the weights, {', '.join(map(str, found))}" if found else "no weight: the model has none"
        raise PinError(f"pin 'tensor' is {tensor}, which divides none of {shown}: pin another size")
