"""Choices that no prices make cheaper than another one of the same decision, whatever the others decide.

Such a choice may be left out of a problem without changing what it costs at least (*dead-end elimination*: Goldstein,
"Efficient rotamer elimination applied to protein side-chains", 1994), here for all prices at once: it costs no less in
each use by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from planner.formulation.cost_table import AGAIN, COVER, Costs
from planner.solve.choices.model import Mask
from planner.solve.problem import Floats, Ints

_Use: TypeAlias = tuple[object, ...]
_WALL: _Use = ()
MOST = 10_000_000
"""Differences of two decisions' costs at most that are looked at; of a decision with more no choice is left out."""


def dominated(
    singles: Sequence[Costs], pairs: Mapping[tuple[int, int], Sequence[Costs]], kept: Sequence[Ints]
) -> list[Mask]:
    """Of every decision which of the kept choices are so; of several that cost the same, all but the first.

    Args:
        singles, pairs: the costs of decisions, and of pairs of them, the smaller number first.
    """
    alone: list[list[tuple[_Use, Floats]]] = [[] for _ in kept]
    beside: list[list[tuple[_Use, int, Floats]]] = [[] for _ in kept]
    for number, costs in enumerate(singles):
        alone[number] += _by_use(costs, (kept[number],))
    for (one, other), several in pairs.items():
        for costs in several:
            for use, table in _by_use(costs, (kept[one], kept[other])):
                if one == other:
                    alone[one].append((use, table.diagonal()))
                else:
                    beside[one].append((use, other, table))
                    beside[other].append((use, one, table.T))
    return [_of_one(*each) for each in zip(map(len, kept), alone, beside, strict=True)]


def _by_use(costs: Costs, kept: tuple[Ints, ...]) -> Iterator[tuple[_Use, Floats]]:
    """Kept choices' costs of each use, more being dearer, and where they are forbidden."""
    at: Any = np.ix_(*kept)
    for use, each in costs.parts.items():
        again = costs.again if use == AGAIN else ()
        yield (costs.place, costs.origin, use, again), (-each if use == COVER else each)[at]
    for level, each in enumerate(() if costs.saved is None else costs.saved):
        yield (costs.place, costs.origin, "saved", level), each[at]
    if costs.wall is not None:
        yield _WALL, costs.wall[at]


def _of_one(count: int, alone: Sequence[tuple[_Use, Floats]], beside: Sequence[tuple[_Use, int, Floats]]) -> Mask:
    """Of one decision."""
    least: dict[_Use, Floats] = {}  # [one, other]: how much more one costs at least
    together: dict[tuple[_Use, int], Floats] = {}
    for use, neighbour, table in beside:
        together[use, neighbour] = together.get((use, neighbour), 0.0) + table
    forbidden = np.zeros((count, count), bool)  # where a neighbour forbids other, but not one
    for use, each in alone:
        if use == _WALL:
            forbidden |= np.isinf(each)[None, :] & np.isfinite(each)[:, None]
        else:
            least[use] = least.get(use, 0.0) + each[:, None] - each[None, :]
    if count * count * max((table.shape[1] for table in together.values()), default=1) > MOST:
        return np.zeros(count, bool)
    for (use, neighbour), table in together.items():
        if use == _WALL:
            forbidden |= (np.isfinite(table)[:, None] & np.isinf(table)[None, :]).any(axis=2)
            continue
        more = table[:, None] - table[None, :]
        if (wall := together.get((_WALL, neighbour))) is not None:
            more = np.where(np.isfinite(wall)[:, None], more, math.inf)
        least[use] = least.get(use, 0.0) + more.min(axis=2)
    is_no_less = np.logical_and.reduce([~forbidden, *(each >= 0.0 for each in least.values())])
    np.fill_diagonal(is_no_less, False)
    found = np.zeros(count, bool)
    for choice in reversed(range(count)):  # one at a time: rounding may have each of several cost no less than the next
        found[choice] = (is_no_less[choice] & ~found).any()
    return found
