"""Simulates one training step from its inputs through forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from planner.analysis.memory.autograd_tape import Tape, Value
from planner.analysis.memory.backward import run_backward
from planner.analysis.memory.forward import output_at, reshard_shared, run
from planner.analysis.memory.gather import bucket_bytes, following_of, keeps_gradients
from planner.analysis.memory.offloadable import Saves, first_of
from planner.analysis.memory.readers import enters_before, readers_of
from planner.analysis.memory.skip import ENDS, UnevenError, fill_in, skip_over, skipped_leaves
from planner.analysis.memory.steady_state import Skip, Wiring, skips
from planner.analysis.memory.storages import BEFORE
from planner.analysis.memory.usage import Usage
from planner.analysis.memory.walk import Walk
from planner.formulation.assignment import Assignment
from planner.formulation.decision_names import called, state_of
from planner.formulation.resharding import local_bytes
from planner.formulation.stage_boundaries import crossing
from planner.ir.folding import Instance
from planner.ir.graph import Ref


def usage(assignment: Assignment, blocks: range | None = None) -> Usage:
    """Follow one training step of an assignment on the rank with the highest peak, with micro-batches that of one
    micro-batch.

    Args:
        blocks: the numbers of those of a stage, which takes values from the stage before and hands others on; left out:
            all.
    """
    wiring = Wiring(assignment)
    if assignment.space.training.activations:
        return _follow_leaving(Walk(wiring, [], blocks))
    found = [each for each in skips(wiring, ENDS) if blocks is None or _is_inside(each, blocks)]
    try:
        return follow(Walk(wiring, found, blocks))
    except UnevenError:
        return follow(Walk(wiring, [], blocks))


def _is_inside(skip: Skip, blocks: range) -> bool:
    """Whether blocks have a run with its ends."""
    return blocks.start <= skip.start - ENDS * skip.period and skip.end + ENDS * skip.period <= blocks.stop


def follow(walk: Walk) -> Usage:
    """Follow a step from its leaves to the last gradient.

    Raises:
        UnevenError: instances that others stand for do not do the same.
    """
    heap, walk.following = walk.heap, following_of(walk)
    values = _leaves_of(walk)
    walk.parts = {ref: value.storage for ref, value in values.items()}
    leaf_bytes = heap.total
    heap.moment("forward")
    if keeps_gradients(walk.space):
        walk.buckets = heap.new("gradients", "gradients", bucket_bytes(walk, values))
    values = {ref: reshard_shared(walk, ref, value) for ref, value in values.items()}
    received, sent = _received_by(walk), _crossing_after(walk, walk.blocks.stop - 1)
    if walk.saves is None:  # else what saves them holds them, once the program has returned
        for value in received.values():
            heap.hold(value.storage)
    values.update(received)
    dropped = _read_last(walk, sent, received)
    skips = {skip.start: skip for skip in walk.skips}
    number = walk.blocks.start
    while number < walk.blocks.stop:
        if number in skips:
            skip_over(walk, skips[number], values)
            number = skips[number].end
        walk.number = number
        heap.enter("forward", number)
        instance = walk.instances[number]
        inputs, before = {ref: values[ref] for ref in instance.block.inputs}, len(walk.tapes)
        nth = walk.space.decision_graph.blocks.numbers[number][1]
        values.update(run(walk, instance, walk.assignment.recompute.level(instance.kind, nth), inputs))
        for ref in dropped.get(number, ()):
            if ref in values:
                heap.drop(values.pop(ref).storage)
        if walk.saves is not None:
            _note_saved(walk, walk.saves, instance, inputs, walk.tapes[before:])
        number += 1
    walk.number = BEFORE
    leaving = {at: output_at(walk, at, values) for at in _leaving_here(walk)}
    starts = [values[ref] for ref in sent] + [leaving[at] for at in walk.graph.roots if at in leaving]
    for value in (*values.values(), *leaving.values()):
        heap.drop(value.storage)
    kept, saved_bytes = tuple(each.held for each in heap.alive), heap.total - leaf_bytes
    run_backward(walk, starts)
    totals = heap.totals()
    for skip in walk.skips:
        fill_in(walk, skip, totals)
    alive = sorted(heap.at_peak(), key=lambda held: -held.bytes)
    left = tuple(each.held for each in heap.alive)
    return Usage(
        heap.peak,
        heap.peak_at,
        tuple(heap.moments),
        tuple(alive),
        kept,
        left,
        heap.by_block,
        leaf_bytes,
        saved_bytes,
        walk.read_again,
    )


def _follow_leaving(walk: Walk) -> Usage:
    """:meth:`usage`, and what of all that is saved may leave; ``by_block`` and ``saved_bytes`` are beside that."""
    found = follow(walk)
    assert walk.saves is not None
    saved = first_of(walk.saves.found, walk.space.training.activations)
    away = {number: each.left for each in saved for number in each.storages}
    beside = follow(Walk(walk.wiring, [], walk.blocks, away))
    return replace(found, by_block=beside.by_block, saved_bytes=beside.saved_bytes, saved=saved)


def _note_saved(
    walk: Walk, saves: Saves, instance: Instance, inputs: Mapping[Ref, Value], tapes: Iterable[Tape]
) -> None:
    """Note what an instance, whose forward is over, has saved."""
    own = [*(storage for tape in tapes for storage in tape.saved), *walk.holding]
    saves.add(walk.number, own)
    made = (Ref(node.name, at) for node in instance.block.nodes for at, t in enumerate(node.results) if t.grad)
    if any(ref not in walk.graph.differentiated for ref in made):
        saves.stay((*own, *(value.storage for value in inputs.values())))
    saves.left(walk.number)


def _crossing_after(walk: Walk, number: int) -> list[Ref]:
    """The values that go on from a stage whose last block this is."""
    return [] if number < 0 or number + 1 == len(walk.instances) else crossing(walk.space.folded)[number]


def _received_by(walk: Walk) -> dict[Ref, Value]:
    """What comes from the stage before, held; its gradients stay until they are sent back."""
    found = {}
    for ref in _crossing_after(walk, walk.blocks.start - 1):
        size = local_bytes(walk.graph.type_of(ref), walk.assignment.consumer_layout(ref), walk.mesh)
        made = None
        if ref in walk.graph.differentiated:
            tape = walk.tape(ref.node, 1)
            tape.keeps = True
            made = (tape, 0)
        found[ref] = Value(walk.heap.new(walk.called(ref), "activations", size), size, made)
    return found


def _leaving_here(walk: Walk) -> list[int]:
    """The positions of the outputs that leave the model here; those that no block makes, with the last."""
    made = {ref for number in walk.blocks for ref in walk.instances[number].block.outputs}
    is_last = walk.blocks.stop == len(walk.instances)
    return [at for at, ref in enumerate(walk.space.leaving) if ref in made or (is_last and ref not in walk.wiring.made)]


def _read_last(walk: Walk, sent: Iterable[Ref], received: Iterable[Ref]) -> dict[int, list[Ref]]:
    """The values that each block is the last to read, those left out that something else needs; of what a stage takes
    that is its last block, whoever reads it.
    """
    leaving, taken = {*walk.space.leaving, *sent}, {*received}
    found: dict[int, list[Ref]] = {}
    for ref, number in walk.wiring.last.items():
        if ref not in leaving:
            found.setdefault(walk.blocks.stop - 1 if ref in taken else number, []).append(ref)
    return found


def _leaves_of(walk: Walk) -> dict[Ref, Value]:
    values = {}
    readers = readers_of(walk.assignment) if walk.is_away else {}
    skipped, read = skipped_leaves(walk), _read_here(walk)
    for name in walk.graph.leaves.names:
        times = skipped.get(name, 1)
        if not times or (read is not None and name not in read):
            continue
        leaf = walk.graph.by_name[name]
        tensor, layout = leaf.results[0], walk.assignment.produced(Ref(leaf.name))
        size = local_bytes(tensor, layout, walk.mesh)
        use = "parameters" if leaf.op in ("param", "buffer") else "activations"
        is_away = walk.is_away and leaf.op == "param"
        storage = walk.heap.new(called(leaf), use, 0 if is_away else size, times)
        walk.leaves[storage] = leaf.name
        made = None
        if leaf.op == "param" and tensor.grad:
            state = size // tensor.item_bytes * walk.space.training.optimizer_bytes_per_element
            walk.heap.new(state_of(leaf), "optimizer", 0 if is_away else state, times)
            tape = walk.tape(leaf.target, 1)
            own = is_away and not enters_before(walk.assignment, leaf.name, readers.get(leaf.name, ()))
            tape.keeps, tape.leaves = True, own
            made = (tape, 0)
        if leaf.name not in skipped:
            values[Ref(leaf.name)] = Value(walk.heap.hold(storage), size, made)
    return values


def _read_here(walk: Walk) -> set[str] | None:
    """The leaves that a stage reads; ``None``: it is the only one."""
    if len(walk.blocks) == len(walk.instances):
        return None
    refs = [ref for number in walk.blocks for ref in walk.instances[number].block.inputs]
    return {ref.node for ref in (*refs, *(walk.space.leaving[at] for at in _leaving_here(walk)))}
