"""The largest batch, or the longest sequence, at which a plan's decisions fit into memory.

Sizes that the decisions divide evenly come back with a period, that of the ranks they are cut over, and among these
bytes grow with the size. The formula of the peak says where the last one that fits should be; following whole steps
through memory, or pricing them with micro-batches, says where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.base.errors import PlanError
from planner.base.formatting import in_all_bytes
from planner.base.symbolic_int import at_sizes
from planner.sizes.rescale import OtherSizes, Scale, check_size


def max_batch(sizes: OtherSizes, sequence: int | None, limit_bytes: int) -> int:
    """The greatest batch that fits into ``limit_bytes``, at the planned sequence length or another.

    Raises:
        PlanError: the sizes cannot be followed, no batch is divided evenly, or even the smallest does not fit.
    """
    check_size("sequence", sequence)
    scale = sizes.scale(batch=True, sequence=sequence is not None)
    return _largest(scale, "batch", lambda size: (size, sequence or 0), scale.followed.batch, limit_bytes)


def max_sequence(sizes: OtherSizes, batch: int | None, limit_bytes: int) -> int:
    """The longest sequence that fits into ``limit_bytes``; as :func:`max_batch`."""
    check_size("batch", batch)
    scale = sizes.scale(batch=batch is not None, sequence=True)
    return _largest(scale, "sequence length", lambda size: (batch or 0, size), scale.followed.sequence, limit_bytes)


def _largest(scale: Scale, what: str, pair: Callable[[int], tuple[int, int]], planned: int, limit_bytes: int) -> int:
    """The greatest size that fits.

    Raises:
        PlanError: no size is divided evenly, or even the smallest does not fit; says by how much.
    """
    period = math.lcm(*(each.number for each in scale.divisors))
    even = [size for size in range(1, period + 1) if scale.is_even(*pair(size))]
    if not even:
        scale.check(*pair(planned))

    def size_of(number: int) -> int:
        return number // len(even) * period + even[number % len(even)]

    def fits(number: int) -> bool:
        sizes = pair(size_of(number))
        return scale.refusal(*sizes) is None and scale.peak_bytes(*sizes) <= limit_bytes

    def foreseen(number: int) -> bool:
        sizes = pair(size_of(number))
        return scale.refusal(*sizes) is None and all(at_sizes(each, *sizes) <= limit_bytes for each in scale.moments)

    first = 0
    while scale.refusal(*pair(size_of(first))) is not None and size_of(first) < planned:
        first += 1
    if not fits(first):
        needed = scale.peak_bytes(*pair(size_of(first)))
        raise PlanError(
            f"no {what} fits: the smallest that the plan divides evenly, {size_of(first)}, takes "
            f"{in_all_bytes(needed)}, and a device has {in_all_bytes(limit_bytes)} to give: plan again with a larger "
            "cluster, or with parameters sharded"
        )
    hint = _last(foreseen, first, first) if foreseen(first) else first
    return size_of(_last(fits, first, hint))


def _last(holds: Callable[[int], bool], first: int, hint: int) -> int:
    """The last number for which ``holds``, which does so from ``first`` up to there; ``hint`` is near it."""
    low, high, step = first, hint, 1
    if holds(hint):
        low, high = hint, hint + 1
        while holds(high):
            low, step = high, 2 * step
            high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
