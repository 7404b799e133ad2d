"""Choices that no prices make cheaper than another one of the same decision, whatever the others decide: they cost no
less in each use by itself (:mod:`planner.solve.choices.dominance`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from planner.formulation.cost_table import AGAIN, COVER, Costs
from planner.solve.choices import dominance
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
    alone: list[dict[_Use, Floats]] = [{} for _ in kept]
    beside: list[dict[int, dict[_Use, Floats]]] = [{} for _ in kept]  # by neighbour

    def add(found: dict[_Use, Floats], use: _Use, costs: Floats) -> None:
        found[use] = found[use] + costs if use in found else costs

    for number, costs in enumerate(singles):
        for use, each in _by_use(costs, (kept[number],)):
            add(alone[number], use, each)
    for (one, other), several in pairs.items():
        for costs in several:
            for use, each in _by_use(costs, (kept[one], kept[other])):
                if one == other:
                    add(alone[one], use, each.diagonal())
                else:
                    add(beside[one].setdefault(other, {}), use, each)
                    add(beside[other].setdefault(one, {}), use, each.T)
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


def _of_one(count: int, alone: Mapping[_Use, Floats], beside: Mapping[int, Mapping[_Use, Floats]]) -> Mask:
    """Of one decision."""
    if count * count * max((each.shape[1] for by_use in beside.values() for each in by_use.values()), default=1) > MOST:
        return np.zeros(count, bool)
    allowed = {neighbour: np.isfinite(by_use[_WALL]) for neighbour, by_use in beside.items() if _WALL in by_use}
    by_itself = [np.isfinite(alone[_WALL])[:, None]] if _WALL in alone else []
    uses = dict.fromkeys([*alone, *(use for by_use in beside.values() for use in by_use)])
    uses.pop(_WALL, None)
    sums = (
        dominance.Sum(
            alone.get(use, np.zeros(count)),
            [(by_use[use], allowed.get(neighbour)) for neighbour, by_use in beside.items() if use in by_use],
        )
        for use in uses
    )
    return dominance.dominated(~np.eye(count, dtype=bool), [*by_itself, *allowed.values()], sums)
