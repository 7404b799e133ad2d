"""What is alive in every block of a step without micro-batches, forward and backward, at its fullest moment.

``Assignment -> BlockPeak`` of every block and direction, in the order of time. The step is followed block by block
(:mod:`planner.analysis.memory.step`), none standing for others, so that every tensor has the name of its own block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from planner.analysis.memory.steady_state import Wiring
from planner.analysis.memory.step import follow
from planner.analysis.memory.storages import Direction, PeakReport, Place, Storage, StorageTracker
from planner.analysis.memory.walk import Walk
from planner.formulation.assignment import Assignment


class BlockPeak(NamedTuple):
    """The fullest moment of a block in one direction.

    Attributes:
        number: of the block, or :data:`planner.analysis.memory.storages.BEFORE`.
        bytes: alive then; ``report`` says of what.
    """

    direction: Direction
    number: int
    bytes: int
    report: Callable[[], PeakReport]


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
        replay = _Replay(self._changes)
        return [BlockPeak(*place, each.bytes, partial(replay.report, each)) for place, each in self._fullest.items()]


class _Replay:
    """What was alive at moments of a step that is over; cheap for those that are asked for in the order of time."""

    def __init__(self, changes: Sequence[Storage]) -> None:
        self._changes = changes
        self._done = 0
        self._alive: dict[Storage, None] = {}

    def report(self, moment: _Fullest) -> PeakReport:
        """All that was alive, largest first."""
        if moment.changes < self._done:
            self._done, self._alive = 0, {}
        for storage in self._changes[self._done : moment.changes]:
            if storage in self._alive:
                del self._alive[storage]
            else:
                self._alive[storage] = None
        self._done = moment.changes
        ordered = sorted(self._alive, key=lambda each: -each.bytes)
        return PeakReport(moment.bytes, moment.what, tuple(storage.held for storage in ordered))
