"""Lower bounds of a pipelined step: how often it takes at least what one micro-batch takes in a block.

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
from dataclasses import dataclass
from itertools import accumulate

from planner.formulation.decisions import DecisionGraph
from planner.ir.folding import Instance

OUT_OF_ORDER = ("zero_bubble", "zbv", "dualpipev", "2bw")
"""Schedules in which a micro-batch need not be through with one stage's backward before the next one's."""


@dataclass(frozen=True)
class PipelinePace:
    """That of the average rank: how often it takes what one micro-batch takes in each block.

    Attributes:
        stages: ranks of the pipeline; 1 without one.
        micro_batches: of a step.
        rounds: how often the average rank takes what one micro-batch takes in all stages.
        waits: how often it waits for the first blocks, in order.
    """

    stages: int
    micro_batches: int
    rounds: float
    waits: tuple[float, ...] = ()

    @property
    def packed(self) -> frozenset[int]:
        """The blocks that it is the pace of alone, by their numbers in the graph; none: it is that of all."""
        return frozenset()

    def work(self, times: int, part: float) -> float:
        """How often a step takes what runs in each micro-batch, waiting of the average rank aside.

        Args:
            times: in how many blocks.
            part: and in which part of those that are packed.
        """
        return times * self.rounds

    def waited(self, instances: Iterable[Instance], kind: object) -> float:
        """How often the average rank waits for the blocks of a kind; ``instances`` are all, in order."""
        return sum(times for times, each in zip(self.waits, instances, strict=False) if each.kind == kind)

    def again(self, times: int, again: int, part: float) -> float:
        """How often it takes what so many of those blocks recompute, which a rank may do while it waits."""
        return again * self.rounds

    def once(self, times: int, part: float) -> float:
        """How often a rank takes what is done once a step."""
        return times / self.stages

    def once_again(self, times: int, again: int, part: float) -> float:
        """The same where so many of those blocks do it again in backward."""
        return again / self.stages


@dataclass(frozen=True)
class Packed(PipelinePace):
    """That of equal blocks, each whole on some rank: how often one rank takes what it takes in them.

    NothingFits is known of other blocks, nor of what only some of these recompute.

    Attributes:
        instances: their numbers in the graph.
        most: some rank takes so often what one micro-batch takes in one of them, its waiting included.
        own: and so often at least without what it waits for.
        blocks: that rank, and the one with most, has so many of them at least.
    """

    instances: frozenset[int] = frozenset()
    most: int = 0
    own: int = 0
    blocks: int = 0

    @property
    def packed(self) -> frozenset[int]:
        return self.instances

    def work(self, times: int, part: float) -> float:
        return part * self.most

    def waited(self, instances: Iterable[Instance], kind: object) -> float:
        return 0.0  # that is among the most

    def again(self, times: int, again: int, part: float) -> float:
        return part * self.own if again == times else 0.0

    def once(self, times: int, part: float) -> float:
        return part * self.blocks

    def once_again(self, times: int, again: int, part: float) -> float:
        return part * self.blocks if again == times else 0.0


def pace_of(stages: int, micro_batches: int, schedule: str | None = None) -> PipelinePace:
    """That of the average of so many ranks.

    Args:
        schedule: one that is pinned, in which ranks may not wait.
    """
    average = micro_batches / stages
    if schedule in OUT_OF_ORDER:
        return PipelinePace(stages, micro_batches, average)
    waits = ((stages - 1 - at) / stages for at in range(stages - 1) if stages <= micro_batches)
    return PipelinePace(stages, micro_batches, max(1.0, average), tuple(waits))  # one goes through all stages and back


def packing(pace: PipelinePace, decision_graph: DecisionGraph) -> Packed | None:
    """That of equal blocks beside the average rank's; ``None`` where its bound of operations is not higher."""
    if not 1 < pace.stages <= pace.micro_batches:
        return None
    packed, flops, instances = (
        pack(pace, decision_graph.equal_blocks),
        decision_graph.blocks.flops,
        decision_graph.folded.instances,
    )
    mean = pace.rounds * sum(len(each) * one for each, one in zip(decision_graph.folded.kinds, flops, strict=True))
    mean += sum(times * flops[instance.kind] for times, instance in zip(pace.waits, instances, strict=False))
    return packed if packed.most * flops[instances[min(packed.instances)].kind] > mean else None


def pack(pace: PipelinePace, instances: frozenset[int]) -> Packed:
    """The shortest step into which equal blocks can be packed, in units of one micro-batch in one block."""
    ranks, micro_batches = pace.stages, pace.micro_batches
    waits = [0, *accumulate(bool(pace.waits) and at in instances for at in range(ranks - 1))]

    def fits(length: int) -> bool:
        return sum(max(0, length - wait) // micro_batches for wait in waits) >= len(instances)

    low, high = 0, micro_batches * len(instances) + max(waits)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    own = high - max(waits)
    blocks = min(-(-own // micro_batches), -(-len(instances) // ranks))
    return Packed(ranks, micro_batches, pace.rounds, pace.waits, instances, high, own, blocks)
