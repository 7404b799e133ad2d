"""What autograd remembers of a step, and what a block that recomputes discards and recomputes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from planner.analysis.memory.storages import Storage, StorageTracker
from planner.formulation.remat.backward_slice import Again, is_view
from planner.ir.folding import Block


@dataclass(eq=False)
class Tape:
    """One node of the autograd graph; those that were made later run earlier.

    Attributes:
        block: the number of the block that made it.
        incoming: the gradient of each result, as far as it has arrived.
        views: the results of which that is a view, to which autograd adds nothing in place.
        saved: storages held until the node has run.
        holds: those of them that stay where a block recomputes.
        again: storages that it needs and that its block recomputes for it.
        targets: where the gradients of its operands go.
        works: bytes that it needs while it runs.
        together: bytes of one storage in which all of its gradients lie; 0: each has its own.
        bucket: where that storage lies if it is there from the start.
        sends: what it needs while it runs is sent, and there until the next such node runs.
        uses: it uses the gradients of its results, which are parameters, and lets them go; where they are on their way
            (``awaits_reduction``), when the next such node runs.
        keeps: its gradient stays when backward is over (a parameter's).
        awaits: how many gradients are still to come before it is done, if that matters.
        leaves: its gradient is not counted here, since it goes to the host as soon as its block runs its backward.
    """

    name: str
    block: int
    incoming: list[Storage | None]
    saved: list[Storage] = field(default_factory=list)
    holds: list[Storage] = field(default_factory=list)
    again: list[tuple[Frame, Storage]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    works: int = 0
    together: int = 0
    bucket: Storage | None = None
    sends: bool = False
    uses: bool = False
    awaits_reduction: bool = False
    keeps: bool = False
    leaves: bool = False
    awaits: int = 0
    views: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Target:
    """Where a gradient goes: result ``result`` of ``tape``.

    ``passes``: it is what came in for result ``of``. ``is_view``: it is a view of what came in or was computed.
    """

    tape: Tape
    result: int
    bytes: int
    passes: bool = False
    of: int = 0
    is_view: bool = False


@dataclass(frozen=True)
class Value:
    """A tensor of the program: its storage, its bytes, and the autograd node (and result) that made it."""

    storage: Storage
    bytes: int
    made: tuple[Tape, int] | None = None


class Frame:
    """What a block that recomputes made in forward, from what, and which of it is kept.

    Args:
        before: the last block before it that gathers parameters again.

    Attributes:
        ahead: storages of parameters on their way, which are there before the block runs again.
    """

    def __init__(self, block: Block, again: Again, before: Frame | None):
        self.name, self.again, self.before = block.path, again, before
        self.ahead: list[Storage] = []
        self.at = {node.name: at for at, node in enumerate(block.nodes)}
        self._computes = any(not is_view(block.nodes[at]) for at in again.operators)
        self.made: dict[Storage, tuple[Storage, ...]] = {}
        self.beside: dict[Storage, int] = {}
        self.copied: dict[Storage, int] = {}
        self.kept: set[Storage] = set()
        self.held: list[Storage] = []
        self.uses: Counter[Storage] = Counter()
        self.remade: dict[Storage, Storage] = {}
        self.handed: set[Storage] = set()
        self.until_return: list[Storage] = []

    def draws(
        self, heap: StorageTracker, drawn: Storage, operands: Iterable[Storage], result: Storage, copied_bytes: int
    ) -> None:
        """Note what was drawn; to draw it again makes the result again, which stays until all is made.

        Args:
            copied_bytes: of operands that are copied for it. Backward has the copies in place of the operands, but
                these are there, too, until all is made, and in forward until the block returns.
        """
        self.handed.add(result)
        self.until_return += [heap.hold(result), heap.new(result.held.name, "temporary", copied_bytes)]
        self.copied[drawn] = copied_bytes
        self.makes(heap, drawn, (*operands, result), keeps=False)

    def is_held_besides(self, storage: Storage) -> bool:
        """Whether an operand is held for what runs again, or made again, while autograd holds a copy of it."""
        return self._computes or (storage in self.made and storage not in self.kept)

    def makes(
        self, heap: StorageTracker, storage: Storage, sources: Iterable[Storage], keeps: bool, beside_bytes: int = 0
    ) -> None:
        """Note that a storage was made from others; what is kept of these to make it again is there from then on.

        Args:
            beside_bytes: needed beside while it is made.
        """
        self.made[storage], self.beside[storage] = tuple(sources), beside_bytes
        if keeps:
            self.kept.add(storage)
        else:
            self.held += [heap.hold(each) for each in self.made[storage] if each in self.kept]

    def discard(self, heap: StorageTracker, tapes: list[Tape]) -> None:
        """The block returns: what its nodes of backward saved goes where it can be recomputed; its sources stay."""
        for tape in tapes:
            stay = {*self.kept, *tape.holds}
            for storage in [each for each in tape.saved if each in self.made and each not in stay]:
                tape.saved.remove(storage)
                tape.again.append((self, storage))
                self.uses[storage] += 1
                heap.drop(storage)
        reads, held = [source for storage in self._needed for source in self.made[storage]], self.held
        self.held = [heap.hold(each) for each in dict.fromkeys(reads) if each not in self.made or each in self.kept]
        for storage in (*held, *self.until_return):
            heap.drop(storage)
        self.until_return.clear()

    @cached_property
    def _needed(self) -> list[Storage]:
        """What has to be recomputed, in order."""
        found: set[Storage] = set()
        waiting = list(self.uses)
        while waiting:
            storage = waiting.pop()
            if storage in self.made and storage not in self.kept and storage not in found:
                found.add(storage)
                waiting.extend(self.made[storage])
        return [storage for storage in self.made if storage in found]

    @property
    def gathers(self) -> list[Storage]:
        """What is gathered again ahead, in order."""
        return [storage for storage in self.ahead if storage in self._needed]

    def start(self, heap: StorageTracker) -> None:
        """Gather again what can be ahead, unless it is on its way."""
        for storage in self.gathers:
            if storage not in self.remade:
                self.remade[storage] = heap.new(storage.held.name, storage.held.use, storage.held.bytes)

    def make(self, heap: StorageTracker) -> None:
        """Make everything again that will be used; the block that runs its backward next gathers from here on."""
        heap.moment(f"recompute {self.name}")
        self.start(heap)
        if self.before is not None and self.gathers:
            self.before.start(heap)
        last = {source: storage for storage in self._needed for source in self.made[storage]}
        copies = []
        for storage in self._needed:
            beside = heap.new(storage.held.name, "temporary", self.beside[storage])
            if storage not in self.remade:
                self.remade[storage] = heap.new(storage.held.name, storage.held.use, storage.held.bytes)
            heap.drop(beside)
            copies.append(heap.new(storage.held.name, "temporary", self.copied.get(storage, 0)))
            for source in dict.fromkeys((*self.made[storage], storage)):
                is_last = last.get(source, storage) is storage and source not in self.handed
                if source in self.remade and not self.uses[source] and is_last:
                    heap.drop(self.remade.pop(source))
        for storage in copies:
            heap.drop(storage)
        for storage in [each for each in self.remade if not self.uses[each]]:
            heap.drop(self.remade.pop(storage))

    def take(self, heap: StorageTracker, storage: Storage) -> Storage:
        """A storage that was recomputed, for one of its uses; with the last use of all nothing stays behind."""
        if storage not in self.remade:
            self.make(heap)
        self.uses[storage] -= 1
        taken = self.remade[storage] if self.uses[storage] else self.remade.pop(storage)
        if self.uses[storage]:
            heap.hold(taken)
        elif not any(self.uses.values()):
            for each in self.held:
                heap.drop(each)
        return taken
