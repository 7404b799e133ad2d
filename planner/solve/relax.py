"""Turn a model into its best Lagrangian lower bound, and the assignments met on the way.

The step time is the larger of two sums, so any mix of the two is a lower bound; bytes over the limit are charged
at a price. The weighted sum that results is minimised by elimination. The bound is concave in mix and price, and
every assignment is a plane above it: the highest point under all planes so far is tried next (Kelley, "The
cutting-plane method for solving convex programs", 1960), until bound and planes meet.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from ortools.linear_solver import pywraplp

from planner.problem import Floats, Ints
from planner.solve.eliminate import Elimination, decode, eliminate
from planner.solve.model import Model, Totals, total
from planner.solve.tree import Tree

_MAX_STEPS = 40
_MAX_PRICE = 1e3  # times the largest step time met, for the room or the largest excess met; more would cost digits
_WORTHWHILE = 0.02  # stop when what is left to gain is this small a part of the gap to the best assignment


@dataclass(frozen=True)
class Multipliers:
    """``mix`` of the exposed sum in the step time (0 to 1) and seconds charged per byte over the limit."""

    mix: float = 0.0
    price: float = 0.0

    def weights(self) -> Floats:
        """One weight per cost column."""
        return np.array([1.0 - self.mix, self.mix, self.price, 1.0])

    def around(self) -> list[Multipliers]:
        """Multipliers that bound partial assignments well which used more or less than their part of a limit."""
        mixes = [Multipliers(mix, self.price) for mix in (0.0, 1.0) if 0.0 < self.mix < 1.0]
        return mixes + [Multipliers(self.mix, self.price * part) for part in (0.7, 0.9, 1.15, 1.4) if self.price > 0.0]


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The best multipliers with their elimination, the lower bound in seconds, and all assignments met."""

    multipliers: Multipliers
    elimination: Elimination
    bound: float
    assignments: tuple[Ints, ...]


def relax(
    model: Model, tree: Tree, room_bytes: float, best: float, start: Multipliers, known: list[Ints], deadline: float
) -> Relaxation:
    """Maximise the lower bound on the step time of assignments that hold at most ``room_bytes``.

    ``known`` assignments give the first planes. Stops early once the bound reaches ``best``, an upper bound, or at
    ``deadline`` (``time.monotonic``).
    """
    planes = [plane for plane in (total(model, assignment) for assignment in known) if plane.allowed]
    assignments: list[Ints] = []
    tried: set[Multipliers] = set()
    found = Relaxation(start, eliminate(model, tree, start.weights()), -math.inf, ())
    trial, elimination = start, found.elimination
    while True:
        tried.add(trial)
        bound = elimination.bound - trial.price * room_bytes
        if bound > found.bound:
            found = Relaxation(trial, elimination, bound, ())
        assignment = decode(elimination)
        totals = total(model, assignment)
        if not totals.allowed or found.bound >= best:
            break
        assignments.append(assignment)
        planes.append(totals)
        trial, height = _highest_point(planes, room_bytes)
        gap = min(best - found.bound, 1e-2 * abs(found.bound))
        settled = height - found.bound <= max(_WORTHWHILE * gap, 1e-9 * abs(found.bound))
        if settled or trial in tried or len(tried) >= _MAX_STEPS or time.monotonic() > deadline:
            break
        elimination = eliminate(model, tree, trial.weights())
    return Relaxation(found.multipliers, found.elimination, found.bound, tuple(assignments))


def _highest_point(planes: list[Totals], room_bytes: float) -> tuple[Multipliers, float]:
    """The multipliers at which the lowest plane is highest, and how high."""
    second = max(max(abs(plane.time_s), abs(plane.exposed_s)) for plane in planes) or 1.0
    excess = [plane.held_bytes - room_bytes for plane in planes]
    byte = max(map(abs, [*excess, room_bytes])) or 1.0
    program = pywraplp.Solver.CreateSolver("GLOP")
    height = program.NumVar(-program.infinity(), program.infinity(), "height")
    mix = program.NumVar(0.0, 1.0, "mix")
    price = program.NumVar(0.0, _MAX_PRICE, "price")
    for plane, over in zip(planes, excess, strict=True):
        # The height is below every plane.
        rise = (plane.exposed_s - plane.time_s) / second
        program.Add(height <= plane.time_s / second + rise * mix + over / byte * price)
    program.Maximize(height)
    program.Solve()
    top = Multipliers(min(1.0, max(0.0, mix.solution_value())), max(0.0, price.solution_value()) * second / byte)
    return top, height.solution_value() * second
