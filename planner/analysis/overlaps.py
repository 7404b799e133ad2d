"""Which collectives of a step in one piece are on their way while blocks compute, as its plan claims and traces show.

Parameters that are gathered ahead are sent where the block before that gathers begins, and waited for by their own.
Gradients are sent where backward is over with their block. What is scattered, or summed in a wider dtype, is waited for
where the next of these are sent, since it is in memory for as long; what is summed where it lies, at the end. Where
backward updates blocks, all is waited for behind the next block that is updated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.analysis.memory.readers import read_alone
from planner.analysis.memory.remat_demand import gathered_again
from planner.formulation.assignment import Assignment, GatherBucket

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, order=True)
class Overlap:
    """A collective that is on its way while blocks compute.

    Attributes:
        kind: of collective.
        block: the number of the instance whose parameters it gathers, or whose gradients it reduces.
        beside: the numbers of those that compute meanwhile, in order; none: it is waited for at once.
    """

    kind: str
    phase: Phase
    block: int
    beside: tuple[int, ...]


@dataclass(frozen=True)
class ObservedFlight:
    """A collective of a step that was on its way.

    Attributes:
        carried_s: seconds in which it was carried, which may be those in which it waited for other ranks.
        exposed_s: seconds in which this rank waited for it and computed nothing; ``None`` of both: the trace does not
            say.
    """

    overlap: Overlap
    carried_s: float | None
    exposed_s: float | None


def overlaps(assignment: Assignment) -> list[Overlap]:
    """Every gather of parameters and every reduction of gradients that somebody waits for later, block by block."""
    return [*_gathers(assignment), *_reductions(assignment)]


def _gathers(assignment: Assignment) -> Iterator[Overlap]:
    space, before = assignment.space, None
    again: list[tuple[int, int]] = []
    for number, instance in enumerate(space.folded.instances):
        ahead, buckets = assignment.ahead(instance.block), assignment.gather_buckets(instance.block)
        for place in ahead:
            beside = () if before is None else tuple(range(before, number))
            yield from _gathered("forward", number, beside, _crossings(assignment, buckets[place], "S>R"))
        before = number if ahead else before
        kind, nth = space.decision_graph.blocks.numbers[number]
        refs = gathered_again(assignment, instance, assignment.recompute.level(kind, nth))
        again += [(number, place) for place in ahead if not refs.isdisjoint(buckets[place])]
    numbers = sorted({number for number, _ in again}, reverse=True)
    for number, place in again:
        at, bucket = numbers.index(number), assignment.gather_buckets(space.folded.instances[number].block)[place]
        beside = tuple(range(numbers[at - 1], number, -1)) if at else ()
        yield from _gathered("backward", number, beside, _crossings(assignment, bucket, "S>R"))


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


def _sent(assignment: Assignment, number: int) -> Iterator[tuple[str, bool]]:
    """The reductions of a block that nobody but its parameters' gradients waits for, bucket by bucket; and whether
    nothing else may be on its way with one, since it is in memory beside the gradients.
    """
    space = assignment.space
    for bucket in assignment.gather_buckets(space.folded.instances[number].block):
        steps, first = _crossings(assignment, bucket), space.graph.by_name[next(iter(bucket)).node]
        if steps and first.results[0].grad:  # like the others
            is_sum = steps[0] == "I>R"
            yield "all_reduce" if is_sum else "reduce_scatter", not is_sum or space.training.widening(first) > 1


def _crossings(assignment: Assignment, bucket: GatherBucket, rule: str = "") -> list[str]:
    """The rules of the steps that cross ranks, or of those with one rule; like those of the other parameters."""
    axes = assignment.space.mesh.axes
    rules = [step.rule for step in next(iter(bucket.values())) if axes[step.axis].size > 1]
    return [each for each in rules if rule in ("", each)]
