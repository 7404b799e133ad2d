"""Predict: what one step of an assignment will do — every collective, and where bytes and seconds go.

The collectives are enumerated as the rewrite emits them, call by call, so that a counter around
``torch.distributed`` must observe exactly the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from planner.conversion import Collective, Route, local_bytes
from planner.formulate import Assignment
from planner.graph import Ref


@dataclass(frozen=True)
class Prediction:
    """One training step on the slowest rank, and the fullest.

    Attributes:
        step_time_s: seconds of the whole step.
        peak_bytes: bytes at the fullest moment.
        time_s: seconds by use: ``compute``, ``communication``, ``gradients`` (exposed), ``optimizer``.
        memory_bytes: bytes by use: ``parameters``, ``gradients``, ``optimizer``, ``activations``, ``temporary``.
        collectives: each distinct call and how often a step makes it.
    """

    step_time_s: float
    peak_bytes: int
    time_s: dict[str, float]
    memory_bytes: dict[str, int]
    collectives: tuple[tuple[Collective, int], ...]


def collectives(assignment: Assignment) -> Counter[Collective]:
    """Every collective call of one forward and backward pass on one rank."""
    space = assignment.space
    graph, mesh = space.graph, space.mesh
    calls: Counter[Collective] = Counter()

    def add(ref: Ref, route: Route) -> None:
        for step in route:
            calls.update(step.collectives(graph.type_of(ref), mesh))

    for node in graph.nodes:
        for index in range(len(node.results)):
            ref = Ref(node.name, index)
            if space.is_read(ref):
                add(ref, assignment.relay_route(ref))
    for position, ref in enumerate(space.leaving):
        add(ref, assignment.output_route(position))
    for instance in space.folded.instances:
        sums: dict[tuple[tuple[int, ...], str], dict[Ref, int]] = {}
        for node in instance.block.nodes:
            seen: set[tuple[Ref, object]] = set()
            choice = assignment.choice(node)
            for position, ref in enumerate(node.inputs):
                if (ref, choice.operands[position]) in seen:
                    continue
                seen.add((ref, choice.operands[position]))
                axes = assignment.summed_over(node, position)
                if axes:
                    tensor = graph.type_of(ref)
                    sums.setdefault((axes, tensor.dtype), {})[ref] = local_bytes(
                        tensor, choice.operands[position], mesh
                    )
                else:
                    add(ref, assignment.operand_route(node, position))
            differentiated = any(t.grad for t in node.results)
            for axis, inner in choice.inner:
                if mesh.axes[axis].size > 1 and (inner.phase == "forward" or differentiated):
                    bytes_in = space.inner_bytes(space.rules[node.name], choice, inner)
                    calls[Collective(inner.kind, mesh.axes[axis].name, bytes_in, inner.phase)] += 1
        for (axes, _), sizes in sums.items():
            for axis in axes:
                calls[Collective("all_reduce", mesh.axes[axis].name, sum(sizes.values()), "backward")] += 1
    return calls


def predict(assignment: Assignment, step_time_s: float, peak_bytes: int) -> Prediction:
    """Break a step down by use; ``step_time_s`` and ``peak_bytes`` are the evaluation's."""
    space = assignment.space
    compute, communication, optimizer = 0.0, 0.0, 0.0
    memory = {"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0, "temporary": 0}
    for node in space.graph.nodes:
        if node.is_leaf:
            layout = assignment.produced(Ref(node.name))
            seconds, held = space.storage(node, layout)
            stored = local_bytes(node.results[0], layout, space.mesh)
            optimizer += seconds
            if node.op == "param" and node.results[0].grad:
                memory["parameters"] += stored
                memory["gradients"] += stored
                memory["optimizer"] += held - 2 * stored
            else:
                memory["activations"] += stored
            continue
        work = space.work(node, assignment.choice(node))
        compute += work.forward_s + work.backward_s
        communication += work.inner_s
        memory["activations"] += work.saved_bytes
        memory["temporary"] = max(memory["temporary"], work.transient_bytes)
    accounted = sum(memory.values())
    memory["activations"] += max(0, peak_bytes - accounted)
    communication = max(communication, step_time_s - compute - optimizer)
    calls = sorted(
        collectives(assignment).items(), key=lambda item: (item[0].phase, item[0].axis, item[0].kind, item[0].bytes_in)
    )
    return Prediction(
        step_time_s,
        peak_bytes,
        {"compute": compute, "communication": communication, "optimizer": optimizer},
        memory,
        tuple(calls),
    )
