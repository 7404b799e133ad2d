"""Simulates parameter all-gathers and gradient reductions, block by block and prefetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

from planner.analysis.memory.autograd_tape import Target, Value
from planner.analysis.memory.storages import Storage
from planner.analysis.memory.walk import Walk
from planner.formulation.assignment import Assignment, GatherBucket
from planner.formulation.resharding import ReshardStep, local_bytes
from planner.formulation.search_space import Space
from planner.ir.folding import Block
from planner.ir.graph import Ref
from planner.ir.layout import MICRO, Shard


def _are_parameters(values: Iterable[Value]) -> bool:
    """Whether gradients of these values are those of parameters."""
    return all(value.made[0].keeps or value.made[0].uses for value in values if value.made)


def keeps_gradients(space: Space) -> bool:
    """Whether sums that leave as gradients lie in memory that is there throughout a step in one piece; see
    autopar/runtime/host/gradient_buckets.py.
    """
    return space.cost.cluster.on_cpu and space.unsharding.overlaps_reduce and not space.training.updates_on_device


def bucket_bytes(walk: Walk, values: Mapping[Ref, Value]) -> int:
    """Bytes of the sums that leave as gradients of parameters, whose memory the host keeps for the next step."""
    times = Counter(range(len(walk.instances)))
    for skip in walk.skips:
        times.subtract(range(skip.start, skip.end))
        times.update(dict.fromkeys(range(skip.start - skip.period, skip.start), skip.times))
    found = sum(value.bytes for ref, value in values.items() if value.made and sums_of(walk.assignment, ref))
    for number in +times:
        refs = summed_by(walk.assignment, walk.instances[number].block)
        found += times[number] * sum(values[ref].bytes for ref in refs if values[ref].made)
    return found


def summed_by(assignment: Assignment, block: Block) -> list[Ref]:
    """The parameters of a block whose gradients are summed over ranks as they are stored."""
    found: list[Ref] = []
    for bucket in assignment.gather_buckets(block):
        steps = [step for step in next(iter(bucket.values())) if _crosses(assignment, step)]  # like those of the others
        found += bucket if steps and steps[0].rule == "I>R" else ()
    return found


def sums_of(assignment: Assignment, ref: Ref) -> list[ReshardStep]:
    """The steps by which a parameter reaches its several readers, if its gradient is only summed."""
    route = assignment.shared_route(ref) if assignment.only_sums_gradient(ref) else ()
    return [step for step in route if _crosses(assignment, step)]


def _crosses(assignment: Assignment, step: ReshardStep) -> bool:
    """Whether a step crosses ranks."""
    axis = assignment.space.mesh.axes[step.axis]
    return axis.size > 1 and axis.name != MICRO


def gather(walk: Walk, block: Block, frame: dict[Ref, Value]) -> dict[Ref, Value]:
    """Parameters that are gathered, and whose gradients are reduced, together: an autograd node per axis; held."""
    ready: dict[Ref, Value] = {}
    if walk.used:
        return ready
    ahead = walk.assignment.ahead(block)
    for number, bucket in enumerate(walk.assignment.gather_buckets(block)):
        current = [frame[ref] for ref in bucket]
        for value in current:
            walk.heap.hold(value.storage)
        once = walk.assignment.summed_together(bucket)  # not in a micro-batch
        for place, steps in enumerate(zip(*bucket.values(), strict=True)):
            if place >= once and _crosses(walk.assignment, steps[0]):
                is_ahead = place == ahead.get(number)
                current = prefetch(walk, current, bucket, steps, number if is_ahead else None)
        ready.update(zip(bucket, current, strict=True))
    return ready


def prefetch(
    walk: Walk, values: list[Value], bucket: GatherBucket, steps: tuple[ReshardStep, ...], ahead: int | None = None
) -> list[Value]:
    """The same held values after one step, held in their place.

    Args:
        ahead: the number of the bucket, if this step is perhaps underway.
    """
    types = [walk.graph.type_of(ref) for ref in bucket]
    is_sum = steps[0].rule == "I>R"
    tape = walk.tape("sum of gradients" if is_sum else "gathering", len(values))
    tape.together = sum(value.bytes for value in values if value.made)
    tape.bucket = walk.buckets if is_sum and _are_parameters(values) else None
    tape.targets = [Target(*value.made, value.bytes) for value in values if value.made]
    made = [(tape, number) if value.made else None for number, value in enumerate(values)]
    widening = max(walk.space.widening(ref) for ref in bucket)
    tape.sends = (widening > 1 or not is_sum) and not walk.is_away and _are_parameters(values)
    tape.works = tape.together * widening if widening > 1 else 0
    if is_sum:
        return [replace(value, made=each) for value, each in zip(values, made, strict=True)]
    sizes = [local_bytes(tensor, step.after, walk.mesh) for tensor, step in zip(types, steps, strict=True)]
    names = [f"gathered {walk.called(ref)}" for ref in bucket]
    tape.works += widening * sum(size for size, value in zip(sizes, values, strict=True) if value.made)
    storages = _gather(walk, [value.storage for value in values], names, sizes, steps, ahead)
    return [Value(*each) for each in zip(storages, sizes, made, strict=True)]


def complete(walk: Walk, block: Block, frame: Mapping[Ref, Value]) -> dict[Ref, Value]:
    """What a block takes, with a node whose backward uses the gradients of what this block alone reads."""
    refs = walk.alone.get(walk.number, ())
    tape = walk.tape("update", len(refs)) if refs else None
    if tape is None:
        return {**frame}
    tape.uses = True
    tape.awaits_reduction = any(
        _crosses(walk.assignment, step)
        for bucket in walk.assignment.gather_buckets(block)
        for ref, route in bucket.items()
        for step in route
        if ref in refs
    )
    return {**frame, **{ref: replace(frame[ref], made=(tape, number)) for number, ref in enumerate(refs)}}


def following_of(walk: Walk) -> dict[int, int]:
    """The instances that are simulated and gather ahead -> the one after."""
    skipped = {number for skip in walk.skips for number in range(skip.start, skip.end)}
    followed = [number for number in walk.blocks if number not in skipped]
    return dict(pairwise(number for number in followed if walk.assignment.ahead(walk.instances[number].block)))


def _start_following(walk: Walk) -> None:
    """Gather what the next block uses."""
    walk.heap.starts_next()
    following = walk.following.get(walk.number)
    if following is None:
        return
    block = walk.instances[following].block
    buckets = walk.assignment.gather_buckets(block)
    for number, place in walk.assignment.ahead(block).items():
        if (following, number) not in walk.underway:
            steps = {ref: route[place] for ref, route in buckets[number].items()}
            sizes = [local_bytes(walk.graph.type_of(ref), step.after, walk.mesh) for ref, step in steps.items()]
            names = [f"gathered {walk.called(ref)}" for ref in steps]
            walk.underway[following, number] = _start(walk, [walk.parts[ref] for ref in steps], names, sizes)


def _start(walk: Walk, parts: list[Storage], names: list[str], sizes: list[int]) -> tuple[Storage, Storage]:
    """Storages of what is sent of parts and of what comes, both held."""
    heap = walk.heap
    if len(parts) == 1:
        return heap.hold(parts[0]), heap.new(names[0], "gathered", sum(sizes))
    own = heap.new("parts of a chunk", "temporary", sum(part.held.bytes for part in parts))
    return own, heap.new("a chunk", "gathered", sum(sizes))


def _gather(
    walk: Walk,
    parts: list[Storage],
    names: list[str],
    sizes: list[int],
    steps: tuple[ReshardStep, ...],
    ahead: int | None,
) -> list[Storage]:
    """Storages of whole parameters, made of those of their parts, which are no longer held."""
    heap = walk.heap
    underway = None if ahead is None else walk.underway.pop((walk.number, ahead), None)
    own, every = underway or _start(walk, parts, names, sizes)
    if ahead is not None:
        walk.ahead += [own, every]
        _start_following(walk)
        if walk.frame is not None:
            walk.frame.ahead += [own, every]
    if own is not parts[0]:
        _make(walk, own, parts)
    for storage in parts:
        heap.drop(storage)
    _make(walk, every, [own])
    heap.drop(own)
    cut = steps[0].src
    if len(parts) == 1 and isinstance(cut, Shard) and cut.dim == 0 and cut.outer == 1:
        found = [heap.hold(every)]
    else:
        found = [heap.new(name, "gathered", size) for name, size in zip(names, sizes, strict=True)]
        for storage in found:
            _make(walk, storage, [every])
    heap.drop(every)
    return found


def _make(walk: Walk, storage: Storage, sources: list[Storage]) -> None:
    if walk.frame is not None:
        walk.frame.makes(walk.heap, storage, sources, keeps=False)
