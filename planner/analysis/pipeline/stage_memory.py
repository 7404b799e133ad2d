"""Memory of one stage through forward and backward of one micro-batch, put together from simulated blocks.

``(BlockMemories, blocks of a stage, levels) -> StageMemory``. What a block hands on is in memory that others may save,
and gradients of it come from all that read it: so here is followed who holds which value from when to when, and blocks
add what they have for themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from planner.analysis.memory.block import NONE, SHARED, BlockMemory, BlockMoment, Surroundings
from planner.analysis.pipeline.block_memories import BlockMemories
from planner.formulation.remat.levels import Level
from planner.formulation.resharding import local_bytes
from planner.ir.folding import Block
from planner.ir.graph import Ref

BEFORE_BLOCKS = "backward before the first block"


@dataclass
class _Memory:
    """Memory in which blocks of a stage hand one another values, or find them when it begins.

    Attributes:
        made: the block that makes it; one less than the first: it is there before.
        last: the last block that reads it; one more than the last: it leaves the stage.
        savers: the blocks whose backward needs it.
        stays: whether the stage holds it all the time.
    """

    bytes: int
    made: int
    last: int
    savers: list[int] = field(default_factory=list)
    stays: bool = False

    @property
    def is_saved(self) -> bool:
        return self.stays or bool(self.savers)


class At(NamedTuple):
    """A moment of a stage.

    Attributes:
        number: of the block that runs; ``place``: of the moment in it; both -1: none does.
        bytes: of this micro-batch then.
    """

    what: str
    number: int
    place: int
    bytes: int


class Piece(NamedTuple):
    """Something that is there of a micro-batch.

    Attributes:
        what: ``saved`` by a block of its own; a ``value`` or its ``gradient``; a gradient as it is ``stored``; what is
            ``coming`` to another block; gradients that were ``sent`` to be reduced; what waits for gradients of weights
            (``parted``), and these (``weights``).
        of: the block, or the value.
    """

    what: Literal["saved", "value", "gradient", "stored", "coming", "sent", "parted", "weights"]
    of: int | Ref
    bytes: int


class _BlockBackward(NamedTuple):
    """Backward of a block.

    Attributes:
        beside: bytes of what is there beside the block.
        moments: those of the block, with what is coming to others.
        waiting: the values whose gradients wait for blocks before it.
        sent_bytes: of gradients that the block before it has sent to be reduced.
    """

    number: int
    beside: int
    moments: tuple[BlockMoment, ...]
    memory: BlockMemory
    around: Surroundings
    waiting: tuple[Ref, ...]
    sent_bytes: int = 0

    def at(self, more: int = 0, come: int | None = None) -> Iterator[At]:
        """Its moments.

        Args:
            more: bytes that are there besides.
            come: bytes of the gradients of parameters that have come, in the first backward; left out: in a later one.
        """
        for place, moment in enumerate(self.moments):
            size = moment.later if come is None else moment.bytes + come
            yield At(moment.what, self.number, place, self.beside + more + size)


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one micro-batch in a stage.

    Attributes:
        parts: what runs, in order, by what it is part of: ``F`` forward, ``B`` backward, ``I`` and ``W`` its two parts;
            of those that find gradients of weights also the ``first``, whose gradients stay as they come. All others
            are beside gradients that are there.
        saved_bytes: from forward to backward; ``parted_bytes``: besides, between the two parts of backward.
        received_bytes: of values that it takes.
        sent_bytes: of values that it sends on, beside what is saved.
        returned_bytes: of gradients that it sends back.
        gradient_bytes: to which micro-batches add.
    """

    parts: Mapping[str, tuple[At, ...]]
    saved_bytes: int
    parted_bytes: int
    received_bytes: int
    sent_bytes: int
    returned_bytes: int
    gradient_bytes: int


def part_of(kind: str, is_first: bool) -> str:
    """The part of a stage that an action runs."""
    return f"first {kind}" if is_first else kind


class StageRun:
    """One stage, followed block by block.

    Args:
        prefetch: whether parameters are gathered a block ahead.
        splits: whether backward is in two parts; in a first stage, which nobody waits for, the second one does all.

    Attributes:
        held: memory in which values pass from block to block, by the value that was first in it.
    """

    def __init__(
        self, memories: BlockMemories, blocks: range, levels: Sequence[Level], *, prefetch: bool, splits: bool
    ):
        self.memories, self.blocks, self.levels = memories, blocks, levels
        self.prefetch, self.splits = prefetch, splits and blocks.start > 0
        self._parts_later = splits and not blocks.start
        self.graph, self.space = memories.graph, memories.space
        self.received = memories.crossing[blocks.start - 1] if blocks.start else []
        self.sent = memories.crossing[blocks.stop - 1]
        self.parts = [memories.of(number, level) for number, level in zip(blocks, levels, strict=True)]
        self.root: dict[Ref, Ref] = {}
        self.held: dict[Ref, _Memory] = {}
        self._first_reader: dict[Ref, int] = {}
        self._follow_values()

    @cached_property
    def memory(self) -> StageMemory:
        """All of it."""
        whole = self._whole()
        parts = {"F": tuple(self._forward()), **whole}
        if self.splits:
            parts |= self._split()
        elif self._parts_later:
            parts |= {"I": (), "W": whole["B"], "first W": whole["first B"]}
        sent = dict.fromkeys(self.root[ref] for ref in self.sent)
        complete_bytes = sum(step.memory.gradient_bytes for step in self._backward)
        return StageMemory(
            parts,
            self.saved_bytes,
            self._parted_bytes if self.splits else self._gradients_of(self.sent) * self._parts_later,
            sum(map(self._size, self.received)),
            sum(self.held[root].bytes for root in sent if not self.held[root].is_saved),
            self._gradients_of(self.received),
            complete_bytes + sum(self.gathered_before.values()),
        )

    @cached_property
    def saved_bytes(self) -> int:
        """From forward to backward."""
        return sum(part.own_bytes for part in self.parts) + sum(h.bytes for h in self.held.values() if h.is_saved)

    def level_of(self, number: int) -> Level:
        """The level of a block."""
        return self.levels[number - self.blocks.start]

    def around(self, number: int) -> Surroundings:
        """What a block finds around it in the whole backward."""
        return self._backward[self.blocks.stop - 1 - number].around

    # ---- who holds what ----------------------------------------------------------------------------------------------

    def _follow_values(self) -> None:
        before, end = self.blocks.start - 1, self.blocks.stop
        for ref in self.received:
            self._add(ref, self._size(ref), before, stays=True)
        leaving = {*self.space.leaving, *self.sent}
        for number, part in zip(self.blocks, self.parts, strict=True):
            block = self._block(number)
            for ref, saves in zip(block.inputs, part.saves, strict=True):
                self._first_reader.setdefault(ref, number)
                if ref not in self.root:
                    self._add(ref, self.memories.converted_bytes(ref), before)
                held = self.held[self.root[ref]]
                held.last = max(held.last, number)
                if saves:
                    held.savers.append(number)
            for at, (ref, output) in enumerate(zip(block.outputs, part.outputs, strict=True)):
                if output.like != at:
                    other = block.inputs[-1 - output.like] if output.like < 0 else block.outputs[output.like]
                    self.root[ref] = self.root[other]
                else:
                    self._add(ref, output.bytes, number)
                    if output.is_saved:
                        self.held[ref].savers.append(number)
                if ref in leaving:
                    self.held[self.root[ref]].last = end
        for ref in self.sent:
            self.held[self.root[ref]].last = end

    def _add(self, ref: Ref, size: int, made: int, stays: bool = False) -> None:
        self.root[ref] = ref
        self.held[ref] = _Memory(size, made, made, stays=stays)

    def _block(self, number: int) -> Block:
        return self.memories.instances[number].block

    def _size(self, ref: Ref) -> int:
        return self.memories.size(ref)

    def _gradients_of(self, refs: Sequence[Ref]) -> int:
        """Bytes of the gradients that come back for values which are sent."""
        return sum(self._size(ref) for ref in refs if ref in self.graph.differentiated)

    # ---- forward -----------------------------------------------------------------------------------------------------

    def _forward(self) -> Iterator[At]:
        beside = [0] * (len(self.blocks) + 1)
        for held in self.held.values():
            beside[held.made + 1 - self.blocks.start] += held.bytes
            if not held.is_saved and held.last + 1 < self.blocks.stop:
                beside[held.last + 1 - self.blocks.start] -= held.bytes
        there = 0
        for number, part, more, coming in zip(self.blocks, self.parts, beside[:-1], self.on_the_way, strict=True):
            there += more
            for index, moment in enumerate(part.forward):
                yield At(moment.what, number, index, there + moment.bytes + coming.bytes(moment))
            there += part.own_bytes

    @cached_property
    def on_the_way(self) -> list[_OnTheWay]:
        """Beside each block in forward."""
        return _coming([part.coming_bytes * self.prefetch for part in self.parts])

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _whole(self) -> dict[str, tuple[At, ...]]:
        """The whole backward."""
        first, later, come = list[At](), list[At](), 0
        for step in self._backward:
            first += step.at(come=come)
            later += step.at()
            come += step.memory.gradient_bytes
        if self.gathered_before:
            there = sum(piece.bytes for piece in self._before_blocks())
            first.append(At(BEFORE_BLOCKS, -1, -1, there + come))
            later.append(At(BEFORE_BLOCKS, -1, -1, there))
        return {"first B": tuple(first), "B": tuple(later)}

    def _split(self) -> dict[str, tuple[At, ...]]:
        """Backward in two parts; all that is saved is there throughout."""
        inputs, first, later, parted, found = list[At](), list[At](), list[At](), 0, 0
        for step in self._of_inputs:
            inputs += step.at(parted)
            parted += step.memory.parted_bytes
        for step in self._of_weights:
            first += step.at(parted + found, come=0)
            later += step.at(parted + found)
            found += step.memory.found_bytes
        return {"I": tuple(inputs), "first W": tuple(first), "W": tuple(later)}

    @property
    def _parted_bytes(self) -> int:
        """What the first part leaves for the second one."""
        return sum(step.memory.parted_bytes for step in self._of_inputs)

    @cached_property
    def _backward(self) -> list[_BlockBackward]:
        return [*self._steps(splits=False)]

    @cached_property
    def _of_inputs(self) -> list[_BlockBackward]:
        return [*self._steps(splits=True)]

    @cached_property
    def _of_weights(self) -> list[_BlockBackward]:
        found = []
        for step in self._of_inputs:
            around = step.around._replace(part="W")
            memory = self.memories.of(step.number, self.level_of(step.number), around)
            beside = self.saved_bytes - memory.saved_bytes
            found.append(_BlockBackward(step.number, beside, memory.backward, memory, around, ()))
        return found

    def _steps(self, *, splits: bool) -> Iterator[_BlockBackward]:
        """Backward of every block, last first; ``splits``: of what leads to inputs."""
        start, differentiated = self.blocks.start, self.graph.differentiated
        own, saved = [0], [0] * (len(self.blocks) + 1)  # of blocks before; by the block from which on it is there
        for each in self.parts:
            own.append(own[-1] + each.own_bytes)
        for held in self.held.values():
            if held.is_saved:
                saved[0 if held.stays else min(held.savers) + 1 - start] += held.bytes
        coming = _coming([each.again_bytes * self.prefetch for each in reversed(self.parts)])
        came, there = {ref for ref in self.sent if ref in differentiated}, dict[Ref, int]()
        stays_bytes, there_bytes, saved_bytes, sent_bytes = self._gradients_of(self.sent), 0, sum(saved), 0
        for at in reversed(range(len(self.blocks))):
            number, block = start + at, self._block(start + at)
            around = self._around(number, there, came)
            if splits:
                around = around._replace(ends=(False,) * len(block.inputs), part="I")
            memory = self.memories.of(number, self.levels[at], around)
            touched = {ref for ref in (*block.inputs, *block.outputs) if ref in there}
            there_bytes -= sum(map(self._size, touched))
            waiting = [ref for ref in there if ref not in touched]
            added = [ref for ref in block.inputs if ref in came]
            waiting += (ref for ref in self.sent if ref in differentiated and ref not in added)
            beside = stays_bytes - sum(map(self._size, added)) + there_bytes
            saved_bytes -= saved[at + 1]
            beside += self.saved_bytes - memory.saved_bytes if splits else own[at] + saved_bytes
            moments = tuple(
                moment.beside(coming[-1 - at].bytes(moment) + sent_bytes * moment.beside_sent)
                for moment in memory.backward
            )
            yield _BlockBackward(number, beside, moments, memory, around, tuple(waiting), sent_bytes)
            sent_bytes = memory.sent_bytes or sent_bytes
            for ref in block.outputs:
                there.pop(ref, None)
            for ref, state in zip(block.inputs, memory.gradients, strict=True):
                there.pop(ref, None)
                if state:
                    there[ref] = state
                    there_bytes += self._size(ref)
                    came.discard(ref)

    def _around(self, number: int, there: Mapping[Ref, int], came: Set[Ref]) -> Surroundings:
        block, ended = self._block(number), set[Ref]()
        ends, settles = [], []
        for ref in block.inputs:
            root = self.root[ref]
            held = self.held[root]
            ends.append(not held.stays and held.bytes > 0 and held.savers[:1] == [number] and root not in ended)
            if ends[-1]:
                ended.add(root)
            is_param, is_shared = self.graph.by_name[ref.node].op == "param", self.memories.is_shared_parameter(ref)
            settles.append(is_param and not (is_shared and (self._first_reader[ref] < number or held.bytes)))
        return Surroundings(
            given=tuple(SHARED if ref in came else there.get(ref, NONE) for ref in block.inputs),
            ends=tuple(ends),
            settles=tuple(settles),
            returns=tuple(ref in there or ref in came for ref in block.outputs),
            stays=tuple(ref in came for ref in block.outputs),
        )

    # ---- parameters that are gathered before all blocks --------------------------------------------------------------

    @cached_property
    def gathered_before(self) -> dict[Ref, int]:
        """The trained ones, and bytes of them as they are stored."""
        refs = (ref for ref in self._first_reader if self.memories.is_shared_parameter(ref))
        gathered = (ref for ref in refs if self.held[self.root[ref]].bytes)
        produced = self.memories.assignment.produced
        return {ref: local_bytes(self.graph.type_of(ref), produced(ref), self.space.mesh) for ref in gathered}

    def _before_blocks(self) -> Iterator[Piece]:
        """What is there when the gradients of these become those of what is stored."""
        for ref, size in self.gathered_before.items():
            yield Piece("gradient", ref, self._size(ref))
            yield Piece("stored", ref, size)
        for ref in (*self.sent, *self.received):
            if ref in self.graph.differentiated:
                yield Piece("gradient", ref, self._size(ref))

    # ---- what there is, one by one -----------------------------------------------------------------------------------

    def pieces(self, part: str, at: At) -> Iterator[Piece]:
        """What is there of a micro-batch at a moment, beside what the block that runs has."""
        kind = part[-1]
        if kind == "F":
            yield from self._forward_pieces(at)
        elif at.number < 0:
            yield from self._before_blocks()
        elif self.splits and kind == "I":
            yield from self._saved_pieces(at.number)
            yield from self._step_pieces(self._of_inputs, at)
            for step in self._of_inputs[: self.blocks.stop - 1 - at.number]:
                yield Piece("parted", step.number, step.memory.parted_bytes)
        elif self.splits and kind == "W":
            yield from self._saved_pieces(at.number)
            for step in self._of_inputs:
                yield Piece("parted", step.number, step.memory.parted_bytes)
            for step in self._of_weights[: self.blocks.stop - 1 - at.number]:
                yield Piece("weights", step.number, step.memory.found_bytes)
        else:
            for number, memory in zip(range(self.blocks.start, at.number), self.parts, strict=False):
                yield Piece("saved", number, memory.own_bytes)
            for ref, held in self.held.items():
                if held.stays or (held.savers and held.savers[0] < at.number):
                    yield Piece("value", ref, held.bytes)
            yield from self._step_pieces(self._backward, at)

    def _forward_pieces(self, at: At) -> Iterator[Piece]:
        place = at.number - self.blocks.start
        for number, memory in zip(self.blocks[:place], self.parts, strict=False):
            yield Piece("saved", number, memory.own_bytes)
        for ref, held in self.held.items():
            if held.made < at.number and (held.is_saved or held.last >= at.number):
                yield Piece("value", ref, held.bytes)
        yield Piece("coming", at.number, self.on_the_way[place].bytes(self.parts[place].forward[at.place]))

    def _saved_pieces(self, number: int) -> Iterator[Piece]:
        """All that is saved, but for what a block made of it."""
        for other, memory in zip(self.blocks, self.parts, strict=True):
            if other != number:
                yield Piece("saved", other, memory.own_bytes)
        for ref, held in self.held.items():
            if held.is_saved and not (held.made == number and number in held.savers):
                yield Piece("value", ref, held.bytes)

    def _step_pieces(self, steps: Sequence[_BlockBackward], at: At) -> Iterator[Piece]:
        """Gradients that wait beside a block, and what is coming to others."""
        step = steps[self.blocks.stop - 1 - at.number]
        for ref in step.waiting:
            yield Piece("gradient", ref, self._size(ref))
        moment = step.memory.backward[at.place]
        sent_bytes = step.sent_bytes * moment.beside_sent
        yield Piece("sent", at.number, sent_bytes)
        yield Piece("coming", at.number, step.moments[at.place].later - moment.later - sent_bytes)


class _OnTheWay(NamedTuple):
    """Bytes of parameters on their way to another block: there while all of this one runs, or from when its own are
    there on.
    """

    throughout: int = 0
    after: int = 0

    def bytes(self, moment: BlockMoment) -> int:
        """At a moment of the block."""
        return self.throughout + self.after * moment.beside_next


def _coming(sizes: Sequence[int]) -> list[_OnTheWay]:
    """What is on its way while blocks run one after the other, from what comes to each: nothing comes ahead to the
    first one that gathers anything.
    """
    found, next_bytes = list[_OnTheWay](), 0
    for size in reversed(sizes):
        found.append(_OnTheWay(after=next_bytes) if size else _OnTheWay(throughout=next_bytes))
        next_bytes = size or next_bytes
    first = next((at for at, size in enumerate(sizes) if size), len(sizes))
    return [_OnTheWay()] * first + found[::-1][first:]
