"""Activations that may be offloaded: what each block saves for backward and does not need in between.

A storage may leave when the forward of a block is over and nothing but backward needs it from there on; it comes back
for the first block in backward that saved it. Those that become free in the same block, and that the same blocks
saved, leave together.

Values of the program leave, masks of dropout, and what attention with a trained mask keeps on a CPU, whose bytes are
known to the last one. What else operators keep (statistics of norms, what attention with dropout copies) stays, as do
leaves, what leaves the model, and all of a block that also computes what the loss does not need, of which autograd
saves more than is simulated. So do values that a stage of a pipeline hands on; those that it takes from the one before
leave after its last block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from planner.analysis.memory.storages import Storage
from planner.formulation.training import Activations


@dataclass(frozen=True)
class OffloadableActivations:
    """Storages that leave and come back together.

    Attributes:
        left: the number of the block in whose forward they are the last time needed.
        savers: the numbers of the blocks that saved them, whose backwards need them.
        sizes: bytes of each.
        storages: their numbers on the heap.
    """

    left: int
    savers: tuple[int, ...]
    sizes: tuple[int, ...]
    storages: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of all."""
        return sum(self.sizes)


@dataclass
class Saves:
    """What is saved so far, block by block.

    Attributes:
        found: what may leave.
    """

    found: list[OffloadableActivations] = field(default_factory=list)
    _pending: dict[Storage, list[int]] = field(default_factory=dict)
    _apart: set[Storage] = field(default_factory=set)

    def add(self, number: int, storages: Iterable[Storage]) -> None:
        """A block saves these, some several times."""
        for storage in storages:
            self._pending.setdefault(storage, []).append(number)

    def stay(self, storages: Iterable[Storage]) -> None:
        """These do not leave."""
        self._apart.update(storages)

    def left(self, number: int) -> None:
        """The forward of a block is over."""
        groups: dict[tuple[int, ...], list[Storage]] = {}
        for storage, savers in [*self._pending.items()]:
            if storage.holders == len(savers):
                del self._pending[storage]
                if storage not in self._apart and storage.bytes:
                    groups.setdefault(tuple(sorted(set(savers))), []).append(storage)
        for by, storages in groups.items():
            sizes, numbers = tuple(each.bytes for each in storages), tuple(each.number for each in storages)
            self.found.append(OffloadableActivations(number, by, sizes, numbers))


def first_of(saved: Collection[OffloadableActivations], blocks: Activations) -> tuple[OffloadableActivations, ...]:
    """Those that leave in the first so many blocks in which anything does."""
    numbers = sorted({each.left for each in saved})
    chosen = numbers if blocks == "all" else numbers[:blocks]
    return tuple(each for each in saved if each.left in chosen)
