"""What choices cost by use, stacked into one matrix, so that prices make singles and pairs of all of them at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from planner.solve.problem import Floats, Ints

FORWARD, BACKWARD, ONCE, BEHIND, COVER, HELD, AGAIN = USES = range(7)
"""Seconds forward, backward, once a step, once behind work, of that work; bytes held; seconds that may run again."""
BODY, FIRST, LAST, ANYWHERE = "body", "first", "last", "anywhere"
PLACES = (BODY, FIRST, LAST, ANYWHERE)


@dataclass(frozen=True, eq=False)
class Costs:
    """One decision's, or one pair's: ``(7, ...)`` by use, how often each level runs it again, and bytes saved by level.

    ``place`` says whose prices count; infinite ``wall`` forbids; ``is_value`` if they are of a value that is given, or
    on its way, not of work or of parameters; ``transient`` are bytes that are there for a moment.
    """

    place: str
    parts: Floats
    again: Floats
    saved: Floats
    wall: Floats
    is_value: bool = False
    transient: Floats | float = 0.0


Group = tuple[str, bool]
"""Costs that have the same weights: a place, and whether they are of values."""
GROUPS: tuple[Group, ...] = tuple(product(PLACES, (False, True)))


class CostTable:
    """The costs of some choices of every decision, and of every pair of them.

    Pairs of a decision with itself count as its own.

    Args:
        levels: so many there are.
        singles: every decision's.
        pairs: of pairs of decisions, the smaller number first.
        kept: of every decision, the choices that are looked at.
    """

    def __init__(
        self,
        levels: int,
        singles: Sequence[Costs],
        pairs: Mapping[tuple[int, int], Sequence[Costs]],
        kept: Sequence[Ints],
    ):
        self._levels = levels
        self._counts = dict.fromkeys(GROUPS, 0)
        self._known: dict[object, tuple[_Part, tuple[Costs, ...], tuple[Ints, ...], bool]] = {}
        self._singles = [[self._part((each,), (own,))] for each, own in zip(singles, kept, strict=True)]
        self._pairs: dict[tuple[int, int], list[_Part]] = {}
        for (tail, head), several in pairs.items():
            for group in GROUPS:
                here = tuple(each for each in several if (each.place, each.is_value) == group)
                if here and tail == head:
                    self._singles[tail].append(self._part(here, (kept[tail],), diagonal=True))
                elif here:
                    self._pairs.setdefault((tail, head), []).append(self._part(here, (kept[tail], kept[head])))
        width = AGAIN + 2 * levels + 1
        self._stacked = {group: np.empty((width, size)) for group, size in self._counts.items()}
        for part, several, at, diagonal in self._known.values():
            into = self._stacked[part.group][:, part.columns].reshape(width, *part.shape)
            self._add_up(into, several, at, diagonal)
        del self._counts, self._known

    def _part(self, several: tuple[Costs, ...], kept: tuple[Ints, ...], diagonal: bool = False) -> _Part:
        """The columns of what some costs of one place add up to; pairs that share theirs share it."""
        key = (*map(id, several), *(own.tobytes() for own in kept), diagonal)
        if key not in self._known:
            group, shape = (several[0].place, several[0].is_value), tuple(map(len, kept))
            start, size = self._counts[group], math.prod(shape)
            self._counts[group] += size
            self._known[key] = _Part(group, slice(start, start + size), shape), several, kept, diagonal
        return self._known[key][0]

    def _add_up(self, into: Floats, several: tuple[Costs, ...], kept: tuple[Ints, ...], diagonal: bool) -> None:
        """What some costs add up to, by use and kept choices."""
        for number, costs in enumerate(several):
            parts, saved, wall = (_of_kept(each, kept, diagonal) for each in (costs.parts, costs.saved, costs.wall))
            again = np.multiply.outer(costs.again, parts[AGAIN])
            starts = (0, AGAIN, AGAIN + self._levels, AGAIN + 2 * self._levels)
            for start, each in zip(starts, (parts[:AGAIN], again, saved, wall[None]), strict=True):
                if number:
                    into[start : start + len(each)] += each
                else:
                    into[start : start + len(each)] = each

    def under(self, weights: Mapping[Group, Floats]) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """Singles and pairs, ``(weights, choices, ...)``.

        Args:
            weights: by group, of each use before :data:`AGAIN`, of what each level runs again, of what each saves; and
                1.
        """
        priced = {group: weights[group].T @ uses for group, uses in self._stacked.items()}

        def total(parts: list[_Part]) -> Floats:
            first, *others = [priced[each.group][:, each.columns].reshape(-1, *each.shape) for each in parts]
            total: Floats = sum(others, first)
            return total

        return [*map(total, self._singles)], {ends: total(parts) for ends, parts in self._pairs.items()}


def _of_kept(costs: Floats, kept: tuple[Ints, ...], diagonal: bool) -> Floats:
    """The costs of kept choices, by which the last axes go."""
    if diagonal:
        return costs[..., kept[0], kept[0]]
    if costs.shape[-len(kept) :] == tuple(map(len, kept)):
        return costs
    at: Any = (..., *np.ix_(*kept))
    found: Floats = costs[at]
    return found


@dataclass(frozen=True)
class _Part:
    """Columns of the matrix of one group, for choices of so many each."""

    group: Group
    columns: slice
    shape: tuple[int, ...]
