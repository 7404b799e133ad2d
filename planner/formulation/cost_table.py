"""What choices cost by use, stacked into matrices, so that prices make singles and pairs of all of them at once.

Most costs have few uses: a value that is resharded takes time forward and backward, and holds nothing. Those of the
same uses are stacked together, so that no zeros are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from planner.formulation.decisions import Flow
from planner.solve.problem import Floats, Ints

FORWARD, BACKWARD, ONCE, BEHIND, COVER, HELD, MORE, AGAIN = USES = range(8)
"""Seconds forward, backward, once a step, once behind work, of that work; bytes held; seconds of micro-batches beyond
the space's; and seconds that may run again.
"""
BODY, FIRST, LAST, ANYWHERE = "body", "first", "last", "anywhere"
PLACES = (BODY, FIRST, LAST, ANYWHERE)
WORK, VALUE, GATHERED = ("work", "value", "gathered")
"""What costs are of: work, or what is held throughout; values that are given, or on their way; parameters that are
gathered in every micro-batch, which takes as long however small that is.
"""


@dataclass(frozen=True, eq=False)
class Costs:
    """One decision's, or one pair's: arrays of a ``shape``, one for each use that there is.

    ``again`` is how often each level runs :data:`AGAIN`, and ``saved`` are bytes by level; ``wall`` is infinite where
    choices are forbidden, and left out where none is.

    ``place`` and ``origin`` say which prices count, ``flow`` which parameter they are of that every micro-batch
    gathers; a pair's ``is_turned`` if its head is first. ``transient`` are bytes that are there for a moment.
    """

    place: str
    shape: tuple[int, ...]
    parts: Mapping[int, Floats]
    again: tuple[float, ...] = ()
    saved: Floats | None = None
    wall: Floats | None = None
    origin: str = WORK
    flow: Flow | None = None
    is_turned: bool = False
    transient: Floats | float = 0.0

    def of(self, use: int) -> Floats:
        """What is of one use, of every choice."""
        return self.parts[use] if use in self.parts else np.broadcast_to(0.0, self.shape)

    @property
    def transposed(self) -> Costs:
        """A pair's the other way around."""
        parts = {use: each.T for use, each in self.parts.items()}
        saved, wall = (None if each is None else each.swapaxes(-1, -2) for each in (self.saved, self.wall))
        return replace(self, shape=self.shape[::-1], parts=parts, saved=saved, wall=wall, is_turned=not self.is_turned)

    @property
    def group(self) -> Group:
        """Those with which these are stacked."""
        again = self.again if AGAIN in self.parts else ()
        return Group(self.place, self.origin, tuple(self.parts), again, self.saved is not None, self.wall is not None)

    @property
    def rows(self) -> list[Floats]:
        """What is stacked."""
        saved, wall = [] if self.saved is None else [*self.saved], [] if self.wall is None else [self.wall]
        return [*self.parts.values(), *saved, *wall]


class Group(NamedTuple):
    """What costs have in common that are stacked: prices and uses, in order."""

    place: str
    origin: str
    uses: tuple[int, ...]
    again: tuple[float, ...]
    is_saved: bool
    is_walled: bool

    def weights(self, weights: Floats, levels: int) -> Floats:
        """Of its rows, by those of every use, level and wall."""
        again_of, saved = weights[AGAIN : AGAIN + levels], weights[AGAIN + levels : -1]
        found = [weights[use] if use != AGAIN else np.array(self.again) @ again_of for use in self.uses]
        return np.stack([*found, *saved[: levels * self.is_saved], *weights[-1:][: self.is_walled]])


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
        self._sizes: dict[Group, int] = {}
        self._known: dict[object, tuple[_Part, tuple[Costs, ...], tuple[Ints, ...], bool]] = {}
        self._singles = [self._parts((each,), (own,)) for each, own in zip(singles, kept, strict=True)]
        self._pairs: dict[tuple[int, int], list[_Part]] = {}
        for (tail, head), several in pairs.items():
            if tail == head:
                self._singles[tail] += self._parts(several, (kept[tail],), diagonal=True)
            else:
                self._pairs[tail, head] = self._parts(several, (kept[tail], kept[head]))
        self._stacked = {
            group: np.empty((len(group.uses) + levels * group.is_saved + group.is_walled, size))
            for group, size in self._sizes.items()
        }
        for part, several, at, diagonal in self._known.values():
            into = self._stacked[part.group][:, part.columns].reshape(-1, *part.shape)
            for number, costs in enumerate(several):
                for row, each in zip(into, costs.rows, strict=True):
                    if number:
                        row += _of_kept(each, at, diagonal)
                    else:
                        row[...] = _of_kept(each, at, diagonal)
        del self._sizes, self._known

    def _parts(self, several: Sequence[Costs], kept: tuple[Ints, ...], diagonal: bool = False) -> list[_Part]:
        """The columns of what some costs add up to, those of each group together."""
        found: dict[Group, list[Costs]] = {}
        for each in several:
            found.setdefault(each.group, []).append(each)
        return [self._part(group, tuple(each), kept, diagonal) for group, each in found.items()]

    def _part(self, group: Group, several: tuple[Costs, ...], kept: tuple[Ints, ...], diagonal: bool) -> _Part:
        """The columns of what some costs of a group add up to; pairs that share theirs share it."""
        key = (*map(id, several), *(own.tobytes() for own in kept), diagonal)
        if key not in self._known:
            shape, start = tuple(map(len, kept)), self._sizes.get(group, 0)
            self._sizes[group] = start + math.prod(shape)
            self._known[key] = _Part(group, slice(start, self._sizes[group]), shape), several, kept, diagonal
        return self._known[key][0]

    def under(self, weights: Mapping[tuple[str, str], Floats]) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """Singles and pairs, ``(weights, choices, ...)``.

        Args:
            weights: by place and origin of costs, of each use before :data:`AGAIN`, of what each level runs
                again, of what each saves; and 1.
        """
        priced = {
            group: group.weights(weights[group.place, group.origin], self._levels).T @ rows
            for group, rows in self._stacked.items()
        }

        def total(parts: list[_Part]) -> Floats:
            first, *others = [priced[each.group][:, each.columns].reshape(-1, *each.shape) for each in parts]
            total: Floats = sum(others, first)
            return total

        return [*map(total, self._singles)], {ends: total(parts) for ends, parts in self._pairs.items()}


def _of_kept(costs: Floats, kept: tuple[Ints, ...], diagonal: bool) -> Floats:
    """The costs of kept choices, by which the axes go."""
    if diagonal:
        return costs[kept[0], kept[0]]
    if costs.shape == tuple(map(len, kept)):
        return costs
    at: Any = np.ix_(*kept)
    found: Floats = costs[at]
    return found


@dataclass(frozen=True)
class _Part:
    """Columns of the matrix of one group, for choices of so many each."""

    group: Group
    columns: slice
    shape: tuple[int, ...]
