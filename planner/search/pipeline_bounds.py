"""Lower bounds of all plans of one pipeline: every cut, every level of recomputation, every choice.

The master program (:mod:`planner.solve.pipeline.master`) says what a second and a byte are worth on every stage. Under
these prices the cheapest choices for a block, wherever it may be and at whatever level, are found by elimination
(:mod:`planner.solve.choices.under_many`); what all blocks cost so is a bound, and the choices are a variant more
for the master program. The two meet where no block is cheaper in a new one.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np

from planner.formulation.cost_table import ANYWHERE, BODY, FIRST, LAST
from planner.formulation.search_space import Space
from planner.formulation.stage_boundaries import crossing
from planner.formulation.stage_costs import StageCosts
from planner.ir.layout import PIPELINE, Axis
from planner.solve.choices.tree import Tree
from planner.solve.choices.under_many import ENTRIES, LeastOfEach, in_order, least_of_each, least_with_choices
from planner.solve.pipeline.filling import least_rounds
from planner.solve.pipeline.master import (
    FEW_ROUNDS,
    MANY_ROUNDS,
    Master,
    MasterSolution,
    Paths,
    Prices,
    Variant,
    rounds_of_proof,
)
from planner.solve.pipeline.packing import BlockVariant, Packing, RankCapacities
from planner.solve.pipeline.stages import Pipeline
from planner.solve.problem import Floats, Ints

ROUNDS = 3
"""Times at most that the master program is given new variants."""
AMPLE = 0.03
"""Part by which the program's step is longer than enough where its prices are taken as they are."""
CLOSE = 2e-3
"""Part of a step between bound and program that is not worth another round."""
MOST_NEW = 4
"""Variants at most that the master program is given at once."""
BEST = 2
"""Choices at most of those that solve a relaxation, besides the best for all blocks alike."""
TOGETHER = 4
"""For so many prices at a time the choices of least cost are found: more take as long each."""
ALIKE = 0.05
"""Stages whose prices differ by no more of the dearest count as alike where memory costs nothing."""
PARTS = (1.0, 0.75, 0.5, 0.25)
"""Of two prices, how much of one is in the mixtures that others are compared with."""
APART = 5e-4
"""Part of a step by which what is known of other prices may be below the least that was found."""
EVENED = 0.03
"""Part of even pace in the prices that are tried besides: a stage on which seconds cost nothing, since none is on a
longest path, seems to be where all blocks may run slowly.
"""
MIXES = 8
"""So many mixes of what is behind work as if it were, and as if it were not, are tried."""
ENTRIES_OF_PACKING = 30_000
"""Entries of a table at most where blocks are packed: most that is packed is far from the best plan."""
ENTRIES_OF_PROOF = 5_000_000
"""Entries of a table at most where a bound is to be proved, once choices that are too slow are dropped."""
SEVERAL = 2.0
"""That there are more micro-batches than the space has, where nothing takes as long in each of them."""
UNLIMITED = 1e30
"""Bytes of a rank of which the schedule says at no moment what is there."""
OVER = 30.0
"""Price of a device's memory beyond what there is, in steps."""


ChoicesInOrder: TypeAlias = Iterator[tuple[float, tuple[int, ...]]]
"""Choices with what plans with them take at least: those that may be fastest first, or where no plan is known, those
that may need least memory. They are found as they are asked for.
"""


@dataclass(frozen=True)
class PipelineBound:
    """No plan of a pipeline takes less than ``time_s``; infinite: none fits.

    ``expected_s`` is what the relaxation takes with the ``choices`` that were met, best last. Of a bound that is a
    proof, but less than was asked for, ``left`` are all choices that may do better, if they are asked for, unless there
    are too many.
    """

    time_s: float
    choices: tuple[tuple[int, ...], ...]
    expected_s: float = 0.0
    left: ChoicesInOrder | None = None


class PipelineBounds:
    """Bounds of the pipelines of one space; and by whole blocks, of the same with a multiple of its micro-batches.

    Args:
        limit_bytes: of every rank.
        send_s: the least seconds from a stage to the next.
        waits: whether ranks wait for the first blocks, forward and backward, in all schedules that are looked at.
    """

    def __init__(self, costs: StageCosts, limit_bytes: int | None, send_s: float, waits: bool):
        self.costs, self.limit_bytes, self.send_s, self.waits = costs, limit_bytes, send_s, waits
        self._behind = 1.0
        self._free_with: list[Floats] = []
        self._trees: dict[tuple[int, int], Tree] = {}  # by the entries that tables have at most, and decisions
        self._entries = ENTRIES
        self._packings: dict[float, Packing] = {}
        self._blocks_s: dict[float, float] = {}
        self._works_s: dict[float, tuple[float, float]] = {}  # of a micro-batch, in plans faster than so many seconds
        self._below_s = math.inf  # of faster plans no choice was dropped
        self._used: list[tuple[int, ...]] = []  # in the pipeline solved last, by which most blocks of the next run, too
        self.free_s, self._free = self._find_free()

    @property
    def choices(self) -> tuple[tuple[int, ...], ...]:
        """Those that are fastest where memory and waiting cost nothing."""
        return (self._free,) if self._free else ()

    def _part(self, micro_batches: int) -> float:
        """How much of one of the space's micro-batches one of so many is."""
        return self.costs.space.mesh.micro_batches / micro_batches

    @property
    def _is_any_kept(self) -> bool:
        return self.costs.kept is not None

    @cached_property
    def places(self) -> list[str]:
        """Where there are blocks or what lies between them."""
        return [BODY, *(place for place in (FIRST, LAST, ANYWHERE) if self.costs.is_anything(place))]

    def _find_free(self) -> tuple[float, tuple[int, ...]]:
        """What all pipelines take at least if memory and waiting cost nothing, and the choices of that."""
        if self.costs.kept is None:
            return math.inf, ()
        least = self._at_even_pace()
        if math.isfinite(least.bounds[0]) and self._exposed_s(least) < 0.0:
            least = self._at_best_mix(least)
        if math.isinf(least.bounds[0]):
            return math.inf, ()
        self._free_with = [each[0] for each in least_with_choices(least)]
        return float(least.bounds[0]), self._choices_of(least.assignment(0))

    def _exposed_s(self, least: LeastOfEach) -> float:
        """What work does not cover of what is once a step, in what costs least; below zero where there is work left."""
        return self.costs.exposed_s(self._choices_of(least.assignment(0)))

    def _at_best_mix(self, wholly: LeastOfEach) -> LeastOfEach:
        """The highest bound, where what is behind work counts in part as if it were not: the larger of both sums is no
        less than any mix of them.
        """
        self._behind = 0.0
        best = self._at_even_pace()
        if self._exposed_s(best) <= 0.0:  # work covers all that is behind it
            return best
        best_mix, low, high = 0.0, 0.0, 1.0
        if wholly.bounds[0] > best.bounds[0]:
            best, best_mix = wholly, 1.0
        for _ in range(MIXES):
            self._behind = (low + high) / 2
            found = self._at_even_pace()
            if found.bounds[0] > best.bounds[0]:
                best, best_mix = found, self._behind
            low, high = (self._behind, high) if self._exposed_s(found) > 0.0 else (low, self._behind)
        self._behind = best_mix
        return best

    def _at_even_pace(self) -> LeastOfEach:
        ranks, micro_batches = self.costs.space.stages, self.costs.space.mesh.micro_batches
        work = _prices(np.full(1, micro_batches / ranks))
        return self._least_of([(0, 0)], work, work, 1.0 / ranks)[1]

    def free_of(self, counts: Iterable[int], enough_s: float) -> dict[int, float]:
        """What all pipelines of each of some multiples of the space's micro-batches take at least if memory and waiting
        cost nothing, raised no further once it reaches ``enough_s``; of plans that are faster than those with choices
        that were dropped.

        That is concave in their number: the least of what is there anyway and grows in proportion. So it is found for
        the most, and for fewer as long as it may be more than enough; of others it is no less than in between.
        """
        own, found = self.costs.space.mesh.micro_batches, dict[int, float]()
        known, known_s = math.inf, math.inf
        for count in sorted(counts, reverse=True):
            part = (count - own) / (known - own) if count > own else 0.0
            found[count] = self.free_s + part * (known_s - self.free_s) if part else self.free_s
            if found[count] < enough_s <= known_s:
                found[count] = max(found[count], self._free_of(self._multiple(count)))
                known, known_s = count, found[count]
        return found

    def _free_of(self, multiple: float) -> float:
        if multiple == 1.0 or not self.costs.gathers_each or not math.isfinite(self.free_s):
            return self.free_s
        if self.costs.kept is None:
            return max(self.free_s, self._below_s)
        ranks, micro_batches = self.costs.space.stages, self.costs.space.mesh.micro_batches
        work = _prices(np.full(1, micro_batches / ranks))
        (found_s,), _ = self._least_of([(0, 0)], work, work, 1.0 / ranks, multiple)
        return max(self.free_s, min(float(found_s), self._below_s))

    def _multiple(self, micro_batches: int) -> float:
        """How many times the space's micro-batches these are, or :data:`SEVERAL` where that is all that matters."""
        multiple = micro_batches / self.costs.space.mesh.micro_batches
        return multiple if multiple == 1.0 or self.costs.gathers_each else SEVERAL

    def _narrow(self, least_s: list[Floats], enough_s: float) -> None:
        """Drop choices with which all plans take ``enough_s`` or more.

        Args:
            least_s: what plans with each of the kept choices take at least.
        """
        dropped = [each >= enough_s for each in least_s]
        if self.costs.kept is not None and any(each.any() for each in dropped):
            self.costs, self._trees = self.costs.without(dropped), {}

    def _narrow_freely(self, enough_s: float) -> None:
        """Drop those with which they would, even if memory and waiting cost nothing."""
        if enough_s >= self._below_s:
            return
        before, self._below_s = self.costs.kept, enough_s
        self._narrow(self._free_with, enough_s)
        if before is not None and self.costs.kept is not None and before is not self.costs.kept:
            numbers = zip(self._free_with, before, self.costs.kept, strict=True)
            self._free_with = [least_s[np.isin(old, new)] for least_s, old, new in numbers]

    def _choices_of(self, assignment: Ints) -> tuple[int, ...]:
        """An assignment of what is kept in the space's choices."""
        assert self.costs.kept is not None
        return tuple(int(kept[each]) for kept, each in zip(self.costs.kept, assignment, strict=True))

    def of(
        self, paths: Paths, enough_s: float, is_proof: bool = True, known_s: float = 0.0, in_order: bool = False
    ) -> PipelineBound:
        """That of one pipeline with the space's micro-batches, raised no further once it reaches ``enough_s``; unless
        it ``is_proof`` only if it may reach that.

        Args:
            known_s: what all plans of it take at least, as is known by other means.
            in_order: whether the choices that are left are asked for.
        """
        if self.free_s >= enough_s:
            return PipelineBound(self.free_s, self.choices)
        self._narrow_freely(enough_s)
        return copy.copy(self)._of(paths, enough_s, is_proof, known_s, in_order)

    def _of(self, paths: Paths, enough_s: float, is_proof: bool, known_s: float, in_order: bool) -> PipelineBound:
        """The same, with fewer choices from then on."""
        ranks = paths.pipeline.ranks
        assert paths.pipeline.micro_batches == self.costs.space.mesh.micro_batches
        if self.costs.kept is not None and self.limit_bytes is not None:
            self.costs, self._trees = self.costs.fitting(self.limit_bytes), {}
        if self.costs.kept is None:
            return PipelineBound(enough_s, self.choices)
        waiting_s = self._narrow_at_pace(paths, enough_s)
        bound_s, met = max(self.free_s, waiting_s), [*dict.fromkeys((*self.choices, *self._used))]
        if bound_s >= enough_s or self.costs.kept is None:
            return PipelineBound(enough_s, self.choices)
        master, rounds = self._master(paths, self.limit_bytes), MANY_ROUNDS if is_proof else FEW_ROUNDS
        found: _Priced | None = None
        ample_s, new = enough_s * (1 + AMPLE), met
        for number in range(ROUNDS):
            self._add(master, new)
            over_s = OVER * max(bound_s, 1e-9)
            solution = master.solve(over_s, ample_s, rounds)
            if is_proof and number == 0 and not solution.is_settled:  # its prices may say more, with more paths
                rounds = rounds_of_proof(paths.pipeline)
                solution = master.solve(over_s, ample_s, rounds)
            at_these = partial(self._under, solution.prices, 1.0 / ranks, enough_s)
            self._used[:] = _most_used(met, master, solution)
            if is_proof and number == 0:
                if not self._may_prove_more(solution, 1.0 / ranks, enough_s, known_s, in_order):
                    break
                if not self._is_any_kept:
                    return PipelineBound(enough_s, self.choices, solution.step_s)
            is_wanted = is_proof or solution.step_s >= enough_s
            found = at_these(solution.step_s * (1 - CLOSE) if is_wanted else math.inf)
            new = [choices for choices in found.choices if choices not in met][:MOST_NEW]
            is_last = found.is_whole or not new or number == ROUNDS - 1
            if is_last and solution.over > 0.0 and self._needs_more(solution.prices):
                return PipelineBound(enough_s, self.choices, solution.step_s)
            if is_last and is_wanted and not found.is_whole:
                found = at_these(-math.inf)
            bound_s = max(bound_s, min(found.bound_s, enough_s))
            if bound_s >= enough_s:
                break
            met += new
            if is_last:
                break
        if is_proof and found is not None and bound_s < enough_s:
            bound_s = max(bound_s, self._most_s(solution, paths.pipeline, enough_s, found))
        if bound_s >= enough_s:
            return PipelineBound(bound_s, self.choices, solution.step_s)
        best = [*_most_used(met, master, solution), self._alike(master.variants[0], solution, ranks)]
        left: ChoicesInOrder | None = None
        tree = self._trees.get((self._entries, len(self.costs.kept or ())))
        if in_order and tree is not None and tree.exact:
            if math.isfinite(enough_s):
                left = self._fastest_first(solution.prices, 1.0 / ranks)
            else:
                left = self._least_memory_first(bound_s, paths.pipeline)
        return PipelineBound(bound_s, tuple(dict.fromkeys(best)), solution.step_s, left)

    def _fastest_first(self, prices: Prices, once: float) -> ChoicesInOrder:
        """Choices by what all blocks cost under prices on the stage and at the level where they are cheapest.

        Args:
            once: as for :meth:`_under`.
        """
        at = [(stage, level) for stage in range(prices.stages) for level in range(len(self.costs.levels))]
        besides_s = self._besides_s(prices) - self.costs.count * prices.bonus_s
        _, least = self._least_of(at, prices, prices, once)
        yield from self._in_order(least, [float(besides_s[stage]) for stage, _ in at])

    def _least_memory_first(self, bound_s: float, pipeline: Pipeline) -> ChoicesInOrder:
        """Choices by the bytes that all ranks together need at least, as long as there are so many."""
        free_bytes, in_flight = self._capacities(pipeline, 1.0, self.limit_bytes)
        prices, at = _prices(np.zeros(1), 1.0, float(in_flight.min())), self._at_levels
        _, least = self._least_of(at, prices, prices, 0.0)
        for over, choices in self._in_order(least, [-float(free_bytes.sum())] * len(at)):
            if over > 0.0:
                return
            yield bound_s, choices

    def _in_order(self, least: LeastOfEach, more: Sequence[float]) -> ChoicesInOrder:
        """Choices by the least that they cost under any weights, and what is added under each of these."""

        def under(k: int, more: float) -> ChoicesInOrder:
            return ((cost + more, self._choices_of(each)) for cost, each in in_order(least, k))

        met = set[tuple[int, ...]]()
        for cost, choices in heapq.merge(*(under(k, each) for k, each in enumerate(more))):
            if choices not in met:
                met.add(choices)
                yield cost, choices

    def _master(self, paths: Paths, limit_bytes: int | None) -> Master:
        homes = {BODY: None, FIRST: 0, LAST: paths.pipeline.stages - 1, ANYWHERE: None}
        return Master(
            paths,
            [max(1, self.costs.blocks(place)) for place in self.places],
            [homes[place] for place in self.places],
            limit_bytes,
            max(self.free_s, 1e-9),
            self.send_s,
            [self.costs.blocks(place) > 0 for place in self.places],
            [] if limit_bytes is None else self.costs.working_bytes(paths.pipeline.stages),
        )

    def _add(self, master: Master, new: Iterable[tuple[int, ...]]) -> None:
        """Let blocks run by these choices, at any level."""
        for choices in new:
            variants = self.costs.variants(choices, master.pipeline.ranks)
            for group, place in enumerate(self.places):
                for variant in variants[place]:
                    master.add(group, replace(variant, choices=choices))

    def _narrow_at_pace(self, paths: Paths, enough_s: float) -> float:
        """What plans take at least if memory cost nothing; drops choices with which that is ``enough_s`` or more.

        Stages of about the same prices count as one that has the least of each.
        """
        if paths.pace is None:
            master = self._master(paths, None)
            self._add(master, self.choices)
            paths.pace = master.solve(0.0).prices
        prices, once = paths.pace, 1.0 / paths.pipeline.ranks
        groups = _alike_stages(prices)
        body = Prices(
            np.array([prices.forward[group].min() for group in groups]),
            np.array([prices.backward[group].min() for group in groups]),
            np.zeros(len(groups)),
            np.zeros(len(groups)),
            np.array([prices.bonus_s[group].max() for group in groups]),
            0.0,
            0.0,
        )
        found, least = self._least_of([(number, 0) for number in range(len(groups))], body, prices, once)
        besides_s = self._besides_s(prices) - self.costs.count * body.bonus_s
        bound_s = float((found + besides_s).min())
        if bound_s < enough_s and math.isfinite(enough_s):
            with_each = least_with_choices(least)
            self._narrow([(each + besides_s[:, None]).min(axis=0) for each in with_each], enough_s)
        return bound_s

    def _besides_s(self, prices: Prices) -> float:
        """What is added to the costs of all blocks for a bound of the step."""
        worth_s = {FIRST: prices.bonus_s[0], LAST: prices.bonus_s[-1], ANYWHERE: prices.bonus_s.max()}
        others_s = math.fsum(self.costs.blocks(place) * float(each) for place, each in worth_s.items())
        return prices.send * self.send_s - prices.room_s - others_s

    def moving_s(self, byte_s: float, evict_bytes_per_s: float, room_bytes: int) -> float:
        """Seconds of a step of one stage at least, at a price on what the first forward saves beyond the room.

        What is saved by then is on the device or has left it, during that forward or while the device waits. A second
        of waiting frees so many bytes; the price must be no more than that is worth.

        Args:
            byte_s: seconds that a saved byte costs. Of what happens once a step so much is not counted as a second of
                waiting would be worth, since the host may update meanwhile.
        """
        one, micro_batches, waiting = np.ones(1), self.costs.space.mesh.micro_batches, byte_s * evict_bytes_per_s
        prices = Prices(
            one * (micro_batches - waiting), one * micro_batches, one * 0.0, one * byte_s, one * 0.0,
            byte_s * room_bytes, 0.0,
        )  # fmt: skip
        return self._under(prices, 1.0 - waiting).bound_s

    def packed_s(self, pipeline: Pipeline, enough_s: float | None = None) -> float:
        """Seconds at least of blocks that are each whole on some rank, with what the first and the last rank have too.

        A rank that has ``n`` blocks of the body and waits for ``w``, the first of the stages before it, takes
        ``n m + w`` times what a block takes, and ``m`` times what else it has; the first block takes less, wherever.

        Args:
            enough_s: the bound is raised no further once it reaches this, by prices of memory; left out: memory aside.
        """
        if not math.isfinite(self.free_s):
            return self.free_s
        if enough_s is not None:
            self._narrow_freely(enough_s)
        if self.costs.kept is None:
            return self._below_s
        part, ranks = self._part(pipeline.micro_batches), pipeline.ranks
        multiple = self._multiple(pipeline.micro_batches)
        taken_s, once_s = np.zeros(ranks), 0.0
        if ranks > 1:
            block_s, (first_s, last_s, once_s) = self._block_s(multiple), self._least_parts
            if not 0.0 < block_s < math.inf or self.costs.unpreceded is None:
                return 0.0
            if self.waits and ranks <= pipeline.micro_batches:
                body = [each.kind == self.costs.body for each in self.costs.folded.instances[: ranks - 1]]
                follows = zip(body, [False, *body], strict=False)
                each_s = [own * (block_s if before else self.costs.operators_s) for own, before in follows]
                taken_s[1:] = part * np.cumsum(each_s)
            for stage, others_s in ((0, first_s), (-1, last_s)):
                taken_s[pipeline.placed[stage]] += self.costs.space.mesh.micro_batches * others_s
        elif self.free_s <= 0.0:
            return 0.0
        wanted_s = 0.0 if enough_s is None else enough_s - once_s
        limit_bytes = None if enough_s is None else self.limit_bytes
        capacities = RankCapacities(taken_s, *self._capacities(pipeline, part, limit_bytes))
        return min(once_s + self._packing(multiple).least_s(capacities, wanted_s), self._below_s)

    def work_s(self, pipeline: Pipeline, free_s: float) -> float:
        """Seconds of a step at least if memory cost nothing: of whole blocks, or of parts of them while the pipeline
        fills and empties.

        Args:
            free_s: if waiting cost nothing either, see :meth:`free_of`.
        """
        micro_batches, least_s = pipeline.micro_batches, max(self.packed_s(pipeline), free_s)
        more, multiple = least_rounds(pipeline) - micro_batches / pipeline.ranks, self._multiple(micro_batches)
        is_known = multiple in self._works_s
        if more <= 0.0 or not math.isfinite(free_s) or (self.costs.kept is None and not is_known):
            return least_s
        if not is_known:
            first_s, last_s, _ = self._least_parts
            body_s = self.costs.count * self._block_s(multiple)
            self._works_s[multiple] = body_s + first_s + last_s, self._below_s
        work_s, below_s = self._works_s[multiple]
        return max(least_s, min(free_s + more * self._part(micro_batches) * work_s, below_s))

    def _capacities(self, pipeline: Pipeline, part: float, limit_bytes: int | None) -> tuple[Floats, Floats]:
        """Bytes that every rank has for what it holds, and how many of the space's micro-batches are in flight then."""
        free_bytes, in_flight = np.full(pipeline.ranks, UNLIMITED), np.zeros(pipeline.ranks)
        if limit_bytes is None:
            return free_bytes, in_flight
        working = (*self.costs.working_bytes(pipeline.stages, part), 0.0)
        for rank, (_, moments) in enumerate(pipeline.certain_moments):
            known = [(min(each.counts), working[each.backward]) for each in moments if each.added]
            if known:
                count, taken = max(known)
                free_bytes[rank], in_flight[rank] = limit_bytes - taken, part * count
        return free_bytes, in_flight

    def _packing(self, multiple: float) -> Packing:
        """That of the body's blocks without those that follow none, but for one of these; one stage has the whole model
        as one block.

        Args:
            multiple: so many times the space's micro-batches; see :meth:`_multiple`.
        """
        if multiple not in self._packings:
            known, cost_s = self._block_variants(self._free, multiple), partial(self._block_cost_s, multiple)
            if self.costs.space.stages == 1:
                found = Packing(1, self._free_of(multiple), cost_s, known)
            else:
                times, costs = self.costs.space.mesh.micro_batches, self.costs
                assert costs.unpreceded is not None
                count, block_s = costs.count + 1 - costs.unpreceded, self._block_s(multiple)
                found = Packing(count, times * block_s, cost_s, known, times * costs.operators_s)
            self._packings[multiple] = found
        return self._packings[multiple]

    def _block_cost_s(self, multiple: float, held: float, saved: float) -> tuple[float, BlockVariant]:
        """What is packed costs at least, at these prices of bytes, at any level; and what does."""
        prices = _prices(np.full(1, float(self.costs.space.mesh.micro_batches)), held, saved)
        if self.costs.space.stages > 1:
            least, decisions, count = self._body_under(prices, multiple), self.costs.in_body, self.costs.count
        else:
            _, least = self._least_of(self._at_levels, prices, prices, 1.0, multiple, ENTRIES_OF_PACKING)
            decisions, count = tuple(range(len(least.sizes))), 1
        level = int(np.argmin(least.bounds))
        assert self.costs.kept is not None
        assignment = np.zeros(len(self.costs.kept), dtype=np.int64)
        assignment[list(decisions)] = least.assignment(level)
        variants = self._block_variants(self._choices_of(assignment), multiple)
        return float(least.bounds[level]) / count, variants[level]

    def _body_under(self, prices: Prices, multiple: float) -> LeastOfEach:
        """What the body costs at least under the prices of one stage, at each level, whatever is beside it."""
        numbers = {decision: number for number, decision in enumerate(self.costs.in_body)}
        singles, pairs = self.costs.under(self._at_levels, prices, _prices(np.zeros(1)), 0.0, 0.0, multiple=multiple)
        inner = {(numbers[a], numbers[b]): each for (a, b), each in pairs.items() if a in numbers and b in numbers}
        return self._eliminated([singles[each] for each in numbers], inner, ENTRIES_OF_PACKING)

    @property
    def _at_levels(self) -> list[tuple[int, int]]:
        """Of prices of one stage, each level."""
        return [(0, level) for level in range(len(self.costs.levels))]

    def _block_variants(self, choices: tuple[int, ...], multiple: float) -> list[BlockVariant]:
        """What is packed with some choices, at every level."""
        costs, times = self.costs, self.costs.space.mesh.micro_batches
        variants = costs.variants(choices, costs.space.stages, multiple)
        if costs.space.stages > 1:
            each_s = [(each, times * (each.forward_s + each.backward_s)) for each in variants[BODY]]
            return [BlockVariant(work_s, each.held_bytes, each.saved_bytes) for each, work_s in each_s]
        found = []
        for level in range(len(costs.levels)):
            here = [(max(1, costs.blocks(at)), variants[at][level if at == BODY else 0]) for at in self.places]
            work_s = sum(n * (times * (each.forward_s + each.backward_s) + each.once_s) for n, each in here)
            held, saved = (sum(n * getattr(each, name) for n, each in here) for name in ("held_bytes", "saved_bytes"))
            found.append(BlockVariant(work_s, held, saved))
        return found

    @cached_property
    def _least_parts(self) -> tuple[float, float, float]:
        """Seconds at least of what the first and the last rank have besides blocks, and once a step."""
        none, (first, last) = _prices(np.zeros(2)), map(_prices, np.eye(2))
        once_s = self._least(none, none, 1.0 / self.costs.space.stages)
        return self._least(none, first), self._least(none, last), max(0.0, once_s)

    def _block_s(self, multiple: float) -> float:
        """Seconds at least of a block; see :meth:`_multiple`."""
        if multiple not in self._blocks_s:
            in_body = self._body_under(_prices(np.ones(1)), multiple)
            self._blocks_s[multiple] = float(in_body.bounds[0]) / self.costs.count
        return self._blocks_s[multiple]

    def _least(self, body: Prices, others: Prices, once: float = 0.0) -> float:
        """What everything costs at least, nothing recomputed and nothing behind work; what is free is allowed."""
        singles, pairs = self.costs.under([(0, 0)], body, others, once, 0.0)
        pairs = {ends: table for ends, table in pairs.items() if np.where(np.isinf(table), 0.0, table).any()}
        return float(least_of_each(singles, pairs).bounds[0])

    def _under(
        self, prices: Prices, once: float, enough_s: float = math.inf, promising_s: float = -math.inf
    ) -> _Priced:
        """What all blocks cost at least under prices, and choices that cost about that.

        Only prices of which it is open whether they are the cheapest are looked at themselves, the most promising first
        (:class:`_Entries`).

        Args:
            once: what a second once a step counts.
            enough_s: bounds are raised no further.
            promising_s: choices that cost less are enough, whatever others cost.
        """
        entries, besides_s = self._entries_at(prices, once), self._besides_s(prices)
        met: dict[tuple[int, ...], float] = {}
        while True:
            best_s = entries.best_s
            if best_s + besides_s < promising_s:
                break
            is_enough = best_s + besides_s >= enough_s  # if what is known of the others is, too
            closely_s = math.inf if is_enough else best_s - APART * abs(best_s)
            chosen = entries.open(min(closely_s, enough_s - besides_s), TOGETHER)
            if not len(chosen):
                break
            found, least = self._least_of([entries.at[k] for k in chosen], prices, prices, once)
            if np.isinf(found).all():
                return _Priced(math.inf, True, ())
            entries.add(chosen, found)
            for number, k in enumerate(chosen):
                choices = self._choices_of(least.assignment(number))
                met[choices] = min(met.get(choices, math.inf), float(found[number] - entries.bonus_s[k]))
        ordered = sorted(met, key=lambda choices: met[choices])
        return _Priced(entries.lower_s + besides_s, best_s + besides_s >= promising_s, tuple(ordered))

    def _most_s(self, solution: MasterSolution, pipeline: Pipeline, enough_s: float, found: _Priced) -> float:
        """The most that is proved under the prices of a solution, or between these and even pace where they say less
        than the program's step.

        Args:
            enough_s: bounds are raised no further.
            found: under these prices.
        """
        prices, once = solution.prices, 1.0 / pipeline.ranks
        if found.bound_s < solution.step_s * (1 - CLOSE):
            evened = _between(prices, _prices(np.full(prices.stages, pipeline.micro_batches / pipeline.ranks)), EVENED)
            other = self._under(evened, once, enough_s)
            if other.bound_s > found.bound_s:
                prices, found = evened, other
        return self._mixed_s(prices, once, enough_s, found)

    def _mixed_s(self, prices: Prices, once: float, enough_s: float, found: _Priced) -> float:
        """The most that is proved under prices by mixes of what is behind work, see :meth:`_at_best_mix`.

        Args:
            once, enough_s: as for :meth:`_under`.
            found: under these prices, as things are mixed.
        """
        before, bound_s, low, high = self._behind, found.bound_s, 0.0, 1.0
        while bound_s < enough_s and found.choices:
            low, high = (self._behind, high) if self.costs.exposed_s(found.choices[0]) > 0.0 else (low, self._behind)
            if high - low < 1 / MIXES:
                break
            self._behind = (low + high) / 2
            found = self._under(prices, once, enough_s)
            bound_s = max(bound_s, found.bound_s)
        self._behind = before
        return min(bound_s, enough_s)

    def _entries_at(self, prices: Prices, once: float) -> _Entries:
        least_s = -once * self._behind * self.costs.most_covered_s
        return _Entries(prices, len(self.costs.levels), self.costs.count, least_s)

    def _may_prove_more(
        self, solution: MasterSolution, once: float, enough_s: float, known_s: float, in_order: bool
    ) -> bool:
        """Whether prices may prove more than is known; where tables are split, only larger ones, in fewer choices.

        Args:
            once, enough_s: as for :meth:`_under`.
        """
        _, least = self._least_of([(0, 0)], solution.prices, solution.prices, once)
        if least.tree.exact:
            return True
        if solution.step_s <= known_s and not solution.over:
            return False
        if math.isfinite(enough_s):
            self._narrow_under(solution.prices, once, enough_s)
        if self._is_any_kept and not in_order:
            self.costs, self._trees = self.costs.undominated(), {}
        self._entries = ENTRIES_OF_PROOF
        return True

    def _narrow_under(self, prices: Prices, once: float, enough_s: float) -> None:
        """Drop choices with which all plans take ``enough_s`` or more, as prices tell.

        Args:
            once: as for :meth:`_under`.
        """
        entries, besides_s = self._entries_at(prices, once), self._besides_s(prices)
        least_s: list[Floats] | None = None
        while len(chosen := entries.open(enough_s - besides_s, TOGETHER)):
            found, least = self._least_of([entries.at[k] for k in chosen], prices, prices, once)
            if np.isinf(found).all():
                return
            entries.add(chosen, found)
            more = (besides_s - entries.bonus_s[chosen])[:, None]
            with_each = [(each + more).min(axis=0) for each in least_with_choices(least)]
            least_s = with_each if least_s is None else [*map(np.minimum, least_s, with_each)]
            if not any((each >= enough_s).any() for each in least_s):
                return
        if least_s is not None:
            self._narrow(least_s, enough_s)

    def _needs_more(self, prices: Prices) -> bool:
        """Whether all plans need more memory than there is, at the prices of bytes alone."""
        nothing = np.zeros(prices.stages)
        room_s = prices.room_s + float(prices.bonus_s.sum())
        bytes_alone = Prices(nothing, nothing, prices.held, prices.saved, nothing, room_s, 0.0)
        return self._under(bytes_alone, 0.0).bound_s > 1e-6 * room_s

    def _alike(self, variants: Sequence[Variant], solution: MasterSolution, ranks: int) -> tuple[int, ...]:
        """The choices that are cheapest for all blocks alike, shared out over levels and stages as in the master."""
        prices = solution.prices
        parts = np.zeros((len(self.costs.levels), prices.stages))
        for variant, shares in zip(variants, solution.shares[0], strict=True):
            parts[variant.level] += shares / self.costs.count
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
        return self._choices_of(self._eliminated(singles, pairs).assignment(0))

    def _least_of(
        self,
        at: list[tuple[int, int]],
        body: Prices,
        prices: Prices,
        once: float,
        multiple: float = 1.0,
        entries: int | None = None,
    ) -> tuple[Floats, LeastOfEach]:
        tables = self.costs.under(at, body, prices, once, once * self._behind, multiple=multiple)
        least = self._eliminated(*tables, entries)
        return least.bounds, least

    def _eliminated(
        self, singles: list[Floats], pairs: dict[tuple[int, int], Floats], entries: int | None = None
    ) -> LeastOfEach:
        entries = entries or self._entries
        key = entries, len(singles)
        least = least_of_each(singles, pairs, self._trees.get(key), entries)
        self._trees[key] = least.tree
        return least


@dataclass(frozen=True)
class _Priced:
    """No plan costs less than ``bound_s`` under some prices; ``choices``, cheapest first, cost about that if all were
    looked at (``is_whole``).
    """

    bound_s: float
    is_whole: bool
    choices: tuple[tuple[int, ...], ...]


class _Entries:
    """The least costs of all blocks at each stage and level: of some they are known, of others a bound.

    The least cost is concave in what the body's prices are, grows with them, and is not below ``least_s`` where there
    are none. So where prices are no less than a ``part`` of some mixture of others, it is no less than that part of the
    mixture of what it is there, and the rest of ``least_s``.
    """

    def __init__(self, prices: Prices, levels: int, count: int, least_s: float):
        self.at = [(stage, level) for stage in range(prices.stages) for level in range(levels)]
        stages, self._level = np.array(self.at).T
        self._rows = np.stack([prices.forward, prices.backward, prices.held, prices.saved], axis=1)[stages]
        self.bonus_s = count * prices.bonus_s[stages]
        self._least_s = least_s
        self._lower, self._exact = np.full(len(self.at), least_s), np.full(len(self.at), math.inf)

    @property
    def best_s(self) -> float:
        """The least that is known, less what blocks are worth there."""
        return float((self._exact - self.bonus_s).min())

    @property
    def lower_s(self) -> float:
        """No entry is less."""
        return float((np.where(np.isfinite(self._exact), self._exact, self._lower) - self.bonus_s).min())

    def open(self, enough_s: float, count: int) -> Ints:
        """The most promising of those that may be below ``enough_s``, at most so many."""
        left = np.where(np.isfinite(self._exact), math.inf, self._lower - self.bonus_s)
        return np.argsort(left, kind="stable")[: min(count, int((left < enough_s).sum()))]

    def add(self, chosen: Ints, found_s: Floats) -> None:
        """These entries' costs are known."""
        self._exact[chosen] = found_s
        for level in np.unique(self._level[chosen]):
            here = self._level == level
            known, left = (np.flatnonzero(here & (np.isfinite(self._exact) == is_known)) for is_known in (True, False))
            if not len(left):
                continue
            one, other = np.triu_indices(len(known))
            rows, costs = self._rows[known], self._exact[known]
            mixtures = np.concatenate([part * rows[one] + (1 - part) * rows[other] for part in PARTS])
            mixed_s = np.concatenate([part * costs[one] + (1 - part) * costs[other] for part in PARTS])
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = np.where(mixtures > 0.0, self._rows[left][:, None] / mixtures, math.inf)
            part = np.minimum(ratios.min(axis=2), 1.0)
            self._lower[left] = np.maximum(self._lower[left], (part * mixed_s + (1 - part) * self._least_s).max(axis=1))


def _prices(seconds: Floats, held: float = 0.0, saved: float = 0.0) -> Prices:
    """Those of a second, forward and backward alike, by stage, and of a byte."""
    one, nothing = np.ones(len(seconds)), np.zeros(len(seconds))
    return Prices(seconds, seconds, held * one, saved * one, nothing, 0.0, 0.0)


def _between(one: Prices, other: Prices, part: float) -> Prices:
    """Prices of which so much is of the other ones: they bound a step as both do."""
    mixed = ((1 - part) * getattr(one, each.name) + part * getattr(other, each.name) for each in fields(Prices))
    return Prices(*mixed)


def _alike_stages(prices: Prices) -> list[Ints]:
    """Numbers of stages, those together of which seconds cost about the same."""
    by_use = np.stack([prices.forward, prices.backward], axis=1)
    rounded = np.round(by_use / max(float(by_use.max()), 1e-300) / ALIKE).astype(np.int64)
    _, numbers = np.unique(rounded, axis=0, return_inverse=True)
    return [np.flatnonzero(numbers.reshape(-1) == number) for number in range(int(numbers.max()) + 1)]


def _most_used(met: Iterable[tuple[int, ...]], master: Master, solution: MasterSolution) -> list[tuple[int, ...]]:
    """The choices in whose variants most blocks are, at most :data:`BEST`, the most used last."""
    used = dict.fromkeys(met, 0.0)
    for variant, shares in zip(master.variants[0], solution.shares[0], strict=True):
        used[variant.choices] += float(shares.sum())
    return sorted((each for each in used if used[each] > 0.0), key=lambda each: used[each])[-BEST:]


def least_send_s(space: Space) -> float:
    """Seconds that the result of a stage takes to the next one at least: of the least that any block passes on."""
    if space.stages == 1:
        return 0.0
    parts = space.mesh.size * space.mesh.micro_batches
    least = min(
        sum(space.graph.type_of(ref).size_bytes // parts for ref in refs) for refs in crossing(space.folded)[:-1]
    )
    return space.collective_s("send", Axis(PIPELINE, space.stages, space.mesh.size), least)
