"""Simulates backward: the nodes that autograd runs, last made first, and the gradients that arrive."""

from __future__ import annotations

from planner.analysis.memory.autograd_tape import Tape, Target, Value
from planner.analysis.memory.skip import UnevenError, run_skipped_backward
from planner.analysis.memory.storages import Storage, is_before
from planner.analysis.memory.walk import Walk


def run_backward(walk: Walk, roots: list[Value]) -> None:
    """Run backward from these values."""
    heap = walk.heap
    starts = [(*value.made, value.bytes) for value in roots if value.made is not None]
    reached = reached_from(walk, [tape for tape, *_ in starts])
    for tape, result, size in starts:
        tape.incoming[result] = heap.new("gradient of the loss", "temporary", size)
    skipped = list(walk.kept)
    for tape in reversed([tape for tape in walk.tapes if tape in reached]):
        while skipped and not is_before(tape.block) and tape.block < skipped[-1].end:
            run_skipped_backward(walk, skipped.pop())
        run_node(walk, tape)
    for skip in reversed(skipped):
        run_skipped_backward(walk, skip)
    receive(walk)
    for storage in walk.using:
        heap.drop(storage)


def use(walk: Walk, tape: Tape) -> None:
    """Parameters are updated by the gradients of the block before, and by these if they are there."""
    gradients = [*filter(None, tape.incoming)]
    let_go = walk.using if tape.awaits_reduction else [*walk.using, *gradients]
    for storage in let_go:
        walk.heap.drop(storage)
    walk.using = gradients if tape.awaits_reduction else []


def receive(walk: Walk) -> None:
    """What was sent to be reduced is no longer needed."""
    if walk.sent is not None:
        walk.heap.drop(walk.sent)
        walk.sent = None


def reached_from(walk: Walk, roots: list[Tape]) -> dict[Tape, None]:
    """The nodes that backward runs; what others saved is let go."""
    reached = _reached_from(roots)
    for tape in walk.tapes:
        if tape not in reached:
            if walk.skips and (tape.saved or tape.again):
                raise UnevenError
            for storage in tape.saved:
                walk.heap.drop(storage)
            for frame, storage in tape.again:
                frame.uses[storage] -= 1
    return reached


def _reached_from(roots: list[Tape]) -> dict[Tape, None]:
    found = dict.fromkeys(roots)
    waiting = list(found)
    while waiting:
        for target in waiting.pop().targets:
            if target.tape not in found:
                found[target.tape] = None
                waiting.append(target.tape)
    return found


def run_node(walk: Walk, tape: Tape) -> None:
    """Run one node of backward."""
    heap = walk.heap
    if tape.keeps:
        return
    heap.enter("backward", tape.block)
    heap.moment(f"backward {tape.name}")
    if tape.uses:
        use(walk, tape)
        return
    saved = [*tape.saved, *(frame.take(heap, storage) for frame, storage in tape.again)]
    if tape.sends:
        receive(walk)
    works = heap.new(tape.name, "temporary", tape.works)
    if tape.sends:
        walk.sent = heap.hold(works)
    size = 0 if all(target.tape.leaves for target in tape.targets) else tape.together
    together = heap.hold(tape.bucket) if tape.bucket else heap.new("gradients", "gradients", size)
    arriving = []
    for target in tape.targets:
        came = tape.incoming[target.of]
        if tape.together:
            storage = heap.hold(together)
        elif target.passes and came is not None:
            storage = heap.hold(came)
        else:
            stays = target.tape.keeps or target.tape.uses or target.tape.together
            size = 0 if target.tape.leaves else target.bytes
            storage = heap.new(f"gradient in {tape.name}", "gradients" if stays else "temporary", size)
        arriving.append((target, storage))
    for storage in (together, works, *filter(None, tape.incoming), *saved):
        heap.drop(storage)
    for target, storage in arriving:
        _arrive(walk, target, storage)
    for target in tape.targets:
        if target.tape.awaits:
            target.tape.awaits -= 1
            if not target.tape.awaits:
                heap.settle(target.tape.incoming[target.result], target.tape.name)


def _arrive(walk: Walk, target: Target, storage: Storage) -> None:
    """Add a gradient to what has arrived: in place where nobody else holds that, and it is no view."""
    heap, tape, number = walk.heap, target.tape, target.result
    present = tape.incoming[number]
    if present is None:
        tape.incoming[number] = storage
        if target.is_view:
            tape.views.add(number)
    elif present.holders == 1 and number not in tape.views:
        heap.drop(storage)
    else:
        tape.incoming[number] = heap.new(tape.name, "temporary", storage.held.bytes)
        tape.views.discard(number)
        heap.drop(present)
        heap.drop(storage)
