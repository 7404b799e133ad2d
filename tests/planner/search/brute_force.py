"""Brute force over everything that a search may choose from, for graphs so small that this can be counted out.

Every configuration (stages, mesh, micro-batches, when parameters are gathered), every assignment of its decisions,
every schedule, every cut and every level of recomputation of every block is priced by the definitions of cost and
memory: ``evaluate`` and ``usage`` of a step in one piece, ``links_of``, ``evaluate`` of a cut and ``price`` of others.
Nothing here is of a search: no bound, no solver, no elimination. Left out are only assignments of infinite cost, what
stores more than there is, and what a sum of work already puts above something that was found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.analysis.memory import usage
from planner.analysis.pipeline.chain import Link, chain_of, links_of
from planner.analysis.pipeline.staged import Staged, price
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.assignment import assignment_of
from planner.formulation.constraints.mesh_candidates import candidate_meshes
from planner.formulation.decisions import DecisionGraph
from planner.formulation.pipeline_pace import pace_of
from planner.formulation.remat.levels import Amount, Level, Recompute, least_memory_first
from planner.formulation.search_space import Space
from planner.formulation.stage_boundaries import crossing
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.formulation.unsharding import PER_MICRO_BATCH, PER_STEP, Unsharding
from planner.formulation.variables import Variable
from planner.ir.folding import Folded, fold, relabel
from planner.ir.graph import Graph, Ref
from planner.ir.layout import Mesh
from planner.search.block_splitting import finer
from planner.search.remat_selection import with_levels_between
from planner.solve.pipeline.simulate import step_s
from planner.solve.pipeline.stages import Cut, Pipeline, stage_times
from planner.solve.pipeline.stages import evaluate as evaluate_cut
from planner.solve.problem import Floats, Ints, Problem, evaluate
from tests.planner.plans import named

SCHEDULES = {"1f1b": (1,), "interleaved_1f1b": (2, 4, 8)}
"""Schedules of pipelines, with their numbers of virtual stages."""
AXES = 3
"""Axes of a mesh at most."""
ROUNDING = 1e-9


class TooLargeError(Exception):
    """More than can be counted out."""


class Config(NamedTuple):
    """One parallel configuration: the ranks of the pipeline, the mesh of a stage with its micro-batches, and whether
    parameters are gathered once a step.
    """

    stages: int
    mesh: Mesh
    once: bool = True

    @property
    def in_one_piece(self) -> bool:
        return self.stages == 1 and self.mesh.micro_batches == 1

    @property
    def facts(self) -> tuple[object, ...]:
        """All but how axes are called."""
        micro_batches, axes = self.mesh.micro_batches, self.mesh.micro_batched(1).axes
        return self.stages, micro_batches, self.once, *((axis.size, axis.stride) for axis in axes)

    def __str__(self) -> str:
        sizes = [self.mesh.micro_batches, *self.mesh.micro_batched(1).sizes]
        return (
            f"pipeline {self.stages} x micro {' x '.join(map(str, sizes))}{'' if self.once else ', gathered in each'}"
        )


@dataclass(frozen=True)
class Optimum:
    """The best of a configuration within a limit; infinite where nothing fits."""

    time_s: float = math.inf
    peak_bytes: int = 0
    what: str = ""


NOTHING_FITS = Optimum()


class BruteForce:
    """All plans of one graph on one cluster, whatever memory there is.

    Args:
        most: plans of one configuration that are looked at one by one, beyond which it is :class:`TooLargeError`.
        apart: whether equal blocks may differ in steps of several micro-batches or stages too.
        training: what a step keeps where; when parameters are gathered is counted out.
    """

    def __init__(
        self,
        graph: Graph,
        cluster: ClusterSpec,
        most: int = 3000,
        apart: bool = False,
        training: Training | None = None,
    ):
        self.graph, self.cluster, self.most, self.apart = graph, cluster, most, apart
        self.training = training or Training()
        self.cost, self.rules = CostModel(cluster), rules_of(graph)
        self.folded = finer(fold(graph), self.rules, 2)
        self.levels = with_levels_between(named(self.folded), DecisionGraph(self.folded, self.rules), self.cost)
        self.kinds = {number: each.kind for number, each in enumerate(self.folded.instances)}
        self.single = relabel(self.folded, range(len(self.kinds)))
        self.whole = {config: Whole(self, config) for config in self.configs if config.in_one_piece}
        self.parts = {config: Parts(self, config) for config in self.configs if not config.in_one_piece}

    @cached_property
    def configs(self) -> tuple[Config, ...]:
        """Every configuration of up to three axes."""
        inputs = [leaf.results[0].shape for leaf in self.graph.leaves if leaf.op == "input"]
        batch = math.gcd(*(shape[0] for shape in inputs))
        found, world = [], self.cluster.world_size
        for stages in (n for n in range(1, min(world, len(self.kinds)) + 1) if world % n == 0):
            for mesh in candidate_meshes(self.cluster, AXES, world // stages):
                for micro_batches in (n for n in range(1, batch + 1) if batch % n == 0):
                    found.append(Config(stages, mesh.micro_batched(micro_batches)))
                    if not found[-1].in_one_piece and mesh.size > 1 and self.training.tier == "device":
                        found.append(found[-1]._replace(once=False))
        return tuple(found)

    def optima(self, limit_bytes: int | None) -> dict[Config, Optimum]:
        """The best of every configuration that fits where each is simulated."""
        whole = {config: each.best(limit_bytes) for config, each in self.whole.items()}
        return {**whole, **{config: each.best(limit_bytes) for config, each in self.parts.items()}}

    def space(self, config: Config, folded: Folded) -> Space:
        """Every decision of a configuration."""
        unsharding: Unsharding = PER_STEP if config.once else PER_MICRO_BATCH
        pace = pace_of(config.stages, config.mesh.micro_batches)
        training = replace(self.training, unsharding=unsharding)
        return Space(folded, config.mesh, self.cost, training, self.rules, pace=pace)


def best_of(optima: dict[Config, Optimum]) -> Optimum:
    """The best of all."""
    return min(optima.values(), key=lambda each: each.time_s)


# ---- assignments -------------------------------------------------------------------------------------------------


def finite(problem: Problem, most: int) -> Ints:
    """Every assignment of finite cost, a row each."""
    count = len(problem.vertices)
    alone = [np.isfinite(vertex.time_s) for vertex in problem.vertices]
    before: list[list[tuple[int, NDArray[np.bool_]]]] = [[] for _ in range(count)]
    for edge in problem.edges:
        allowed = np.isfinite(edge.time_s) & np.isfinite(edge.background_s)
        first, second = sorted((edge.tail, edge.head))
        if first == second:  # from one of equal blocks to the next
            alone[first] &= allowed.diagonal()
            continue
        before[second].append((first, allowed if edge.tail == first else allowed.T))
    rows = np.zeros((1, 0), np.int64)
    for own, edges in zip(alone, before, strict=True):
        allowed = np.tile(own, (len(rows), 1))
        for other, pairs in edges:
            allowed &= pairs[rows[:, other]]
        at, choice = np.nonzero(allowed)
        if len(at) > most:
            raise TooLargeError(f"{len(at)} assignments")
        rows = np.column_stack([rows[at], choice])
    return rows


def costs(problem: Problem, rows: Ints) -> tuple[Floats, Ints]:
    """Seconds and peak of assignments, as ``evaluate`` has them."""
    assert not any(vertex.spans for vertex in problem.vertices)
    time, exposed, held, transient = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows), np.int64), 0
    for vertex, chosen in zip(problem.vertices, rows.T, strict=True):
        time, held = time + vertex.time_s[chosen], held + vertex.held_bytes[chosen]
        exposed += (vertex.background_s - vertex.cover_s)[chosen]
        transient = np.maximum(transient, vertex.transient_bytes[chosen])
    for edge in problem.edges:
        pair = rows[:, edge.tail], rows[:, edge.head]
        time, exposed = time + edge.time_s[pair], exposed + edge.background_s[pair]
        held = held + edge.held_bytes[pair]
    return time + np.maximum(0.0, exposed), held + transient


class Whole:
    """All steps in one piece on one mesh: every block decides for itself, and recomputes at a level of its own."""

    def __init__(self, brute: BruteForce, config: Config):
        self.space, self.most = brute.space(config, brute.single), brute.most
        self.rows = finite(self.space.problem(None), 20 * brute.most)
        kinds = brute.kinds
        self.amounts = [
            _apart(levels, kinds) for levels in itertools.product(*(brute.levels.of(kind) for kind in kinds.values()))
        ]
        if len(self.rows) * len(self.amounts) > 25 * brute.most:
            raise TooLargeError(f"{len(self.rows)} assignments with {len(self.amounts)} amounts of recomputation")
        self._peaks: dict[tuple[int, int], int] = {}

    @cached_property
    def _costs(self) -> tuple[Floats, Ints]:
        """[amount, row]: seconds and summed bytes."""
        found = [costs(self.space.problem(None, amount), self.rows) for amount in self.amounts]
        return np.stack([times for times, _ in found]), np.stack([peaks for _, peaks in found])

    @cached_property
    def _order(self) -> Ints:
        return np.argsort(self._costs[0], axis=None, kind="stable")

    @cached_property
    def _stored(self) -> Ints:
        """[row]: bytes of leaves, with gradients and optimizer state, all of which are there when backward is over."""
        leaves = [at for at, (kind, *_) in enumerate(self.space.variables) if kind == "leaf"]
        vertices = self.space.problem(None).vertices
        return np.sum([vertices[at].held_bytes[self.rows[:, at]] for at in leaves], axis=0)

    def _peak(self, amount: int, row: int) -> int:
        if (amount, row) not in self._peaks:
            if len(self._peaks) > self.most:
                raise TooLargeError("simulations of a step in one piece")
            chosen = assignment_of(self.space, self.rows[row].tolist(), self.amounts[amount])
            self._peaks[amount, row] = usage(chosen).peak_bytes
            assert self._stored[row] <= self._peaks[amount, row], "what is stored is not there"
        return self._peaks[amount, row]

    def best(self, limit_bytes: int | None) -> Optimum:
        times, _ = self._costs
        places = self._order
        if limit_bytes is not None:
            places = places[self._stored[places % len(self.rows)] <= limit_bytes]
        for place in places.tolist():
            amount, row = divmod(place, len(self.rows))
            if limit_bytes is None or self._peak(amount, row) <= limit_bytes:
                return self._found(float(times[amount, row]), amount, row)
        return NOTHING_FITS

    @property
    def times(self) -> Iterator[tuple[int, int, float, float]]:
        """Every amount and row with its seconds, and what of them is the update."""
        leaves = [at for at, (kind, *_) in enumerate(self.space.variables) if kind == "leaf"]
        vertices = self.space.problem(None).vertices
        updating = np.sum([vertices[at].time_s[self.rows[:, at]] for at in leaves], axis=0)
        for (amount, row), time_s in np.ndenumerate(self._costs[0]):
            yield amount, row, float(time_s), float(updating[row])

    def _found(self, time_s: float, amount: int, row: int) -> Optimum:
        problem = self.space.problem(None, self.amounts[amount])
        found = evaluate(problem, tuple(self.rows[row].tolist()))
        assert math.isclose(found.time_s, time_s, rel_tol=ROUNDING), "counted otherwise than evaluate does"
        peak = self._peak(amount, row)
        return Optimum(time_s, peak, f"{_leveled(self.amounts[amount])}, {found.peak_bytes} B by the sum")


def _apart(levels: Sequence[Level], kinds: dict[int, int]) -> Recompute:
    """A level for every block, each a kind of its own. Of equal blocks the one that recomputes most stands for all in
    the sum of bytes, see :class:`Amount`.
    """

    def leader(kind: int) -> int:
        return min((n for n in kinds if kinds[n] == kind), key=lambda n: least_memory_first(levels[n]))

    return Recompute(
        tuple(Amount.of({level: 1}, leads=leader(kinds[number]) == number) for number, level in enumerate(levels))
    )


def _leveled(recompute: Recompute) -> tuple[Level, ...]:
    return tuple(amount.level(0) for amount in recompute.amounts)


# ---- pipelines and micro-batches -----------------------------------------------------------------------------------


class Chain(NamedTuple):
    """What some assignments make of the blocks; they are alike in all that counts, and ``row`` is one of them."""

    links: tuple[Link, ...]
    row: tuple[int, ...]


class Run(NamedTuple):
    """One way for a chain to run, and what it takes."""

    step_s: float
    bounds: tuple[int, ...]
    savings: tuple[int, ...]


class Parts:
    """All steps of several micro-batches or stages of one configuration."""

    def __init__(self, brute: BruteForce, config: Config):
        self.config, self.levels = config, brute.levels
        folded = brute.folded
        if brute.apart:
            folded, self.levels = brute.single, brute.levels.of_kinds(brute.kinds)
        self.space, self.blocks = brute.space(config, folded), len(brute.kinds)
        self.rows = finite(self.space.problem(None), 20 * brute.most)
        self.most, self._runs = brute.most, dict[object, list[Run]]()
        self._seconds: dict[object, float] = {}
        self._peaks: dict[object, int] = {}
        self._own_links: dict[int, tuple[Link, ...]] = {}
        self._stored: dict[object, int] = {}

    @cached_property
    def pipelines(self) -> list[Pipeline]:
        ranks, micro_batches = self.config.stages, self.config.mesh.micro_batches
        if ranks == 1:
            return [Pipeline("1f1b", 1, micro_batches)]
        found = [Pipeline(name, ranks, micro_batches, n) for name, counts in SCHEDULES.items() for n in counts]
        return [each for each in found if each.stages <= self.blocks]

    def links(self, row: Sequence[int]) -> tuple[Link, ...]:
        """The chain that an assignment makes of the blocks."""
        return links_of(assignment_of(self.space, row), self.levels)

    @cached_property
    def chains(self) -> list[Chain]:
        """The different ones. A block's link depends on decisions that it has to do with, so that few are made."""
        known: dict[object, list[Link]] = {}
        ids = np.zeros((len(self.rows), self.blocks), np.int64)
        all_links: list[Link] = []
        made: dict[int, tuple[Link, ...]] = {}
        for block in range(self.blocks):
            _, first, inverse = np.unique(
                self.rows[:, self._scope(block)], axis=0, return_index=True, return_inverse=True
            )
            found = []
            for row in first.tolist():
                if row not in made:
                    if len(made) > self.most / 5:
                        raise TooLargeError(f"chains of {self.config}")
                    made[row] = self.links(self.rows[row].tolist())
                link = made[row][block]
                same = known.setdefault(link.block, [])
                if link not in same:
                    same.append(link)
                    all_links.append(link)
                found.append(next(n for n, each in enumerate(all_links) if each is same[same.index(link)]))
            ids[:, block] = np.array(found)[inverse.reshape(-1)]
        chains, rows = np.unique(ids, axis=0, return_index=True)
        return [
            Chain(tuple(all_links[n] for n in chain), tuple(self.rows[row].tolist()))
            for chain, row in zip(chains.tolist(), rows.tolist(), strict=True)
            if all(math.isfinite(all_links[n].block.work_s) for n in chain)
        ]

    def _scope(self, number: int) -> list[int]:
        """The decisions that a block has to do with: its own, those of what it reads, makes or lets pass, and, of
        leaves that others read too, of these.
        """
        space, block = self.space, self.space.folded.instances[number].block
        values = {ref for node in block.nodes for ref in node.inputs} | {*crossing(space.folded)[number]}
        values |= {Ref(node.name, index) for node in block.nodes for index in range(len(node.results))}
        names = {*(node.name for node in block.nodes), *(ref.node for ref in values)}
        shared = {ref for ref in values if space.graph.by_name[ref.node].is_leaf and space.reshard_point_of(ref)}
        names |= {node.name for node in space.graph.nodes if not shared.isdisjoint(node.inputs)}
        wanted: set[Variable | None] = {space.variable_of[name] for name in names}
        wanted |= {space.reshard_point_of(ref) for ref in values}
        wanted |= {("output", place) for place, ref in enumerate(space.leaving) if ref in values}
        return [at for at, variable in enumerate(space.variables) if variable in wanted]

    @cached_property
    def _order(self) -> list[tuple[float, int, Pipeline]]:
        """Chains and how they run, by what a rank takes at least on average."""
        found = []
        for number, chain in enumerate(self.chains):
            work_s = math.fsum(link.block.work_s for link in chain.links)
            least_s = self.config.mesh.micro_batches * work_s / self.config.stages
            found += [(least_s, number, pipeline) for pipeline in self.pipelines]
        return sorted(found, key=lambda each: each[:2])

    def best(self, limit_bytes: int | None) -> Optimum:
        best, found = math.inf, None
        for least_s, number, pipeline in self._order:
            if least_s * (1 - ROUNDING) >= best:
                break
            for inner in itertools.combinations(range(1, self.blocks), pipeline.stages - 1):
                bounds = (0, *inner, self.blocks)
                if limit_bytes is not None and self._stored_bytes(number, pipeline, bounds) > limit_bytes:
                    continue
                for run in self._runs_of(number, pipeline, bounds):
                    if run.step_s >= best:
                        break
                    if limit_bytes is None or self._peak(number, pipeline, run) <= limit_bytes:
                        best, found = run.step_s, (number, pipeline, run)
        if found is None:
            return NOTHING_FITS
        return self._checked(*found, limit_bytes)

    def _runs_of(self, number: int, pipeline: Pipeline, bounds: tuple[int, ...]) -> list[Run]:
        """A cut of a chain with every way for every block to save, fastest first."""
        key = number, pipeline, bounds
        if key not in self._runs:
            links = self.chains[number].links
            ways = [*itertools.product(*(range(len(link.block.savings)) for link in links))]
            once_s = price(links, pipeline, evaluate_cut(pipeline, chain_of(links), bounds, ways[0])).step_s
            once_s -= self._step_s(links, pipeline, bounds, ways[0])
            self._runs[key] = sorted(
                Run(self._step_s(links, pipeline, bounds, way) + once_s, bounds, way) for way in ways
            )
        return self._runs[key]

    def _step_s(
        self, links: tuple[Link, ...], pipeline: Pipeline, bounds: tuple[int, ...], savings: tuple[int, ...]
    ) -> float:
        times = stage_times(chain_of(links), bounds, savings)
        key = (pipeline, *(part.tobytes() for part in (times.forward_s, times.input_s, times.weight_s, times.send_s)))
        if key not in self._seconds:
            if len(self._seconds) > 2 * self.most:
                raise TooLargeError(f"cuts of {self.config}")
            p = pipeline
            self._seconds[key] = step_s(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, times)
        return self._seconds[key]

    def _stored_bytes(self, number: int, pipeline: Pipeline, bounds: tuple[int, ...]) -> int:
        """Bytes of leaves, gradients and optimizer state on the fullest rank: all are there at the end of a step."""
        key = number, pipeline, bounds
        if key not in self._stored:
            blocks, ranks = [link.block for link in self.chains[number].links], [0] * pipeline.ranks
            for home, (low, high) in zip(pipeline.placed, itertools.pairwise(bounds), strict=True):
                ranks[home] += sum(block.held_bytes + block.gradient_bytes for block in blocks[low:high])
            self._stored[key] = max(ranks)
        return self._stored[key]

    def _links_of(self, number: int) -> tuple[Link, ...]:
        """Of a chain the links of one assignment, whose stages say what blocks hold together."""
        if number not in self._own_links:
            self._own_links[number] = self.links(self.chains[number].row)
        return self._own_links[number]

    def _peak(self, number: int, pipeline: Pipeline, run: Run) -> int:
        """The lesser of what it holds where it gathers ahead and where it waits."""
        key = number, pipeline, run
        if key not in self._peaks:
            if len(self._peaks) > self.most:
                raise TooLargeError(f"simulations of {self.config}")
            self._peaks[key] = min(each.peak_bytes for each in self._priced(self._links_of(number), pipeline, run))
            assert self._stored_bytes(number, pipeline, run.bounds) <= self._peaks[key], "what is stored is not there"
        return self._peaks[key]

    def _priced(self, links: tuple[Link, ...], pipeline: Pipeline, run: Run) -> Iterator[Staged]:
        found: Cut = evaluate_cut(pipeline, chain_of(links), run.bounds, run.savings)
        yield price(links, pipeline, found)
        if any(link.gathers_ahead for link in links):
            yield price(links, pipeline, found, prefetch=False)

    def _checked(self, number: int, pipeline: Pipeline, run: Run, limit_bytes: int | None) -> Optimum:
        """What was found, priced once more from its assignment alone."""
        staged = min(self._priced(self._links_of(number), pipeline, run), key=lambda each: each.peak_bytes)
        assert math.isclose(staged.step_s, run.step_s, rel_tol=ROUNDING), "links of an assignment are mixed up"
        assert limit_bytes is None or staged.peak_bytes <= limit_bytes
        what = f"{pipeline.schedule} x {pipeline.virtual_stages}, cut {run.bounds}, {staged.levels}"
        return Optimum(staged.step_s, staged.peak_bytes, what)
