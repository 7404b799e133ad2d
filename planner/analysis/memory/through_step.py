"""What is alive in every block of a step without micro-batches, forward and backward, at its fullest moment.

``Assignment -> BlockPeak`` of every block and direction, in the order of time. The step is followed block by block
(:mod:`planner.analysis.memory.step`), none standing for others, so that every tensor has the name of its own block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from planner.analysis.memory.steady_state import Wiring
from planner.analysis.memory.step import follow
from planner.analysis.memory.storages import Direction, Held, PeakReport, Place, Storage, StorageTracker
from planner.analysis.memory.walk import Walk
from planner.formulation.assignment import Assignment


class BlockPeak(NamedTuple):
    """The fullest moment of a block in one direction; ``number``: its own, or
    :data:`planner.analysis.memory.storages.BEFORE`.
    """

    direction: Direction
    number: int
    peak: PeakReport


def block_peaks(assignment: Assignment) -> list[BlockPeak]:
    """Those of a step, in the order of time; of the rank with the highest peak."""
    tracker = _PlaceTracker()
    follow(Walk(Wiring(assignment), [], heap=tracker))
    return tracker.peaks()


class _Fullest(NamedTuple):
    """The fullest moment of a place: bytes, what runs, and how many changes lie before."""

    bytes: int
    what: str
    changes: int


class _PlaceTracker(StorageTracker):
    """Remembers the fullest moment of every block and direction."""

    def __init__(self) -> None:
        super().__init__()
        self._fullest: dict[Place, _Fullest] = {}

    def enter(self, direction: Direction, number: int) -> None:
        super().enter(direction, number)
        self._note(f"{direction} {number}")

    def new(self, name: str, use: str, size: int, times: int = 1) -> Storage:
        found = super().new(name, use, size, times)
        self._note(self.moments[-1][0])
        return found

    def _note(self, what: str) -> None:
        known = self._fullest.get(self._block)
        if known is None or self.total > known.bytes:
            self._fullest[self._block] = _Fullest(self.total, what, len(self._changes))

    def peaks(self) -> list[BlockPeak]:
        """Every place's fullest moment, in the order in which they were entered."""
        alive = self._alive_after(each.changes for each in self._fullest.values())
        return [
            BlockPeak(*place, PeakReport(each.bytes, each.what, held))
            for (place, each), held in zip(self._fullest.items(), alive, strict=True)
        ]

    def _alive_after(self, counts: Iterable[int]) -> list[tuple[Held, ...]]:
        """What is alive after so many changes each, largest first."""
        wanted = [*counts]
        found: dict[int, tuple[Held, ...]] = {}
        alive: dict[Storage, None] = {}
        before = 0
        for count in sorted({*wanted}):
            for storage in self._changes[before:count]:
                if storage in alive:
                    del alive[storage]
                else:
                    alive[storage] = None
            ordered = sorted(alive, key=lambda each: -each.bytes)
            found[count], before = tuple(storage.held for storage in ordered), count
        return [found[count] for count in wanted]
