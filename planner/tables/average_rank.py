"""A bound on every placement of embedding tables: how long the average rank takes."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from planner.tables.placement import Options

Floats = NDArray[np.float64]


def average_rank(options: Options, ranks: int, memory_bytes: int) -> tuple[float, Options]:
    """Seconds that the slowest rank takes at least, and the options with which the average rank takes about them.

    No rank takes longer than the slowest, so that no part does: the longer it may take, the fewer options are left out,
    and the less the average rank takes. The bound is where the two meet.
    """
    count = max(map(len, options.values()))
    seconds = np.full((len(options), count), np.inf)  # where a table has fewer options
    total_s, total_bytes = np.zeros((2, len(options), count))
    for row, each in enumerate(options.values()):
        for column, option in enumerate(each):
            seconds[row, column], total_s[row, column] = option.seconds, option.total_s
            total_bytes[row, column] = option.total_bytes
    limits = np.unique(seconds[np.isfinite(seconds)])
    limits = limits[limits >= seconds.min(1).max()]
    average = partial(_average_s, seconds, total_s, total_bytes, ranks, memory_bytes)
    low, high = -1, len(limits)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if average(limits[middle])[0] <= limits[middle] else (middle, high)
    meets = [(limits[high], high)] if high < len(limits) else []
    meets += [(average(limits[low])[0], low)] if low >= 0 else []
    bound_s, at = min(meets)
    chosen = average(limits[at])[1]
    return float(bound_s), {name: (each[place],) for (name, each), place in zip(options.items(), chosen, strict=True)}


def _average_s(
    seconds: Floats, total_s: Floats, total_bytes: Floats, ranks: int, memory_bytes: int, limit_s: float
) -> tuple[float, list[int]]:
    """Seconds of the average rank with the cheapest option of every table of which no part takes longer; and these.

    Where their bytes exceed its memory, bytes have a price; it is a bound under any, and best where memory is just
    full.
    """

    def priced(price: float) -> tuple[float, float, list[int]]:
        """The bound under a price on bytes, and by how many bytes the average rank exceeds its memory."""
        chosen = np.where(seconds <= limit_s, total_s + price * total_bytes, np.inf).argmin(1)
        each = np.arange(len(chosen)), chosen
        over = total_bytes[each].sum() / ranks - memory_bytes
        return total_s[each].sum() / ranks + price * over, over, chosen.tolist()

    bound_s, over, chosen = priced(0.0)
    if over <= 0:
        return bound_s, chosen
    low, high = 0.0, bound_s / memory_bytes
    most = 2**60 * high
    while over > 0 and high < most:
        low, high = high, 2 * high
        found_s, over, chosen = priced(high)
        bound_s = max(bound_s, found_s)
    for _ in range(40):
        middle = (low + high) / 2
        found_s, over, found = priced(middle)
        bound_s = max(bound_s, found_s)
        if over > 0:
            low = middle
        else:
            high, chosen = middle, found
    return bound_s, chosen
