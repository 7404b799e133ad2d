"""Memory of each pipeline rank through a micro-batched step: its peak, and what that consists of.

``(links, Pipeline, Cut) -> bytes of every rank at its fullest``. Each stage is followed through one micro-batch
(:mod:`planner.analysis.pipeline.stage_memory`), and the schedule says what a rank holds while each of its actions runs
(:mod:`planner.solve.pipeline.running`): other micro-batches, gradients to which they add, messages. Beside all of that
are leaves and outputs, through all of the step (:mod:`planner.analysis.pipeline.leaf_memory`).

Or a rank is fullest when gradients are reduced, at the end of the step.
:mod:`planner.analysis.pipeline.peak_report` names every tensor of that sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from planner.analysis.pipeline.chain import Link, Shared, also_read, placed
from planner.analysis.pipeline.stage_memory import At, StageMemory, StageRun, part_of
from planner.solve.pipeline.running import Running, running
from planner.solve.pipeline.schedule import versions
from planner.solve.pipeline.stages import Cut, Pipeline

StageRuns: TypeAlias = dict[object, StageRun]
"""Stages that were followed, by their blocks and how these run."""


class Peak(NamedTuple):
    """When a rank holds most while it computes.

    Attributes:
        bytes: that it holds; ``at``: what it runs, beside what else.
    """

    bytes: int
    at: At
    beside: Running


@dataclass(frozen=True)
class LiveMemory:
    """What the ranks hold of a cut chain.

    Attributes:
        links: the chain, block by block.
        prefetch: whether micro-batches gather parameters a block ahead; else each waits for them where they are used.
        followed: stages of this cut or others that were followed before.
    """

    links: Sequence[Link]
    pipeline: Pipeline
    cut: Cut
    prefetch: bool = True
    followed: StageRuns = field(default_factory=dict, compare=False, repr=False)

    # ---- the sum -----------------------------------------------------------------------------------------------------

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Of every rank at its fullest."""
        return tuple(max(self.peak(rank).bytes, self.at_the_end(rank)) for rank in range(self.pipeline.ranks))

    def peak(self, rank: int) -> Peak:
        """When a rank holds most while it computes."""
        every = enumerate(self.running[rank])
        size, _, each = max((self._most(rank, each), number, each) for number, each in every if self._parts_of(each))
        return Peak(size, self._fullest_of(each), each)

    @property
    def backward_bytes(self) -> list[int]:
        """Bytes of the rank while each stage runs its whole backward, at its fullest."""
        found = [0] * self.pipeline.stages
        for rank, every in enumerate(self.running):
            for each in every:
                if each.kind == "B":
                    found[each.stage] = max(found[each.stage], self._most(rank, each))
        return found

    def _most(self, rank: int, each: Running) -> int:
        """Bytes of a rank while an action runs, at its fullest."""
        return self.held[rank] + self.beside(rank, each) + self._fullest_of(each).bytes

    def _fullest_of(self, each: Running) -> At:
        return self._fullest[each.stage][part_of(each.kind, each.is_first)]

    def at_the_end(self, rank: int, reduced_bytes: int | None = None) -> int:
        """Bytes that a rank has when gradients are reduced, so many at a time, or of the block with most."""
        most = self.reduced(rank)[0] if reduced_bytes is None else reduced_bytes
        gradients = sum(self.stages[stage].gradient_bytes for stage in self.stages_of(rank))
        return self.held[rank] + gradients + self.at_end[rank] + most

    def peaks_at_end(self, rank: int) -> bool:
        """Whether a rank is fullest when gradients are reduced, and not while it computes."""
        return int(self.at_the_end(rank)) == int(self.rank_bytes[rank])

    def beside(self, rank: int, each: Running) -> int:
        """Bytes that a rank has beside the micro-batch that it works on, leaves and outputs aside."""
        stages, found = self.stages_of(rank), 0
        for stage, count, parted, added in zip(stages, each.counts, each.parted, each.added, strict=True):
            memory = self.stages[stage]
            found += count * memory.saved_bytes + parted * memory.parted_bytes
            found += (added and not (each.is_first and stage == each.stage)) * memory.gradient_bytes
        for (stage, kind), is_sent, count in each.messages:
            found += count * self.message_bytes(stage, kind, is_sent)
        return found

    def message_bytes(self, stage: int, kind: str, is_sent: bool) -> int:
        """Bytes of a message for a stage: what it takes, or of what was sent that which nothing else holds."""
        if kind == "B":
            return self.stages[stage + 1].returned_bytes
        return self.stages[stage - 1].sent_bytes if is_sent else self.stages[stage].received_bytes

    # ---- stages ------------------------------------------------------------------------------------------------------

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        """Every stage through one micro-batch."""
        return tuple(run.memory for run in self.runs)

    @cached_property
    def runs(self) -> tuple[StageRun, ...]:
        """The same, to ask what there is."""
        memories, ways = self.links[0].memories, zip(self.links, self.cut.savings, strict=True)
        levels = [link.levels[way] for link, way in ways]
        splits = any(each.kind == "I" for rank in self.running for each in rank)
        found = []
        for low, high in pairwise(self.cut.bounds):
            key = memories, low, self.cut.savings[low:high], self.prefetch, splits
            if key not in self.followed:
                self.followed[key] = StageRun(
                    memories, range(low, high), levels[low:high], prefetch=self.prefetch, splits=splits
                )
            found.append(self.followed[key])
        return tuple(found)

    @cached_property
    def _fullest(self) -> list[dict[str, At]]:
        """The fullest moment of each part of every stage."""
        return [
            {part: max(moments, key=lambda at: at.bytes) for part, moments in stage.parts.items() if moments}
            for stage in self.stages
        ]

    def _parts_of(self, each: Running) -> tuple[At, ...]:
        return self.stages[each.stage].parts[part_of(each.kind, each.is_first)]

    @cached_property
    def running(self) -> tuple[tuple[Running, ...], ...]:
        """What each rank holds beside each of its actions."""
        p = self.pipeline
        return running(p.schedule, p.ranks, p.micro_batches, p.virtual_stages)

    # ---- through all of the step, and at its end ---------------------------------------------------------------------

    @cached_property
    def held(self) -> list[int]:
        """Bytes that each rank holds of leaves and outputs through all of the step."""
        found = [0] * self.pipeline.ranks
        for stage, link, _ in self.placed:
            found[self.pipeline.placed[stage]] += sum(link.held.values())
        for stage, home in enumerate(self.pipeline.placed):
            found[home] += self.before * self.stages[stage].gradient_bytes
        for rank, _, each in self.also_read:
            found[rank] += sum(each.held.values())
        return [size + self.given_bytes(rank) for rank, size in enumerate(found)]

    @property
    def before(self) -> int:
        """Of how many batches before gradients are there."""
        return versions(self.pipeline.schedule) - 1

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
        return [size + self.added_up(rank)[1] for rank, size in enumerate(found)]

    def added_up(self, rank: int) -> tuple[str, int]:
        """The largest parameter of which several blocks of a rank find a gradient, and bytes of the sum of these."""
        readers = Counter(name for number in self.blocks_of(rank) for name, _ in self.links[number].uses)
        sizes = {name: size for number in self.blocks_of(rank) for name, size in self.links[number].uses}
        return max(
            ((name, sizes[name]) for name, count in readers.items() if count > 1),
            key=lambda each: each[1],
            default=("", 0),
        )

    def reduced(self, rank: int) -> tuple[int, int]:
        """Bytes of gradients of one block of a rank as they are sent to be reduced, of that with most; its number."""
        return max((self.links[number].reduced_bytes, number) for number in self.blocks_of(rank))

    @property
    def also_read(self) -> Iterator[tuple[int, str, Shared]]:
        """See :func:`planner.analysis.pipeline.chain.also_read`."""
        return also_read(self.links, self.pipeline, self.cut.bounds)

    # ---- who has what ------------------------------------------------------------------------------------------------

    @property
    def placed(self) -> Iterator[tuple[int, Link, int]]:
        """See :func:`planner.analysis.pipeline.chain.placed`."""
        return placed(self.links, self.cut)

    def blocks_of(self, rank: int) -> list[int]:
        """The numbers of those of a rank."""
        return [n for s in self.stages_of(rank) for n in range(self.cut.bounds[s], self.cut.bounds[s + 1])]

    def stages_of(self, rank: int) -> list[int]:
        """Those of a rank."""
        return self._stages_of[rank]

    @cached_property
    def _stages_of(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.pipeline.ranks)]
        for stage, home in enumerate(self.pipeline.placed):
            found[home].append(stage)
        return found


def moments(alive: LiveMemory, every: Iterable[Iterable[Running]]) -> Iterator[int]:
    """Bytes of every rank at its fullest moments, of each part of a stage those that may be the fullest.

    Args:
        every: :attr:`LiveMemory.running`; of sizes, where micro-batches are to move.
    """
    known: dict[tuple[int, str], list[int]] = {}
    for rank, states in enumerate(every):
        reduced = dict.fromkeys(alive.links[number].reduced_bytes for number in alive.blocks_of(rank))
        yield from (alive.at_the_end(rank, each) for each in reduced)
        for each in states:
            part = part_of(each.kind, each.is_first)
            key = each.stage, part
            if key not in known:
                known[key] = [*_candidates(alive, alive.stages[each.stage].parts[part])]
            beside = alive.held[rank] + alive.beside(rank, each)
            yield from {beside + most: None for most in known[key]}


def _candidates(alive: LiveMemory, moments: Iterable[At]) -> Iterator[int]:
    """Bytes of moments: of those that are the same in equal blocks, what may be the most."""
    groups: dict[object, list[int]] = {}
    for at in moments:
        key = at.number if at.number < 0 else alive.links[0].memories.alike(at.number)
        groups.setdefault((key, at.place), []).append(at.bytes)
    yield from dict.fromkeys(size for sizes in groups.values() for size in _outermost(sizes))


def _outermost(sizes: Sequence[int]) -> list[int]:
    """Of sizes, each perhaps by as much above the one before it as the one after it is above it, those that may be the
    largest: the others.
    """
    last = len(sizes) - 1
    between = (at for at in range(1, last) if sizes[at] - sizes[at - 1] == sizes[at + 1] - sizes[at])
    left = {*between}
    return [size for at, size in enumerate(sizes) if at not in left]
