"""How long a step takes at least whose blocks are packed on ranks, each of which takes so many in time and memory.

A rank that has ``n`` of equal blocks works ``n`` times what one takes, and holds ``n`` times what one holds. Under a
price of a byte a block costs no less than its cheapest variant does, so a rank takes no more of them than its seconds
and its priced bytes pay for, rounded down. A step is too short in which all ranks together take too few. Whatever the
prices are, that is a bound. The first block, before which nothing lies, may cost less, whichever rank has it. Prices at
which ranks take the fewest are sought between variants that are known, as Kelley (1960) does for one price, and what a
block costs there is asked for. :mod:`planner.formulation.pipeline_pace` packs blocks by their work alone, before
anything is known of a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.solve.problem import Floats

ROUNDS = 4
"""Prices at most that are asked for, for one bound."""
CLOSE = 2e-3
"""Part of a step by which a bound may be below what variants that are known take, to be left as it is."""
ROUNDING = 1e-9
"""Part of blocks that a rank may lack and take them nevertheless."""
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
class RankCapacities:
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
        leading_s: seconds of a step that the first one takes at least, whose bytes do not count; ``None``: as others.
    """

    def __init__(
        self,
        count: int,
        free_s: float,
        cost_s: Callable[[float, float], tuple[float, BlockVariant]],
        variants: Sequence[BlockVariant],
        leading_s: float | None = None,
    ):
        self._count, self._free_s, self._cost_s, self._leading_s = count, free_s, cost_s, leading_s
        self._known = [(0.0, 0.0, free_s)]
        self._variants = [*variants]

    def least_s(self, capacities: RankCapacities, enough_s: float) -> float:
        """A lower bound of the step, raised only until it reaches ``enough_s``; where nothing fits it is a long one."""
        known = self._at_known_prices(capacities)
        least_s = self._shortest_s(capacities, *known)
        for _ in range(ROUNDS):
            if least_s >= enough_s:
                break
            prices, costs = self._between_variants(capacities)
            aim_s = min(enough_s, self._shortest_s(capacities, prices, costs))
            if least_s >= aim_s * (1 - CLOSE):
                break
            blocks = _blocks_at(capacities, aim_s, prices, costs)
            ranks, fewest = np.arange(len(blocks)), blocks.argmin(axis=1)
            at = prices[ranks, fewest]
            most = _blocks_at(capacities, aim_s, *known).min(axis=1)
            more = np.where(at > 0.0, most - blocks[ranks, fewest], 0.0)
            rank = int(more.argmax())
            if more[rank] <= 0.0 or not self._ask(at[rank], at[rank] * capacities.in_flight[rank]):
                break
            known = self._at_known_prices(capacities)
            least_s = self._shortest_s(capacities, *known)
        return least_s

    def _ask(self, held: float, saved: float) -> bool:
        """Whether what a block costs at these prices was not known."""
        if any(np.allclose((held, saved), each[:2], rtol=1e-3, atol=0.0) for each in self._known):
            return False
        cost_s, variant = self._cost_s(held, saved)
        self._known.append((held, saved, cost_s))
        self._variants.append(variant)
        return True

    def _at_known_prices(self, capacities: RankCapacities) -> tuple[Floats, Floats]:
        """Prices of a byte for each rank that were asked for, and what a block costs there.

        A byte in flight that costs more than as many of them as are in flight of a held one raises the price of that.
        """
        held, saved, costs = np.array(self._known).T
        in_flight = np.maximum(capacities.in_flight, 1e-300)[:, None]
        return np.maximum(held, saved / in_flight), np.tile(costs, (len(in_flight), 1))

    def _between_variants(self, capacities: RankCapacities) -> tuple[Floats, Floats]:
        """Prices of a byte for each rank at which two of the known variants cost as much, with the least that they do;
        at one of them it may take fewer blocks than at any other.
        """
        work_s, held, saved = np.array(self._variants).T
        sizes = held + capacities.in_flight[:, None] * saved
        one, other = np.triu_indices(len(work_s), 1)
        dearest = DEAREST * self._count * self._free_s / max(1.0, float(capacities.free_bytes.min()))
        with np.errstate(divide="ignore", invalid="ignore"):
            prices = (work_s[other] - work_s[one]) / (sizes[:, one] - sizes[:, other])
        prices = np.where((prices > 0.0) & (prices < dearest), prices, 0.0)
        ends = np.tile((0.0, dearest), (len(sizes), 1))
        prices = np.concatenate([prices, ends], axis=1)
        return prices, (work_s + prices[:, :, None] * sizes[:, None]).min(axis=2)

    def _shortest_s(self, capacities: RankCapacities, prices: Floats, costs: Floats) -> float:
        """The shortest step in which ranks take all blocks; the longest that is looked at where they do in none.

        Args:
            prices: of a byte, ``(ranks, prices)``; one of each rank is zero.
            costs: of a block at these.
        """
        taken_s, numbers = capacities.taken_s[:, None], np.arange(1, self._count + 1) * (1 - ROUNDING)
        paid_s = _paid_s(capacities, prices)
        from_s = taken_s + (numbers[:, None] * costs[:, None] - paid_s[:, None]).max(axis=2)  # for so many on a rank
        in_order = np.partition(from_s, (max(0, self._count - 2), self._count - 1), axis=None)
        shortest_s = in_order[self._count - 1]
        if self._leading_s is not None:  # on one rank it is instead of any other
            without_s = in_order[self._count - 2] if self._count > 1 else 0.0
            others = (from_s <= without_s).sum(axis=1)[:, None] * (1 - ROUNDING)
            with_leading_s = taken_s[:, 0] + (others * costs + self._leading_s - paid_s).max(axis=1)
            shortest_s = min(shortest_s, max(without_s, with_leading_s.min()))
        return min(float(shortest_s), float(taken_s.max()) + LONGEST * self._count * self._free_s)


def _blocks_at(capacities: RankCapacities, step_s: float, prices: Floats, costs: Floats) -> Floats:
    """Blocks that each rank takes at most, none of them the first, ``(ranks, prices)``."""
    left_s = np.maximum(0.0, step_s - capacities.taken_s)[:, None]
    found: Floats = np.maximum(0.0, left_s + _paid_s(capacities, prices)) / costs
    return found


def _paid_s(capacities: RankCapacities, prices: Floats) -> Floats:
    """What the bytes for blocks of each rank are worth, ``(ranks, prices)``."""
    with np.errstate(over="ignore"):  # of nothing in flight
        found: Floats = prices * capacities.free_bytes[:, None]
    return found
