"""Memory of each pipeline rank through a micro-batched step: its peak, and what that consists of.

``(links, Pipeline, Cut) -> bytes of every rank at its fullest``. While a rank computes it holds, all at once:

* ``held``: of leaves and outputs what is there through all of the step;
* ``gradients``: those to which micro-batches add, once the first backward is over, and while it runs those that have
  ``arrived``;
* ``saved_bytes``: what its stages saved and sent on, once for every micro-batch in flight;
* ``needs``: what the block that runs needs beside that, less what is gone by then;
* ``added``, ``parted_bytes``, ``waiting_bytes``: gradients of one micro-batch that wait for others, what second parts
  of backward need, room for messages.

Or it is fullest when gradients are reduced, at the end of the step, and holds ``held``, ``gradients`` and ``at_end``.
:mod:`planner.analysis.pipeline.peak_report` names every tensor of that sum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from planner.analysis.memory.storages import USES
from planner.analysis.pipeline.chain import Link, Shared, also_read, placed
from planner.analysis.pipeline.gathered_parameters import GatheredParameters, gathered_by, savers_of, working_moments
from planner.formulation.assignment import Assignment
from planner.formulation.remat.levels import Level
from planner.solve.pipeline.schedule import InFlight
from planner.solve.pipeline.stages import Cut, Pipeline


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
    """What a block needs beside all that its rank has saved.

    Attributes:
        bytes: all together; ``gathered``: how much of that is gathered for it, ``arrived``: of gradients that come in
            the first backward.
        number: of the block.
    """

    bytes: int = 0
    gathered: int = 0
    arrived: int = 0
    number: int = 0


@dataclass(frozen=True)
class LiveMemory:
    """What the ranks hold of a cut chain.

    Attributes:
        links: the chain, block by block.
        prefetch: whether micro-batches gather parameters a block ahead; else each waits for them where they are used.
    """

    links: Sequence[Link]
    pipeline: Pipeline
    cut: Cut
    prefetch: bool = True

    # ---- the sum -----------------------------------------------------------------------------------------------------

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Of every rank at its fullest."""
        ranks = range(self.pipeline.ranks)
        return tuple(max(self._while_computing(rank), self.at_the_end(rank, self.reduced(rank)[0])) for rank in ranks)

    def _while_computing(self, rank: int) -> int:
        moment, need = self.peak_moment(rank)
        return self.beside(rank) + self.there(rank, moment) + need.bytes

    def at_the_end(self, rank: int, reduced_bytes: int) -> int:
        """Bytes that a rank has when gradients are reduced, so many at a time."""
        return self.held[rank] + self.gradients[rank] + self.at_end[rank] + reduced_bytes

    def beside(self, rank: int) -> int:
        """Bytes that a rank has while it computes, whatever is in flight and whichever block runs."""
        return self.held[rank] + self.added_bytes[rank] + self.waiting_bytes[rank] + self.parted_bytes[rank]

    def there(self, rank: int, moment: InFlight) -> int:
        """Bytes that a rank has at a moment, saved for backward and of gradients to which micro-batches add."""
        return self.held_of(moment.counts, self.stages_of(rank)) + moment.added * self.gradients[rank]

    def peak_moment(self, rank: int) -> tuple[InFlight, Need]:
        """When a rank holds most while it computes: what is in flight, and what needs most then."""
        stages, moments = self.pipeline.moments[rank]
        options = (
            (at, max(self.needs[at.added][stage] for count, stage in zip(at.counts, stages, strict=True) if count))
            for at in moments
            if any(at.counts)
        )
        return max(options, key=lambda each: self.there(rank, each[0]) + each[1].bytes)

    def peaks_at_end(self, rank: int) -> bool:
        """Whether a rank is fullest when gradients are reduced, and not while it computes."""
        return int(self.at_the_end(rank, self.reduced(rank)[0])) == int(self.rank_bytes[rank])

    def by_use(self, rank: int) -> dict[str, int]:
        """What a rank holds at its fullest, by use."""
        found, is_at_end = Counter[str](), self.peaks_at_end(rank)
        moment, need = self.peak_moment(rank)
        since = None if is_at_end or moment.added else need.number
        own = {*self.blocks_of(rank)}
        for number in own:
            found.update(self.links[number].held)
        for number, gradients in self.come:
            if number in own and self.has_come(number, since):
                found.update(gradients)
        for home, _, each in self.also_read:
            if home == rank:
                found.update(each.held)
        found.update(gradients=sum(apart for home, _, apart, _ in self.apart if home == rank))
        found.update(activations=self.given_bytes(rank))
        if is_at_end:
            found.update(gradients=self.at_end[rank], temporary=self.reduced(rank)[0])
            return {use: found[use] for use in USES}
        working = need.bytes - need.arrived + self.gone_bytes[need.number]
        working += self.waiting_bytes[rank] + self.added_bytes[rank]
        found["activations"] += self.rank_bytes[rank] - working - found.total()
        found.update(gathered=need.gathered, temporary=working - need.gathered)
        return {use: found[use] for use in USES}

    # ---- through all of the step, and at its end ---------------------------------------------------------------------

    @cached_property
    def held(self) -> list[int]:
        """Bytes that each rank holds of leaves and outputs through all of the step."""
        found = [0] * self.pipeline.ranks
        for stage, link, _ in self.placed:
            found[self.pipeline.placed[stage]] += link.block.held_bytes
        for rank, _, each in self.also_read:
            found[rank] += sum(each.held.values())
        for rank, _, apart, _ in self.apart:
            found[rank] += apart
        return [size + self.given_bytes(rank) for rank, size in enumerate(found)]

    def given_bytes(self, rank: int) -> int:
        """Bytes of the inputs that a rank is given as all are, and that blocks of other ranks count."""
        return sum(link.input_bytes for link in self.links) - sum(
            self.links[at].input_bytes for at in self.blocks_of(rank)
        )

    @cached_property
    def at_end(self) -> list[int]:
        """Bytes that each rank holds besides when gradients are reduced: sums over ranks, and parts that are stored."""
        found = [0] * self.pipeline.ranks
        for stage, link, _ in self.placed:
            found[self.pipeline.placed[stage]] += link.at_end_bytes
        for rank, _, each in self.also_read:
            found[rank] += each.at_end_bytes
        for rank, _, _, last in self.apart:
            found[rank] += last
        return found

    def reduced(self, rank: int) -> tuple[int, int]:
        """Bytes of gradients of one block of a rank as they are sent to be reduced, of that with most; its number."""
        return max((self.links[number].reduced_bytes, number) for number in self.blocks_of(rank))

    @property
    def apart(self) -> Iterator[tuple[int, str, int, int]]:
        """Ranks, the parameters that several blocks there use, bytes of the gradients that are there for that until the
        end of the step, beside one, and of what these are added up in then.
        """
        found: dict[tuple[int, str], list[int]] = {}
        for stage, link, _ in self.placed:
            for use in link.uses:
                if use.held:
                    found.setdefault((self.pipeline.placed[stage], use.name), []).append(use.held)
        yield from ((home, name, sum(sizes[1:]), sizes[0]) for (home, name), sizes in found.items() if len(sizes) > 1)

    @property
    def also_read(self) -> Iterator[tuple[int, str, Shared]]:
        """See :func:`planner.analysis.pipeline.chain.also_read`."""
        return also_read(self.links, self.pipeline, self.cut.bounds)

    # ---- gradients to which micro-batches add ------------------------------------------------------------------------

    @cached_property
    def gradients(self) -> list[int]:
        """Bytes of them on each rank."""
        found = [0] * self.pipeline.ranks
        for (stage, _, _), come in zip(self.placed, self.come_bytes, strict=True):
            found[self.pipeline.placed[stage]] += come
        return found

    @cached_property
    def come_bytes(self) -> list[int]:
        """Bytes of those that come when each block runs its backward first."""
        found = [0] * len(self.links)
        for number, gradients in self.come:
            found[number] += sum(gradients.values())
        return found

    @property
    def come(self) -> Iterator[tuple[int, Mapping[str, int]]]:
        """Blocks, and what comes when they run their backward first, bytes by use: of what several blocks of a rank
        read, with the last of these.
        """
        for number, (stage, link, _) in enumerate(self.placed):
            yield number, link.gradients
            for name, gradients in link.shared_gradients:
                yield self.last_reader(self.pipeline.placed[stage], name, number), gradients
        for rank, name, each in self.also_read:
            yield self.last_reader(rank, name), each.gradients

    def last_reader(self, rank: int, name: str, first: int = 0) -> int:
        """The number of the last block of a rank that reads a leaf which others read too; where there is one rank
        alone, its last block.
        """
        return self._last_readers.get((rank, name), first if self.pipeline.ranks > 1 else len(self.links) - 1)

    @cached_property
    def _last_readers(self) -> dict[tuple[int, str], int]:
        return {
            (self.pipeline.placed[stage], name): number
            for number, (stage, link, _) in enumerate(self.placed)
            for name, _ in link.shared
        }

    @cached_property
    def arrived(self) -> list[int]:
        """Bytes of those that are there while each block runs its backward first: its own, and of later ones of its
        stage.
        """
        found, after, last = list[int](), 0, -1
        for (stage, _, _), come in reversed([*zip(self.placed, self.come_bytes, strict=True)]):
            after = (after if stage == last else 0) + come
            found.append(after)
            last = stage
        return found[::-1]

    def has_come(self, number: int, since: int | None) -> bool:
        """Whether the gradients of a block are there while another one runs its backward first; ``None``: that is
        over.
        """
        return since is None or (number >= since and self.stage_of(number) == self.stage_of(since))

    # ---- of every micro-batch in flight ------------------------------------------------------------------------------

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

    # ---- of the block that runs --------------------------------------------------------------------------------------

    @cached_property
    def needs(self) -> tuple[list[Need], list[Need]]:
        """Of each stage, the block that needs most beside what is saved of all micro-batches: until its first backward
        is over, and later.
        """
        early, late = ([Need()] * self.pipeline.stages for _ in range(2))
        for number, (stage, link, way) in enumerate(self.placed):
            need = link.working_bytes[way] + self.around(number, stage)
            gathered, arrived = link.gathered_bytes[way] + self.coming[number].bytes, self.arrived[number]
            early[stage] = max(early[stage], Need(need + arrived, gathered, arrived, number))
            late[stage] = max(late[stage], Need(need, gathered, 0, number))
        return early, late

    def around(self, number: int, stage: int) -> int:
        """Bytes that are there while a block of a stage runs, beside what it works with: what is on its way, and the
        gradients that came back, less what is gone.
        """
        return self.coming[number].bytes + self.returned_bytes[stage] - self.gone_bytes[number]

    @cached_property
    def gone_bytes(self) -> list[int]:
        """Bytes that later blocks of a stage save, which are gone when a block runs its backward, unless that is done
        in two parts, and not yet there before.
        """
        found, after, last, parted = list[int](), 0, -1, self.parted
        for stage, link, way in reversed([*self.placed]):
            after = after if stage == last and not parted[stage] else 0
            found.append(after)
            after, last = after + link.block.savings[way].saved_bytes, stage
        return found[::-1]

    @cached_property
    def coming(self) -> list[Coming]:
        """What is on its way beside each block, in forward or in backward, whichever is more."""
        if not self.prefetch:
            return [Coming()] * len(self.links)
        forward = [Coming(link.coming_bytes, number) for number, link in enumerate(self.links)]
        ways = enumerate(zip(self.links, self.cut.savings, strict=True))
        backward = [Coming(link.coming_again_bytes[way], number, True) for number, (link, way) in ways]
        most: list[Coming] = []
        for low, high in pairwise(self.cut.bounds):
            there, back = _beside(forward[low:high]), _beside(backward[low:high][::-1])[::-1]
            most += (max(pair, key=lambda each: each.bytes) for pair in zip(back, there, strict=True))
        return most

    # ---- gradients that wait, and messages ---------------------------------------------------------------------------

    @property
    def added(self) -> Iterator[tuple[int, str, int]]:
        """Ranks, the parameters of which several operators there find one gradient together in each micro-batch, and
        bytes of what they add up in before that is added to the gradient of other micro-batches.
        """
        found: Counter[tuple[int, str, int, int]] = Counter()
        for number, (stage, link, _) in enumerate(self.placed):
            for use in link.uses:
                home = self.pipeline.placed[stage]
                found[home, use.name, use.bytes, -1 if use.together else number] += use.readers
        yield from dict.fromkeys(each[:3] for each, readers in found.items() if readers > 1)

    @cached_property
    def added_bytes(self) -> list[int]:
        """Of :attr:`added`, all of a rank together."""
        found = [0] * self.pipeline.ranks
        for rank, _, size in self.added:
            found[rank] += size
        return found

    @cached_property
    def parted(self) -> Sequence[int]:
        """Of how many micro-batches at most each stage has found the gradients of inputs, and not yet those of weights.
        The first one has nobody to wait for it, and finds all in the second part.
        """
        return (0, *self.pipeline.parted[1:])

    @cached_property
    def parted_bytes(self) -> list[int]:
        """Bytes that each rank keeps for second parts of backward beside what is saved."""
        found, parted = [0] * self.pipeline.ranks, self.parted
        for stage, link, _ in self.placed:
            found[self.pipeline.placed[stage]] += parted[stage] * link.parted_bytes
        return [more + most for more, most in zip(found, self.second_bytes, strict=True)]

    @cached_property
    def second_bytes(self) -> list[int]:
        """Bytes of the gradients of weights that a second part finds, before they are added to those of other
        micro-batches, of the stage of each rank that finds most.
        """
        found = [0] * self.pipeline.stages
        for (stage, _, _), come in zip(self.placed, self.come_bytes, strict=True):
            found[stage] += come * bool(self.parted[stage])
        return [max(found[stage] for stage in self.stages_of(rank)) for rank in range(self.pipeline.ranks)]

    @cached_property
    def waiting_bytes(self) -> list[int]:
        """Bytes that each rank has ready for the next message of every other one."""
        homes, largest = self.pipeline.placed, dict[tuple[int, int], int]()
        for stage, (here, there) in enumerate(pairwise(homes)):
            for way, size in (((there, here), self.sent_bytes[stage]), ((here, there), self.returned_bytes[stage])):
                largest[way] = max(largest.get(way, 0), size)
        return [sum(size for (to, _), size in largest.items() if to == rank) for rank in range(self.pipeline.ranks)]

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
        leaves = (here != there for here, there in pairwise(self.pipeline.placed))
        yield from zip(self.cut.bounds[1:], (*leaves, False), strict=True)

    # ---- who has what ------------------------------------------------------------------------------------------------

    @property
    def placed(self) -> Iterator[tuple[int, Link, int]]:
        """See :func:`planner.analysis.pipeline.chain.placed`."""
        return placed(self.links, self.cut)

    def stage_of(self, number: int) -> int:
        """That of a block."""
        return bisect_right(self.cut.bounds, number) - 1

    def blocks_of(self, rank: int) -> list[int]:
        """The numbers of those of a rank."""
        stages = [stage for stage, home in enumerate(self.pipeline.placed) if home == rank]
        return [number for s in stages for number in range(self.cut.bounds[s], self.cut.bounds[s + 1])]

    def stages_of(self, rank: int) -> Sequence[int]:
        """Those of a rank."""
        return self.pipeline.moments[rank][0]


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
    assignment: Assignment, alive: LiveMemory, in_flight: Iterable[tuple[Sequence[int], Iterable[InFlight]]]
) -> Iterator[int]:
    """Bytes of every rank at its fullest moments, beside each operator that may need most then.

    Args:
        in_flight: :attr:`planner.solve.pipeline.stages.Pipeline.moments`; of sizes, where micro-batches are to move.
    """
    space, savers = assignment.space, savers_of(assignment)
    for rank in range(alive.pipeline.ranks):
        reduced = dict.fromkeys(alive.links[number].reduced_bytes for number in alive.blocks_of(rank))
        yield from (alive.at_the_end(rank, each) for each in reduced)
    alike = dict[tuple[int, int, Level, int], list[tuple[int, GatheredParameters]]]()
    for number, (stage, link, way) in enumerate(alive.placed):
        gathered = gathered_by(assignment, number, savers)
        kind, level = space.folded.instances[number].kind, link.levels[way]
        alike.setdefault((stage, kind, level, gathered.there_bytes(level)), []).append((number, gathered))
    working: list[list[dict[int, None]]] = [[{} for _ in range(alive.pipeline.stages)] for _ in range(2)]
    for (stage, _, level, _), blocks in alike.items():
        needed = working_moments(assignment, blocks[-1][0], level, blocks[-1][1])
        later = [alive.around(number, stage) for number, _ in blocks]
        first = [around + alive.arrived[number] for around, (number, _) in zip(later, blocks, strict=True)]
        for added, sizes in enumerate((first, later)):
            working[added][stage].update({most + size: None for size in _outermost(sizes) for most in needed})
    for rank, (stages, at) in enumerate(in_flight):
        beside = alive.beside(rank)
        for moment in at:
            there = beside + alive.there(rank, moment)
            running = (stage for count, stage in zip(moment.counts, stages, strict=True) if count)
            yield from {there + most: None for stage in running for most in working[moment.added][stage]}


def _outermost(sizes: Sequence[int]) -> list[int]:
    """Of sizes, each perhaps by as much above the one before it as the one after it is above it, those that may be the
    largest: the others.
    """
    last = len(sizes) - 1
    between = (at for at in range(1, last) if sizes[at] - sizes[at - 1] == sizes[at + 1] - sizes[at])
    left = {*between}
    return [size for at, size in enumerate(sizes) if at not in left]
