"""A chain of layers cut over a pipeline, and what such a cut takes.

A chain is blocks one after the other, equal ones as a block and a count. A cut gives every stage the blocks between two
boundaries, at least one, and every block one of its ways to save activations: all of them, or less and some
recomputation before its backward. :func:`evaluate` is the only definition of a cut's step and bytes;
:mod:`planner.solve.pipeline.partition` looks for the best one.

A rank holds, of each of its stages, ``held_bytes`` of all blocks always, ``gradient_bytes`` once gradients are added
up, and the saved bytes once for every micro-batch in flight; the peak is at one of the fullest moments of its order
(:attr:`planner.solve.pipeline.schedule.Schedule.moments`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from planner.base.errors import ScheduleError
from planner.solve.pipeline.schedule import InFlight, certain, check_fits, fullest, placed, schedule
from planner.solve.pipeline.simulate import Times, step_s


@dataclass(frozen=True)
class RematOption:
    """A way to save a block's activations: bytes per micro-batch, and seconds of recomputing the rest."""

    recompute_s: float
    saved_bytes: int


@dataclass(frozen=True)
class ChainBlock:
    """A block of the chain on one rank: seconds and bytes per micro-batch.

    ``held_bytes`` are there always: parameters, optimizer state, for 2bw the second version of the weights and the
    gradients of the batch before; ``gradient_bytes`` from the first backward on.
    ``send_s`` is the way of its result to a next stage on another rank, and of the gradient back.
    """

    name: str
    forward_s: float
    input_s: float
    weight_s: float
    held_bytes: int
    savings: tuple[RematOption, ...]
    send_s: float = 0.0
    gradient_bytes: int = 0

    @property
    def work_s(self) -> float:
        """Seconds at least, forward and backward."""
        return self.forward_s + self.input_s + self.weight_s + min(saving.recompute_s for saving in self.savings)


Chain = Sequence[tuple[ChainBlock, int]]


@dataclass(frozen=True)
class Pipeline:
    """What a chain is cut for."""

    schedule: str
    ranks: int
    micro_batches: int
    virtual_stages: int = 1

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual_stages

    @property
    def stretch(self) -> float:
        """How many times what ranks work a step takes while it fills and empties, too, if all stages take as long."""
        return 1 + (self.ranks - 1) / (self.micro_batches * self.virtual_stages)

    @property
    def placed(self) -> tuple[int, ...]:
        """The rank of every stage."""
        return placed(self.schedule, self.ranks, self.virtual_stages)

    @property
    def late(self) -> tuple[int, ...]:
        """As of :class:`planner.solve.pipeline.schedule.Schedule`."""
        return schedule(self.schedule, self.ranks, self.micro_batches, self.virtual_stages).late

    @cached_property
    def moments(self) -> list[tuple[list[int], tuple[InFlight, ...]]]:
        """Each rank's stages, and what they hold at its fullest moments.

        Of a single micro-batch gradients come as what is saved goes: either all of one is there, or of the other.
        """
        found = self._by_rank(fullest(self.schedule, self.ranks, self.micro_batches, self.virtual_stages))
        return found if self.micro_batches > 1 else [(stages, _parted(each)) for stages, each in found]

    @property
    def certain_moments(self) -> list[tuple[list[int], list[InFlight]]]:
        """The same, ``added`` where all that a rank holds is there, gradients of all its stages included.

        Of a single micro-batch what is held counts without gradients: never are all there with all that is saved.
        """
        found = self._by_rank(certain(self.schedule, self.ranks, self.micro_batches, self.virtual_stages))
        is_single = self.micro_batches == 1
        return [(stages, [each._replace(added=each.added or is_single) for each in every]) for stages, every in found]

    def _by_rank(self, moments: tuple[tuple[InFlight, ...], ...]) -> list[tuple[list[int], tuple[InFlight, ...]]]:
        placed = self.placed
        return [([s for s, home in enumerate(placed) if home == rank], each) for rank, each in enumerate(moments)]


def _parted(moments: tuple[InFlight, ...]) -> tuple[InFlight, ...]:
    """Moments without gradients, and one with gradients alone."""
    saved = [moment._replace(added=False) for moment in moments]
    return (*dict.fromkeys(saved), InFlight((0,) * len(moments[0].counts), added=True))


@dataclass(frozen=True)
class Cut:
    """Stage ``s`` has the blocks from ``bounds[s]`` up to, not including, ``bounds[s + 1]``.

    ``savings`` numbers each block's way to save. ``bound_s`` is proved: no cut takes less that fits with what backwards
    have beside.
    """

    bounds: tuple[int, ...]
    savings: tuple[int, ...]
    step_s: float
    rank_bytes: tuple[int, ...]
    bound_s: float

    @property
    def gap(self) -> float:
        """(step - bound) / step; 0 is proven optimal."""
        return max(0.0, 1 - self.bound_s / self.step_s) if self.step_s > 0 else 0.0

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        return "optimal" if self.gap <= 1e-6 else "feasible"


def blocks_of(chain: Chain) -> tuple[ChainBlock, ...]:
    """The blocks one by one."""
    return tuple(block for block, count in chain for _ in range(count))


def stage_times(chain: Chain, bounds: Sequence[int], savings: Sequence[int]) -> Times:
    """Seconds of every stage of a cut."""
    blocks = blocks_of(chain)
    parts = np.array(
        [
            (b.forward_s, b.input_s + b.savings[which].recompute_s, b.weight_s)
            for b, which in zip(blocks, savings, strict=True)
        ]
    )
    forward, backward, weight = np.add.reduceat(parts, list(bounds[:-1]), axis=0).T
    return Times(forward, backward, weight, np.array([blocks[b - 1].send_s for b in bounds[1:-1]]))


def rank_bytes(pipeline: Pipeline, chain: Chain, bounds: Sequence[int], savings: Sequence[int]) -> tuple[int, ...]:
    """Bytes that each rank holds when it is fullest."""
    return tuple(max(map(int, each)) for each in _moment_bytes(pipeline, chain, bounds, savings))


def backward_bytes(pipeline: Pipeline, chain: Chain, bounds: Sequence[int], savings: Sequence[int]) -> list[int]:
    """Bytes that the rank of each stage holds when it is fullest and runs the stage's whole backward."""
    found = [0] * pipeline.stages
    sizes = _moment_bytes(pipeline, chain, bounds, savings)
    for (_, moments), each in zip(pipeline.moments, sizes, strict=True):
        for moment, size in zip(moments, each, strict=True):
            if moment.backward >= 0:
                found[moment.backward] = max(found[moment.backward], int(size))
    return found


def _moment_bytes(
    pipeline: Pipeline, chain: Chain, bounds: Sequence[int], savings: Sequence[int]
) -> list[list[int | float]]:
    """Bytes of every rank at each of its fullest moments."""
    blocks = blocks_of(chain)
    held = [sum(b.held_bytes for b in blocks[i:j]) for i, j in pairwise(bounds)]
    gradients = [sum(b.gradient_bytes for b in blocks[i:j]) for i, j in pairwise(bounds)]
    saved = [
        sum(b.savings[which].saved_bytes for b, which in zip(blocks[i:j], savings[i:j], strict=True))
        for i, j in pairwise(bounds)
    ]
    return [
        [
            sum(held[s] for s in stages)
            + moment.added * sum(gradients[s] for s in stages)
            + sum(n * saved[s] for n, s in zip(moment.counts, stages, strict=True))
            for moment in moments
        ]
        for stages, moments in pipeline.moments
    ]


def evaluate(pipeline: Pipeline, chain: Chain, bounds: Sequence[int], savings: Sequence[int]) -> Cut:
    """What a cut takes; its bound is that of :func:`bound_s`."""
    p = pipeline
    seconds = step_s(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, stage_times(chain, bounds, savings))
    held = rank_bytes(pipeline, chain, bounds, savings)
    return Cut(tuple(bounds), tuple(savings), seconds, held, bound_s(pipeline, chain))


def bound_s(pipeline: Pipeline, chain: Chain) -> float:
    """Seconds that a step takes at least, however the chain is cut and however much memory there is.

    The larger of what the busiest rank computes and, unless steps overlap, of one micro-batch's way there and back. The
    busiest rank has no less than the average, and of every kind of block no fewer than its part, rounded up.
    """
    p = pipeline
    total = sum(block.work_s * count for block, count in chain)
    most = max(block.work_s * math.ceil(count / p.ranks) for block, count in chain)
    busiest = p.micro_batches * max(total / p.ranks, most)
    if p.schedule == "2bw":
        return busiest
    whole = 0.0 if _splits(p) else sum(block.weight_s * count for block, count in chain)
    way = sum((block.work_s - block.weight_s) * count for block, count in chain) + whole
    return max(busiest, way + 2 * (p.ranks - 1) * min(block.send_s for block, _ in chain))


def _splits(pipeline: Pipeline) -> bool:
    """Whether a stage may hand on its gradient before those of its weights are there."""
    return pipeline.schedule in ("zero_bubble", "zbv", "dualpipev")


def check_chain(pipeline: Pipeline, chain: Chain) -> None:
    """Raise :class:`ScheduleError` unless there is such a pipeline, and a block for each stage."""
    check_fits(pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.virtual_stages)
    for block, _ in chain:
        seconds = (block.forward_s, block.input_s, block.weight_s, block.send_s)
        sizes = (block.held_bytes, block.gradient_bytes, *(s.saved_bytes for s in block.savings))
        assert all(0 <= each < math.inf for each in (*seconds, *(s.recompute_s for s in block.savings))), block
        assert block.savings and min(sizes) >= 0, block
    total = sum(count for _, count in chain)
    if total < pipeline.stages:
        raise ScheduleError(
            f"{pipeline.stages} stages ({pipeline.ranks} ranks of {pipeline.virtual_stages}) need as many blocks; the "
            f"chain has {total}. Take fewer ranks or fewer virtual stages"
        )
