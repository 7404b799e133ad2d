"""Bytes of one rank through a step, by use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.analysis.memory.offloadable import OffloadableActivations
from planner.analysis.memory.storages import Direction, Held, PeakReport


@dataclass(frozen=True)
class Usage:
    """Bytes of one rank through a step.

    Attributes:
        peak_bytes: at the peak.
        peak_at: what runs then.
        moments: (what runs, bytes alive while it does), in order. Where instances of a block do the same, each with
            so many bytes more or less than the one before it, those in the middle are left out.
        alive: every storage at the peak, largest first.
        kept: every storage when forward is over.
        left: every storage when backward is over.
        by_block: the most that is alive in a block, forward and backward, by direction and its number; a number of
            :data:`BEFORE` stands for what is done before the first block, and undone after it.
        leaf_bytes: of leaves.
        saved_bytes: of what is held between forward and backward, without leaves.
        read_again: the leaves whose own memory backward of a block may read, by its number; where parameters are at
            home on the host.
        saved: what blocks save that may leave in between, where the plan lets it; then ``by_block`` and ``saved_bytes``
            are without it.
    """

    peak_bytes: int
    peak_at: str
    moments: tuple[tuple[str, int], ...]
    alive: tuple[Held, ...]
    kept: tuple[Held, ...]
    left: tuple[Held, ...]
    by_block: Mapping[tuple[Direction, int], int]
    leaf_bytes: int
    saved_bytes: int
    read_again: Mapping[int, frozenset[str]]
    saved: tuple[OffloadableActivations, ...] = ()

    @property
    def fullest(self) -> PeakReport:
        """The fullest moment."""
        return PeakReport(self.peak_bytes, self.peak_at, self.alive)

    def __str__(self) -> str:
        """The fullest moment and what fills it, largest first."""
        return str(self.fullest)

    def by_use(self) -> dict[str, int]:
        """Bytes at the peak by use."""
        return self.fullest.by_use()
