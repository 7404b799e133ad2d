"""How much a plan recomputes where saved activations may leave the device instead.

Both take the same bytes off the device: recomputing takes its seconds, and leaving the link's. The search prices the
first alone; so of a plan's layouts a few amounts are tried, from the least with which a step fits to the most, each
with the transfer schedule of what then leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from planner.analysis.memory import Usage, usage
from planner.analysis.offload.step_timing import largest_working_set, offloaded_s
from planner.base.errors import InfeasibleError
from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.remat.levels import Recompute
from planner.formulation.search_space import Space

SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Parts of the way from the least amount with which a step fits to the most, that are tried."""


def fastest_amount(
    space: Space, choices: Sequence[int], amounts: Sequence[Recompute]
) -> tuple[Recompute, Usage] | None:
    """The amount of recomputation with which a step is predicted to be the shortest, and its memory.

    Args:
        choices: what else is decided.
        amounts: from the least to the most.

    Returns:
        ``None``: no amount fits the device and the host.
    """
    budget_bytes = space.cost.cluster.device.usable_bytes
    known: dict[int, tuple[Assignment, Usage]] = {}

    def followed(number: int) -> tuple[Assignment, Usage]:
        if number not in known:
            made = assignment_of(space, choices, amounts[number])
            known[number] = made, usage(made)
        return known[number]

    def excess_bytes(number: int) -> int:
        return largest_working_set(*followed(number)).bytes - budget_bytes

    least = bisect_left(range(len(amounts)), True, key=lambda number: excess_bytes(number) <= 0)
    found = []
    for number in dict.fromkeys(least + round(share * (len(amounts) - 1 - least)) for share in SHARES):
        if number < len(amounts) and excess_bytes(number) <= 0:
            try:
                found.append((offloaded_s(*followed(number)), number))
            except InfeasibleError:  # the host has no room for what leaves; with more recomputation less does
                continue
    if not found:
        return None
    _, best = min(found)
    return amounts[best], followed(best)[1]
