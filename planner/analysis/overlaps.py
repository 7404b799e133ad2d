"""Which collectives and messages of a step are on their way while it computes, as its plan claims and traces show.

Parameters that are gathered ahead are sent where the block before that gathers begins, and waited for by their own.
Gradients are sent where backward is over with their block. What is scattered, or summed in a wider dtype, is waited for
where the next of these are sent, since it is in memory for as long; what is summed where it lies, at the end. Where
backward updates blocks, all is waited for behind the next block that is updated.

A micro-batched step gathers ahead within one action of its schedule, and waits for gradients where they are sent: in
each micro-batch, or once a step. Messages between the ranks of a pipeline are on their way beside whole actions, see
:mod:`planner.solve.pipeline.running`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.analysis.memory.readers import read_alone
from planner.analysis.memory.remat_demand import gathered_again
from planner.formulation.assignment import Assignment, GatherBucket
from planner.ir.layout import MICRO
from planner.solve.pipeline.running import message_flights
from planner.solve.pipeline.schedule import Action, Schedule

Phase = Literal["forward", "backward", "once"]
"""``once``: before the first micro-batch, or after the last."""
BlockOrAction = int | Action
"""A block, by the number of the instance, or an action of a pipeline's schedule."""


@dataclass(frozen=True)
class Overlap:
    """A collective that is on its way while blocks compute, or a message that is while actions do.

    Attributes:
        kind: of collective, or ``send`` or ``receive``.
        of: the block whose parameters it gathers, or whose gradients it reduces; the action that waits for a message.
            ``None``: it is done once a step.
        beside: those that compute meanwhile, in order; none: it is waited for at once.
    """

    kind: str
    phase: Phase
    of: BlockOrAction | None
    beside: tuple[BlockOrAction, ...]


@dataclass(frozen=True)
class ObservedFlight:
    """A collective of a step that was on its way.

    Attributes:
        carried_s: seconds in which it was carried, which may be those in which it waited for other ranks.
        exposed_s: seconds in which this rank waited for it and computed nothing; ``None`` of either: the trace does
            not say.
    """

    overlap: Overlap
    carried_s: float | None
    exposed_s: float | None


def overlaps(assignment: Assignment) -> list[Overlap]:
    """Of a step in one piece: every gather of parameters and every reduction of gradients, block by block, of what one
    block alone reads.
    """
    blocks = range(len(assignment.space.folded.instances))
    return [*_gathers(assignment, blocks), *_gathers_again(assignment, blocks), *_reductions(assignment)]


def scheduled_overlaps(
    assignment: Assignment, schedule: Schedule, bounds: Sequence[int], rank: int | None
) -> list[Overlap]:
    """The same of one rank of a micro-batched step, and every message that it exchanges with other ranks.

    Nothing of the parts of a backward in two, which run no block as a whole.

    Args:
        assignment: what to do, recomputing as the step does.
        bounds: stage ``s`` has the blocks from ``bounds[s]`` up to, not including, ``bounds[s + 1]``.
        rank: of the pipeline; ``None``: one runs all stages.
    """
    found = [] if rank is None else [*_messages(schedule, rank)]
    for action in schedule.actions if rank is None else schedule.rows[rank]:
        blocks = range(*bounds[action.stage : action.stage + 2])
        if action.kind == "F":
            found += _gathers(assignment, blocks)
        elif action.kind == "B":
            found += [*_gathers_again(assignment, blocks), *_reductions_at_once(assignment, blocks, is_once=False)]
    stages = sorted({each.stage for each in (schedule.actions if rank is None else schedule.rows[rank])})
    for blocks in (range(*bounds[stage : stage + 2]) for stage in stages):
        found += [*_gathers_once(assignment, blocks), *_reductions_at_once(assignment, blocks, is_once=True)]
    return found


def _messages(schedule: Schedule, rank: int) -> Iterator[Overlap]:
    for message, is_sent, beside in message_flights(schedule, rank):
        yield Overlap(
            "send" if is_sent else "receive", "forward" if message.kind == "F" else "backward", message, beside
        )


def _gathers(assignment: Assignment, blocks: range) -> Iterator[Overlap]:
    """In forward of these blocks."""
    before = None
    if assignment.space.unsharding.once_per_step:
        return
    for number in blocks:
        block = assignment.space.folded.instances[number].block
        ahead = assignment.ahead(block)
        beside = () if before is None else tuple(range(before, number))
        for place, bucket in enumerate(assignment.gather_buckets(block)):
            steps = _crossings(assignment, bucket, "S>R")
            yield from _gathered("forward", number, beside if place in ahead else (), steps)
        before = number if ahead else before


def _gathers_again(assignment: Assignment, blocks: range) -> Iterator[Overlap]:
    """In backward of these blocks."""
    space, after = assignment.space, None
    for number in reversed(blocks):
        instance, (kind, nth) = space.folded.instances[number], space.decision_graph.blocks.numbers[number]
        level, ahead = assignment.recompute.level(kind, nth), assignment.ahead(instance.block)
        refs = gathered_again(assignment, instance, level)
        # Micro-batched, what both parts of a backward in two would gather is gathered ahead.
        both = gathered_again(assignment, instance, level, of_weights=space.micro_batched)
        beside, is_ahead = () if after is None else tuple(range(after, number, -1)), False
        for place, bucket in enumerate(assignment.gather_buckets(instance.block)):
            if refs.isdisjoint(bucket):
                continue
            goes_ahead = place in ahead and not both.isdisjoint(bucket)
            steps = _crossings(assignment, bucket, "S>R")
            yield from _gathered("backward", number, beside if goes_ahead else (), steps)
            is_ahead |= goes_ahead
        after = number if is_ahead else after


def _gathers_once(assignment: Assignment, blocks: range) -> Iterator[Overlap]:
    """Before the first micro-batch, of these blocks."""
    if assignment.space.unsharding.once_per_step:
        for number in blocks:
            for bucket in assignment.gather_buckets(assignment.space.folded.instances[number].block):
                yield from (Overlap("all_gather", "once", None, ()) for _ in _crossings(assignment, bucket, "S>R"))


def _gathered(phase: Phase, number: int, beside: tuple[int, ...], steps: Sequence[str]) -> Iterator[Overlap]:
    """The steps of a bucket that gather: the first is ahead, and its result is sent on at once."""
    for place, _ in enumerate(steps):
        yield Overlap("all_gather", phase, number, () if place else beside)


def _reductions(assignment: Assignment) -> Iterator[Overlap]:
    space = assignment.space
    if not space.unsharding.overlaps_reduce:
        return
    backward = [n for n, each in enumerate(space.folded.instances) if space.runs_backward(each)]
    sent = {number: [*_sent(assignment, number)] for number in backward}
    alone = {number for number in backward if any(is_alone for _, is_alone in sent[number])}
    updating = set(read_alone(assignment)) if space.training.updates_on_device else set[int]()
    for number in backward:
        for place, (kind, is_alone) in enumerate(sent[number]):
            ends = updating | alone if is_alone else updating
            waits = max((each for each in ends if each < number), default=backward[0])
            # Backward sends the first bucket last; those behind it have been waited for by then.
            is_last = not (is_alone and any(other for _, other in sent[number][:place]))
            beside = tuple(each for each in reversed(backward) if waits <= each < number) if is_last else ()
            yield Overlap(kind, "backward", number, beside)
        block = space.folded.instances[number].block
        for bucket in (each for each in assignment.gather_buckets(block) if _is_trained(assignment, each)):
            for rule in _crossings(assignment, bucket)[1:]:  # whose results are reduced again
                yield Overlap("all_reduce" if rule == "I>R" else "reduce_scatter", "backward", number, ())


def _reductions_at_once(assignment: Assignment, blocks: range, is_once: bool) -> Iterator[Overlap]:
    """In backward of these blocks of one micro-batch, or after the last one."""
    space = assignment.space
    for number in blocks:
        instance = space.folded.instances[number]
        for bucket in assignment.gather_buckets(instance.block) if space.runs_backward(instance) else ():
            first = None if space.unsharding.once_per_step else assignment.summed_together(bucket)
            rules, summed = _crossings(assignment, bucket), len(_crossings(assignment, bucket, first=first))
            for rule in (rules[:summed] if is_once else rules[summed:]) if _is_trained(assignment, bucket) else ():
                kind = "all_reduce" if rule == "I>R" else "reduce_scatter"
                yield Overlap(kind, "once", None, ()) if is_once else Overlap(kind, "backward", number, ())


def _is_trained(assignment: Assignment, bucket: GatherBucket) -> bool:
    return assignment.space.graph.by_name[next(iter(bucket)).node].results[0].grad  # like the others


def _sent(assignment: Assignment, number: int) -> Iterator[tuple[str, bool]]:
    """The reductions of a block that nobody but its parameters' gradients waits for, bucket by bucket; and whether
    nothing else may be on its way with one, since it is in memory beside the gradients.
    """
    space = assignment.space
    for bucket in assignment.gather_buckets(space.folded.instances[number].block):
        steps, first = _crossings(assignment, bucket), space.graph.by_name[next(iter(bucket)).node]
        if steps and _is_trained(assignment, bucket):
            is_sum = steps[0] == "I>R"
            yield "all_reduce" if is_sum else "reduce_scatter", not is_sum or space.training.widening(first) > 1


def _crossings(assignment: Assignment, bucket: GatherBucket, rule: str = "", first: int | None = None) -> list[str]:
    """The rules of the steps that cross ranks, or of the first ones or those with one rule; like those of the other
    parameters.
    """
    axes = assignment.space.mesh.axes
    steps = next(iter(bucket.values()))[:first]
    rules = [step.rule for step in steps if axes[step.axis].size > 1 and axes[step.axis].name != MICRO]
    return [each for each in rules if rule in ("", each)]
