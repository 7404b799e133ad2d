"""Which rank sends a part that another lacks: the nearest that holds it; equally near ones share the work."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def level_between(one: int, other: int, spans: Sequence[int]) -> int:
    """The number of the innermost level of the network that has both ranks in one unit.

    Args:
        spans: devices in one unit of each level, innermost first; one unit of the last has all ranks.
    """
    return next((level for level, span in enumerate(spans) if one // span == other // span), len(spans) - 1)


def source_of(rank: int, holders: Sequence[int], spans: Sequence[int]) -> int:
    """Which of the holders of a part sends it to a rank; the rank itself where it is one.

    Ranks that are equally far from several holders are spread evenly over them.

    Args:
        holders: in order, at least one.
        spans: see :func:`level_between`.
    """
    at = bisect.bisect_left(holders, rank)
    if at < len(holders) and holders[at] == rank:
        return rank
    for span in (*spans[:-1], None):
        unit = range(0, holders[-1] + 1) if span is None else range(rank // span * span, (rank // span + 1) * span)
        first, last = (bisect.bisect_left(holders, end) for end in (unit.start, unit.stop))
        if first < last:
            return holders[first + rank % (last - first)]
    raise AssertionError("nobody holds it")
