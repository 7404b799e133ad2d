"""Turn a problem into what no assignment can beat, by a few eliminations: far less work than solving it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.problem import Problem
from planner.solve.best import Best
from planner.solve.cheapest import Cheapest
from planner.solve.model import HALF_BYTE, Model, Weights, build_model, drop_forbidden, restrict

_STEPS = 7
_CLOSE = 1e-4  # relative distance from the bound to an assignment at which more steps are not worth their time


@dataclass(frozen=True)
class Bounds:
    """No assignment takes less than ``time_s`` seconds, memory aside, or fits in less than ``peak_bytes``.

    Both are infinite when every assignment is forbidden. ``choices`` is the fastest assignment met that fits,
    ``None`` if none did; ``lightest`` one that holds little, whether it fits or not, ``None`` where there is no limit
    or the fastest assignment fits.
    """

    time_s: float
    peak_bytes: float
    choices: tuple[int, ...] | None = None
    lightest: tuple[int, ...] | None = None


def lower_bounds(problem: Problem, enough_s: float = math.inf) -> Bounds:
    """Bounds of one problem; that on time is raised no further once it reaches ``enough_s``.

    The step time is the larger of two sums, so any mix of them is a lower bound, concave in the mix; bytes beyond the
    limit may be charged at any price, and the bound is concave in the price. The best mix without a price, then the
    best price with that mix, are found by bisection. What is held at least is found where the fastest does not fit.
    """
    problem.check()
    model = _within(problem)
    if model is None:
        return Bounds(math.inf, math.inf)
    cheapest = Cheapest(model)
    best, peak_bytes, room_bytes, light = Best(problem, math.inf), 0.0, math.inf, None
    if problem.limit_bytes is not None:
        room_bytes = _room_bytes(model)
        peak_bytes = problem.limit_bytes - room_bytes
    time_s, low, high, mix, mixed = -math.inf, 0.0, 1.0, 0.0, 0.0
    for step in range(_STEPS):
        least = cheapest.under(_weights(model, 1.0 - mix, mix, 0.0))
        time_s, mixed = max((time_s, mixed), (least.bound, mix))
        sums = least.totals
        best.offer_assignment(least.model, least.assignment)
        if step == 0 and sums.held_bytes > room_bytes:
            held = cheapest.under(_weights(model, 0.0, 0.0, 1.0))
            light = held.choices
            best.offer(light)
            peak_bytes += held.bound
            if held.bound > room_bytes:
                enough_s = -math.inf  # nothing fits, however fast
        low, high = (mix, high) if sums.exposed_s > sums.time_s else (low, mix)
        if low == high or time_s >= enough_s or sums.objective_s - time_s <= _CLOSE * time_s:
            break
        mix = (low + high) / 2
    excess = sums.held_bytes - room_bytes
    low, high, price = 0.0, math.inf, 0.1 * abs(time_s) / max(excess, 1.0)
    for _ in range(_STEPS if excess > 0 else 0):
        if time_s >= min(enough_s, best.objective_s * (1 - _CLOSE)):
            break
        least = cheapest.under(_weights(model, 1.0 - mixed, mixed, price))
        time_s = max(time_s, least.bound - price * room_bytes)
        best.offer_assignment(least.model, least.assignment)
        low, high = (price, high) if least.totals.held_bytes > room_bytes else (low, price)
        price = 4 * low if math.isinf(high) else (low + high) / 2
    return Bounds(time_s, peak_bytes, best.choices, light)


def lightest(problem: Problem) -> tuple[int, ...] | None:
    """An assignment that holds little, whether it fits or not; ``None`` when every assignment is forbidden."""
    model = _within(problem)
    if model is None:
        return None
    return Cheapest(model).under(_weights(model, 0.0, 0.0, 1.0)).choices


@dataclass(frozen=True)
class Between:
    """No assignment that fits takes less than ``time_s``; ``choices`` are those met at the best bound, to be tried."""

    time_s: float
    choices: tuple[tuple[int, ...], ...] = ()


def lower_bound_between(first: Problem, last: Problem, enough_s: float = math.inf) -> Between:
    """A bound for every problem on the way from ``first`` to ``last``, whose costs change evenly between both.

    At a fixed mix and price the least weighted cost is a minimum of straight lines, so concave along the way: no
    problem between lies below both ends, and none fits where neither end does. The mix is the better one without a
    price; the price is found by bisection.
    """
    ends = []
    for problem in (first, last):
        model = _within(problem)
        if model is None:
            return Between(math.inf)
        ends.append(_End(model, Cheapest(model), _room_bytes(model)))
    if all(end.is_too_large for end in ends):
        return Between(math.inf)
    found = max((tuple(end.at(mix, 0.0) for end in ends) for mix in (0.0, 0.5, 1.0)), key=_least)
    mix, saved = found[0].mix, found[0].excess - found[1].excess
    slower = found[1].bound_s - found[0].bound_s
    best, low, high, price = found, 0.0, math.inf, slower / saved if slower > 0 and saved > 0 else 0.0
    price = price or 0.1 * abs(_least(found)) / max(found[0].excess, 1.0)
    for _ in range(_STEPS):
        if _least(best) >= enough_s:
            break
        found = tuple(end.at(mix, price) for end in ends)
        best = max(best, found, key=_least)
        lower = min(found, key=lambda point: point.bound_s)
        low, high = (price, high) if lower.excess > 0 else (low, price)
        price = 4 * low if math.isinf(high) else (low + high) / 2
    return Between(_least(best), tuple(dict.fromkeys(point.choices for point in best)))


@dataclass(frozen=True)
class _Point:
    """What an end's cheapest assignment at a mix and a price costs, and by how many bytes it is too large."""

    mix: float
    bound_s: float
    excess: float
    choices: tuple[int, ...]


@dataclass(frozen=True)
class _End:
    """One of two problems between which others lie."""

    model: Model
    cheapest: Cheapest
    room_bytes: float

    @property
    def is_too_large(self) -> bool:
        """Whether nothing fits, however slow."""
        return self.cheapest.under(_weights(self.model, 0.0, 0.0, 1.0)).bound > self.room_bytes

    def at(self, mix: float, price: float) -> _Point:
        least = self.cheapest.under(_weights(self.model, 1.0 - mix, mix, price))
        excess = least.totals.held_bytes - self.room_bytes
        return _Point(mix, least.bound - price * self.room_bytes, excess, least.choices)


def _least(points: tuple[_Point, ...]) -> float:
    return min(point.bound_s for point in points)


def _within(problem: Problem) -> Model | None:
    """A problem's model without choices that need more than the limit for themselves, unless that leaves nothing.

    ``None`` where every assignment is forbidden.
    """
    model = build_model(problem)
    if problem.limit_bytes is None:
        return drop_forbidden(model)
    kept = restrict(model, [values <= problem.limit_bytes for values in model.transient])
    return (None if kept is None else drop_forbidden(kept)) or drop_forbidden(model)


def _room_bytes(model: Model) -> float:
    """What may be held beside the operator that needs most for itself at least."""
    return model.limit_bytes - max((float(values.min()) for values in model.transient), default=0.0) + HALF_BYTE


def _weights(model: Model, time: float, exposed: float, held: float) -> Weights:
    """Weights of the columns, without a price for memory."""
    return Weights(np.array([time, exposed, held, 1.0]), 0.0, np.zeros(len(model.rooms)))
