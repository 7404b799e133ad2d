"""Cuts a chain of layers into pipeline stages for the shortest step, with a proof of how good the cut is.

A step takes as long as the longest path of its schedule, and every path is a weighted sum of what stages take. So for
any mix of paths, and any price on bytes over the limit, the cut of least weighted sum is a lower bound on all cuts that
fit. A weighted sum is minimised exactly, stage by stage, and block by block where a block may save in several ways.

1. *Planes.* The bound is concave in mix and prices, and every cut is a plane above it: the highest point under all
   planes so far is looked at next (Kelley, 1960). Each cut that is met is simulated, which gives it a path of its own.
2. *Tree.* Cuts are built from the first stage on, the most promising first; what cannot beat the best cut is left out
   by the same sums over the rest of the chain. An exhausted tree is a proof.

Sums over a chain of a hundred blocks are as fast as arrays can be added. Of a much longer one equal blocks are bundled
first; the cut between bundles is then bettered block by block.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count, pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from planner.base.errors import InfeasibleError
from planner.base.formatting import in_bytes
from planner.solve.pipeline.schedule import InFlight, placed
from planner.solve.pipeline.simulate import Path, Times, critical
from planner.solve.pipeline.stages import (
    Chain,
    ChainBlock,
    Cut,
    Pipeline,
    RematOption,
    blocks_of,
    bound_s,
    check_chain,
    evaluate,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PLANES = 150
"""Planes at most."""
CLOSE = 1e-3
"""Part of a step between bound and planes that is not worth another plane."""
NEAR = (0.0, 0.7)
"""How much of the best point so far goes into the next, in turn: planes say little far from where they were found."""
SLACKS = (0.0, 0.003, 0.01, 0.02, 0.04)
"""Parts by which the slowest stage may be slower than it must for cuts that are tried."""
PRICE = 4.0
"""Highest price of the whole limit's bytes, in steps."""
BEYOND = 0.1
"""Part of a step by which a cut may be slower than is wanted that others are made of by moving blocks."""
OFFER = 4
"""Nodes of the tree that looking at a cut counts as, of :data:`MOST_BLOCKS` at most."""
MOVES = 3000
"""Work for moving blocks at least, where they go on helping: it is what betters a cut most."""
TRY = 3
"""Effort for each cut that is looked at for a block to move."""
PATHS = 60
"""Paths by which cuts are refused before they are simulated: the last ones."""
FRONT = 400
"""Ways for a stage to save that are kept at most; with more, the tree proves nothing."""
MOST_BLOCKS = 256
"""Longer chains are cut between bundles of equal blocks in a row first, in about so many where they are long enough."""
EFFORT = 3500
"""Work for planes; the tree has what moving blocks left of twice as much, or a quarter.

A node of the tree counts as one, simulating a cut as one per hundred actions.
"""


def cut(
    pipeline: Pipeline,
    chain: Chain,
    limit_bytes: int | None = None,
    cutoff_s: float = math.inf,
    effort: int = EFFORT,
    working_bytes: Sequence[int] = (),
) -> Cut | None:
    """The cut of shortest step among those whose ranks hold at most ``limit_bytes``.

    ``None`` where none was found that takes less than ``cutoff_s``, which ends the search early;
    :class:`InfeasibleError` where none was found that fits. More ``effort`` takes longer and leaves smaller gaps.

    Args:
        working_bytes: what the backward of each stage has beside what is held and saved; left out: nothing.
    """
    check_chain(pipeline, chain)
    working_bytes = working_bytes or (0,) * pipeline.stages
    size = max(1, sum(count for _, count in chain) // max(MOST_BLOCKS, pipeline.stages))
    work, found, bound = _cut(pipeline, chain, size, limit_bytes, cutoff_s, effort, working_bytes)
    while found.cut is None and math.isinf(cutoff_s) and size > 1:  # what fits may be between blocks of a bundle
        size //= 2
        work, found, bound = _cut(pipeline, chain, size, limit_bytes, cutoff_s, effort, working_bytes)
    if found.cut is None or found.best_s >= cutoff_s:
        if cutoff_s < math.inf and bound < math.inf:
            return None
        raise InfeasibleError(_too_large(work, found), found.excess_bytes)
    best = evaluate(pipeline, chain, *found.cut)
    return Cut(best.bounds, best.savings, best.step_s, best.rank_bytes, min(bound, best.step_s))


TIE = 1e-9
"""Part of a step by which two cuts may differ and count as equal."""


@dataclass(frozen=True)
class _Bundle:
    """Equal blocks in a row that are moved and save together."""

    block: ChainBlock
    count: int

    @property
    def as_one(self) -> ChainBlock:
        """All of them as one block; only the last one's result is sent."""
        b, count = self.block, self.count
        return replace(
            b,
            forward_s=b.forward_s * count,
            input_s=b.input_s * count,
            weight_s=b.weight_s * count,
            held_bytes=b.held_bytes * count,
            gradient_bytes=b.gradient_bytes * count,
            savings=tuple(RematOption(each.recompute_s * count, each.saved_bytes * count) for each in b.savings),
        )


def _cut(
    pipeline: Pipeline,
    chain: Chain,
    size: int,
    limit_bytes: int | None,
    cutoff_s: float,
    effort: int,
    working_bytes: Sequence[int],
) -> tuple[_Work, _Found, float]:
    """What is found between bundles of ``size`` blocks, then block by block, and a bound of all cuts."""
    bundles, found = _bundles(chain, size), _Found(cutoff_s)
    coarse = chain if size == 1 else [(bundle.as_one, 1) for bundle in bundles]
    work = _Work(pipeline, coarse, limit_bytes, effort, working_bytes)
    planes = _planes(work, found)
    bound = max(planes.bound_s, bound_s(pipeline, chain))
    if bound < found.step_s * (1 - TIE):
        bound = max(bound, _tree(work, planes, found))
    if size > 1:  # other cuts are between blocks of a bundle
        bound = bound_s(pipeline, chain)
    if size > 1 and found.cut is not None:
        work = _Work(pipeline, chain, limit_bytes, effort, working_bytes)
        found = _unbundled(work, bundles, found.cut, cutoff_s)
    return work, found, bound


def _bundles(chain: Chain, size: int) -> list[_Bundle]:
    """A chain in bundles of so many equal blocks, and what is left over of each kind."""
    wholes = ((block, count // size, count % size) for block, count in chain)
    return [_Bundle(block, each) for block, whole, rest in wholes for each in [size] * whole + [rest] * (rest > 0)]


def _unbundled(
    work: _Work, bundles: Sequence[_Bundle], cut: tuple[tuple[int, ...], tuple[int, ...]], cutoff_s: float
) -> _Found:
    """A cut between bundles as one between blocks, bettered by moving single ones."""
    found, starts = _Found(cutoff_s), [0, *accumulate(bundle.count for bundle in bundles)]
    bounds = tuple(starts[each] for each in cut[0])
    savings = tuple(way for bundle, way in zip(bundles, cut[1], strict=True) for _ in range(bundle.count))
    found.offer(work, bounds, savings)
    _offer_around(work, found, bounds, None)
    _improve(work, found)
    return found


class _Work:
    """A pipeline and a chain as arrays: a column per block, memory rows per rank and fullest moment."""

    def __init__(
        self, pipeline: Pipeline, chain: Chain, limit_bytes: int | None, effort: int, working_bytes: Sequence[int]
    ):
        self.pipeline, self.limit, self.effort = pipeline, limit_bytes, effort
        self.blocks = blocks_of(chain)
        self.size, self.stages = len(self.blocks), pipeline.stages
        self.home = placed(pipeline.schedule, pipeline.ranks, pipeline.virtual_stages)
        self.parts = np.array([(b.forward_s, b.input_s, b.weight_s) for b in self.blocks]).T
        self.held = np.array([(b.held_bytes, b.gradient_bytes) for b in self.blocks], dtype=float).T
        self.sends = np.array([b.send_s for b in self.blocks])
        ways = max(len(b.savings) for b in self.blocks)
        last = [(*b.savings, *[b.savings[-1]] * (ways - len(b.savings))) for b in self.blocks]
        self.recompute = np.array([[s.recompute_s for s in each] for each in last])
        self.saved = np.array([[s.saved_bytes for s in each] for each in last], dtype=float)
        rows = [] if limit_bytes is None else pipeline.moments
        working = (*map(float, working_bytes), 0.0)  # the last one where no backward runs
        ordered = [(stages, sorted(each, key=_in_flight, reverse=True)) for stages, each in rows]
        fullest = [(stages, each[0]) for stages, each in ordered]
        moments = fullest + [(stages, moment) for stages, each in ordered for moment in each[1:]]
        self.holds = np.zeros((len(moments), 2, self.stages))
        self.keeps = np.zeros((len(moments), self.stages))
        for row, (stages, moment) in enumerate(moments):
            self.holds[row, 0, stages], self.holds[row, 1, stages] = 1.0, moment.added
            self.keeps[row, stages] = moment.counts
        self.limits = np.array([float(limit_bytes or 0) - working[moment.backward] for _, moment in moments])
        by_stage = np.stack([self.keeps, self.holds[:, 1], np.tile(self.limits[:, None], self.stages)], axis=2)
        full = [np.unique(by_stage[self.holds[:, 0, stage] > 0.0, stage], axis=0) for stage in range(self.stages)]
        self._full = [[(float(a), float(b), float(c)) for a, b, c in each] for each in full]
        self._of_stage = np.repeat(np.arange(self.stages), list(map(len, full)))
        self._fullest = np.concatenate(full).T
        least = np.vstack([self.held, self.saved.min(axis=1)])  # of held, gradients and saved, of every block
        self._before = np.concatenate([np.zeros((3, 1)), np.cumsum(least, axis=1)], axis=1)
        self.alone = pipeline.virtual_stages == 1
        self.priced = 0 if self.alone else len(fullest)  # rows: other moments only say whether a cut fits
        self._intervals: dict[tuple[int, int], _Front] = {}
        self._shared: dict[tuple[int, ...], tuple[int, ...] | None] = {}
        self.moments = [
            (
                stages,
                np.array([moment.counts for moment in each], dtype=float),
                np.array([m.added for m in each], float),
                np.array([working[m.backward] for m in each]),
            )
            for stages, each in rows
        ]
        self.thinned = False
        kinds: dict[ChainBlock, int] = {}
        self.kinds = [kinds.setdefault(b, len(kinds)) for b in self.blocks]
        self._savings = [block.savings for block in kinds]
        self._counts = np.zeros((self.size + 1, len(kinds)), dtype=np.int64)  # of each kind before a place
        self._counts[np.arange(1, self.size + 1), self.kinds] = 1
        self._counts = self._counts.cumsum(axis=0)
        self._fronts = {(0,) * len(kinds): _Front(np.zeros(1), np.zeros(1))}

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """[stage, i, j]: whether the stage may have the blocks i to j - 1, as far as it alone can tell."""
        i, j = np.arange(self.size + 1)[:, None], np.arange(self.size + 1)[None, :]
        stage = np.arange(self.stages)[:, None, None]
        fits = (i < j) & (i >= stage) & (self.size - j >= self.stages - 1 - stage)
        fits &= ((stage > 0) | (i == 0)) & ((stage < self.stages - 1) | (j == self.size))
        if self.limit is not None:
            fits &= self.least_excess <= 0.0
        return fits

    def allows(self, bounds: Ints) -> bool:
        """Whether every stage of a cut has blocks, and may have them as far as it alone can tell."""
        if not (bounds[:-1] < bounds[1:]).all():
            return False
        if self.limit is None:
            return True
        in_flight, added, limits = self._fullest
        always, gradients, saved = np.diff(self._before[:, bounds])[:, self._of_stage]
        return bool((always + added * gradients + in_flight * saved <= limits).all())

    @cached_property
    def least_excess(self) -> Floats:
        """[stage, i, j]: bytes over the limit of the stage with the blocks i to j - 1 at the least, at its fullest."""
        i, j = np.arange(self.size + 1)[:, None], np.arange(self.size + 1)[None, :]
        return np.stack([self._excess(full, i, j) for full in self._full])

    def _excess(self, full: list[tuple[float, float, float]], i: Ints, j: Ints) -> Floats:
        """The same of one stage, by what it holds at each of its fullest moments."""
        always, added, each = self._before[:, j] - self._before[:, i]
        most = np.full(np.broadcast_shapes(i.shape, j.shape), -math.inf)
        for in_flight, is_added, limit in full:
            np.maximum(most, always + is_added * added + in_flight * each - limit, out=most)
        return most

    def totals(self, bounds: tuple[int, ...], savings: tuple[int, ...]) -> tuple[Times, Floats, Floats]:
        """Times, held bytes (always, and of gradients) and saved bytes of a cut's stages."""
        starts, which = list(bounds[:-1]), (np.arange(self.size), np.array(savings))
        parts = self.parts + np.array([[0.0], [1.0], [0.0]]) * self.recompute[which]
        forward, backward, weight = np.add.reduceat(parts, starts, axis=1)
        times = Times(forward, backward, weight, self.sends[np.array(bounds[1:-1], dtype=int) - 1])
        return times, np.add.reduceat(self.held, starts, axis=1), np.add.reduceat(self.saved[which], starts)

    def totals_at(self, bounds: tuple[int, ...], points: list[int]) -> tuple[Times, Floats, Floats]:
        """The same of stages that save as points of their fronts say."""
        starts = list(bounds[:-1])
        forward, backward, weight = np.add.reduceat(self.parts, starts, axis=1)
        fronts = [self.front(i, j) for i, j in pairwise(bounds)]
        seconds = np.array([front.seconds[point] for front, point in zip(fronts, points, strict=True)])
        saved = np.array([front.saved[point] for front, point in zip(fronts, points, strict=True)])
        times = Times(forward, backward + seconds, weight, self.sends[np.array(bounds[1:-1], dtype=int) - 1])
        return times, np.add.reduceat(self.held, starts, axis=1), saved

    def over(self, held: Floats, saved: Floats) -> Floats:
        """Bytes over the limit by memory row."""
        over: Floats = np.tensordot(self.holds, held, 2) + self.keeps @ saved - self.limits
        return over

    def front(self, i: int, j: int) -> _Front:
        """The ways in which the blocks i to j - 1 may save together, none of them worse than another in both."""
        if (i, j) not in self._intervals:
            self._intervals[i, j] = self._front(tuple((self._counts[j] - self._counts[i]).tolist()))
        return self._intervals[i, j]

    def _front(self, counts: tuple[int, ...]) -> _Front:
        """That of so many blocks of each kind."""
        missing = list[int]()
        while counts not in self._fronts:
            kind = max(kind for kind, count in enumerate(counts) if count)
            missing.append(kind)
            counts = (*counts[:kind], counts[kind] - 1, *counts[kind + 1 :])
        front = self._fronts[counts]
        for kind in reversed(missing):
            counts = (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :])
            front = self._fronts[counts] = self._with_block(front, kind)
        return front

    def _with_block(self, front: _Front, kind: int) -> _Front:
        """A front of one block more."""
        savings = self._savings[kind]
        seconds = np.add.outer(front.seconds, [each.recompute_s for each in savings]).reshape(-1)
        saved = np.add.outer(front.saved, [float(each.saved_bytes) for each in savings]).reshape(-1)
        order = np.lexsort((saved, seconds))
        least = np.minimum.accumulate(saved[order])
        points = order[np.append(True, saved[order][1:] < least[:-1])]
        if len(points) > FRONT:
            self.thinned = True
            points = points[np.round(np.linspace(0, len(points) - 1, FRONT)).astype(np.int64)]
        befores, ways = np.divmod(points, len(savings))
        return _Front(seconds[points], saved[points], _LastBlock(front, befores, ways))

    def shared(self, rank: int, moments: Floats, held: Floats, fronts: list[_Front]) -> tuple[int, ...] | None:
        """Points for the stages of one rank that fit together; ``None`` if not even those of least memory do.

        Args:
            moments, held: by moment, how many micro-batches each stage holds, and bytes that are held besides.
        """
        key = (rank, *map(id, fronts))
        if key not in self._shared:
            points = [0] * len(fronts)
            over = moments @ np.array([front.saved[0] for front in fronts]) + held - (self.limit or 0)
            rows, steps = moments.tolist(), [front.step(0) for front in fronts]
            while over.max() > 0:
                best, gain = -1, -1.0
                for place, (count, (freed, seconds)) in enumerate(zip(rows[int(over.argmax())], steps, strict=True)):
                    if count and freed and count * freed / seconds > gain:
                        best, gain = place, count * freed / seconds
                if best < 0:
                    break
                over -= moments[:, best] * steps[best][0]
                points[best] += 1
                steps[best] = fronts[best].step(points[best])
            self._shared[key] = tuple(points) if over.max() <= 0 else None
        return self._shared[key]

    def fastest(self, stage: int, i: int, j: int) -> int | None:
        """The first point of a front that fits where the stage has its rank for itself; ``None`` if none does."""
        if self.limit is None:
            return 0
        held, gradients, _ = (self._before[:, j] - self._before[:, i]).tolist()
        room = min((limit - held - added * gradients) / count for count, added, limit in self._full[stage] if count)
        saved = self.front(i, j).saved
        point = int(np.searchsorted(-saved, -room))
        return point if point < len(saved) else None

    def through(self, recomputed: Floats) -> Floats:
        """[stage, i, j]: seconds of a step at least, if a stage with a rank to itself has the blocks i to j - 1.

        It starts when the first micro-batch has come through all blocks before and computes all of them; where its last
        action is a whole backward, the last gradient then goes back through all blocks before.
        """
        p = self.pipeline
        forward, back, weight = (np.append(0.0, np.cumsum(part)) for part in self.parts)
        before = np.zeros(self.size + 1)
        if p.schedule != "2bw":
            before = forward + (0 if p.schedule == "zero_bubble" else back + weight)
        busy = forward + back + weight
        seconds: Floats = before[:, None] + p.micro_batches * (busy[None, :] - busy[:, None] + recomputed)
        return seconds

    def recomputed(self, best_s: float) -> Floats:
        """[stage, i, j]: the least recomputation with which a stage fits that has a rank to itself.

        Not for stages that are in no cut below ``best_s`` seconds.
        """
        seconds = np.full(self.allowed.shape, math.inf)
        busy = np.append(0.0, np.cumsum(self.parts.sum(axis=0)))
        for i, j in np.argwhere(self.allowed.any(axis=0)).tolist():
            if self.pipeline.micro_batches * (busy[j] - busy[i]) < best_s:
                for stage in np.flatnonzero(self.allowed[:, i, j]).tolist():
                    point = self.fastest(stage, i, j)
                    if point is not None:
                        seconds[stage, i, j] = self.front(i, j).seconds[point]
        return seconds

    def chosen(self, i: int, j: int, point: int) -> tuple[int, ...]:
        """The savings of the blocks i to j - 1, in their order, at a point of their front.

        Of equal blocks the first ones save least: they run backward when others have let go of what they saved.
        """
        order = sorted(range(i, j), key=lambda place: self.kinds[place])
        pairs = zip(order, self.front(i, j).ways(point), strict=True)
        each = sorted(pairs, key=lambda pair: (self.kinds[pair[0]], self.saved[pair]))
        ways = {place: way for place, (_, way) in zip(order, each, strict=True)}
        return tuple(ways[place] for place in range(i, j))


def _in_flight(moment: InFlight) -> tuple[int, bool, int]:
    """How many micro-batches a rank holds at a moment, whether gradients as well, and what it works on."""
    return sum(moment.counts), moment.added, moment.backward


@dataclass(frozen=True, eq=False)
class _Front:
    """Points by rising seconds and falling bytes; ``last`` says what each is made of."""

    seconds: Floats
    saved: Floats
    last: _LastBlock | None = None

    def step(self, point: int) -> tuple[float, float]:
        """The bytes that the next point frees and the seconds that it takes more; 0 bytes: there is none."""
        if point + 1 == len(self.seconds):
            return 0.0, 1.0
        freed, seconds = self.saved[point] - self.saved[point + 1], self.seconds[point + 1] - self.seconds[point]
        return float(freed), max(float(seconds), 1e-30)

    def ways(self, point: int) -> tuple[int, ...]:
        """Of every block at a point, blocks ordered by kind."""
        found, last = list[int](), self.last
        while last is not None:
            found.append(int(last.ways[point]))
            point = int(last.befores[point])
            last = last.fewer.last
        return tuple(reversed(found))


@dataclass(frozen=True, eq=False)
class _LastBlock:
    """Of every point of a front, the point of one block fewer and the way of the last block."""

    fewer: _Front
    befores: Ints
    ways: Ints


class _Found:
    """The best cut so far that fits, the least excess met, and paths by which others turned out slower.

    Cuts that take somewhat more than ``cutoff_s`` are only there to make others of.
    """

    def __init__(self, cutoff_s: float):
        self.cutoff_s, self.best_s = cutoff_s, cutoff_s * (1 + BEYOND)
        self.cut: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self.excess_bytes: int = 0
        self.least_excess = math.inf
        self.spent = 0.0
        self.paths: list[Floats] = []

    @property
    def step_s(self) -> float:
        """What is worth seeking takes less."""
        return min(self.best_s, self.cutoff_s)

    def offer(self, work: _Work, bounds: tuple[int, ...], savings: tuple[int, ...]) -> None:
        """Take a cut that fits and is better."""
        if self._is_better(work, *work.totals(bounds, savings)):
            self.cut = bounds, savings

    def offer_points(self, work: _Work, bounds: tuple[int, ...], points: list[int]) -> None:
        """The same of a cut whose stages save as points of their fronts say."""
        if self._is_better(work, *work.totals_at(bounds, points)):
            self.cut = bounds, _spelled(work, bounds, points)

    def _is_better(self, work: _Work, times: Times, held: Floats, saved: Floats) -> bool:
        """Whether a cut that takes and holds so much fits and is better than what is known from then on. Simulated is
        only what no known path proves slower.
        """
        self.spent += OFFER * max(1.0, work.size / MOST_BLOCKS)
        over = float(work.over(held, saved).max(initial=-math.inf))
        if over > 0:
            if over < self.least_excess:
                self.least_excess, self.excess_bytes = over, math.ceil(over)
            return False
        flat = np.concatenate([times.forward_s, times.input_s, times.weight_s, times.send_s])
        if self.paths and float((np.stack(self.paths) @ flat).max()) >= self.best_s * (1 - TIE):
            return False
        p = work.pipeline
        self.spent += _cost(p)
        seconds, path = critical(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, times)
        self.paths = [*self.paths[-PATHS:], np.append(path.work.ravel(), path.sends)]
        is_better = seconds < self.best_s * (1 - TIE)
        self.best_s = seconds if is_better else self.best_s
        return is_better


@dataclass(frozen=True, eq=False)
class _Weights:
    """What a stage's seconds (rows: forward, input, weight), ways and bytes (of what is held, rows: always, gradients)
    count in a weighted sum, per stage.

    ``constant`` is taken off: what the prices give back for the limits.
    """

    parts: Floats
    sends: Floats
    held: Floats
    saved: Floats
    constant: float


@dataclass(frozen=True, eq=False)
class _Rest:
    """The least weighted sum of the stages from ``s`` on if they have the blocks from ``i`` on, ``least[s, i]``.

    ``sums[s]`` are weighted sums of the blocks before a place; ``next[s, i]`` is where stage s then ends.
    """

    weights: _Weights
    least: Floats
    next: Ints
    savings: Ints

    def cut(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The bounds and savings of the least sum."""
        bounds = [0]
        for ends in self.next:
            bounds.append(int(ends[bounds[-1]]))
        savings = [int(self.savings[s, b]) for s, (i, j) in enumerate(pairwise(bounds)) for b in range(i, j)]
        return tuple(bounds), tuple(savings)

    @property
    def bound_s(self) -> float:
        return float(self.least[0, 0]) - self.weights.constant


def _rest(work: _Work, weights: _Weights, recomputed: Floats | None) -> _Rest:
    """Minimise a weighted sum over all cuts, from the last stage to the first.

    Where stages have their ranks for themselves, ``recomputed`` says what each recomputes; else blocks save as weighed.
    """
    blocks = weights.parts.T @ work.parts + weights.held.T @ work.held
    savings = np.zeros((work.stages, work.size), dtype=np.int64)
    if recomputed is None:
        ways = weights.parts[1][:, None, None] * work.recompute + weights.saved[:, None, None] * work.saved
        savings = ways.argmin(axis=2)
        blocks += ways.min(axis=2)
    sums = np.concatenate([np.zeros((work.stages, 1)), np.cumsum(blocks, axis=1)], axis=1)
    ends = np.zeros((work.stages, work.size + 1))
    ends[:-1, 1:] = weights.sends[:, None] * work.sends
    least = np.full((work.stages + 1, work.size + 1), math.inf)
    least[-1, -1] = 0.0
    following = np.zeros((work.stages, work.size + 1), dtype=np.int64)
    everywhere = np.arange(work.size + 1)
    allowed = work.allowed if recomputed is None else np.isfinite(recomputed)
    for stage in range(work.stages - 1, -1, -1):
        value = sums[stage] + ends[stage] + least[stage + 1]
        if recomputed is not None:
            value = value + max(weights.parts[1, stage], 1e-300) * recomputed[stage]
        value = np.where(allowed[stage], value, math.inf)
        following[stage] = value.argmin(axis=1)
        least[stage] = value[everywhere, following[stage]] - sums[stage]
    return _Rest(weights, least, following, savings)


class _Planes:
    """Paths, and cuts as planes over mixes of paths and prices of memory rows; the best bound and what gave it."""

    def __init__(self, work: _Work):
        self.work = work
        self.paths = _busy(work)
        self.cuts: list[tuple[Times, Floats]] = []
        self.rests: list[_Rest] = []
        self.bound_s = 0.0
        self._seconds = np.zeros((0, len(self.paths)))  # [cut, path]

    def add_cut(self, bounds: tuple[int, ...], savings: tuple[int, ...]) -> Times:
        """Take a cut: its times, and the excess of each memory row in limits."""
        times, held, saved = self.work.totals(bounds, savings)
        self.cuts.append((times, self.work.over(held, saved)[: self.work.priced] / max(self.work.limit or 1, 1)))
        row = np.array([[path.seconds(times) for path in self.paths]])
        self._seconds = np.concatenate([self._seconds, row])
        return times

    def add_path(self, times: Times) -> float:
        """Take the longest path at these times; its seconds."""
        p = self.work.pipeline
        seconds, path = critical(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, times)
        self.paths.append(path)
        column = np.array([[path.seconds(each)] for each, _ in self.cuts])
        self._seconds = np.concatenate([self._seconds, column], axis=1)
        return seconds

    def highest(self, unit: float) -> tuple[float, Floats, Floats, Times]:
        """The highest point under all planes.

        Returns its height, its mix of paths and price of each memory row (per limit), and the times of the cuts whose
        planes meet there, each as much as it holds the point down: no path known so far is longer than the height at
        these times, so the longest one there is the path that is missing most.
        """
        program = pywraplp.Solver.CreateSolver("GLOP")
        mix = [program.NumVar(0, 1, "") for _ in self.paths]
        prices = [program.NumVar(0, PRICE, "") for _ in range(self.work.priced)]
        height = program.NumVar(-program.infinity(), program.infinity(), "")
        whole = program.Constraint(1, 1)
        for each in mix:
            whole.SetCoefficient(each, 1)
        planes = []
        for (_, over), seconds in zip(self.cuts, (self._seconds / unit).tolist(), strict=True):
            plane = program.Constraint(0, program.infinity())
            plane.SetCoefficient(height, -1)
            for each, long in zip(mix, seconds, strict=True):
                plane.SetCoefficient(each, long)
            for price, excess in zip(prices, over.tolist(), strict=True):
                plane.SetCoefficient(price, excess)
            planes.append(plane)
        program.Objective().SetCoefficient(height, 1)
        program.Objective().SetMaximization()
        program.Solve()
        mixed = np.array([max(0.0, each.solution_value()) for each in mix])
        priced = np.array([max(0.0, each.solution_value()) for each in prices])
        holding = np.array([abs(plane.dual_value()) for plane in planes])
        return height.solution_value() * unit, mixed / mixed.sum(), priced * unit, self._between(holding)

    def _between(self, parts: Floats) -> Times:
        """The mean of all cuts' times."""
        parts = parts / parts.sum()
        fields = zip(*((t.forward_s, t.input_s, t.weight_s, t.send_s) for t, _ in self.cuts), strict=True)
        return Times(*(parts @ np.stack(field) for field in fields))

    def weights(self, mix: Floats, prices: Floats) -> _Weights:
        """The weighted sum of a mix of paths and of prices per limit."""
        per_byte = prices / max(self.work.limit or 1, 1)
        known = self.paths[: len(mix)]
        return _Weights(
            np.tensordot(mix, np.stack([path.work for path in known]), 1),
            np.tensordot(mix, np.stack([path.sends for path in known]), 1),
            np.tensordot(per_byte, self.work.holds[: self.work.priced], 1),
            per_byte @ self.work.keeps[: self.work.priced],
            float(per_byte @ self.work.limits[: self.work.priced]),
        )


def _busy(work: _Work) -> list[Path]:
    """Every rank's own path: all that it does, one after the other."""
    paths = []
    for rank in range(work.pipeline.ranks):
        own = np.array([home == rank for home in work.home], dtype=float)
        paths.append(Path(np.tile(own * work.pipeline.micro_batches, (3, 1)), np.zeros(work.stages - 1)))
    return paths


def _planes(work: _Work, found: _Found) -> _Planes:
    """Raise the bound until it meets the planes or the best cut; every cut on the way is offered."""
    planes = _Planes(work)
    start = _start(work)
    if start is None:
        planes.bound_s = math.inf
        return planes
    bounds, savings = start
    _offer_around(work, found, bounds, savings)
    if work.limit is not None and not work.alone and (even := _least_busy(work)) is not None:
        _offer_around(work, found, even, savings)
    recomputed, through = None, np.zeros(0)
    if work.alone:
        recomputed = work.recomputed(found.step_s)
        through = work.through(recomputed)
        _flat(work, found, planes, recomputed, through)
    if planes.bound_s < found.step_s * (1 - TIE):
        _improve(work, found)
    unit = max(planes.add_path(planes.add_cut(*(found.cut or start))), 1e-30)
    mixes, prices_of = [np.full(len(planes.paths), 1 / len(planes.paths))], [np.zeros(work.priced)]
    each = 2 * _cost(work.pipeline) + work.stages  # two simulations, and a sum per stage
    for attempt in range(min(PLANES, int(work.effort / each))):
        found.spent += each / 2
        height, mix, prices, between = planes.highest(unit)
        missing = planes.add_path(between) - height
        near = NEAR[attempt % len(NEAR)]
        mix = (1 - near) * mix + near * np.append(mixes[-1], np.zeros(len(mix) - len(mixes[-1])))
        prices = (1 - near) * prices + near * prices_of[-1]
        if recomputed is not None:  # stages that are too slow by themselves are in no better cut
            recomputed = np.where(through < found.step_s * (1 - TIE), recomputed, math.inf)
        rest = _rest(work, planes.weights(mix, prices), recomputed)
        if rest.bound_s == math.inf:  # no cut is left that fits and is better
            planes.bound_s = found.step_s
            break
        if rest.bound_s > planes.bound_s or not planes.rests:
            planes.bound_s = max(planes.bound_s, rest.bound_s)
            planes.rests.append(rest)
            mixes.append(mix)
            prices_of.append(prices)
        if planes.bound_s >= found.step_s * (1 - TIE) or max(height - planes.bound_s, missing) <= CLOSE * unit:
            break
        bounds, savings = rest.cut()
        if work.alone:
            points = _fitting(work, bounds)
            assert points is not None
            savings = _spelled(work, bounds, points)
        planes.add_cut(bounds, savings)
        _offer_around(work, found, bounds, savings)
    return planes


def _start(work: _Work) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The cut whose fullest stage is least full, blocks saving least; without a limit, whose busiest is least busy.

    ``None`` where some stage cannot have any blocks that fit.
    """
    if work.limit is None:
        bounds, fewest = _least_busy(work), work.recompute.argmin(axis=1)
    else:
        (_, bounds), fewest = _flattest(work, work.least_excess), work.saved.argmin(axis=1)
    return None if bounds is None else (bounds, tuple(map(int, fewest)))


def _least_busy(work: _Work) -> tuple[int, ...] | None:
    """The cut whose busiest stage is least busy, if some cut fits."""
    busy = np.append(0.0, np.cumsum(work.parts.sum(axis=0) + work.recompute.min(axis=1)))
    return _flattest(work, np.broadcast_to(busy[None, :] - busy[:, None], work.allowed.shape))[1]


def _flattest(work: _Work, size: Floats) -> tuple[float, tuple[int, ...] | None]:
    """The cut whose largest stage is least large, sizes by [stage, i, j], and how large that is; ``None``: no cut."""
    least = np.full((work.stages + 1, work.size + 1), math.inf)
    least[-1, -1] = -math.inf
    following = np.zeros((work.stages, work.size + 1), dtype=np.int64)
    for stage in range(work.stages - 1, -1, -1):
        value = np.where(work.allowed[stage], np.maximum(size[stage], least[stage + 1]), math.inf)
        following[stage] = value.argmin(axis=1)
        least[stage] = value.min(axis=1)
    if least[0, 0] == math.inf:
        return math.inf, None
    bounds = [0]
    for ends in following:
        bounds.append(int(ends[bounds[-1]]))
    return float(least[0, 0]), tuple(bounds)


def _flat(work: _Work, found: _Found, planes: _Planes, recomputed: Floats, through: Floats) -> None:
    """Bound the step by its slowest stage, and offer the cuts of little work among those of hardly slower stages."""
    slowest, _ = _flattest(work, through)
    planes.bound_s = min(slowest, found.step_s)
    even = _Weights(
        np.ones((3, work.stages)), np.ones(work.stages - 1), np.zeros((2, work.stages)), np.zeros(work.stages), 0.0
    )
    for slack in SLACKS:
        rest = _rest(work, even, np.where(through <= slowest * (1 + slack), recomputed, math.inf))
        if rest.bound_s < math.inf:
            _offer_around(work, found, *rest.cut())


def _improve(work: _Work, found: _Found) -> None:
    """Take a block from one stage and give another one, all between moving along, as long as that helps; first where
    the paths that are known say that the step gets shortest, with the same recomputation, and only where it does.
    """
    until, moved = found.spent + max(MOVES, work.effort), found.cut is not None
    while moved and found.cut is not None:
        moved, best_s, tries = False, found.best_s, work.effort // TRY
        for step_s, bounds in _moves(work, found, *found.cut):
            if step_s >= best_s * (1 - TIE) or found.spent > until or not tries:
                break
            if work.allows(bounds):
                tries -= 1
                _offer_around(work, found, tuple(bounds.tolist()), None)
                if found.best_s < best_s:
                    moved = True
                    break


def _moves(
    work: _Work, found: _Found, bounds: tuple[int, ...], savings: tuple[int, ...]
) -> Iterator[tuple[float, Ints]]:
    """Cuts with one block taken from a stage and given to another, by how long the longest of the known paths is then
    if all stages recompute as much as before; shortest first.
    """
    times, _, _ = work.totals(bounds, savings)
    stages, inner = work.stages, np.array(bounds[1:-1], dtype=np.int64)
    paths = np.stack(found.paths)
    counts, sends = paths[:, : 3 * stages].reshape(len(paths), 3, stages), paths[:, 3 * stages :]
    fewer = counts[:, :, 1:] - counts[:, :, :-1]  # by how much what comes to the later of two stages counts more there

    def longer(blocks: Ints, ends: Ints, turned: int) -> Floats:
        """[path, stage]: seconds by which paths are longer if each end before a stage is another one."""
        moved = turned * np.einsum("kpb,pb->kb", fewer, work.parts[:, blocks])
        moved += sends * (work.sends[ends - 1] - work.sends[inner - 1])
        return np.concatenate([np.zeros((len(paths), 1)), np.cumsum(moved, axis=1)], axis=1)

    later, sooner = longer(inner - 1, inner - 1, 1), longer(inner, inner + 1, -1)
    giver, taker = np.nonzero(~np.eye(stages, dtype=bool))
    is_later = giver < taker
    more = np.where(is_later, later[:, taker] - later[:, giver], sooner[:, giver] - sooner[:, taker])
    now = paths @ np.concatenate([times.forward_s, times.input_s, times.weight_s, times.send_s])
    step_s = (now[:, None] + more).max(axis=0)
    for pair in np.argsort(step_s, kind="stable").tolist():
        one, other = sorted((giver[pair], taker[pair]))
        shifted = np.array(bounds, dtype=np.int64)
        shifted[one + 1 : other + 1] += -1 if is_later[pair] else 1
        yield float(step_s[pair]), shifted


def _cost(p: Pipeline) -> float:
    """What simulating a cut counts."""
    return 1 + min(p.micro_batches, 8 * p.ranks) * p.stages * 3 / 100


def _offer_around(work: _Work, found: _Found, bounds: tuple[int, ...], savings: tuple[int, ...] | None) -> None:
    """Offer a cut, with its savings if any, and with those of least recomputation found that fit."""
    points = _fitting(work, bounds)
    if points is None:
        least_memory = tuple(map(int, work.saved.argmin(axis=1)))
        found.offer(work, bounds, least_memory)
        return
    if savings is not None and not work.alone:
        found.offer(work, bounds, savings)
    found.offer_points(work, bounds, points)


def _spelled(work: _Work, bounds: tuple[int, ...], points: list[int]) -> tuple[int, ...]:
    return tuple(
        way for (i, j), point in zip(pairwise(bounds), points, strict=True) for way in work.chosen(i, j, point)
    )


def _fitting(work: _Work, bounds: tuple[int, ...]) -> list[int] | None:
    """A point per stage such that all ranks fit, each stage as fast as others on its rank leave it.

    Where too much is held, the stage that frees the most bytes per second of recomputation saves less.
    """
    fronts = [work.front(i, j) for i, j in pairwise(bounds)]
    points = [0] * work.stages
    if work.limit is None:
        return points
    if work.alone:
        first = [work.fastest(s, i, j) for s, (i, j) in enumerate(pairwise(bounds))]
        return None if None in first else [point or 0 for point in first]
    held = np.add.reduceat(work.held, list(bounds[:-1]), axis=1)
    for rank, (stages, moments, added, working) in enumerate(work.moments):
        always, gradients = held[:, stages].sum(axis=1)
        beside = always + added * gradients + working
        mine = work.shared(rank, moments, beside, [fronts[stage] for stage in stages])
        if mine is None:
            return None
        for stage, point in zip(stages, mine, strict=True):
            points[stage] = point
    return points


def _tree(work: _Work, planes: _Planes, found: _Found) -> float:
    """Build cuts from the first stage on, most promising first; what is proved when the tree or the effort ends."""
    rests = planes.rests[-6:]
    if not rests:
        return planes.bound_s
    constants = np.array([rest.weights.constant for rest in rests])
    least = np.stack([rest.least for rest in rests])
    p = work.pipeline
    tick = count()
    root = _Node(
        0, 0, np.zeros(len(rests)), work.over(np.zeros((2, work.stages)), np.zeros(work.stages)), np.zeros(p.ranks)
    )
    heap: list[tuple[float, int, int, _Node]] = [(planes.bound_s, 0, next(tick), root)]
    until = max(2.0 * work.effort, found.spent + work.effort / 4)
    while heap and heap[0][0] < found.step_s * (1 - TIE):
        if found.spent > until or work.thinned:
            return heap[0][0]
        bound, _, _, node = heapq.heappop(heap)
        for child in _children(work, rests, node, found.step_s):
            found.spent += 1
            sums = child.sums + least[:, child.stage, child.place] - constants
            value = max(bound, float(sums.max()), p.micro_batches * float(child.busy.max()))
            if value >= found.step_s * (1 - TIE):
                continue
            if child.stage == work.stages:
                bounds, points = child.cut()
                found.offer_points(work, bounds, points)
            else:
                heapq.heappush(heap, (value, -child.stage, next(tick), child))
    return found.step_s


@dataclass(frozen=True, eq=False)
class _Node:
    """The first ``stage`` stages have the blocks before ``place``; sums per rest, excess per memory row, busy ranks."""

    stage: int
    place: int
    sums: Floats
    over: Floats
    busy: Floats
    point: int = 0
    parent: _Node | None = None

    def cut(self) -> tuple[tuple[int, ...], list[int]]:
        """Bounds, and the point of each stage's front."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        nodes.reverse()
        return tuple(node.place for node in nodes), [node.point for node in nodes[1:]]


def _children(work: _Work, rests: list[_Rest], node: _Node, best_s: float) -> Iterator[_Node]:
    """Every end of the next stage, with every way to save that may be part of a cut better than the best."""
    stage, i = node.stage, node.place
    room = best_s / work.pipeline.micro_batches - node.busy[work.home[stage]]
    rank = work.home[stage]
    for j in np.flatnonzero(work.allowed[stage, i]).tolist():
        parts = work.parts[:, i:j].sum(axis=1)
        if parts.sum() >= room:
            break
        front = work.front(i, j)
        held = work.held[:, i:j].sum(axis=1)
        over = node.over + work.holds[:, :, stage] @ held
        points: list[int | None] = [*range(len(front.seconds))]
        if work.alone or work.limit is None:  # nobody else on the rank needs the bytes
            points = [work.fastest(stage, i, j)]
        for point in points:
            if point is None:
                continue
            excess = over + work.keeps[:, stage] * front.saved[point]
            if excess.max(initial=-math.inf) > 0:
                continue
            seconds = parts + np.array([0.0, front.seconds[point], 0.0])
            more = [
                rest.weights.parts[:, stage] @ seconds
                + rest.weights.held[:, stage] @ held
                + rest.weights.saved[stage] * front.saved[point]
                + (rest.weights.sends[stage] * work.sends[j - 1] if stage < work.stages - 1 else 0.0)
                for rest in rests
            ]
            busy = node.busy.copy()
            busy[rank] += seconds.sum()
            yield _Node(stage + 1, j, node.sums + np.array(more), excess, busy, point, node)


def _too_large(work: _Work, found: _Found) -> str:
    limit = in_bytes(work.limit or 0)
    p = work.pipeline
    if found.least_excess == math.inf:
        excess = work.least_excess[:, np.arange(work.size), np.arange(1, work.size + 1)].min(axis=0)
        worst = int(excess.argmax())
        needed = in_bytes(excess[worst] + (work.limit or 0))
        return (
            f"{work.blocks[worst].name} alone needs {needed} as a stage of {p.schedule} with "
            f"{p.micro_batches} micro-batches, or what is left cannot be shared out; the limit is {limit}. "
            "Take smaller micro-batches, shard more, or take a schedule with fewer in flight"
        )
    return (
        f"no cut into {p.stages} stages was found that fits {limit}: the least needs "
        f"{in_bytes(found.least_excess)} more on its fullest rank. Take smaller micro-batches, shard more, or "
        "take a schedule with fewer in flight"
    )
