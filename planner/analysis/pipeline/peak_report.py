"""Lists what is live, tensor by tensor, on a pipeline rank of a micro-batched step: when the fullest is at its peak, or
at any other moment.

``(Assignment, Staged, rank) -> PeakReport``. What a rank holds is put together from simulated blocks
(:mod:`planner.analysis.pipeline.rank_memory`); here every term of that has its name, so that together they are the
peak: leaves, gradients, what each block saved of every micro-batch in flight, messages, and what the block that runs
has then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from planner.analysis.memory.block import BlockRun, Surroundings
from planner.analysis.memory.storages import BEFORE, Held, PeakReport
from planner.analysis.pipeline.leaf_memory import LeafTensor, Leaves
from planner.analysis.pipeline.rank_memory import Peak
from planner.analysis.pipeline.stage_memory import Piece, part_of
from planner.analysis.pipeline.staged import Staged
from planner.formulation.assignment import Assignment
from planner.formulation.decision_names import called
from planner.formulation.remat.levels import Level
from planner.ir.graph import Ref
from planner.solve.pipeline.running import Message
from planner.solve.pipeline.schedule import versions


def peak_micro_batched(assignment: Assignment, staged: Staged) -> PeakReport:
    """What is alive when the rank with the highest peak is at its peak.

    Args:
        assignment: the decisions that run so; their own recomputation aside.
    """
    return RankReport(assignment, staged, staged.peak_rank).fullest()


SECOND = "what waits for gradients of weights"
"""What the first part of a backward leaves for the second one, see :mod:`autopar.runtime.autograd.split_backward`."""

WEIGHTS = "gradients of weights of one micro-batch"
"""What the second part finds, before it is added up."""
COMING, SENT = "parameters on their way to another block", "gradients that are being reduced"
OF_BLOCKS = {"coming": COMING, "sent": SENT, "parted": SECOND, "weights": WEIGHTS}


class RankReport:
    """One rank of a pipeline."""

    def __init__(self, assignment: Assignment, staged: Staged, rank: int):
        self.assignment, self.space, self.rank = assignment, assignment.space, rank
        self.staged, self.alive = staged, staged.alive
        self.graph, self.instances = self.space.graph, self.space.folded.instances
        self.leaves = Leaves(assignment, versions(staged.pipeline.schedule))
        self.memories = staged.links[0].memories
        self.stages = {stage: self.alive.runs[stage] for stage in self.alive.stages_of(rank)}
        self._runs: dict[object, tuple[int, BlockRun]] = {}
        self._watched: dict[object, tuple[str, tuple[Held, ...]]] = {}
        self._named_alike: dict[tuple[tuple[Held, ...], int], tuple[Held, ...]] = {}

    def fullest(self) -> PeakReport:
        """The fullest moment of all."""
        return self.at_end() if self.alive.peaks_at_end(self.rank) else self.during(self.alive.peak(self.rank))

    def at_end(self) -> PeakReport:
        """When gradients are reduced."""
        alive = (*self._held, *self._gradients(1 + self.alive.before, self.stages), *self._at_end())
        return _report(alive, f"reducing gradients{self._on_rank}")

    def during(self, peak: Peak) -> PeakReport:
        """At a moment of an action."""
        what, running = self._running(peak)
        alive = (*self._held, *self._beside(peak), *self._of_stage(peak), *running)
        return _report(alive, self._where(what, peak))

    def _where(self, what: str, peak: Peak) -> str:
        each, stages = peak.beside, len(self.stages)
        in_flight = sum(each.counts) + 1
        also = f"with {in_flight} micro-batch{'es' * (in_flight != 1)} in flight"
        also += f" in its {stages} stages together" * (stages > 1)
        return f"{what}, {also}{self._on_rank}"

    @property
    def _on_rank(self) -> str:
        return f", on pipeline rank {self.rank}" if self.staged.pipeline.ranks > 1 else ""

    # ---- leaves, and the end of the step -----------------------------------------------------------------------------

    @cached_property
    def _held(self) -> tuple[Held, ...]:
        """Of leaves and outputs through all of the step."""
        return tuple(self._leaves_held())

    def _leaves_held(self) -> Iterator[Held]:
        own = self.alive.blocks_of(self.rank)
        for number in own:
            yield from self._named(self.leaves.parts(number).always, number)
            for name, size in self.leaves.outputs(number).items():
                yield Held(f"output {self._called(name)}", "activations", size, block=number)
        for name in self._also_read:
            yield from self._named(self.leaves.shared(name).always, BEFORE)
        for number in (number for number in range(len(self.instances)) if number not in {*own}):
            given = (part for part in self.leaves.parts(number).always if self.graph.by_name[part.leaf].op == "input")
            yield from self._named(given, number)

    def _at_end(self) -> Iterator[Held]:
        """What is there besides when gradients are reduced."""
        for number in self.alive.blocks_of(self.rank):
            yield from self._named(self.leaves.parts(number).at_end, number)
        for name in self._also_read:
            yield from self._named(self.leaves.shared(name).at_end, BEFORE)
        _, reduced = self.alive.reduced(self.rank)
        yield from self._named(self.leaves.parts(reduced).reduced, reduced)
        name, size = self.alive.added_up(self.rank)
        if size:
            yield Held(f"gradient of {self._called(name)} in all its uses", "gradients", size)

    @property
    def _also_read(self) -> Iterator[str]:
        """The leaves that a block of another rank holds as well."""
        yield from (name for rank, name, each in self.alive.also_read if rank == self.rank and each.held)

    def _named(self, parts: Iterable[LeafTensor], number: int) -> Iterator[Held]:
        for part in parts:
            yield Held(part.words.format(self._called(part.leaf)), part.use, part.bytes, part.times, number)

    # ---- beside the micro-batch that is worked on --------------------------------------------------------------------

    def _beside(self, peak: Peak) -> Iterator[Held]:
        each = peak.beside
        for stage, count, parted, added in zip(self.stages, each.counts, each.parted, each.added, strict=True):
            yield from self._saved(stage, count)
            if parted:
                yield Held(SECOND, "temporary", self.alive.stages[stage].parted_bytes, parted)
            is_coming = each.is_first and stage == each.stage
            times = self.alive.before + (added and not is_coming)
            yield from self._gradients(times, [stage])
        for (stage, kind), is_sent, count in each.messages:
            yield from self._message((stage, kind), is_sent, count)

    def _gradients(self, times: int, stages: Iterable[int]) -> Iterator[Held]:
        """To which micro-batches add."""
        for stage in stages if times else ():
            for number in reversed(self.stages[stage].blocks):
                yield from (replace(held, times=times) for held in self._complete(stage, number))
            yield from (replace(held, times=times) for held in self._complete_before(stage))

    def _complete(self, stage: int, number: int) -> Iterator[Held]:
        """The gradients of parameters that are complete when a block has run its backward."""
        run = self.stages[stage]
        like, found = self._run_alike(number, run.level_of(number), run.around(number))
        yield from self._renamed(found.complete, like, number)

    def _complete_before(self, stage: int) -> Iterator[Held]:
        """And those of parameters that are gathered before the first block."""
        for ref, size in self.stages[stage].gathered_before.items():
            yield Held(f"gradient of {self._called(ref.node)}", "gradients", size)

    def _saved(self, stage: int, count: int) -> Iterator[Held]:
        """What a stage saved of so many micro-batches."""
        run = self.stages[stage]
        for number in run.blocks if count else ():
            yield from (replace(held, times=count) for held in self._own(stage, number))
        for ref, held in run.held.items() if count else ():
            if held.is_saved and held.bytes:
                yield self._value(ref, held.bytes, count)

    def _own(self, stage: int, number: int) -> Iterator[Held]:
        """What a block saved by itself."""
        run = self.stages[stage]
        like, found = self._run_alike(number, run.level_of(number), run.around(number))
        yield from self._renamed(found.kept, like, number)

    def _value(self, ref: Ref, size: int, times: int = 1) -> Held:
        node = self.graph.by_name[ref.node]
        use = "gathered" if node.op == "param" else "activations"
        return Held(f"gathered {called(node)}" if node.op == "param" else called(node), use, size, times)

    def _message(self, message: Message, is_sent: bool, count: int) -> Iterator[Held]:
        """What was sent and not answered yet, or what is ready for more."""
        size = self.alive.message_bytes(*message, is_sent)
        stage, kind = message
        what = "gradients" if kind == "B" else "values"
        how = "as they were sent" if is_sent else "that are coming"
        yield Held(f"{what} for stage {stage} {how}", "temporary", size, count)

    # ---- the micro-batch that is worked on ---------------------------------------------------------------------------

    def _of_stage(self, peak: Peak) -> Iterator[Held]:
        """What its stage has of it."""
        each, at = peak.beside, peak.at
        run, part = self.stages[each.stage], part_of(each.kind, each.is_first)
        for piece in run.pieces(part, at):
            yield from self._of_piece(piece, each.stage)
        if each.is_first and not (run.splits and each.kind == "W"):
            for number in run.blocks:
                if number > at.number:
                    yield from self._complete(each.stage, number)

    def _of_piece(self, piece: Piece, stage: int) -> Iterator[Held]:
        what, of, size = piece
        if isinstance(of, Ref):
            name = f"gradient of {self._called(of.node)}"
            use = "gradients" if what == "stored" else "temporary"
            yield self._value(of, size) if what == "value" else Held(name, use, size)
        elif what == "saved":
            yield from self._own(stage, of)
        else:
            use = "gathered" if what == "coming" else "temporary"
            yield Held(OF_BLOCKS[what], use, size, block=of)

    def _running(self, peak: Peak) -> tuple[str, tuple[Held, ...]]:
        """What runs, and what the block has that does."""
        each, at = peak.beside, peak.at
        if at.number < 0:
            return at.what, ()
        run = self.stages[each.stage]
        around, level = run.around(at.number), run.level_of(at.number)
        if run.splits and each.kind in "IW":
            around = around._replace(ends=(False,) * len(around.ends), part=each.kind)
        index = at.place if each.kind == "F" else at.place + len(self.memories.of(at.number, level, around).forward)
        watched = index, each.kind != "F" and not each.is_first
        key = at.number, around, watched
        if key not in self._watched:
            self._watched[key] = BlockRun(self.assignment, at.number, level, around, watched).seen
        return self._watched[key]

    def _run_alike(self, number: int, level: Level, around: Surroundings) -> tuple[int, BlockRun]:
        """A block like this one that was simulated, with its number."""
        key = self.memories.alike(number), level, around
        if key not in self._runs:
            self._runs[key] = number, BlockRun(self.assignment, number, level, around)
        return self._runs[key]

    def _renamed(self, held: tuple[Held, ...], like: int, number: int) -> tuple[Held, ...]:
        """What one block has, as another one that is like it."""
        if like == number:
            return held
        if (held, number) not in self._named_alike:
            self._named_alike[held, number] = tuple(self._rename(held, like, number))
        return self._named_alike[held, number]

    def _rename(self, held: Iterable[Held], like: int, number: int) -> Iterator[Held]:
        names = {a: b for a, b in zip(self._names(like), self._names(number), strict=True) if a != b}
        pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
        for each in held:
            name = pattern.sub(lambda found: names[found[0]], each.name) if names else each.name
            yield replace(each, name=name, block=number)

    def _names(self, number: int) -> list[str]:
        """Those of the operators of a block, and of what it is given."""
        block = self.instances[number].block
        return [*map(called, block.nodes), *(self._called(ref.node) for ref in block.inputs)]

    def _called(self, name: str) -> str:
        return called(self.graph.by_name[name])


def _report(alive: Sequence[Held], where: str) -> PeakReport:
    ordered = sorted(_merged(alive), key=lambda held: -held.all_bytes)
    return PeakReport(sum(held.all_bytes for held in alive), where, tuple(ordered))


def _merged(alive: Iterable[Held]) -> Iterator[Held]:
    """Those of several micro-batches as one."""
    times = Counter[tuple[str, str, int, int]]()
    for held in alive:
        times[held.name, held.use, held.bytes, held.block] += held.times
    for (name, use, size, block), count in times.items():
        if size:
            yield Held(name, use, size, count, block)
