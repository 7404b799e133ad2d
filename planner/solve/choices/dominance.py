"""Choices that another one of the same vertex equals or beats, whatever the neighbours choose.

They may be left out of a problem without changing its optimum (*dead-end elimination*: Goldstein, "Efficient rotamer
elimination applied to protein side-chains", 1994). Here a choice must be as good in each of several sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from planner.solve.choices.model import Mask
from planner.solve.problem import Floats


class Sum(NamedTuple):
    """One of the sums: what a vertex's choices cost by themselves, and in pairs ``(choices, neighbour's choices)`` with
    each neighbour, with which of them are allowed; ``None``: all.
    """

    single: Floats
    pairs: Sequence[tuple[Floats, Mask | None]]


def dominated(may_dominate: Mask, allowed: Iterable[Mask], sums: Iterable[Sum]) -> Mask:
    """Which choices of a vertex are so; of several that cost the same, all but the first.

    Args:
        may_dominate: [one, other]: whether the first may take the place of the second, as far as is known otherwise; no
            choice its own.
        allowed: pairs with each neighbour that are allowed.
        sums: in each of which it must cost no more.
    """
    better, worse = np.nonzero(may_dominate)
    for each in allowed:
        covers = ~(each[worse] & ~each[better]).any(axis=1)
        better, worse = better[covers], worse[covers]
    for single, pairs in sums:
        excess = single[better] - single[worse]
        for costs, mask in pairs:
            more = costs[better] - costs[worse]
            excess += (more if mask is None else np.where(mask[worse], more, -math.inf)).max(axis=1)
        beats = excess <= 0.0
        better, worse = better[beats], worse[beats]
    found = np.zeros(len(may_dominate), dtype=np.bool_)
    for choice in np.unique(worse)[::-1]:  # one at a time: rounding may have each of several cost no less than the next
        found[choice] = not found[better[worse == choice]].all()
    return found
