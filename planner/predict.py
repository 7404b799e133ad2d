"""Predict: what one step of an assignment will do — every collective, and where bytes and seconds go.

The collectives are enumerated as the rewrite emits them, call by call, so that a counter around
``torch.distributed`` must observe exactly the same. Seconds and bytes are those of the solver's
objective, by use: they add up to its step time and peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from planner.conversion import Collective, Route, local_bytes
from planner.fold import Instance
from planner.formulate import Assignment
from planner.graph import Ref
from planner.layout import Layout


@dataclass(frozen=True)
class Prediction:
    """One training step on the slowest rank, and the fullest.

    Attributes:
        step_time_s: seconds of the whole step.
        peak_bytes: bytes at the fullest moment.
        time_s: seconds by use: ``compute``, ``communication`` (of activations, and gathering parameters),
            ``gradients`` (their reduction, as far as backward does not hide it), ``optimizer``.
        memory_bytes: bytes by use: ``parameters``, ``gradients``, ``optimizer``, ``gathered`` (parameters that
            are used in a larger layout than they are stored in), ``activations`` (saved for backward, and
            inputs), ``temporary`` (the largest operator's own).
        collectives: each distinct call and how often a step makes it.
    """

    step_time_s: float
    peak_bytes: int
    time_s: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    collectives: tuple[tuple[Collective, int], ...]


Calls = Counter[Collective]


def collectives(assignment: Assignment) -> Calls:
    """Every collective call of one forward and backward pass on one rank."""
    calls: Calls = Counter()
    for each in calls_by_block(assignment).values():
        calls.update(each)
    return calls


def calls_by_block(assignment: Assignment) -> dict[int | None, Calls]:
    """Distinct block -> its calls over all instances; ``None`` holds those of leaves and outputs."""
    space = assignment.space
    found: dict[int | None, Calls] = {None: Counter()}
    for instance in space.folded.instances:
        found.setdefault(instance.kind, Counter()).update(_block_calls(assignment, instance))
    for leaf in space.graph.leaves:
        if space.is_read(Ref(leaf.name)):
            found[None].update(_route_calls(assignment, Ref(leaf.name), assignment.relay_route(Ref(leaf.name))))
    for position, ref in enumerate(space.leaving):
        found[None].update(_route_calls(assignment, ref, assignment.output_route(position)))
    return found


def sorted_calls(calls: Mapping[Collective, int]) -> list[tuple[Collective, int]]:
    """Calls in a fixed order: backward before forward, by axis, kind and bytes."""
    return sorted(calls.items(), key=lambda item: (item[0].phase, item[0].axis, item[0].kind, item[0].bytes_in))


def _route_calls(assignment: Assignment, ref: Ref, route: Route) -> Calls:
    space = assignment.space
    return Counter(call for step in route for call in step.collectives(space.graph.type_of(ref), space.mesh))


def _block_calls(assignment: Assignment, instance: Instance) -> Calls:
    """Calls of one instance of a block: conversions of operands and results, local forms, and gradient sums.

    Gradients of parameters that are stored whole and used replicated are summed together, in one call per
    axis and dtype.
    """
    space = assignment.space
    graph, mesh = space.graph, space.mesh
    calls: Calls = Counter()
    sums: dict[tuple[tuple[int, ...], str], dict[Ref, int]] = {}
    for node in instance.block.nodes:
        for index in range(len(node.results)):
            ref = Ref(node.name, index)
            if space.is_read(ref):
                calls.update(_route_calls(assignment, ref, assignment.relay_route(ref)))
        seen: set[tuple[Ref, Layout]] = set()
        choice = assignment.choice(node)
        for position, ref in enumerate(node.inputs):
            if (ref, choice.operands[position]) in seen:
                continue
            seen.add((ref, choice.operands[position]))
            axes, tensor = assignment.summed_over(node, position), graph.type_of(ref)
            if axes:
                summed = sums.setdefault((axes, tensor.dtype), {})
                summed[ref] = local_bytes(tensor, choice.operands[position], mesh)
            else:
                calls.update(_route_calls(assignment, ref, assignment.operand_route(node, position)))
        differentiated = any(t.grad for t in node.results)
        for number, inner in choice.inner:
            if mesh.axes[number].size > 1 and (inner.phase == "forward" or differentiated):
                bytes_in = space.inner_bytes(space.rules[node.name], choice, inner)
                calls[Collective(inner.kind, mesh.axes[number].name, bytes_in, inner.phase)] += 1
    for (axes, _), sizes in sums.items():
        for number in axes:
            calls[Collective("all_reduce", mesh.axes[number].name, sum(sizes.values()), "backward")] += 1
    return calls


def predict(assignment: Assignment, step_time_s: float, peak_bytes: int) -> Prediction:
    """Break a step down by use; ``step_time_s`` and ``peak_bytes`` are the evaluation's."""
    space = assignment.space
    time = {"compute": 0.0, "communication": 0.0, "gradients": 0.0, "optimizer": 0.0}
    names = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporary")
    memory = dict.fromkeys(names, 0)
    cover = 0.0
    for node in space.graph.nodes:
        if node.is_leaf:
            layout = assignment.produced(Ref(node.name))
            seconds, held = space.storage(node, layout)
            stored = local_bytes(node.results[0], layout, space.mesh)
            time["optimizer"] += seconds
            trained = node.op == "param" and node.results[0].grad
            memory["parameters" if node.op in ("param", "buffer") else "activations"] += stored
            memory["gradients"] += stored if trained else 0
            memory["optimizer"] += held - 2 * stored if trained else 0
            continue
        work = space.work(node, assignment.choice(node))
        time["compute"] += work.forward_s + work.backward_s
        time["communication"] += work.inner_s
        cover += work.backward_s * space.overlap
        memory["activations"] += work.saved_bytes
        memory["temporary"] = max(memory["temporary"], work.transient_bytes)
    for ref, source, target in _conversions(assignment):
        table = space.table(ref)
        pair = table.index[source], table.index[target]
        time["communication"] += float(table.forward_s[pair])
        is_param = space.graph.by_name[ref.node].op == "param"
        time["gradients" if is_param else "communication"] += float(table.backward_s[pair])
        if is_param:
            before, after = (local_bytes(table.tensor, layout, space.mesh) for layout in (source, target))
            memory["gathered"] += max(0, after - before)
    time["gradients"] = max(0.0, time["gradients"] - cover)
    return Prediction(step_time_s, peak_bytes, time, memory, tuple(sorted_calls(collectives(assignment))))


def _conversions(assignment: Assignment) -> list[tuple[Ref, Layout, Layout]]:
    """Every conversion of the step: of results and leaves once made, of operands, of outputs."""
    space = assignment.space
    found: list[tuple[Ref, Layout, Layout]] = []
    for node in space.graph.nodes:
        results = [Ref(node.name, index) for index in range(len(node.results))]
        found += [(r, assignment.produced(r), assignment.delivered(r)) for r in results if space.relay_of(r)]
        seen: set[tuple[Ref, Layout]] = set()
        for position, ref in enumerate(node.inputs):
            wanted = assignment.choice(node).operands[position]
            if (ref, wanted) not in seen:
                seen.add((ref, wanted))
                found.append((ref, assignment.delivered(ref), wanted))
    for position, ref in enumerate(space.leaving):
        found.append((ref, assignment.delivered(ref), assignment.output_layout(position)))
    return [(ref, source, target) for ref, source, target in found if source != target]
