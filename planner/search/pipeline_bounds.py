"""Lower bounds of all plans of one pipeline: every cut, every level of recomputation, every choice.

The master program (:mod:`planner.solve.pipeline.master`) says what a second and a byte are worth on every stage. Under
these prices the cheapest choices for a block, wherever it may be and at whatever level, are found by elimination
(:mod:`planner.solve.choices.under_many`); what all blocks cost so is a bound, and the choices are a variant more
for the master program. The two meet where no block is cheaper in a new one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from planner.formulation.search_space import Space
from planner.formulation.stage_boundaries import crossing
from planner.formulation.stage_costs import ANYWHERE, BODY, FIRST, LAST, StageCosts
from planner.ir.layout import PIPELINE, Axis
from planner.solve.choices.tree import Tree
from planner.solve.choices.under_many import LeastOfEach, least_of_each
from planner.solve.pipeline.master import Master, MasterSolution, Paths, Prices
from planner.solve.problem import Floats

ROUNDS = 3
"""Times at most that the master program is given new variants."""
CLOSE = 5e-3
"""Part of a step between bound and program that is not worth another round."""
TOGETHER = 16
"""So many prices at a time the choices of least cost are found for."""
APART = 4e-3
"""Part of a step by which what is known of other prices may be below the least that was found."""
OVER = 30.0
"""Price of a device's memory beyond what there is, in steps."""


@dataclass(frozen=True)
class PipelineBound:
    """No plan of a pipeline takes less than ``time_s``; infinite: none fits. ``choices`` are those met, best last."""

    time_s: float
    choices: tuple[tuple[int, ...], ...]


class PipelineBounds:
    """Bounds of the pipelines of one space.

    Args:
        limit_bytes: of every rank.
        send_s: the least seconds from a stage to the next.
        waits: whether ranks wait for the first blocks, forward and backward, in all schedules that are looked at.
    """

    def __init__(self, costs: StageCosts, limit_bytes: int | None, send_s: float, waits: bool):
        self.costs, self.limit_bytes, self.send_s, self.waits = costs, limit_bytes, send_s, waits
        self._tree: Tree | None = None
        self._free: tuple[float, tuple[tuple[int, ...], ...]] = -math.inf, ()
        self._behind = 1.0

    @cached_property
    def places(self) -> list[str]:
        """Where there are blocks or what lies between them."""
        return [BODY, *(place for place in (FIRST, LAST, ANYWHERE) if self._is_there(place))]

    def _choices_of(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """An assignment of what is kept in the space's choices."""
        assert self.costs.kept is not None
        return tuple(int(kept[each]) for kept, each in zip(self.costs.kept, assignment, strict=True))

    def _is_there(self, place: str) -> bool:
        pairs = (each for several in self.costs.pairs.values() for each in several)
        return place == ANYWHERE or any(each.place == place for each in (*self.costs.singles, *pairs))

    def free(self) -> tuple[float, tuple[tuple[int, ...], ...]]:
        """What all pipelines take at least if memory and waiting cost nothing, and the choices of that."""
        if self.costs.kept is None:
            self._free = math.inf, ()
            return math.inf, ()
        ranks, micro_batches = self.costs.space.stages, self.costs.space.mesh.micro_batches
        even, nothing = np.full(1, micro_batches / ranks), np.zeros(1)
        work = Prices(even, even, nothing, nothing, nothing, 0.0, 0.0)
        bound_s, choices = self._under(work, 1.0 / ranks, levels=1)
        if choices and self.costs.exposed_s(choices) < 0.0:  # work covers all that is behind it
            self._behind = 0.0
            bound_s, choices = self._under(work, 1.0 / ranks, levels=1)
        self._free = (bound_s, (choices,) if choices else ())
        return bound_s, tuple(map(self._choices_of, self._free[1]))

    def of(self, paths: Paths, enough_s: float) -> PipelineBound:
        """That of one pipeline, raised no further once it reaches ``enough_s``."""
        costs, stages, ranks = self.costs, paths.pipeline.stages, paths.pipeline.ranks
        bound_s, free = self._free
        met = [*free]
        if bound_s >= enough_s:
            return PipelineBound(bound_s, tuple(map(self._choices_of, met)))
        homes = {BODY: None, FIRST: 0, LAST: stages - 1, ANYWHERE: None}
        counts = [max(1, costs.blocks(place)) for place in self.places]
        master = Master(
            paths, counts, [homes[place] for place in self.places], self.limit_bytes, max(bound_s, 1e-9), self.send_s,
            [costs.blocks(place) > 0 for place in self.places],
        )  # fmt: skip
        for _ in range(ROUNDS):
            variants = costs.variants(met[-1], ranks)
            for group, place in enumerate(self.places):
                for variant in variants[place]:
                    master.add(group, variant)
            solution = master.solve(OVER * max(bound_s, 1e-9))
            found_s, choices = self._under(solution.prices, 1.0 / ranks)
            bound_s = max(bound_s, found_s)
            if math.isinf(bound_s) or bound_s >= enough_s:
                break
            is_new = choices not in met
            met += [choices] * is_new
            if not is_new or bound_s >= solution.step_s * (1 - CLOSE):
                break
        if solution.over > 0.0 and self._needs_more(solution.prices):
            bound_s = math.inf
        if not math.isinf(bound_s) and bound_s < enough_s:
            alike = self._alike(solution, ranks)
            if alike not in met:
                met.append(alike)
        return PipelineBound(bound_s, tuple(map(self._choices_of, met)))

    @cached_property
    def packed_s(self) -> float:
        """Seconds at least of blocks that are each whole on some rank, with what the first and the last rank have too.

        A rank that waits for ``w`` blocks, the first of the stages before it, and has ``n`` of the body takes
        ``n m + w`` times what a block takes, and ``m`` times what else it has.
        """
        costs, ranks, micro_batches = self.costs, self.costs.space.stages, self.costs.space.mesh.micro_batches
        if ranks == 1 or costs.kept is None:
            return 0.0
        nothing, one = np.zeros(2), np.ones(2)
        none = Prices(nothing, nothing, nothing, nothing, nothing, 0.0, 0.0)
        first, last = (Prices(each, each, nothing, nothing, nothing, 0.0, 0.0) for each in np.eye(2))
        block_s = self._least(Prices(one, one, nothing, nothing, nothing, 0.0, 0.0), none, 0.0) / costs.count
        first_s, last_s, once_s = (
            self._least(none, first, 0.0), self._least(none, last, 0.0), self._least(none, none, 1.0 / ranks)
        )  # fmt: skip
        if not 0.0 < block_s < math.inf:
            return 0.0
        body = [instance.kind == costs.body for instance in costs.folded.instances[: ranks - 1]]
        waits = [0, *accumulate(body)] if self.waits and ranks <= micro_batches else [0] * ranks
        besides = [
            waits[rank] * block_s + micro_batches * ((rank == 0) * first_s + (rank == ranks - 1) * last_s)
            for rank in range(ranks)
        ]

        def fits(length_s: float) -> bool:
            rooms = (max(0.0, length_s - each) / (micro_batches * block_s) for each in besides)
            return sum(math.floor(room + 1e-9) for room in rooms) >= costs.count

        low, high = 0.0, micro_batches * block_s * costs.count + max(besides)
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return low + max(0.0, once_s)

    def _least(self, body: Prices, others: Prices, once: float) -> float:
        """What everything costs at least, nothing recomputed and nothing behind work."""
        singles, pairs = self.costs.under([(0, 0)], body, others, once, 0.0)
        least = least_of_each(singles, pairs, self._tree)
        self._tree = least.tree
        return float(least.bounds[0])

    def _under(self, prices: Prices, once: float, levels: int | None = None) -> tuple[float, tuple[int, ...]]:
        """What all blocks cost at least under prices, and the choices of that; infinite where all is forbidden.

        The least cost is concave in what the body's prices are, grows with them, and is not below what work may cover
        where there are none. So at ``part`` of some prices or more it is no less than that part of what it is there and
        the rest of that, and only prices of which this leaves open whether they are the cheapest are looked at
        themselves, the most promising first.

        Args:
            once: what a second once a step counts.
            levels: how many levels of recomputation are looked at, the first ones; all if left out.
        """
        costs = self.costs
        at = [(stage, level) for stage in range(prices.stages) for level in range(levels or len(costs.levels))]
        stages, numbers = np.array(at).T
        rows = np.stack([prices.forward, prices.backward, prices.held, prices.saved], axis=1)[stages]
        bonus_s = costs.count * prices.bonus_s[stages]
        least_s = -once * self._behind * costs.most_covered_s
        lower, exact = np.full(len(at), least_s), np.full(len(at), math.inf)
        least: LeastOfEach | None = None
        best, choices = math.inf, ()
        while True:
            known = np.isfinite(exact)
            open_ = np.where(known, math.inf, lower - bonus_s)
            if known.any() and float(open_.min()) >= best - APART * abs(best):
                break
            chosen = np.argsort(open_, kind="stable")[:TOGETHER]
            chosen = chosen[~known[chosen]]
            if not len(chosen):
                break
            found, least = self._least_of([at[k] for k in chosen], prices, prices, once)
            if np.isinf(found).all():
                return math.inf, ()
            exact[chosen] = found
            for k, cost in zip(chosen, found, strict=True):
                if cost - bonus_s[k] < best:
                    best = float(cost - bonus_s[k])
                    choices = tuple(least.assignment([*chosen].index(k)).tolist())
                like = numbers == numbers[k]
                with np.errstate(divide="ignore", invalid="ignore"):
                    ratios = np.where(rows[k] > 0.0, rows / rows[k], math.inf)
                part = np.minimum(ratios.min(axis=1), 1.0)
                lower = np.where(like, np.maximum(lower, part * cost + (1 - part) * least_s), lower)
        open_ = np.where(np.isfinite(exact), exact, lower) - bonus_s
        others = sum(costs.blocks(place) * _worth_s(place, prices) for place in (FIRST, LAST, ANYWHERE))
        return float(open_.min()) - others - prices.room_s + prices.send * self.send_s, choices

    def _needs_more(self, prices: Prices) -> bool:
        """Whether all plans need more memory than there is, at the prices of bytes alone."""
        nothing = np.zeros(prices.stages)
        room_s = prices.room_s + float(prices.bonus_s.sum())
        bytes_alone = Prices(nothing, nothing, prices.held, prices.saved, nothing, room_s, 0.0)
        return self._under(bytes_alone, 0.0)[0] > 1e-6 * room_s

    def _alike(self, solution: MasterSolution, ranks: int) -> tuple[int, ...]:
        """The choices that are cheapest for all blocks alike, shared out over levels and stages as in the master."""
        levels, prices = len(self.costs.levels), solution.prices
        parts = solution.shares[0].reshape(-1, levels, prices.stages).sum(axis=0) / self.costs.count
        by_stage = parts.sum(axis=0)
        forward, backward, held = (
            np.array([float(each @ by_stage)]) for each in (prices.forward, prices.backward, prices.held)
        )
        nothing, one = np.zeros(1), np.ones(1)
        # Levels weigh what runs again by how much backward counts where they are, and what is saved by the price there.
        again, saved = parts @ prices.backward / np.maximum(backward, 1e-300), parts @ prices.saved
        singles, pairs = self.costs.under(
            [(0, 0)],
            Prices(forward, backward, held, one, nothing, 0.0, 0.0),
            prices,
            1.0 / ranks,
            self._behind / ranks,
            (again[:, None], saved[:, None]),
        )
        return tuple(least_of_each(singles, pairs, self._tree).assignment(0).tolist())

    def _least_of(
        self, at: list[tuple[int, int]], body: Prices, prices: Prices, once: float
    ) -> tuple[Floats, LeastOfEach]:
        singles, pairs = self.costs.under(at, body, prices, once, once * self._behind)
        least = least_of_each(singles, pairs, self._tree)
        self._tree = least.tree
        return least.bounds, least


def _worth_s(place: str, prices: Prices) -> float:
    """What a block of a place is worth to a stage at most."""
    return float({FIRST: prices.bonus_s[0], LAST: prices.bonus_s[-1], ANYWHERE: prices.bonus_s.max()}[place])


def least_send_s(space: Space) -> float:
    """Seconds that the result of a stage takes to the next one at least: of the least that any block passes on."""
    if space.stages == 1:
        return 0.0
    parts = space.mesh.size * space.mesh.micro_batches
    least = min(
        sum(space.graph.type_of(ref).size_bytes // parts for ref in refs) for refs in crossing(space.folded)[:-1]
    )
    return space.collective_s("send", Axis(PIPELINE, space.stages, space.mesh.size), least)
