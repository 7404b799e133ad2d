"""Lower bounds of a pipelined step: how often it takes at least what one micro-batch takes in a block.

A search knows a pipeline only by how many ranks and micro-batches it has: where it is cut is found later, for what the
search decided. Two things hold of every cut.

The *average rank* does its share of all blocks, and waits for the pipeline to fill and to empty: rank ``r`` begins when
the first micro-batch is through the ``r`` stages before its own, and is done before the last one's way back through
them; each of these stages has one block at least, in the order of the graph.

Equal blocks are *packed* whole: where a rank that waits for ``w`` of them has ``n``, the step is no shorter than
``n * m + w`` times what one of ``m`` micro-batches takes in one block; and only from some length on is there room for
all of them. That says nothing of other blocks, so a configuration is bounded by both before anything is decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from planner.formulation.decisions import DecisionGraph
from planner.ir.folding import Instance
from planner.solve.pipeline.schedule import OUT_OF_ORDER


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

    def waited(self, instances: Iterable[Instance], kind: object) -> float:
        """How often the average rank waits for the blocks of a kind; ``instances`` are all, in order."""
        return sum(times for times, each in zip(self.waits, instances, strict=False) if each.kind == kind)


@dataclass(frozen=True)
class Packed:
    """Equal blocks, each whole on some rank.

    Attributes:
        instances: their numbers in the graph.
        most: some rank takes so often what one micro-batch takes in one of them, its waiting included.
    """

    instances: frozenset[int]
    most: int


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
    return Packed(instances, high)
