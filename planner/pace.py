"""Pace: how often a step in turns at least takes what one micro-batch takes in a block.

A search knows a pipeline only by how many ranks and micro-batches it has: where it is cut is found later, for what the
search decided. Two things hold of every cut.

The *average rank* does its share of all blocks, and waits for the pipeline to fill and to empty: rank ``r`` begins when
the first micro-batch is through the ``r`` stages before its own, and is done before the last one's way back through
them; each of these stages has one block at least, in the order of the graph.

Equal blocks are *packed* whole: where a rank that waits for ``w`` of them has ``n``, the step is no shorter than
``n * m + w`` times what one of ``m`` micro-batches takes in one block; and only from some length on is there room for
all of them. That says nothing of other blocks, so the search decides for the average rank and bounds by both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from planner.skeleton import Skeleton

OUT_OF_TURN = ("zero_bubble", "zbv", "dualpipev", "2bw")
"""Schedules in which a micro-batch need not be through with one stage's backward before the next one's."""


@dataclass(frozen=True)
class Packed:
    """Equal blocks, each whole on some rank.

    Attributes:
        instances: their numbers in the graph.
        rounds: some rank takes so often what one micro-batch takes in one of them, its waiting included.
        own: and so often at least without what it waits for.
        blocks: that rank, and the one with most, has so many of them at least.
    """

    instances: frozenset[int]
    rounds: int
    own: int
    blocks: int


@dataclass(frozen=True)
class Pace:
    """A bound of every pipeline of so many ranks, as weights of what one micro-batch takes in each block.

    Attributes:
        stages: ranks of the pipeline; 1 without one.
        micro_batches: of a step.
        rounds: how often the average rank takes what one micro-batch takes in all stages.
        waits: how often it waits for the first blocks, in order.
        packed: where it is the bound of equal blocks instead.
    """

    stages: int
    micro_batches: int
    rounds: float
    waits: tuple[float, ...] = ()
    packed: Packed | None = None

    def packing(self, skeleton: Skeleton) -> Pace | None:
        """That of equal blocks; ``None`` where its bound of operations is not higher."""
        if self.packed is not None or not 1 < self.stages <= self.micro_batches:
            return None
        packed = pack(self.stages, self.micro_batches, skeleton.equal_blocks, bool(self.waits))
        flops, instances = skeleton.flops, skeleton.folded.instances
        mean = self.rounds * sum(len(each) * one for each, one in zip(skeleton.folded.kinds, flops, strict=True))
        mean += sum(times * flops[instance.kind] for times, instance in zip(self.waits, instances, strict=False))
        is_higher = packed.rounds * flops[instances[min(packed.instances)].kind] > mean
        return replace(self, packed=packed) if is_higher else None

    def work(self, times: int, part: float) -> float:
        """How often a step takes what runs in each micro-batch, waiting of the average rank aside.

        Args:
            times: in how many blocks.
            part: and in which part of those that are packed.
        """
        return times * self.rounds if self.packed is None else part * self.packed.rounds

    def waited(self, kinds: Iterable[int], kind: object) -> float:
        """How often the average rank waits for the blocks of a kind; ``kinds`` are those of all blocks, in order."""
        return sum(times for times, each in zip(self.waits, kinds, strict=False) if each == kind and not self.packed)

    def again(self, times: int, again: int, part: float) -> float:
        """How often it takes what so many of those blocks make again, which a rank may do while it waits.

        Nothing is known of packed blocks of which only some make it again.
        """
        if self.packed is None:
            return again * self.rounds
        return part * self.packed.own if again == times else 0.0

    def once(self, times: int, part: float) -> float:
        """How often a rank takes what is done once a step."""
        return times / self.stages if self.packed is None else part * self.packed.blocks

    def once_again(self, times: int, again: int, part: float) -> float:
        """The same where so many of those blocks do it again in backward."""
        if self.packed is None:
            return again / self.stages
        return part * self.packed.blocks if again == times else 0.0


def pace_of(stages: int, micro_batches: int, schedule: str | None = None) -> Pace:
    """That of the average of so many ranks.

    Args:
        schedule: one that is pinned, in which ranks may not wait.
    """
    average = micro_batches / stages
    if schedule in OUT_OF_TURN:
        return Pace(stages, micro_batches, average)
    waits = ((stages - 1 - at) / stages for at in range(stages - 1) if stages <= micro_batches)
    return Pace(stages, micro_batches, max(1.0, average), tuple(waits))  # one goes through all stages and back


def pack(ranks: int, micro_batches: int, instances: frozenset[int], waiting: bool) -> Packed:
    """The shortest step into which equal blocks can be packed, in units of one micro-batch in one block."""
    waits = [0, *accumulate(waiting and at in instances for at in range(ranks - 1))]

    def fits(length: int) -> bool:
        return sum(max(0, length - wait) // micro_batches for wait in waits) >= len(instances)

    low, high = 0, micro_batches * len(instances) + max(waits)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    own = high - max(waits)
    return Packed(instances, high, own, min(-(-own // micro_batches), -(-len(instances) // ranks)))
