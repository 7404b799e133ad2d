"""Simulates forward: operators and blocks as they run, what they save for backward, and what is discarded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.analysis.memory.autograd_tape import Frame, Target, Value
from planner.analysis.memory.convert import convert
from planner.analysis.memory.gather import complete, gather, prefetch, sums_of
from planner.analysis.memory.readers import shares_of
from planner.analysis.memory.remat_demand import gathered_again
from planner.analysis.memory.storages import Storage
from planner.analysis.memory.walk import Walk
from planner.formulation.decision_names import called
from planner.formulation.remat.levels import Level
from planner.formulation.resharding import Route, local_bytes
from planner.ir.folding import Instance
from planner.ir.graph import Node, Ref, TensorType
from planner.ir.layout import MICRO, Shard
from planner.ops import OPS
from planner.ops.function import holds, works
from planner.ops.saved_tensors import SCORES, beside, is_exact, is_own, own_bytes, saved_tensors
from planner.ops.table import Saved


def _is_index(saved: Saved, types: Sequence[TensorType]) -> bool:
    """Whether what backward needs is an operand that only says where to read, such as the tokens of an embedding."""
    return saved.kind == "in" and "float" not in types[saved.place].dtype


def run(walk: Walk, instance: Instance, level: Level, inputs: dict[Ref, Value]) -> dict[Ref, Value]:
    """Run one instance at a level of recomputation."""
    walk.holding = []
    if level == "none":
        return _run_block(walk, instance, inputs)
    before = len(walk.tapes)
    walk.frame = Frame(instance.block, walk.assignment.again(instance.kind, level), walk.before)
    outputs = _run_block(walk, instance, inputs)
    walk.frame.discard(walk.heap, walk.tapes[before:])
    walk.holding = walk.frame.held
    if walk.frame.gathers and gathered_again(walk.assignment, instance, level):
        walk.before = walk.frame
    if walk.is_away:
        _note_reading(walk, walk.frame.held)
    walk.frame = None
    return outputs


def _run_block(walk: Walk, instance: Instance, inputs: dict[Ref, Value]) -> dict[Ref, Value]:
    """Run one instance; returns its outputs, each held once."""
    heap, block = walk.heap, instance.block
    frame = complete(walk, block, inputs)
    for value in frame.values():
        heap.hold(value.storage)
    last = {ref: i for i, node in enumerate(block.nodes) for ref in node.inputs}
    kept = set(block.outputs)
    ready = gather(walk, block, frame)
    for i, node in enumerate(block.nodes):
        heap.moment(f"forward {node.path or node.name}: {node.op}")
        for ref, value in _run_operator(walk, node, frame, ready).items():
            if ref in kept or ref in last:
                frame[ref] = value
            else:
                heap.drop(value.storage)
        for ref in dict.fromkeys(node.inputs):
            if last[ref] == i and ref not in kept:
                heap.drop(frame.pop(ref).storage)
                if ref in ready:
                    heap.drop(ready.pop(ref).storage)
    return {ref: frame[ref] for ref in block.outputs if ref in frame}


def _run_operator(walk: Walk, node: Node, frame: dict[Ref, Value], ready: dict[Ref, Value]) -> dict[Ref, Value]:
    """Convert the operands, make the results, remember what backward needs; returns the results, held."""
    heap, choice, types = walk.heap, walk.assignment.choice(node), walk.graph.input_types(node)
    converted: dict[tuple[Ref, object], Value] = {}
    operands = []
    for position, ref in enumerate(node.inputs):
        key = (ref, choice.operands[position])
        if key not in converted:
            gathered, route = _as_used(walk, node, position, ready)
            keeps = walk.frame is not None and position not in walk.frame.again.taken[walk.frame.at[node.name]]
            converted[key] = convert(walk, gathered or frame[ref], types[position], route, ref, keeps)
        operands.append(converted[key])
    results = _results_of(walk, node, types, operands)
    for value in converted.values():
        heap.drop(value.storage)
    resharded = {}
    for number, value in enumerate(results):
        ref = Ref(node.name, number)
        resharded[ref] = reshard_shared(walk, ref, value) if walk.space.is_read(ref) else value
    return resharded


def _as_used(walk: Walk, node: Node, position: int, ready: dict[Ref, Value]) -> tuple[Value | None, Route]:
    """A parameter that was gathered before, by its block or once a step, and what is left of an operand's way."""
    ref = node.inputs[position]
    if ref in ready:
        return ready[ref], ()
    layout = walk.assignment.choice(node).operands[position]
    used = walk.used.get((ref, layout))
    if used is None:
        return None, walk.assignment.operand_route(node, position)
    if not isinstance(layout[0], Shard):  # of micro-batches, which are the first axis
        return used, ()
    route = (*walk.assignment.shared_route(ref), *walk.assignment.operand_route(node, position))
    return used, tuple(step for step in route if walk.mesh.axes[step.axis].name == MICRO)


def _results_of(walk: Walk, node: Node, types: tuple[TensorType, ...], operands: list[Value]) -> list[Value]:
    heap, row, choice = walk.heap, OPS.get(node.op), walk.assignment.choice(node)
    sizes = [local_bytes(t, layout, walk.mesh) for t, layout in zip(node.results, choice.results, strict=True)]
    shares = shares_of(node)
    storages = [
        heap.hold(operands[shared].storage) if shared >= 0 else heap.new(called(node), "activations", size)
        for shared, size in zip(shares, sizes, strict=True)
    ]
    if walk.frame is not None:
        at, sources = walk.frame.at[node.name], walk.frame.again.sources
        for index, (storage, shared) in enumerate(zip(storages, shares, strict=True)):
            if shared < 0:
                operands_ = (value.storage for value in operands)
                walk.frame.makes(heap, storage, operands_, keeps=(at, index) in sources)
    flows = [tensor.grad and Ref(node.name, i) in walk.graph.differentiated for i, tensor in enumerate(node.results)]
    if not any(flows):
        return [Value(s, size) for s, size in zip(storages, sizes, strict=True)]
    tape = walk.tape(f"{node.path or node.name}: {node.op}", len(sizes))
    on_cpu, tensors_bytes = walk.space.cost.cluster.on_cpu, [*(value.bytes for value in operands), *sizes]
    share = walk.space.share(choice)
    saves, needs = saved_tensors(node, types, on_cpu, share), beside(node, types, tensors_bytes, on_cpu, share)
    tensors = {Saved("in", i): value.storage for i, value in enumerate(operands)}
    if walk.is_away and not all(
        _is_index(saved, types) for saved in (*saves, *holds(node))
    ):  # then autograd saves whatever it computes with
        _note_reading(walk, tensors.values())
    tensors |= {Saved("out", i): storage for i, storage in enumerate(storages)}
    for saved in saves:
        if is_own(saved):
            before = len(tape.saved)
            size = own_bytes(saved, node, types, tensors_bytes, on_cpu, share)
            tape.saved.append(heap.new(f"what {called(node)} keeps", "activations", size))
            if walk.frame is not None:
                copies = operands if saved == SCORES and size and not is_exact(saved, node) else ()
                copied_bytes = sum(value.bytes for value in copies if walk.frame.is_held_besides(value.storage))
                if walk.frame.at[node.name] in walk.frame.again.drawing:
                    read = [value.storage for value in operands]
                    walk.frame.draws(heap, tape.saved[-1], read, storages[0], copied_bytes)
                else:  # the copies stay, and the operands are there for what is recomputed
                    tape.saved.append(heap.new(f"copies for {called(node)}", "activations", copied_bytes))
            if walk.saves is not None and not is_exact(saved, node):
                copied = [value.storage for value in operands] if saved == SCORES and size else []
                walk.saves.stay((*tape.saved[before:], *copied))
        elif saved in tensors:
            tape.saved.append(heap.hold(tensors[saved]))
    for saved in holds(node):
        tape.saved.append(heap.hold(tensors[saved]))
        tape.holds.append(tensors[saved])
        if walk.saves is not None:
            walk.saves.stay([tensors[saved]])
    if needs.forward:
        heap.drop(heap.new(called(node), "temporary", needs.forward))
    more = row.works + works(node) if row is not None else 0
    tape.works = needs.backward + (more * max(operands[0].bytes, sizes[0]) if operands else 0)
    if walk.space.scaling(node, choice) is not None:  # both operands of a product, in a byte for two
        x, w = (value.bytes // 2 for value in operands[:2])
        heap.drop(heap.new(called(node), "temporary", x + w))
        tape.works += sizes[0] // 2 + max(x * types[1].grad, w * types[0].grad)
    passes = row.passes if row is not None else ()
    for i, (value, tensor) in enumerate(zip(operands, types, strict=True)):
        if value.made is not None and tensor.grad:
            same = value.bytes == sizes[0] and tensor.dtype == node.results[0].dtype and not saves
            is_view = row is not None and i in (row.passes if row.view else row.views)
            tape.targets.append(Target(*value.made, value.bytes, passes=i in passes and same, is_view=is_view))
    return [
        Value(s, size, (tape, i) if flow else None)
        for i, (s, size, flow) in enumerate(zip(storages, sizes, flows, strict=True))
    ]


def reshard_shared(walk: Walk, ref: Ref, value: Value) -> Value:
    """A held value, converted to the layout in which its readers find it; held."""
    sums = sums_of(walk.assignment, ref)
    for step in sums:
        (value,) = prefetch(walk, [value], {ref: (step,)}, (step,))
    if sums:
        return value
    route = walk.assignment.shared_route(ref)
    keeps = walk.frame is not None and (walk.frame.at[ref.node], ref.index) not in walk.frame.again.delivered
    result = convert(walk, value, walk.graph.type_of(ref), route, ref, keeps)
    walk.heap.drop(value.storage)
    return result


def output_at(walk: Walk, position: int, values: dict[Ref, Value]) -> Value:
    """An output of the model in the layout in which it leaves; held once more."""
    ref = walk.space.leaving[position]
    return convert(walk, values[ref], walk.graph.type_of(ref), walk.assignment.output_route(position), ref)


def _note_reading(walk: Walk, storages: Iterable[Storage]) -> None:
    """Note that backward of this block reads the memory of leaves among these."""
    names = {walk.leaves[each] for each in storages if each in walk.leaves}
    walk.read_again[walk.number] = walk.read_again.get(walk.number, frozenset()) | names
