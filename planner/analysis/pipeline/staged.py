"""A partitioned pipeline: the best cut found for a chain of blocks, and all that a step of it takes.

:func:`stage` tries the schedules and has :mod:`planner.solve.pipeline.partition` cut the chain
(:mod:`planner.analysis.pipeline.chain`) for the best of them. What happens once a step is left to the end of it: it is
counted for the rank that takes longest, after the last micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations, pairwise, product

import numpy as np

from planner.analysis.pipeline.chain import Link, also_read, chain_of, links_of, placed
from planner.analysis.pipeline.rank_memory import LiveMemory, StageRuns
from planner.base.errors import InfeasibleError
from planner.base.symbolic_float import rest
from planner.formulation.assignment import Assignment
from planner.formulation.remat.levels import Level, Recompute, at_levels, used
from planner.ir.folding import Folded
from planner.solve.pipeline.partition import cut
from planner.solve.pipeline.simulate import Times, bubble
from planner.solve.pipeline.simulate import step_s as simulated_s
from planner.solve.pipeline.stages import (
    Chain,
    Cut,
    Pipeline,
    backward_bytes,
    blocks_of,
    bound_s,
    evaluate,
    stage_times,
)
from planner.solve.problem import Evaluation

BEST = 2
"""So many pipelines are cut for: those whose even cut, saving everything, takes least; more while none fits."""
QUICK, THOROUGH = 300, 3000
"""Effort for cuts that are one of many, and for the last; see :data:`planner.solve.pipeline.partition.EFFORT`."""
TRIES = 8
"""So often a chain is cut anew with less memory when what works beside it did not fit."""
CLOSE = 1e-3
"""Part of a step by which a quick cut that fits may be slower than one that does not, and no other memory is tried; a
thorough one by as much less as it may take longer.
"""
SAME = 1e-9
"""Part of a step by which a bound may be off for rounding."""
ROOM = 0.01
"""Part of the memory that a cut may leave."""
WORKS = ("compute", "recompute", "communication", "gradients", "optimizer")
"""What a rank does in a micro-batched step, by use."""


@dataclass(frozen=True)
class MicroBatchTimes:
    """What a micro-batched step is simulated from: seconds of a micro-batch by stage, and once a step by rank.

    See :class:`planner.solve.pipeline.simulate.Times` and :class:`Link`.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    send_s: tuple[float, ...]
    gather_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    update_s: tuple[float, ...]

    @property
    def of_stages(self) -> Times:
        """The part that the schedule is simulated with."""
        return Times(*(np.array(each) for each in (self.forward_s, self.input_s, self.weight_s, self.send_s)))

    def step_s(self, pipeline: Pipeline) -> float:
        """Seconds of the simulated schedule, and what happens once on the rank that takes longest."""
        p = pipeline
        micro_batches_s = simulated_s(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, self.of_stages)
        return micro_batches_s + self.once_s

    @property
    def once_s(self) -> float:
        """Seconds once a step, on the rank that takes longest."""
        return max(map(sum, zip(self.gather_s, self.reduce_s, self.update_s, strict=True)))

    def bubble(self, micro_batches: int, step_s: float) -> float:
        """The part of the schedule's time in which ranks compute nothing, of all ranks together.

        Args:
            step_s: of the whole step, with what happens once.
        """
        return bubble(micro_batches, self.of_stages, len(self.update_s), step_s - self.once_s)


@dataclass(frozen=True)
class Staged:
    """A chain on a pipeline: the cut, and what all of a step takes.

    Attributes:
        links: the chain, block by block.
        step_s: the simulated schedule and what happens once a step.
        micro_batches: the number of micro-batches, where that is to move a size (:mod:`planner.base.symbolic_int`).
        prefetch: whether micro-batches gather parameters a block ahead; else each waits for them where they are used.
        followed: stages whose memory is known, of this cut or others.
    """

    pipeline: Pipeline
    links: tuple[Link, ...]
    cut: Cut
    step_s: float
    micro_batches: int = 0
    prefetch: bool = True
    followed: StageRuns = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def alive(self) -> LiveMemory:
        """What its ranks hold."""
        return LiveMemory(self.links, self.pipeline, self.cut, self.prefetch, self.followed)

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes of every rank at its fullest."""
        return self.alive.rank_bytes

    @property
    def peak_bytes(self) -> int:
        return max(self.rank_bytes)

    @property
    def peak_rank(self) -> int:
        """The first of those that need most."""
        return self.rank_bytes.index(self.peak_bytes)

    def leaves_nothing(self, limit_bytes: int) -> bool:
        """Whether a cut with a little more memory would hardly be faster."""
        return self.peak_bytes > limit_bytes * (1 - ROOM) or not any(self.cut.savings)

    @property
    def evaluation(self) -> Evaluation:
        """What it takes; of steps of several micro-batches or stages nothing of its communication is told apart."""
        is_whole = not self.links[0].memories.space.micro_batched
        return Evaluation(self.step_s, self.once_s[0][1] if is_whole else 0.0, self.peak_bytes, True)

    @property
    def levels(self) -> tuple[Level, ...]:
        """At which level every block recomputes."""
        return tuple(link.levels[way] for link, way in zip(self.links, self.cut.savings, strict=True))

    def recompute(self, folded: Folded) -> Recompute:
        """Which instances of each kind recompute."""
        return at_levels(folded, self.levels)

    def least_recompute(self, folded: Folded) -> Recompute:
        """What they recompute at least, whatever the cut."""
        return at_levels(folded, (link.levels[0] for link in self.links))

    @cached_property
    def time_s(self) -> dict[str, float]:
        """Seconds of the step by use on the busiest rank (:class:`planner.analysis.prediction.Prediction`)."""
        return {**self.rank_s(self.busiest), "bubble": rest(self.step_s, sum(self._seconds[self.busiest]))}

    def rank_s(self, rank: int) -> dict[str, float]:
        """Seconds of the step by use on one rank, without its waiting."""
        return dict(zip(WORKS, self._seconds[rank], strict=True))

    @cached_property
    def busiest(self) -> int:
        """The rank that has most to do."""
        return max(range(self.pipeline.ranks), key=lambda rank: sum(self._seconds[rank]))

    @cached_property
    def _seconds(self) -> list[list[float]]:
        """Seconds of the step [rank][use], uses as in :data:`WORKS`."""
        micro_batches = self.micro_batches or self.pipeline.micro_batches
        found = [[0.0, 0.0, *once] for once in self.once_s]
        for stage, link, way in placed(self.links, self.cut):
            block, rank = link.block, found[self.pipeline.placed[stage]]
            rank[0] += micro_batches * (block.forward_s + block.input_s + block.weight_s - link.communication_s)
            rank[1] += micro_batches * (block.savings[way].recompute_s - link.gathered_s[way])
            rank[2] += micro_batches * (link.communication_s + link.gathered_s[way])
        return found

    @cached_property
    def once_s(self) -> list[list[float]]:
        """Seconds once a step of every rank: gathering, reducing and the update."""
        return _once_s(self.links, self.pipeline, self.cut.bounds)

    @cached_property
    def times(self) -> MicroBatchTimes:
        """What the step is simulated from."""
        found = stage_times(chain_of(self.links), self.cut.bounds, self.cut.savings)
        stages = (found.forward_s, found.input_s, found.weight_s, found.send_s)
        once = zip(*self.once_s, strict=True)
        return MicroBatchTimes(*(tuple(each.tolist()) for each in stages), *(tuple(map(float, each)) for each in once))

    @property
    def bubble(self) -> float:
        """See :meth:`MicroBatchTimes.bubble`."""
        return self.times.bubble(self.pipeline.micro_batches, self.step_s)


def stage(
    links: Sequence[Link],
    choices: Iterable[Pipeline],
    limit_bytes: int | None,
    cutoff_s: float = math.inf,
    effort: int = QUICK,
) -> Staged | None:
    """The pipeline of shortest step among some, as far as it beats ``cutoff_s``.

    ``None`` if none does, none fits, or a block cannot run so.

    Args:
        effort: what looking for each cut may take, see :func:`planner.solve.pipeline.partition.cut`.
    """
    if not all(math.isfinite(link.block.work_s) for link in links):
        return None
    chain = chain_of(links)
    best: Staged | None = None
    for number, pipeline in enumerate(sorted(choices, key=lambda each: _even_s(each, chain))):
        if number >= BEST and (best is not None or cutoff_s < math.inf):
            break
        least_s = cutoff_s if best is None else best.step_s
        once_s = _least_once_s(links, pipeline)
        if bound_s(pipeline, chain) + once_s < least_s * (1 - SAME):
            found = _cut(links, pipeline, limit_bytes, least_s - once_s, effort)
            if found is not None and found.step_s < least_s:
                best = found
    return best


def _least_once_s(links: Sequence[Link], pipeline: Pipeline) -> float:
    """Seconds once a step at least, of any cut: those of all blocks, shared out evenly."""
    reduce_s = math.fsum(float(link.reduce_s - link.hiding_s) for link in links)
    others_s = math.fsum(float(link.gather_s + link.update_s) for link in links)
    return (others_s + max(0.0, reduce_s)) / pipeline.ranks


def _even_s(pipeline: Pipeline, chain: Chain) -> float:
    """Seconds of a cut into stages of about equal work that saves everything."""
    blocks = blocks_of(chain)
    total, done, bounds = math.fsum(float(block.work_s) for block in blocks), 0.0, [0]
    for at, block in enumerate(blocks):
        left = len(blocks) - at
        wanted = pipeline.stages - len(bounds)
        if at > bounds[-1] and wanted and (left <= wanted or done >= total * len(bounds) / pipeline.stages):
            bounds.append(at)
        done += block.work_s
    times = stage_times(chain, (*bounds, len(blocks)), [0] * len(blocks))
    p = pipeline
    return simulated_s(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, times)


def _cut(
    links: Sequence[Link], pipeline: Pipeline, limit_bytes: int | None, cutoff_s: float, effort: int
) -> Staged | None:
    """The best cut of a chain that fits with what works beside it: one that gathers parameters ahead, or where there is
    none, whatever it takes, one that waits for them.

    Args:
        cutoff_s: of the schedule, without what happens once a step.
    """
    for prefetch in _prefetches(links):
        found = _cut_so(links, pipeline, limit_bytes, cutoff_s, effort, prefetch)
        if found is not None:
            return found
    return None


def _cut_so(
    links: Sequence[Link], pipeline: Pipeline, limit_bytes: int | None, cutoff_s: float, effort: int, prefetch: bool
) -> Staged | None:
    """The same of those that gather parameters ahead, or do not; what is left free is sought between too little, with
    which a cut does not fit, and enough, or once so much that none is found.
    """
    chain, least = chain_of(links), min(min(link.working_bytes) for link in links)
    beside = too_little = _Beside((*[least] * (pipeline.stages - 1), max(least, min(links[-1].working_bytes))))
    best: Staged | None = None
    unfit: Staged | None = None
    enough: _Beside | None = None
    followed: StageRuns = {}
    for _ in range(TRIES):
        room = None if limit_bytes is None else max(0, limit_bytes - beside.spare)
        try:
            found = cut(pipeline, chain, room, cutoff_s if best is None else best.cut.step_s, effort, beside.working)
        except InfeasibleError:
            found = None
        priced = None if found is None else price(links, pipeline, found, prefetch, followed)
        if priced is not None and limit_bytes is not None and priced.peak_bytes > limit_bytes:
            unfit, too_little = priced, beside
            beside = beside.more(priced, limit_bytes) if enough is None else beside.halfway(enough)
        else:
            if priced is not None and (best is None or priced.step_s < best.step_s):
                best = priced
            if limit_bytes is None or unfit is None:
                break
            was_missed = best is None and enough is not None
            if was_missed or (best is not None and best.leaves_nothing(limit_bytes)):
                break
            enough, beside = beside, too_little.halfway(beside)
        if best is not None and unfit is not None and best.step_s <= unfit.step_s * (1 + CLOSE * QUICK / effort):
            break
    return best


@dataclass(frozen=True)
class _Beside:
    """What a cut leaves free: of each stage beside what its backward starts with, and of every rank."""

    working: tuple[int, ...]
    spare: int = 0

    def more(self, priced: Staged, limit_bytes: int) -> _Beside:
        """So much that what did not fit of a cut would: of stages whose backward did not, and of all where a rank did
        not at another moment, of which the cut knows nothing.
        """
        known = backward_bytes(priced.pipeline, chain_of(priced.links), priced.cut.bounds, priced.cut.savings)
        each = zip(priced.alive.backward_bytes, known, self.working, strict=True)
        working = tuple(max(had, size - known) if size > limit_bytes else had for size, known, had in each)
        fullest = [*priced.cut.rank_bytes]
        for rank, *parts in zip(priced.pipeline.placed, known, working, strict=True):
            fullest[rank] = max(fullest[rank], sum(parts))
        more = (size - fullest[rank] for rank, size in enumerate(priced.rank_bytes) if size > limit_bytes)
        return _Beside(working, max(self.spare, *more))

    def halfway(self, other: _Beside) -> _Beside:
        """Between the two."""
        working = tuple((mine + its) // 2 for mine, its in zip(self.working, other.working, strict=True))
        return _Beside(working, (self.spare + other.spare) // 2)


def ways_of(links: Sequence[Link], pipeline: Pipeline) -> int:
    """In how many ways a chain runs on a pipeline: cuts, levels of recomputation, and waiting for what is gathered."""
    cuts = math.comb(len(links) - 1, pipeline.stages - 1)
    return cuts * math.prod(len(link.levels) for link in links) * len(_prefetches(links))


def enumerated(links: Sequence[Link], pipeline: Pipeline, limit_bytes: int, cutoff_s: float) -> Staged | None:
    """The fastest of all ways for a chain to run on a pipeline that fits and takes less than ``cutoff_s``; each is
    tried.
    """
    chain, ends, found = chain_of(links), range(1, len(links)), list[Staged]()
    for inner in combinations(ends, pipeline.stages - 1):
        for ways in filter(partial(_is_in_order, links), product(*(range(len(link.levels)) for link in links))):
            cut = evaluate(pipeline, chain, (0, *inner, len(links)), ways)
            found += (price(links, pipeline, cut, prefetch) for prefetch in _prefetches(links))
    faster = sorted((each for each in found if each.step_s < cutoff_s), key=lambda each: each.step_s)
    return next((each for each in faster if each.peak_bytes <= limit_bytes), None)


def _is_in_order(links: Sequence[Link], savings: Sequence[int]) -> bool:
    """Whether of equal blocks of a step in one piece those that save least come first: plans count the others."""
    if links[0].memories.space.micro_batched:
        return True
    last = dict[int, int]()
    for instance, way in zip(links[0].memories.instances, savings, strict=True):
        if way > last.get(instance.kind, way):
            return False
        last[instance.kind] = way
    return True


def _prefetches(links: Sequence[Link]) -> tuple[bool, ...]:
    """Whether parameters may be gathered ahead, or waited for."""
    is_free = links[0].memories.space.micro_batched and any(link.gathers_ahead for link in links)
    return (True, False) if is_free else (True,)


def price(
    links: Sequence[Link], pipeline: Pipeline, found: Cut, prefetch: bool = True, followed: StageRuns | None = None
) -> Staged:
    """All that a step of a cut takes.

    Args:
        prefetch, followed: see :class:`Staged`.
    """
    once_s = max(map(sum, _once_s(links, pipeline, found.bounds)))
    followed = {} if followed is None else followed
    return Staged(pipeline, tuple(links), found, found.step_s + once_s, prefetch=prefetch, followed=followed)


def in_one_piece(assignment: Assignment) -> Staged:
    """A step without micro-batches as one stage, which recomputes what the assignment says."""
    space, pipeline = assignment.space, Pipeline("1f1b", 1, 1)
    links = links_of(assignment, used(assignment.recompute, space.folded))
    ways = tuple(
        link.levels.index(assignment.comes_to(kind, assignment.recompute.level(kind, nth)))
        for link, (kind, nth) in zip(links, space.decision_graph.blocks.numbers, strict=True)
    )
    return price(links, pipeline, evaluate(pipeline, chain_of(links), (0, len(links)), ways))


def saving_more(staged: Staged, limit_bytes: int, simulations: int) -> Staged:
    """The same stages with one block after the other saving more, as long as that fits and is faster: what backwards
    have beside what is saved is another figure for each level.

    Args:
        simulations: of memory, at most.
    """
    links, tried = staged.links, set[tuple[int, ...]]()
    while simulations > 0:
        cut, ends = staged.cut, (*zip(links, staged.cut.savings, strict=True), None)
        last = [at for at, (one, other) in enumerate(pairwise(ends)) if one != other]  # of each run of equal blocks
        moves = {(*cut.savings[:at], way, *cut.savings[at + 1 :]) for at in last for way in range(cut.savings[at])}
        chain, pipeline = chain_of(links), staged.pipeline
        cuts = (
            evaluate(pipeline, chain, cut.bounds, savings)
            for savings in sorted(moves - tried)
            if _is_in_order(links, savings)
        )
        moved = (price(links, pipeline, each, staged.prefetch, staged.followed) for each in cuts)
        every = sorted(moved, key=lambda each: each.step_s)
        faster = [each for each in every if each.step_s < staged.step_s][:simulations]
        tried, simulations = tried | moves, simulations - len(faster)
        found = next((each for each in faster if each.peak_bytes <= limit_bytes), None)
        if found is None:
            break
        staged = found
    return staged


def waiting(staged: Staged) -> Staged:
    """The same cut, which waits for what it gathers."""
    return price(staged.links, staged.pipeline, staged.cut, prefetch=False)


def _once_s(links: Sequence[Link], pipeline: Pipeline, bounds: Sequence[int]) -> list[list[float]]:
    """Seconds once a step of every rank [rank][what]: gathering, reducing and the update."""
    found, hiding_s = [[0.0, 0.0, 0.0] for _ in range(pipeline.ranks)], [0.0] * pipeline.ranks

    def add(rank: int, *seconds: float) -> None:
        found[rank] = [had + more for had, more in zip(found[rank], seconds, strict=True)]

    for home, (low, high) in zip(pipeline.placed, pairwise(bounds), strict=True):
        for link in links[low:high]:
            add(home, link.gather_s, link.reduce_s, link.update_s)
            hiding_s[home] += link.hiding_s
    for home, _, each in also_read(links, pipeline, bounds):
        add(home, each.gather_s, each.reduce_s + each.sum_s, each.update_s)
    return [
        [gather_s, max(0.0, reduce_s - hidden_s), update_s]
        for (gather_s, reduce_s, update_s), hidden_s in zip(found, hiding_s, strict=True)
    ]
