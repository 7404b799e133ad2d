"""How long a step takes at least whose blocks are packed on ranks, each with room for so many in time and memory.

A rank that has ``n`` of equal blocks works ``n`` times what one takes, and holds ``n`` times what one holds. Under a
price of a byte a block costs no less than its cheapest variant does, so a rank has no room for more of them than its
seconds and its priced bytes pay for, rounded down. A step is too short that leaves the ranks together too little room.
Whatever the prices are, that is a bound; those that leave the least room are sought between variants that are known, as
Kelley (1960) does for one price, and what a block costs there is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from planner.solve.problem import Floats

ROUNDS = 4
"""Prices at most that are asked for, for one bound."""
CLOSE = 2e-3
"""Part of a step by which a bound may be below what variants that are known take, to be left as it is."""
EXACT = 1e-5
"""Part of a step to which it is found how long it is."""
LONGEST = 64
"""So many times what all blocks take on one rank are steps at most that are looked at."""
DEAREST = 2.0
"""Price of all bytes of a rank, in steps that would have all blocks on it, beyond which none is asked for."""


class BlockVariant(NamedTuple):
    """A way to run a block: seconds of a step, bytes that are there always, and of one micro-batch in flight."""

    work_s: float
    held_bytes: float
    saved_bytes: float


@dataclass(frozen=True, eq=False)
class RankRooms:
    """What there is for blocks on every rank.

    Attributes:
        taken_s: seconds of a step that are not there for them.
        free_bytes: that are there for them.
        in_flight: how many micro-batches are at least in flight of every block when that is all there is.
    """

    taken_s: Floats
    free_bytes: Floats
    in_flight: Floats


class Packing:
    """The least seconds of steps of equal blocks.

    Args:
        count: of the blocks.
        free_s: seconds of a step that a block takes at least.
        cost_s: what one costs at least where held and saved bytes cost so many seconds each, and a variant that does.
        variants: some that are known.
    """

    def __init__(
        self,
        count: int,
        free_s: float,
        cost_s: Callable[[float, float], tuple[float, BlockVariant]],
        variants: Sequence[BlockVariant],
    ):
        self._count, self._free_s, self._cost_s = count, free_s, cost_s
        self._known = [(0.0, 0.0, free_s)]
        self._variants = [*variants]

    def least_s(self, rooms: RankRooms, enough_s: float) -> float:
        """A lower bound of the step, raised only until it reaches ``enough_s``; where nothing fits it is a long one."""
        least_s = self._shortest_s(rooms, partial(self._most, rooms))
        for _ in range(ROUNDS):
            if least_s >= enough_s:
                break
            prices, costs = self._between_variants(rooms)
            met_s = self._shortest_s(rooms, partial(_room_of_variants, rooms, prices, costs))
            aim_s = min(enough_s, met_s)
            if least_s >= aim_s * (1 - CLOSE):
                break
            room, at = _least_room(rooms, prices, costs, aim_s)
            more = np.where(at > 0.0, self._most(rooms, aim_s) - room, 0.0)
            rank = int(more.argmax())
            if more[rank] <= 0.0 or not self._ask(at[rank], at[rank] * rooms.in_flight[rank]):
                break
            least_s = self._shortest_s(rooms, partial(self._most, rooms))
        return least_s

    def _ask(self, held: float, saved: float) -> bool:
        """Whether what a block costs at these prices was not known."""
        if any(np.allclose((held, saved), each[:2], rtol=1e-3, atol=0.0) for each in self._known):
            return False
        cost_s, variant = self._cost_s(held, saved)
        self._known.append((held, saved, cost_s))
        self._variants.append(variant)
        return True

    def _most(self, rooms: RankRooms, step_s: float) -> Floats:
        """Blocks at most that each rank has room for, by the prices that were asked for.

        A byte in flight that costs more than as many of them as are in flight of a held one raises the price of that.
        """
        held, saved, costs = np.array(self._known).T
        in_flight = np.maximum(rooms.in_flight, 1e-300)[:, None]
        prices = np.maximum(held, saved / in_flight)
        found: Floats = _rooms_at(rooms, step_s, prices, costs).min(axis=1)
        return found

    def _between_variants(self, rooms: RankRooms) -> tuple[Floats, Floats]:
        """Prices of a byte for each rank at which two of the known variants cost as much, with the least that they do;
        one of them may leave it less room than any other.
        """
        work_s, held, saved = np.array(self._variants).T
        sizes = held + rooms.in_flight[:, None] * saved
        one, other = np.triu_indices(len(work_s), 1)
        dearest = DEAREST * self._count * self._free_s / max(1.0, float(rooms.free_bytes.min()))
        with np.errstate(divide="ignore", invalid="ignore"):
            prices = (work_s[other] - work_s[one]) / (sizes[:, one] - sizes[:, other])
        prices = np.where((prices > 0.0) & (prices < dearest), prices, 0.0)
        ends = np.tile((0.0, dearest), (len(sizes), 1))
        prices = np.concatenate([prices, ends], axis=1)
        return prices, (work_s + prices[:, :, None] * sizes[:, None]).min(axis=2)

    def _shortest_s(self, rooms: RankRooms, room: Callable[[float], Floats]) -> float:
        """The shortest step for which there is room for all blocks; the longest that is looked at where there is for
        none.
        """
        low, high = 0.0, float(rooms.taken_s.max()) + LONGEST * self._count * self._free_s
        if not self._have_room(room(high)):
            return high
        while high - low > EXACT * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._have_room(room(middle)) else (middle, high)
        return low

    def _have_room(self, rooms: Floats) -> bool:
        return float(np.floor(rooms + 1e-9).sum()) >= self._count


def _rooms_at(rooms: RankRooms, step_s: float, prices: Floats, costs: Floats) -> Floats:
    """Blocks for which each rank has room, ``(ranks, prices)``."""
    left_s = np.maximum(0.0, step_s - rooms.taken_s)[:, None]
    found: Floats = np.maximum(0.0, left_s + prices * rooms.free_bytes[:, None]) / costs
    return found


def _room_of_variants(rooms: RankRooms, prices: Floats, costs: Floats, step_s: float) -> Floats:
    """Blocks for which each rank has room at most, at the best of some prices."""
    return _least_room(rooms, prices, costs, step_s)[0]


def _least_room(rooms: RankRooms, prices: Floats, costs: Floats, step_s: float) -> tuple[Floats, Floats]:
    """Blocks for which each rank has room at the price that leaves it the least, and that price."""
    found = _rooms_at(rooms, step_s, prices, costs)
    at = found.argmin(axis=1)
    every = np.arange(len(at))
    return found[every, at], prices[every, at]
