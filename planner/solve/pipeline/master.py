"""The linear relaxation of a pipelined step: shares of blocks on stages, in variants, within memory.

Of a pipeline every stage has some blocks, every block runs in one of its variants. Where shares need not be whole, and
neighbours need not agree, the shortest step is a linear program: no path of the schedule is longer than the step, no
rank holds more than the limit at any moment, and all blocks are somewhere. Paths are added when the simulated schedule
finds one that is longer (Kelley, 1960), variants when a block is cheaper in another one under the program's prices
(column generation, as for cutting stock: Gilmore and Gomory, 1961).

What is used of it as a proof are its :class:`Prices` alone: whatever they are, a step of any pipeline of this schedule
that fits takes at least what its blocks cost under them, each where it is cheapest (weak duality).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from ortools.linear_solver import pywraplp

from planner.solve.pipeline.simulate import Path, Times, several_critical
from planner.solve.pipeline.stages import Pipeline
from planner.solve.problem import Floats

FEW_ROUNDS, MANY_ROUNDS, MOST_ROUNDS = 6, 15, 120
"""Simulations of a schedule at most, to find its paths: usually, for a proof, and where that may say more than is
known.
"""
MOST_ACTIONS = 60_000
"""Actions of all of the last together, at about the most, unless :data:`MANY_ROUNDS` have more."""
SIMULATED = 6
"""Micro-batches a rank in the steps that are simulated, at about the most."""
FIRST, EACH = 40, 3
"""Paths that are drawn of the even shares, and of others."""
CLOSE = 2e-3
"""Part of a step by which a path may be longer than the program knows."""
WITHOUT_GRADIENTS = 0.5
"""Of what is held so much is there before any gradient: no gradient is larger than its parameter, gathered or not."""
BOX = 0.3
"""Part by which stages may have other blocks than the best found while paths are sought: they say little far off."""


@dataclass(frozen=True)
class Variant:
    """A way to run a block, by some choices at a level of recomputation: seconds of a micro-batch and once a step;
    bytes always and per micro-batch in flight.
    """

    forward_s: float
    backward_s: float
    once_s: float
    held_bytes: float
    saved_bytes: float
    level: int = 0
    choices: tuple[int, ...] = ()

    def is_no_worse(self, other: Variant) -> bool:
        """Whether it takes and holds at most as much as another one, but for rounding."""
        return all(mine <= its + 1e-9 * abs(its) for mine, its in zip(self._costs, other._costs, strict=True))

    @property
    def _costs(self) -> tuple[float, ...]:
        return self.forward_s, self.backward_s, self.once_s, self.held_bytes, self.saved_bytes


@dataclass(frozen=True, eq=False)
class Prices:
    """What a block costs where, by stage: seconds of step per second forward and backward, and per byte.

    Attributes:
        held, saved: of bytes that are there always, and of those of each micro-batch in flight.
        bonus_s: what a block is worth to a stage, since each has one at least.
        room_s: what the memory of all ranks is worth, which is taken off; less what all stages' bonuses are.
        send: of a second on the way from a stage to the next and back.
    """

    forward: Floats
    backward: Floats
    held: Floats
    saved: Floats
    bonus_s: Floats
    room_s: float
    send: float

    @property
    def stages(self) -> int:
        return len(self.forward)


@dataclass(frozen=True, eq=False)
class MasterSolution:
    """What the program found: the step in seconds, how many blocks of each group run in which variant on which stage,
    by how many limits memory is exceeded, the prices, and whether more paths would say no more. ``path_s`` are seconds
    of the longest path that it knows.
    """

    step_s: float
    path_s: float
    shares: tuple[Floats, ...]
    over: float
    prices: Prices
    is_settled: bool = False


@dataclass(eq=False)
class Paths:
    """The paths of a pipeline's schedule that were found, which are the same whatever its stages take.

    ``pace`` are the prices of seconds alone where some stages were solved for, which are valid for all.
    """

    pipeline: Pipeline
    found: list[Path] = field(default_factory=list)
    pace: Prices | None = None

    def __post_init__(self) -> None:
        """Begin with every rank's own path: all that it does, one after the other."""
        p = self.pipeline
        for rank in range(p.ranks):
            own = np.array([home == rank for home in p.placed], dtype=float)
            self.found.append(Path(np.tile(own * p.micro_batches, (3, 1)), np.zeros(p.stages - 1)))

    def longest(self, times: Times, count: int) -> float:
        """Seconds of the simulated schedule; so many of its longest paths are among those found from then on."""
        p = self.pipeline
        seconds, paths = several_critical(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, times, count)
        self.add(paths)
        return seconds

    def add(self, paths: Iterable[Path]) -> int:
        """Add those that are not among the found ones yet; how many these are then."""
        known = {path.work.tobytes() for path in self.found}
        self.found += {path.work.tobytes(): path for path in paths if path.work.tobytes() not in known}.values()
        return len(self.found)


def rounds_of_proof(pipeline: Pipeline) -> int:
    """Simulations of a pipeline's schedule at most where a proof may say more than is known."""
    actions = 2 * pipeline.stages * min(pipeline.micro_batches, SIMULATED * pipeline.ranks)
    return min(max(MANY_ROUNDS, MOST_ACTIONS // actions), MOST_ROUNDS)


class Master:
    """The linear program of one pipeline, to which variants are added.

    Args:
        paths: of the pipeline.
        counts: how many blocks each group has.
        homes: the stage on which all blocks of a group are; ``None``: anywhere.
        limit_bytes: of every rank; ``None``: unlimited.
        unit_s: about what a step takes, so that the program's numbers are near one.
        send_s: the least seconds from a stage to the next.
        fills: whether a block of each group is enough for a stage; all are unless given.
        working_bytes: what the backward of each stage has at least beside what is held and saved; left out: nothing.
    """

    def __init__(
        self,
        paths: Paths,
        counts: Sequence[int],
        homes: Sequence[int | None],
        limit_bytes: float | None,
        unit_s: float,
        send_s: float = 0.0,
        fills: Sequence[bool] | None = None,
        working_bytes: Sequence[float] = (),
    ):
        self.paths, self.pipeline, self.send_s, self._unit_s = paths, paths.pipeline, send_s, unit_s
        self.limit_bytes = limit_bytes
        stages = self.pipeline.stages
        self.allowed = [range(stages) if home is None else (home,) for home in homes]
        self.variants: list[list[Variant]] = [[] for _ in counts]
        self._shares: list[list[list[pywraplp.Variable]]] = [[] for _ in counts]
        self._program = program = pywraplp.Solver.CreateSolver("CLP")
        self._step = program.NumVar(0.0, program.infinity(), "")
        self._over = program.NumVar(0.0, program.infinity(), "")
        program.Objective().SetCoefficient(self._step, 1.0)
        program.Objective().SetMinimization()
        self._fills = [True] * len(counts) if fills is None else [*fills]
        self._sizes = [*counts]
        self._counts = [program.Constraint(float(count), float(count)) for count in counts]
        # What every stage takes forward and backward, holds, and saves: rows of paths and moments are of these alone.
        self._units = (unit_s, unit_s, max(1.0, limit_bytes or 1.0), max(1.0, limit_bytes or 1.0))
        self._totals = [[program.NumVar(-math.inf, math.inf, "") for _ in range(stages)] for _ in self._units]
        self._sums = [[program.Constraint(0.0, 0.0) for _ in range(stages)] for _ in self._units]
        for sums, totals in zip(self._sums, self._totals, strict=True):
            for row, total in zip(sums, totals, strict=True):
                row.SetCoefficient(total, -1.0)
        self._filled = [program.Constraint(1.0, program.infinity()) for _ in range(stages)]
        self._path_rows: list[pywraplp.Constraint] = []
        self._moments: list[tuple[list[int], Floats, float, float]] = []
        self._rooms: list[pywraplp.Constraint] = []
        working = (*(working_bytes or (0.0,) * stages), 0.0)
        if limit_bytes is not None:
            for of_rank, moments in self.pipeline.certain_moments:
                for moment in moments:
                    left = 1.0 - working[moment.backward] / max(1.0, limit_bytes)
                    there = 1.0 if moment.added else WITHOUT_GRADIENTS
                    self._moments.append((of_rank, np.array(moment.counts, float), there, left))
                    room = program.Constraint(-program.infinity(), left)
                    room.SetCoefficient(self._over, -1.0)
                    self._rooms.append(room)
                    for stage, count in zip(of_rank, moment.counts, strict=True):
                        room.SetCoefficient(self._totals[2][stage], there)
                        room.SetCoefficient(self._totals[3][stage], float(count))

    def add(self, group: int, variant: Variant) -> None:
        """Let blocks of a group run in a variant, unless another one is no worse in anything."""
        if any(known.is_no_worse(variant) for known in self.variants[group]):
            return
        self.variants[group].append(variant)
        shares, program = [], self._program
        for stage in self.allowed[group]:
            share = program.NumVar(0.0, program.infinity(), "")
            shares.append(share)
            self._counts[group].SetCoefficient(share, 1.0)
            if self._fills[group]:
                self._filled[stage].SetCoefficient(share, 1.0)
            program.Objective().SetCoefficient(share, variant.once_s / self._unit_s)
            amounts = variant.forward_s, variant.backward_s, variant.held_bytes, variant.saved_bytes
            for sums, amount, unit in zip(self._sums, amounts, self._units, strict=True):
                sums[stage].SetCoefficient(share, amount / unit)
        self._shares[group].append(shares)

    def solve(self, most_s: float, enough_s: float = math.inf, rounds: int = FEW_ROUNDS) -> MasterSolution:
        """The shortest step, and the prices at which it is.

        Args:
            most_s: seconds of step that a limit's bytes beyond the limit are priced at.
            enough_s: where the step, with what is over the limit priced, is longer anyway, no more paths are sought.
            rounds: simulations of the schedule at most, to find its paths.
        """
        self._program.Objective().SetCoefficient(self._over, most_s / self._unit_s)
        even = [
            np.full((len(variants), len(at)), count / len(at) / len(variants))
            for variants, at, count in zip(self.variants, self.allowed, self._sizes, strict=True)
        ]
        if len(self.paths.found) == self.pipeline.ranks:
            self.paths.longest(self._times(even), FIRST)
        near: Floats | None = None
        near_s, is_settled = math.inf, False
        for _ in range(rounds):
            self._add_paths()
            found = self._solved(near)
            if found.step_s > enough_s:
                anywhere = found if near is None else self._solved()
                if anywhere.step_s > enough_s:
                    return anywhere
            seconds, is_settled = self._simulated(found)
            if is_settled and near is not None:  # far from there the step may be shorter, as far as is known
                self._add_paths()
                _, is_settled = self._simulated(self._solved())
            if is_settled:
                break
            if seconds < near_s:
                near, near_s = self._blocks_of(found.shares), seconds
        self._add_paths()
        return replace(self._solved(), is_settled=is_settled)

    def _simulated(self, found: MasterSolution) -> tuple[float, bool]:
        """Seconds of the simulated schedule, and whether the longest path known was about as long, or none was new."""
        known = len(self.paths.found)
        seconds = self.paths.longest(self._times(found.shares), EACH)
        return seconds, seconds <= found.path_s * (1 + CLOSE) or len(self.paths.found) == known

    def _blocks_of(self, shares: Sequence[Floats]) -> Floats:
        """Blocks of all groups on each stage."""
        found = np.zeros(self.pipeline.stages)
        for at, each, fills in zip(self.allowed, shares, self._fills, strict=True):
            if fills:
                found[list(at)] += each.sum(axis=0)
        return found

    def _add_paths(self) -> None:
        for path in self.paths.found[len(self._path_rows) :]:
            sends = float(path.sends.sum()) * self.send_s / self._unit_s
            row = self._program.Constraint(sends, self._program.infinity())
            row.SetCoefficient(self._step, 1.0)
            self._path_rows.append(row)
            for totals, times in zip(self._totals[:2], (path.work[0], _backward(path)), strict=True):
                for total, count in zip(totals, times.tolist(), strict=True):
                    if count:
                        row.SetCoefficient(total, -count)

    def _solved(self, near: Floats | None = None) -> MasterSolution:
        """What the program says of the paths so far; with ``near`` among shares not far from so many blocks a stage."""
        for stage, row in enumerate(self._filled):
            low, high = (
                (1.0, math.inf) if near is None else (near[stage] / (1 + BOX), max(1.0, near[stage]) * (1 + BOX))
            )
            row.SetBounds(max(1.0, low), high)
        parameters = pywraplp.MPSolverParameters()
        parameters.SetIntegerParam(parameters.PRESOLVE, parameters.PRESOLVE_OFF)  # with it, it would begin anew
        parameters.SetIntegerParam(parameters.LP_ALGORITHM, parameters.DUAL)
        if self._program.Solve(parameters) != pywraplp.Solver.OPTIMAL:  # rounding on the way from the last basis
            parameters = pywraplp.MPSolverParameters()
            parameters.SetIntegerParam(parameters.INCREMENTALITY, parameters.INCREMENTALITY_OFF)
            status = self._program.Solve(parameters)
            assert status == pywraplp.Solver.OPTIMAL, status
        stages = self.pipeline.stages
        shares = tuple(
            np.array([[share.solution_value() for share in each] for each in group]) for group in self._shares
        )
        mix = np.array([max(0.0, row.dual_value()) for row in self._path_rows])
        mix = mix / mix.sum()
        forward, backward = np.zeros(stages), np.zeros(stages)
        send = 0.0
        for part, path in zip(mix.tolist(), self.paths.found, strict=False):
            if part:
                forward += part * path.work[0]
                backward += part * _backward(path)
                send += part * float(path.sends.sum())
        held, saved, room_s = np.zeros(stages), np.zeros(stages), 0.0
        for room, (of_rank, counts, there, left) in zip(self._rooms, self._moments, strict=True):
            price = max(0.0, -room.dual_value()) * self._unit_s
            if price:
                held[of_rank] += price * there / max(1.0, self.limit_bytes or 1.0)
                saved[of_rank] += price * counts / max(1.0, self.limit_bytes or 1.0)
                room_s += price * left
        bonus = np.array([max(0.0, row.dual_value()) for row in self._filled]) * self._unit_s
        prices = Prices(forward, backward, held, saved, bonus, room_s - float(bonus.sum()), send)
        return MasterSolution(
            self._program.Objective().Value() * self._unit_s,
            self._step.solution_value() * self._unit_s,
            shares,
            self._over.solution_value(),
            prices,
        )

    def _times(self, shares: Sequence[Floats]) -> Times:
        stages = self.pipeline.stages
        forward, backward = np.zeros(stages), np.zeros(stages)
        for variants, at, each in zip(self.variants, self.allowed, shares, strict=True):
            for variant, row in zip(variants, each, strict=True):
                forward[list(at)] += variant.forward_s * row
                backward[list(at)] += variant.backward_s * row
        half = np.maximum(backward, 0.0) / 2
        return Times(np.maximum(forward, 0.0), half, half, np.full(stages - 1, self.send_s))


def _backward(path: Path) -> Floats:
    """How often a path takes each stage's backward, which may come in two parts, at least."""
    found: Floats = np.minimum(path.work[1], path.work[2])
    return found
