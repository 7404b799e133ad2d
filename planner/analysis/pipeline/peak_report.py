"""Lists what is live, tensor by tensor, when the fullest pipeline rank of a micro-batched step is at its peak.

``(Assignment, Staged) -> PeakReport``. What a micro-batched step holds is added up, not followed
(:mod:`planner.analysis.pipeline.rank_memory`); here every term of that sum has its name, so that together they are the
peak: leaves, what each block saved of every micro-batch in flight, and what the block that needs most has while it runs
or runs its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from planner.analysis.memory.storages import BEFORE, Held, PeakReport
from planner.analysis.pipeline.gathered_parameters import (
    GatheredParameters,
    coming,
    gathered_by,
    owned,
    parted,
    savers_of,
)
from planner.analysis.pipeline.leaf_memory import LeafTensor, Leaves, Parts
from planner.analysis.pipeline.rank_memory import Coming
from planner.analysis.pipeline.staged import Staged
from planner.formulation.assignment import Assignment
from planner.formulation.decision_names import called
from planner.formulation.remat.levels import Level
from planner.formulation.remat.saved_accounting import Places
from planner.formulation.resharding import local_bytes
from planner.formulation.stage_boundaries import crossing, sent
from planner.ir.graph import Node, Ref
from planner.ops.workspace import What
from planner.solve.pipeline.schedule import versions

NEXT = "room for the next messages"
"""What each other rank's next message is going to be received in."""
SECOND = "gradients of weights of one micro-batch"
"""What the second part of a backward finds, see :mod:`autopar.runtime.autograd.split_backward`."""
Moment = tuple[str, list[Held]]
"""What runs, and what is alive then beside what is held and saved."""


def peak_micro_batched(assignment: Assignment, staged: Staged) -> PeakReport:
    """What is alive when the rank with the highest peak is at its peak.

    Args:
        assignment: the decisions that run so; their own recomputation aside.
    """
    return _Rank(assignment, staged, staged.peak_rank).fullest()


class _Rank:
    """One rank of a pipeline."""

    def __init__(self, assignment: Assignment, staged: Staged, rank: int):
        self.assignment, self.space, self.rank = assignment, assignment.space, rank
        self.staged, self.alive = staged, staged.alive
        self.graph, self.instances = self.space.graph, self.space.folded.instances
        self.leaves = Leaves(assignment, versions(staged.pipeline.schedule))
        self.savers = savers_of(assignment)

    def fullest(self) -> PeakReport:
        alive = [*self._held(), *self._gradients()]
        if self.alive.peaks_at_end(self.rank):
            alive += self._at_end()
            where = f"reducing gradients{self._on_rank}"
        else:
            what, beside = self._most()
            alive += [*self._saved(), *self._messages(), *self._added(), *beside]
            where = self._where(what)
        size = sum(held.all_bytes for held in alive)
        ordered = sorted((held for held in alive if held.bytes), key=lambda held: -held.all_bytes)
        return PeakReport(size, where, tuple(ordered))

    def _where(self, what: str) -> str:
        stages, in_flight = len(self._in_flight), sum(self._in_flight.values())
        also = f"with {in_flight} micro-batch{'es' * (in_flight != 1)} in flight"
        also += f" in its {stages} stages together" * (stages > 1)
        return f"{what}, {also}{self._on_rank}"

    @property
    def _on_rank(self) -> str:
        return f", on pipeline rank {self.rank}" if self.staged.pipeline.ranks > 1 else ""

    def _at_end(self) -> Iterator[Held]:
        """What is there besides when gradients are reduced."""
        for number, *_ in self._blocks:
            yield from self._named(self.leaves.parts(number).at_end, number)
        for name in self._also_read:
            yield from self._named(self._shared(name).at_end, BEFORE)
        _, reduced = self.alive.reduced(self.rank)
        yield from self._named(self.leaves.parts(reduced).reduced, reduced)
        for rank, name, _, last in self.alive.apart:
            if rank == self.rank:
                yield Held(f"gradient of {self._called(name)} in all its uses", "gradients", last)

    def _added(self) -> Iterator[Held]:
        """What the gradients of a micro-batch add up in, where several operators find one."""
        for rank, name, size in self.alive.added:
            if rank == self.rank:
                yield Held(f"gradient of {self._called(name)} in one micro-batch", "temporary", size)

    @cached_property
    def _moment(self) -> tuple[dict[int, int], int]:
        """How many micro-batches each stage of the rank holds at its fullest moment, and the block that runs then."""
        moment, need = self.alive.peak_moment(self.rank)
        return dict(zip(self.alive.stages_of(self.rank), moment.counts, strict=True)), need.number

    @property
    def _in_flight(self) -> dict[int, int]:
        return self._moment[0]

    @property
    def _blocks(self) -> Iterator[tuple[int, int, Level, Sequence[Places]]]:
        """Of each block of the rank: its number, its stage, the level at which it recomputes, and what it saves."""
        for number, (stage, link, way) in enumerate(self.alive.placed):
            if self.staged.pipeline.placed[stage] == self.rank:
                yield number, stage, link.levels[way], link.saved[way]

    def _held(self) -> Iterator[Held]:
        """Of leaves and outputs through all of the step."""
        for number, *_ in self._blocks:
            yield from self._named(self.leaves.parts(number).always, number)
            for name, size in self.leaves.outputs(number).items():
                yield Held(f"output {self._called(name)}", "activations", size, block=number)
        for name in self._also_read:
            yield from self._named(self._shared(name).always, BEFORE)
        own = {*self.alive.blocks_of(self.rank)}
        for number in (number for number in range(len(self.instances)) if number not in own):
            given = (part for part in self.leaves.parts(number).always if self.graph.by_name[part.leaf].op == "input")
            yield from self._named(given, number)
        for rank, name, apart, _ in self.alive.apart:
            if rank == self.rank:
                yield Held(f"gradient of {self._called(name)} in other uses", "gradients", apart)

    def _gradients(self) -> Iterator[Held]:
        """To which micro-batches add, as far as they have come."""
        moment, need = self.alive.peak_moment(self.rank)
        is_over = moment.added or self.alive.peaks_at_end(self.rank)
        since = None if is_over else need.number
        for number, *_ in self._blocks:
            own = self.leaves.first_read[number]
            for part in self.leaves.parts(number).gradients:
                is_shared = part.leaf in own and self.leaves.is_read_elsewhere(part.leaf)
                comes = self.alive.last_reader(self.rank, part.leaf, number) if is_shared else number
                if self.alive.has_come(comes, since):
                    yield from self._named([part], number)
        for name in self._also_read:
            if self.alive.has_come(self.alive.last_reader(self.rank, name), since):
                yield from self._named(self._shared(name).gradients, BEFORE)

    @property
    def _also_read(self) -> Iterator[str]:
        """The leaves that a block of another rank holds as well."""
        yield from (name for rank, name, each in self.alive.also_read if rank == self.rank and each.held)

    def _shared(self, name: str) -> Parts:
        return self.leaves.shared(name, is_saved=len(self.savers.get(Ref(name), ())) > 1)

    def _named(self, parts: Iterable[LeafTensor], number: int) -> Iterator[Held]:
        for part in parts:
            yield Held(part.words.format(self._called(part.leaf)), part.use, part.bytes, part.times, number)

    def _saved(self) -> Iterator[Held]:
        """From forward to backward, of all micro-batches in flight; of one of them later blocks saved nothing yet, or
        what they did is gone.
        """
        (in_flight, running), left = self._moment, self.alive.parted
        for number, stage, level, saved in self._blocks:
            is_gone = number > running and stage == self.alive.stage_of(running) and not left[stage]
            for held in self._saved_by(number, level, saved):
                if in_flight[stage] - is_gone:
                    yield replace(held, times=in_flight[stage] - is_gone)
            for node, size in parted(self.assignment, self.instances[number]) if left[stage] else ():
                yield Held(f"for gradients of weights of {called(node)}", "activations", size, left[stage], number)

    def _saved_by(self, number: int, level: Level, saved: Sequence[Places]) -> Iterator[Held]:
        """Of one micro-batch."""
        for node, places in zip(self.instances[number].block.nodes, saved, strict=True):
            for place in places:
                size = self.assignment.kept_bytes(node, self.instances[number].kind, level, (place,))
                yield Held(self._at(node, place), "activations", size, block=number)
        for node, size in owned(self.assignment, self.instances[number], level, again=False):
            yield Held(f"what {called(node)} keeps", "activations", size, block=number)
        for name, size in gathered_by(self.assignment, number, self.savers).saved(level).items():
            yield Held(f"gathered {self._called(name)}", "activations", size, block=number)

    def _messages(self) -> Iterator[Held]:
        """What was sent on and not answered yet, what the block that runs was sent, and what is ready for more."""
        in_flight, running = self._moment
        for stage, times in in_flight.items():
            if times and self.alive.sent_bytes[stage]:
                for ref, size in self._crossing(stage).items():
                    yield Held(f"{self._called(ref.node)} as it was sent on", "activations", size, times)
        stage = self.alive.stage_of(running)
        if self.alive.returned_bytes[stage]:
            for ref, size in self._crossing(stage).items():
                if ref in self.graph.differentiated:
                    yield Held(f"gradient of {self._called(ref.node)} as it came", "temporary", size)
        yield Held(NEXT, "temporary", self.alive.waiting_bytes[self.rank])
        yield Held(SECOND, "activations", self.alive.second_bytes[self.rank])

    def _crossing(self, stage: int) -> dict[Ref, int]:
        """Bytes of the values that leave a stage for the next one."""
        return sent(self.assignment, crossing(self.space.folded)[self.staged.cut.bounds[stage + 1] - 1])

    def _most(self) -> Moment:
        """While the block runs, or runs its backward, that needs most beside all that."""
        number = self._moment[1]
        _, link, way = [*self.alive.placed][number]
        if not link.working_bytes[way] + self.alive.coming[number].bytes:
            return "between two operators", []
        level, gathered = link.levels[way], gathered_by(self.assignment, number, self.savers)
        moments = self._moments(number, level, gathered)
        what, beside = max(moments, key=lambda moment: sum(held.bytes for held in moment[1]))
        return what, [*beside, *self._coming(self.alive.coming[number])]

    def _coming(self, to: Coming) -> Iterator[Held]:
        """What is on its way to another block."""
        level = self.staged.levels[to.number] if to.is_again else None
        for name, size in coming(self.assignment, to.number, level).items() if to.bytes else ():
            yield Held(f"gathered {self._called(name)} on its way", "gathered", size, block=to.number)

    def _moments(self, number: int, level: Level, gathered: GatheredParameters) -> Iterator[Moment]:
        """Those of :func:`planner.analysis.pipeline.gathered_parameters.working_moments`, with names."""
        instance = self.instances[number]
        there = [
            Held(f"gathered {self._called(name)}", "gathered", size, block=number)
            for name, size in gathered.there(level).items()
        ]
        again = list(there)
        if level != "none":
            dropped = self.assignment.again(instance.kind, level).dropped
            for node, places in zip(instance.block.nodes, dropped, strict=True):
                again += (
                    Held(f"{self._at(node, place)} again", "temporary", self._bytes(node, place), block=number)
                    for place in places
                )
        again += (
            Held(f"what {called(node)} keeps again", "temporary", size, block=number)
            for node, size in owned(self.assignment, instance, level, again=True)
        )
        for node in instance.block.nodes:
            whole = gathered.gradients.get(node.name, 0)
            gradients = [Held(f"whole gradients of {called(node)}", "temporary", whole, block=number)] if whole else []
            choice = self.assignment.choice(node)
            tensors, layouts = (*self.graph.input_types(node), *node.results), (*choice.operands, *choice.results)
            sizes = [local_bytes(tensor, at, self.space.mesh) for tensor, at in zip(tensors, layouts, strict=True)]
            for pieces in self.space.decision_graph.blocks.working(node).pieces(sizes, layouts):
                alive = [
                    Held(_in_words(what, self._at(node, place)), "temporary", size, block=number)
                    for what, place, size in pieces
                    if size
                ]
                is_backward = any(what in ("gradient", "works", "gradient's sum") for what, *_ in pieces)
                direction = "backward" if is_backward or gradients else "forward"
                yield f"{direction} {node.path or node.name}: {node.op}", [*again, *gradients, *alive]
        if gathered.parts.total():
            sent = [
                Held(f"{self._called(name)} as it comes", "temporary", size + gathered.own[name], block=number)
                for name, size in gathered.parts.items()
            ]
            yield f"gathering for {instance.block.path or instance.block.nodes[0].name}", [*there, *sent]

    def _bytes(self, node: Node, place: int) -> int:
        return self.space.bytes_of(node, self.assignment.choice(node), (place,))

    def _at(self, node: Node, place: int) -> str:
        """The name of an operator's operand or result."""
        count = len(node.inputs)
        return called(node) if place >= count else self._called(node.inputs[place].node)

    def _called(self, name: str) -> str:
        return called(self.graph.by_name[name])


def _in_words(what: What, name: str) -> str:
    words = {
        "": "{}",
        "gradient": "gradient of {}",
        "works": "what {} works with",
        "sum": "{} and its sum over ranks",
        "gradient's sum": "gradient of {} and its sum over ranks",
    }
    return words[what].format(name)
