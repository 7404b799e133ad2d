"""From whom a rank gets what it lacks: itself, then the nearest of those that hold it, in turns."""

from __future__ import annotations

from collections.abc import Sequence


def level_between(one: int, other: int, spans: Sequence[int]) -> int:
    """The number of the innermost level of the network that has both ranks in one unit.

    Args:
        spans: devices in one unit of each level, innermost first; one unit of the last has all ranks.
    """
    return next((level for level, span in enumerate(spans) if one // span == other // span), len(spans) - 1)


def source_of(rank: int, holders: Sequence[int], spans: Sequence[int]) -> int:
    """Which of the holders of a part sends it to a rank; the rank itself where it is one.

    Ranks that are equally far away from several holders take different ones in turn.
    """
    if rank in holders:
        return rank
    levels = [level_between(rank, holder, spans) for holder in holders]
    nearest = sorted(holder for holder, level in zip(holders, levels, strict=True) if level == min(levels))
    return nearest[rank % len(nearest)]
