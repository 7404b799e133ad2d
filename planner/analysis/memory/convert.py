"""Simulates resharding: what is held while a value goes from one layout to another."""

from __future__ import annotations

from dataclasses import replace

from planner.analysis.memory.autograd_tape import Target, Value
from planner.analysis.memory.walk import Walk
from planner.formulation.resharding import ReshardStep, Route, local_bytes
from planner.ir.graph import Ref, TensorType
from planner.ir.layout import MICRO, Shard


def convert(walk: Walk, value: Value, tensor: TensorType, route: Route, ref: Ref, keeps: bool = False) -> Value:
    """``value`` after a route; the result is held once more. ``keeps``: it is not converted again in backward."""
    heap = walk.heap
    heap.hold(value.storage)
    gathered = walk.graph.by_name[ref.node].op == "param"
    for step in route:
        if walk.mesh.axes[step.axis].size == 1:
            continue
        if walk.mesh.axes[step.axis].name == MICRO:
            value = _of_this_micro_batch(walk, value, tensor, step, f"{walk.called(ref)} as {step.dst}")
            continue
        following = _take_step(walk, value, tensor, step, f"{walk.called(ref)} as {step.dst}", gathered)
        if walk.frame is not None and following.storage is not value.storage:
            walk.frame.makes(
                heap, following.storage, (value.storage,), keeps, _scratch_bytes(walk, step, value, tensor)
            )
        heap.drop(value.storage)
        value = following
    return value


def _of_this_micro_batch(walk: Walk, value: Value, tensor: TensorType, step: ReshardStep, name: str) -> Value:
    """A held value as one micro-batch sees it, a part of what is the same in all or the value itself, in its memory."""
    size = local_bytes(tensor, step.after, walk.mesh)
    if value.made is None or size == value.bytes:
        return replace(value, bytes=size)
    tape = walk.tape(name, 1)
    tape.targets = [Target(*value.made, value.bytes)]
    return Value(value.storage, size, (tape, 0))


def _take_step(walk: Walk, value: Value, tensor: TensorType, step: ReshardStep, name: str, gathered: bool) -> Value:
    heap = walk.heap
    size = local_bytes(tensor, step.after, walk.mesh)
    use = "gathered" if gathered and size > value.bytes else "activations"
    if step.rule in ("I>R", "R>I"):
        storage = heap.hold(value.storage)
    else:
        scratch = heap.new(name, "temporary", _scratch_bytes(walk, step, value, tensor))
        storage = heap.new(name, use, size)
        heap.drop(scratch)
    made = None
    if value.made is not None:
        tape = walk.tape(name, 1)
        tape.targets = [Target(*value.made, value.bytes, passes=step.rule in ("R>I", "P>I"))]
        made = (tape, 0)
    return Value(storage, size, made)


def _scratch_bytes(walk: Walk, step: ReshardStep, value: Value, tensor: TensorType) -> int:
    """What a step of a resharding needs besides: a shard of an inner dim is put in order before it is sent, or
    after it was received.
    """
    apart = [t for t in (step.src, step.dst) if isinstance(t, Shard) and (t.dim > 0 or t.outer > 1)]
    return max(local_bytes(tensor, step.after, walk.mesh), value.bytes) if apart else 0
