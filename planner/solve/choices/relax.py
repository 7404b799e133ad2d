"""Turn a model into its best Lagrangian lower bound, and the assignments met on the way.

The step time is the larger of two sums, so any mix of the two is a lower bound; bytes over the limit, or over the
room of a moment, are charged at a price. The weighted sum that results is minimised by elimination. The bound is
concave in mix and prices, and every assignment is a plane above it: the highest point under all planes so far is
tried next (Kelley, "The cutting-plane method for solving convex programs", 1960), until bound and planes meet. Where
there are moments the next point is looked for near the best so far, as planes say little far away from where they
were found (the box step method: Marsten, Hogan and Blankenship, 1975).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
from ortools.linear_solver import pywraplp

from planner.solve.choices.eliminate import Elimination, decode, eliminate
from planner.solve.choices.model import ChoiceModel, Totals, Weights, total
from planner.solve.choices.tree import Tree
from planner.solve.problem import Floats, Ints

_MAX_STEPS = 40
_MAX_PRICE = 1e3  # times the largest step time met, for the room or the largest excess met; more would cost digits
_WORTHWHILE = 0.02  # stop when what is left to gain is this small a part of the gap to the best assignment


@dataclass(frozen=True)
class Multipliers:
    """``mix`` of the exposed sum in the step time (0 to 1), seconds per byte over the limit, and over rooms.

    ``moments`` are the moments whose rooms have a price, with it.
    """

    mix: float = 0.0
    price: float = 0.0
    moments: tuple[tuple[int, float], ...] = ()

    def weights(self, model: ChoiceModel) -> Weights:
        """The weights of the model's columns and moments."""
        prices = np.zeros(len(model.rooms))
        for moment, price in self.moments:
            prices[moment] = price
        columns = np.array([1.0 - self.mix, self.mix, self.price + prices.sum(), 1.0])
        return Weights(columns, self.price, prices)

    def moved(self, old: ChoiceModel, new: ChoiceModel) -> Multipliers:
        """The same for a model with only some of the moments."""
        kept = {int(number): moment for moment, number in enumerate(new.moments)}
        numbers = ((int(old.moments[moment]), price) for moment, price in self.moments)
        return replace(self, moments=tuple((kept[number], price) for number, price in numbers if number in kept))

    def scaled(self, part: float) -> Multipliers:
        """With all prices this much higher."""
        return Multipliers(self.mix, self.price * part, tuple((moment, price * part) for moment, price in self.moments))

    def around(self) -> list[Multipliers]:
        """Multipliers that bound partial assignments well which used more or less than their part of a limit."""
        mixes = [replace(self, mix=mix) for mix in (0.0, 1.0) if 0.0 < self.mix < 1.0]
        priced = self.price > 0.0 or self.moments
        return mixes + [self.scaled(part) for part in (0.7, 0.9, 1.15, 1.4) if priced]


@dataclass(frozen=True, eq=False)
class Relaxation:
    """The best multipliers with their elimination, the lower bound in seconds, and all assignments met."""

    multipliers: Multipliers
    elimination: Elimination
    bound: float
    assignments: tuple[Ints, ...]


@dataclass(frozen=True, eq=False)
class Plane:
    """An assignment's sums, and by how much it is over the limit and the rooms."""

    time_s: float
    exposed_s: float
    over_bytes: float
    over_rooms: Floats


def plane(model: ChoiceModel, totals: Totals, room_bytes: float) -> Plane:
    """The plane of an assignment that may hold ``room_bytes``."""
    over_rooms = totals.held_bytes + totals.span_bytes - model.rooms
    return Plane(totals.time_s, totals.exposed_s, totals.held_bytes - room_bytes, over_rooms)


def relax(
    model: ChoiceModel,
    tree: Tree,
    room_bytes: float,
    best: float,
    start: Multipliers,
    known: list[Ints],
    deadline: float,
) -> Relaxation:
    """Maximise the lower bound on the step time of assignments that hold at most ``room_bytes`` and fit the rooms.

    ``known`` assignments give the first planes. Stops early once the bound reaches ``best``, an upper bound, or at
    ``deadline`` (``time.monotonic``).
    """
    totals = [total(model, assignment) for assignment in known]
    box = TrustRegion(model, [plane(model, each, room_bytes) for each in totals if each.allowed], room_bytes)
    assignments: list[Ints] = []
    tried: set[Multipliers] = set()
    found = Relaxation(start, eliminate(model, tree, start.weights(model)), -math.inf, ())
    trial, elimination = start, found.elimination
    while True:
        tried.add(trial)
        bound = elimination.bound - trial.price * room_bytes
        box.judge(trial, bound)
        if bound > found.bound:
            found = Relaxation(trial, elimination, bound, ())
        assignment = decode(elimination)
        met = total(model, assignment)
        if not met.allowed or found.bound >= best:
            break
        assignments.append(assignment)
        box.add(plane(model, met, room_bytes))
        gap = min(best - found.bound, 1e-2 * abs(found.bound))
        settled = max(_WORTHWHILE * gap, 1e-9 * abs(found.bound))
        trial, height = box.highest()
        while height - found.bound <= settled and box.widen():
            trial, height = box.highest()
        late = len(tried) >= _MAX_STEPS * (1 + len(box.moments)) or time.monotonic() > deadline
        if height - found.bound <= settled or trial in tried or late:
            break
        elimination = eliminate(model, tree, trial.weights(model))
    return Relaxation(found.multipliers, found.elimination, found.bound, tuple(assignments))


class TrustRegion:
    """All planes so far, and the part of the space of multipliers in which the next point is looked for.

    Only moments at which some assignment exceeded its room most have a price.
    """

    _GROW, _SHRINK = 1.5, 0.6  # of the box, after a point that was better than the best and one that was not
    _PLANES = 200  # looked at; older ones are forgotten

    def __init__(self, model: ChoiceModel, planes: list[Plane], room_bytes: float) -> None:
        self.planes: list[Plane] = []
        self.moments: list[int] = []
        self._room = max(abs(room_bytes), float(np.abs(model.rooms).max(initial=0.0)))
        self._radius = 1.0 if len(model.rooms) else math.inf
        self._centre, self._best = Multipliers(), -math.inf
        for each in planes:
            self.add(each)

    def moved(self, old: ChoiceModel, new: ChoiceModel) -> TrustRegion:
        """The same for a model with only some of the moments."""
        kept = np.searchsorted(old.moments, new.moments)
        box = TrustRegion(new, [replace(each, over_rooms=each.over_rooms[kept]) for each in self.planes], self._room)
        box._radius, box._best, box._centre = self._radius, self._best, self._centre.moved(old, new)
        return box

    def add(self, plane: Plane) -> None:
        """Take an assignment's plane into account."""
        self.planes = [*self.planes[1 - self._PLANES :], plane]
        if len(plane.over_rooms) and plane.over_rooms.max() > 0.0:
            moment = int(plane.over_rooms.argmax())
            if moment not in self.moments:
                self.moments.append(moment)

    def judge(self, trial: Multipliers, bound: float) -> None:
        """Move to a better point, and look further or less far from now on."""
        better = bound > self._best
        self._radius *= self._GROW if better else self._SHRINK
        if better:
            self._centre, self._best = trial, bound
        for moment, _ in trial.moments:
            if moment not in self.moments:
                self.moments.append(moment)

    def renew(self) -> None:
        """Forget how good the best point was and look far again, as bounds have become better since."""
        self._best, self._radius = -math.inf, max(self._radius, 1.0)

    def widen(self) -> bool:
        """Look further, if there is more to see."""
        if self._radius >= _MAX_PRICE:
            return False
        self._radius *= 10.0
        return True

    def highest(self) -> tuple[Multipliers, float]:
        """The multipliers at which the lowest plane is highest, and how high; where GLOP fails, the best so far."""
        planes, moments = self.planes, self.moments
        second = max(max(abs(p.time_s), abs(p.exposed_s)) for p in planes) or 1.0
        byte = max(self._room, *(abs(p.over_bytes) for p in planes)) or 1.0
        program = pywraplp.Solver.CreateSolver("GLOP")
        height = program.NumVar(-program.infinity(), program.infinity(), "height")
        mix = program.NumVar(0.0, 1.0, "mix")
        centre = dict(self._centre.moments)

        def variable(near: float) -> pywraplp.Variable:
            near *= byte / second
            return program.NumVar(max(0.0, near - self._radius), min(_MAX_PRICE, near + self._radius), "")

        price = variable(self._centre.price)
        prices = [variable(centre.get(moment, 0.0)) for moment in moments]
        for p in planes:
            # The height is below every plane.
            row = program.RowConstraint(-program.infinity(), p.time_s / second, "")
            row.SetCoefficient(height, 1.0)
            row.SetCoefficient(mix, (p.time_s - p.exposed_s) / second)
            row.SetCoefficient(price, -p.over_bytes / byte)
            for moment, each in zip(moments, prices, strict=True):
                row.SetCoefficient(each, -float(p.over_rooms[moment]) / byte)
        program.Maximize(height)
        if program.Solve() != pywraplp.Solver.OPTIMAL:  # planes that hardly differ can be too much for its digits
            return self._centre, self._best
        found = ((moment, each.solution_value() * second / byte) for moment, each in zip(moments, prices, strict=True))
        top = Multipliers(
            min(1.0, max(0.0, mix.solution_value())),
            max(0.0, price.solution_value()) * second / byte,
            tuple((moment, value) for moment, value in sorted(found) if value > 0.0),
        )
        return top, height.solution_value() * second
