"""Turns: the best pipeline found for a chain of blocks, and all that a step of it takes.

:func:`stage` tries the schedules and has :mod:`planner.pipeline.partition` cut the chain (:mod:`planner.chain`) for the
best of them. What happens once a step is left to the end of it: it is counted for the rank that takes longest, after
the last micro-batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.assignment import Assignment
from planner.brought import Brought, brought_by, savers_of, working_moments
from planner.chain import Link, Shared, chain_of
from planner.errors import InfeasibleError
from planner.fold import Folded
from planner.heap import USES
from planner.pipeline.partition import cut
from planner.pipeline.simulate import Times, bubble
from planner.pipeline.simulate import step_s as simulated_s
from planner.pipeline.stages import Chain, Cut, Pipeline, blocks_of, bound_s, stage_times
from planner.problem import Evaluation
from planner.recompute import Level, Recompute, at_levels
from planner.seconds import rest

BEST = 2
"""So many pipelines are cut for: those whose even cut, saving everything, takes least; more while none fits."""
QUICK, THOROUGH = 100, 1000
"""Effort for cuts that are one of many, and for the last; see :data:`planner.pipeline.partition.EFFORT`."""
TRIES = 8
"""So often a chain is cut anew with less memory when what works beside it did not fit."""


WORKS = ("compute", "recompute", "communication", "gradients", "optimizer")
"""What a rank does in a step in turns, by use."""


@dataclass(frozen=True)
class TurnTimes:
    """What a step in turns is simulated from: seconds of a micro-batch by stage, and once a step by rank.

    See :class:`planner.pipeline.simulate.Times` and :class:`Link`.
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
        turns_s = simulated_s(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, self.of_stages)
        return turns_s + self.once_s

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


class Coming(NamedTuple):
    """Parameters that are on their way while a block computes: to the next one of its stage that gathers any, or, in
    backward, to the last one before it that gathers any again.

    Attributes:
        number: of the block that they come to; ``is_again``: in backward.
    """

    bytes: int = 0
    number: int = 0
    is_again: bool = False


class Need(NamedTuple):
    """What a block needs beside all that its rank has saved: bytes, how much of that is gathered for it; its number."""

    bytes: int
    gathered: int
    number: int


@dataclass(frozen=True)
class Staged:
    """A chain on a pipeline: the cut, and what all of a step takes.

    Attributes:
        links: the chain, block by block.
        step_s: the simulated schedule and what happens once a step.
        rank_bytes: of every rank at its fullest.
        turns: the number of micro-batches, where that is to move a size (:mod:`planner.polynomial`).
        waits: whether each micro-batch waits for what it gathers where it is used, and nothing is gathered ahead.
    """

    pipeline: Pipeline
    links: tuple[Link, ...]
    cut: Cut
    step_s: float
    rank_bytes: tuple[int, ...]
    turns: int = 0
    waits: bool = False

    @property
    def peak_bytes(self) -> int:
        return max(self.rank_bytes)

    @property
    def fullest_rank(self) -> int:
        """The first of those that need most."""
        return self.rank_bytes.index(self.peak_bytes)

    @property
    def evaluation(self) -> Evaluation:
        """What it takes, as of a plan in one turn; nothing of its communication is told apart."""
        return Evaluation(self.step_s, 0.0, self.peak_bytes, True)

    @property
    def levels(self) -> tuple[Level, ...]:
        """At which level every block recomputes."""
        return tuple(link.levels[way] for link, way in zip(self.links, self.cut.savings, strict=True))

    def recompute(self, folded: Folded) -> Recompute:
        """Which instances of each kind recompute."""
        return at_levels(folded, self.levels)

    @cached_property
    def time_s(self) -> dict[str, float]:
        """Seconds of the step by use on the rank that has most to do, see :class:`planner.predict.Prediction`."""
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
        turns = self.turns or self.pipeline.micro_batches
        found = [[0.0, 0.0, *once] for once in self.once_s]
        for stage, link, way in self.placed:
            block, rank = link.block, found[self.pipeline.placed[stage]]
            rank[0] += turns * (block.forward_s + block.input_s + block.weight_s - link.communication_s)
            rank[1] += turns * (block.savings[way].recompute_s - link.gathered_s[way])
            rank[2] += turns * (link.communication_s + link.gathered_s[way])
        return found

    @cached_property
    def once_s(self) -> list[list[float]]:
        """Seconds once a step of every rank: gathering, reducing and the update."""
        return _once_s(self.links, self.pipeline, self.cut.bounds)

    @cached_property
    def times(self) -> TurnTimes:
        """What the step is simulated from."""
        found = stage_times(chain_of(self.links), self.cut.bounds, self.cut.savings)
        stages = (found.forward_s, found.input_s, found.weight_s, found.send_s)
        once = zip(*self.once_s, strict=True)
        return TurnTimes(*(tuple(each.tolist()) for each in stages), *(tuple(map(float, each)) for each in once))

    @property
    def bubble(self) -> float:
        """See :meth:`TurnTimes.bubble`."""
        return self.times.bubble(self.pipeline.micro_batches, self.step_s)

    @cached_property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes by use on the fullest rank."""
        fullest = self.fullest_rank
        found, summed = Counter[str](), 0
        for stage, link, _ in self.placed:
            if self.pipeline.placed[stage] == fullest:
                found.update(link.held)
                summed += link.summed_bytes
        for rank, _, each in self.also_read:
            if rank == fullest:
                found.update(each.held)
        for rank, _, apart, last in self.apart:
            if rank == fullest:
                found.update(gradients=apart)
                summed += last
        if self.is_fullest_at_end:
            found.update(gradients=summed)
            return {use: found[use] for use in USES}
        _, need = self.fullest_moment(fullest)
        working = need.bytes + self.gone_bytes[need.number] + self.waiting_bytes[fullest]
        working += sum(size for rank, _, size in self.added if rank == fullest)
        found["activations"] += self.peak_bytes - working - found.total()
        found.update(gathered=need.gathered, temporary=working - need.gathered)
        return {use: found[use] for use in USES}

    @cached_property
    def saved_bytes(self) -> list[int]:
        """Bytes that each stage holds of one micro-batch from forward to backward: what it saved, and what it sent on,
        until an answer comes.
        """
        found = [*self.sent_bytes]
        for stage, link, way in self.placed:
            found[stage] += link.block.savings[way].saved_bytes
        return found

    def held_of(self, counts: Sequence[int], stages: Sequence[int]) -> int:
        """Bytes that stages hold of so many micro-batches each, saved for backward."""
        return sum(count * self.saved_bytes[stage] for count, stage in zip(counts, stages, strict=True))

    @cached_property
    def needs(self) -> list[Need]:
        """Of each stage, the block that needs most beside what is saved of all micro-batches."""
        found = [Need(0, 0, 0)] * self.pipeline.stages
        for number, (stage, link, way) in enumerate(self.placed):
            coming = self.coming[number].bytes
            beside = link.working_bytes[way] + coming + self.returned_bytes[stage] - self.gone_bytes[number]
            found[stage] = max(found[stage], Need(beside, link.gathered_bytes[way] + coming, number))
        return found

    @cached_property
    def gone_bytes(self) -> list[int]:
        """Bytes that later blocks of a stage save, which are gone when a block is undone, unless that is done in two
        parts, and not yet there before.
        """
        found, after, last, parted = list[int](), 0, -1, self.pipeline.parted
        for stage, link, way in reversed([*self.placed]):
            after = after if stage == last and not parted[stage] else 0
            found.append(after)
            after, last = after + link.block.savings[way].saved_bytes, stage
        return found[::-1]

    def fullest_moment(self, rank: int) -> tuple[Sequence[int], Need]:
        """When a rank holds most while it computes: micro-batches in flight of its stages, and what needs most then."""
        stages, moments = self.pipeline.moments[rank]
        options = (
            (counts, max(self.needs[stage] for count, stage in zip(counts, stages, strict=True) if count))
            for counts in moments
            if any(counts)
        )
        return max(options, key=lambda each: self.held_of(each[0], stages) + each[1].bytes)

    @cached_property
    def waiting_bytes(self) -> list[int]:
        """Bytes that each rank has ready for the next message of every other one."""
        placed, largest = self.pipeline.placed, dict[tuple[int, int], int]()
        for stage, (here, there) in enumerate(pairwise(placed)):
            for way, size in (((there, here), self.sent_bytes[stage]), ((here, there), self.returned_bytes[stage])):
                largest[way] = max(largest.get(way, 0), size)
        return [sum(size for (to, _), size in largest.items() if to == rank) for rank in range(self.pipeline.ranks)]

    @cached_property
    def parted_bytes(self) -> list[int]:
        """Bytes that each rank keeps for second parts of backward beside what is saved."""
        found, parted = [0] * self.pipeline.ranks, self.pipeline.parted
        for stage, link, _ in self.placed:
            found[self.pipeline.placed[stage]] += parted[stage] * link.parted_bytes
        return [more + most for more, most in zip(found, self.second_bytes, strict=True)]

    @cached_property
    def second_bytes(self) -> list[int]:
        """Bytes of the gradients of weights that a second part finds, before they are added to those of other
        micro-batches, of the stage of each rank that finds most.
        """
        found, parted = [0] * self.pipeline.stages, self.pipeline.parted
        for stage, link, _ in self.placed:
            found[stage] += link.held.get("gradients", 0) * bool(parted[stage])
        homes = [
            [s for s, home in enumerate(self.pipeline.placed) if home == rank] for rank in range(self.pipeline.ranks)
        ]
        return [max(found[stage] for stage in stages) for stages in homes]

    @cached_property
    def sent_bytes(self) -> list[int]:
        """Bytes that each stage sends to another rank."""
        return [self.links[end - 1].sent_bytes * leaves for end, leaves in self._ends]

    @cached_property
    def returned_bytes(self) -> list[int]:
        """Bytes of the gradients that come back for that."""
        return [self.links[end - 1].returned_bytes * leaves for end, leaves in self._ends]

    @property
    def _ends(self) -> Iterator[tuple[int, bool]]:
        """Where each stage ends, and whether the next one is on another rank."""
        placed = self.pipeline.placed
        yield from zip(self.cut.bounds[1:], (*(a != b for a, b in pairwise(placed)), False), strict=True)

    @cached_property
    def is_fullest_at_end(self) -> bool:
        """Whether the fullest rank is fullest when gradients are summed over ranks, and not while it computes."""
        _, at_end = _held(self)
        return int(at_end[self.fullest_rank]) == int(self.peak_bytes)

    @property
    def added(self) -> Iterator[tuple[int, str, int]]:
        """Ranks, the parameters of which several operators there find one gradient together in each micro-batch, and
        bytes of what they add up in before that is added to the gradient of other micro-batches.
        """
        return _added(self.links, self.pipeline, self.cut.bounds)

    @cached_property
    def coming(self) -> list[Coming]:
        """What is on its way beside each block."""
        return _coming(self.links, self.cut, self.waits)

    @property
    def apart(self) -> Iterator[tuple[int, str, int, int]]:
        """Ranks, the parameters that several blocks there use, bytes of the gradients that are there for that until the
        end of the step, beside one, and of what these are added up in then.
        """
        return _apart(self.links, self.pipeline, self.cut.bounds)

    @property
    def placed(self) -> Iterator[tuple[int, Link, int]]:
        """The stage of every block, the block, and how it saves."""
        for stage, (low, high) in enumerate(pairwise(self.cut.bounds)):
            for link, way in zip(self.links[low:high], self.cut.savings[low:high], strict=True):
                yield stage, link, way

    @property
    def also_read(self) -> Iterator[tuple[int, str, Shared]]:
        """Ranks, and what they have to do with leaves, by name, that blocks of others read too, beside what those
        count.
        """
        return _also_read(self.links, self.pipeline, self.cut.bounds)


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
        effort: what looking for each cut may take, see :func:`planner.pipeline.partition.cut`.
    """
    if not all(math.isfinite(link.block.work_s) for link in links):
        return None
    chain = chain_of(links)
    best: Staged | None = None
    for number, pipeline in enumerate(sorted(choices, key=lambda each: _even_s(each, chain))):
        if number >= BEST and (best is not None or cutoff_s < math.inf):
            break
        least_s = cutoff_s if best is None else best.step_s
        if bound_s(pipeline, chain) < least_s:
            found = _cut(links, pipeline, limit_bytes, least_s, effort)
            if found is not None and found.step_s < least_s:
                best = found
    return best


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
    """
    for waits in (False, True):
        if not waits or any(link.coming_bytes for link in links):
            found = _cut_so(links, pipeline, limit_bytes, cutoff_s, effort, waits)
            if found is not None:
                return found
    return None


def _cut_so(
    links: Sequence[Link], pipeline: Pipeline, limit_bytes: int | None, cutoff_s: float, effort: int, waits: bool
) -> Staged | None:
    """The same of those that wait, or do not."""
    spare = min(min(link.working_bytes) for link in links)
    for _ in range(TRIES):
        try:
            room = None if limit_bytes is None else max(0, limit_bytes - spare)
            found = cut(pipeline, chain_of(links), room, cutoff_s, effort)
        except InfeasibleError:
            return None
        if found is None:
            return None
        priced = price(links, pipeline, found, waits)
        if limit_bytes is None or priced.peak_bytes <= limit_bytes:
            return priced
        spare += priced.peak_bytes - limit_bytes
    return None


def price(links: Sequence[Link], pipeline: Pipeline, found: Cut, waits: bool = False) -> Staged:
    """All that a step of a cut takes.

    Args:
        waits: see :class:`Staged`.
    """
    once_s = max(map(sum, _once_s(links, pipeline, found.bounds)))
    staged = Staged(pipeline, tuple(links), found, found.step_s + once_s, (), waits=waits)
    always, at_end = _held(staged)
    for rank, _, size in staged.added:
        always[rank] += size
    for rank, (stages, _) in enumerate(pipeline.moments):
        counts, need = staged.fullest_moment(rank)
        always[rank] += staged.held_of(counts, stages) + need.bytes
        always[rank] += staged.waiting_bytes[rank] + staged.parted_bytes[rank]
    return replace(staged, rank_bytes=tuple(map(max, always, at_end)))


def _held(staged: Staged) -> tuple[list[int], list[int]]:
    """Bytes that each rank holds through all of a step, and at its end."""
    held = [0] * staged.pipeline.ranks
    at_end = [0] * staged.pipeline.ranks
    for stage, link, _ in staged.placed:
        held[staged.pipeline.placed[stage]] += link.block.held_bytes
        at_end[staged.pipeline.placed[stage]] += link.summed_bytes
    for rank, _, each in staged.also_read:
        held[rank] += sum(each.held.values())
    for rank, _, apart, last in staged.apart:
        held[rank] += apart
        at_end[rank] += last
    return held, [every + last for every, last in zip(held, at_end, strict=True)]


def waiting(staged: Staged) -> Staged:
    """The same cut, which waits for what it gathers."""
    return price(staged.links, staged.pipeline, staged.cut, waits=True)


def _coming(links: Sequence[Link], found: Cut, waits: bool) -> list[Coming]:
    """What is on its way beside each block, in forward or in backward, whichever is more."""
    if waits:
        return [Coming()] * len(links)
    ways = [*zip(links, found.savings, strict=True)]
    forward = [Coming(link.coming_bytes, number) for number, link in enumerate(links)]
    backward = [Coming(link.coming_again_bytes[way], number, True) for number, (link, way) in enumerate(ways)]
    most: list[Coming] = []
    for low, high in pairwise(found.bounds):
        there, back = _beside(forward[low:high]), _beside(backward[low:high][::-1])[::-1]
        most += (max(pair, key=lambda each: each.bytes) for pair in zip(back, there, strict=True))
    return most


def _beside(blocks: Sequence[Coming]) -> list[Coming]:
    """What is on its way beside each of some blocks, in the order in which they run: what comes to the next one that
    gathers anything. The first that does starts that.
    """
    found, before = [Coming()] * len(blocks), len(blocks)
    for at, each in enumerate(blocks):
        if each.bytes:
            found[before:at] = [each] * (at - before)
            before = at
    return found


def moments(
    assignment: Assignment, staged: Staged, in_flight: Iterable[tuple[Sequence[int], Iterable[Sequence[int]]]]
) -> Iterator[int]:
    """Bytes of every rank at its fullest moments, beside each operator that may need most then.

    Args:
        in_flight: :attr:`planner.pipeline.stages.Pipeline.moments`; of sizes, where micro-batches are to move.
    """
    pipeline, space, savers = staged.pipeline, assignment.space, savers_of(assignment)
    held, at_end = _held(staged)
    yield from at_end
    for rank, _, size in staged.added:
        held[rank] += size
    # Of blocks that are alike the last of a stage needs most: least is gone behind it.
    last: dict[tuple[int, int, Level, int, int], tuple[int, Brought]] = {}
    for number, (stage, link, way) in enumerate(staged.placed):
        brought = brought_by(assignment, number, savers)
        kind, level = space.folded.instances[number].kind, link.levels[way]
        last[stage, kind, level, brought.there_bytes(level), staged.coming[number].bytes] = number, brought
    working: list[dict[int, None]] = [{} for _ in range(pipeline.stages)]
    for (stage, _, level, _, coming), (number, brought) in last.items():
        beside = coming + staged.returned_bytes[stage] - staged.gone_bytes[number]
        working[stage].update({most + beside: None for most in working_moments(assignment, number, level, brought)})
    for rank, (stages, counts) in enumerate(in_flight):
        for moment in counts:
            there = held[rank] + staged.held_of(moment, stages) + staged.waiting_bytes[rank] + staged.parted_bytes[rank]
            running = (stage for count, stage in zip(moment, stages, strict=True) if count)
            yield from {there + most: None for stage in running for most in working[stage]}


def _added(links: Sequence[Link], pipeline: Pipeline, bounds: Sequence[int]) -> Iterator[tuple[int, str, int]]:
    """See :attr:`Staged.added`."""
    found: Counter[tuple[int, str, int, int]] = Counter()
    for home, (low, high) in zip(pipeline.placed, pairwise(bounds), strict=True):
        for number, link in enumerate(links[low:high], start=low):
            for use in link.uses:
                found[home, use.name, use.bytes, -1 if use.together else number] += use.readers
    yield from dict.fromkeys(each[:3] for each, readers in found.items() if readers > 1)


def _apart(links: Sequence[Link], pipeline: Pipeline, bounds: Sequence[int]) -> Iterator[tuple[int, str, int, int]]:
    """See :attr:`Staged.apart`."""
    found: dict[tuple[int, str], list[int]] = {}
    for home, (low, high) in zip(pipeline.placed, pairwise(bounds), strict=True):
        for link in links[low:high]:
            for use in link.uses:
                if use.held:
                    found.setdefault((home, use.name), []).append(use.held)
    yield from ((home, name, sum(sizes[1:]), sizes[0]) for (home, name), sizes in found.items() if len(sizes) > 1)


def _once_s(links: Sequence[Link], pipeline: Pipeline, bounds: Sequence[int]) -> list[list[float]]:
    """Seconds once a step of every rank [rank][what]: gathering, reducing and the update."""
    found = [[0.0, 0.0, 0.0] for _ in range(pipeline.ranks)]

    def add(rank: int, *seconds: float) -> None:
        found[rank] = [had + more for had, more in zip(found[rank], seconds, strict=True)]

    for home, (low, high) in zip(pipeline.placed, pairwise(bounds), strict=True):
        for link in links[low:high]:
            add(home, link.gather_s, link.reduce_s, link.update_s)
    for home, _, each in _also_read(links, pipeline, bounds):
        add(home, each.gather_s, each.reduce_s + each.sum_s, each.update_s)
    return found


def _also_read(links: Sequence[Link], pipeline: Pipeline, bounds: Sequence[int]) -> Iterator[tuple[int, str, Shared]]:
    """What ranks have to do with leaves, by name, that blocks of others read too, beside what the first such block
    counts.
    """
    readers: dict[str, dict[int, Shared]] = {}
    for home, (low, high) in zip(pipeline.placed, pairwise(bounds), strict=True):
        for link in links[low:high]:
            for name, each in link.shared:
                readers.setdefault(name, {})[home] = each
    for name, ranks in readers.items():
        for number, (rank, each) in enumerate(ranks.items() if len(ranks) > 1 else ()):
            yield rank, name, each if number else Shared({}, 0.0, 0.0, 0.0, each.sum_s)
