"""Turn a problem into what no assignment can beat, by a few eliminations: far less work than solving it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.solve.choices.best import BestFound
from planner.solve.choices.cheapest import Cheapest, LeastWeighted, low_peak
from planner.solve.choices.model import HALF_BYTE, ChoiceModel, Totals, build_model, drop_forbidden, restrict
from planner.solve.choices.relax import Multipliers, Plane, TrustRegion, plane
from planner.solve.problem import Problem, evaluate, least_bytes, most_bytes

_STEPS = 14
_CLOSE = 1e-4  # relative distance from the bound to what it can rise to at which more steps are not worth their time
_FREE = Multipliers()
_DEPTH = 4  # so often a front is halved
_NEAR = 0.01  # the same where no bound is asked for


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

    What is held at least is found where the fastest assignment does not fit.
    """
    problem.check()
    end = _end(problem)
    if end is None:
        return Bounds(math.inf, math.inf)
    is_limited, best, light = problem.limit_bytes is not None, BestFound(problem, math.inf), None
    peak_bytes = problem.limit_bytes - end.room_bytes if problem.limit_bytes is not None else 0.0
    time_s, box = -math.inf, TrustRegion(end.model, [], end.room_bytes)
    for (found,) in _climb((end,), box):
        time_s = max(time_s, found.bound_s)
        best.offer_assignment(found.least.model, found.least.assignment)
        if is_limited and light is None and found.plane.over_bytes > 0:
            least_memory = end.cheapest.least_memory
            light = least_memory.choices
            best.offer(light)
            peak_bytes += least_memory.bound
            if least_memory.bound > end.room_bytes:
                break  # nothing fits, however fast
            box.add(end.plane(least_memory))
        if time_s >= min(enough_s, best.objective_s * (1 - _CLOSE)):
            break
    return Bounds(time_s, peak_bytes, best.choices, light)


def lightest(problem: Problem) -> tuple[int, ...] | None:
    """An assignment of low peak, whether it fits or not; ``None`` when every assignment is forbidden.

    What holds least may need much for a moment; so it is found again among choices that need less.
    """
    end = _end(problem)
    low = None if end is None else low_peak(end.model, lambda capped: Cheapest(capped).least_memory)
    return None if low is None else low.choices


def almost_lightest(problem: Problem, slacks: Sequence[float], most: float = math.inf) -> tuple[tuple[int, ...], ...]:
    """An assignment of low peak, and those met on the way to fast ones of at most ``slacks`` times that peak.

    Some may need more. None when every assignment is forbidden, or the first needs more than ``most`` bytes.
    """
    light = lightest(replace(problem, limit_bytes=most_bytes(problem))) if least_bytes(problem) <= most else None
    least = math.inf if light is None else evaluate(problem, light).peak_bytes
    if light is None or least > most:
        return ()
    limits = [math.ceil(slack * least) for slack in slacks]
    if not limits:
        return (light,)
    end = _end(replace(problem, limit_bytes=max(limits)))
    assert end is not None, "the assignment that was found is allowed"
    met = [end.cheapest.least_memory]
    for limit in limits:
        best = BestFound(replace(problem, limit_bytes=limit), math.inf)
        for each in met:
            best.offer_assignment(each.model, each.assignment)
        limited = replace(end, room_bytes=end.room_bytes - (max(limits) - limit))
        box = TrustRegion(end.model, [limited.plane(each) for each in met], limited.room_bytes)
        for (found,) in _climb((limited,), box, box.highest()[0], _NEAR):
            met.append(found.least)
            best.offer_assignment(end.model, found.least.assignment)
            if found.bound_s >= best.objective_s * (1 - _NEAR):
                break
    return tuple(dict.fromkeys([light, *(each.choices for each in met if each.totals.allowed)]))


def corners(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Assignments that are fastest at some price of a byte, fastest first, whatever the limit: a few, from no price up.

    Between two the price is the one at which they cost the same.
    """
    end = _end(replace(problem, limit_bytes=most_bytes(problem)))
    if end is None:
        return ()
    free = max(
        (found for (found,) in _climb((end,), TrustRegion(end.model, [], end.room_bytes))),
        key=lambda each: each.bound_s,
    )

    def between(fast: LeastWeighted, light: LeastWeighted, depth: int) -> list[LeastWeighted]:
        first, last = fast.totals, light.totals
        slower_s, fewer_bytes = mixed_s(last) - mixed_s(first), first.held_bytes - last.held_bytes
        if not depth or slower_s <= 0 or fewer_bytes <= 0:
            return []
        price = slower_s / fewer_bytes
        found = end.cheapest.under(replace(free.multipliers, price=price).weights(end.model))
        cost = mixed_s(found.totals) + price * found.totals.held_bytes
        if cost >= (mixed_s(first) + price * first.held_bytes) * (1 - _CLOSE):
            return []
        return [*between(fast, found, depth - 1), found, *between(found, light, depth - 1)]

    def mixed_s(totals: Totals) -> float:
        mix = free.multipliers.mix
        return (1 - mix) * totals.time_s + mix * totals.exposed_s

    fast, light = free.least, end.cheapest.least_memory
    return tuple(dict.fromkeys(each.choices for each in (fast, *between(fast, light, _DEPTH), light)))


@dataclass(frozen=True)
class BoundBetween:
    """No assignment that fits takes less than ``time_s``; ``choices`` are those met at the best bound, to be tried."""

    time_s: float
    choices: tuple[tuple[int, ...], ...] = ()


def lower_bound_between(first: Problem, last: Problem, enough_s: float = math.inf) -> BoundBetween:
    """A bound for every problem on the way from ``first`` to ``last``, whose costs change evenly between both.

    At a fixed mix and price the least weighted cost is a minimum of straight lines, so concave along the way: no
    problem between lies below both ends, and none fits where neither end does.
    """
    ends = tuple(end for end in (_end(first), _end(last)) if end is not None)
    if len(ends) < 2 or all(end.cheapest.least_memory.bound > end.room_bytes for end in ends):
        return BoundBetween(math.inf)
    bound_s, best = -math.inf, tuple[_EndBound, ...]()
    box = TrustRegion(ends[0].model, [end.plane(end.cheapest.least_memory) for end in ends], ends[0].room_bytes)
    for found in _climb(ends, box):
        if _least_s(found) > bound_s:
            bound_s, best = _least_s(found), found
        if bound_s >= enough_s:
            break
    return BoundBetween(bound_s, tuple(dict.fromkeys(each.least.choices for each in best)))


@dataclass(frozen=True)
class _EndBound:
    """An end's cheapest assignment at some multipliers, its plane, and the bound that they give."""

    multipliers: Multipliers
    least: LeastWeighted
    plane: Plane
    bound_s: float


@dataclass(frozen=True)
class _End:
    """A problem, one of those between which others lie.

    ``room_bytes`` may be held beside the operator that needs most for itself at least.
    """

    model: ChoiceModel
    cheapest: Cheapest
    room_bytes: float

    def at(self, multipliers: Multipliers) -> _EndBound:
        """The cheapest assignment."""
        least = self.cheapest.under(multipliers.weights(self.model))
        return _EndBound(multipliers, least, self.plane(least), least.bound - multipliers.price * self.room_bytes)

    def plane(self, least: LeastWeighted) -> Plane:
        """No multipliers give a bound above it."""
        return plane(self.model, least.totals, self.room_bytes)


def _climb(
    ends: tuple[_End, ...], box: TrustRegion, multipliers: Multipliers = _FREE, close: float = _CLOSE
) -> Iterator[tuple[_EndBound, ...]]:
    """The ends at one point after another, each where the lowest plane so far is highest, up to where that is close.

    The step time is the larger of two sums, so any mix of them is a lower bound; bytes beyond the limit may be charged
    at any price. See :mod:`planner.solve.choices.relax`.
    """
    bound_s = -math.inf
    for _ in range(_STEPS):
        found = tuple(end.at(multipliers) for end in ends)
        bound_s = max(bound_s, _least_s(found))
        yield found
        if math.isinf(bound_s):
            break
        for each in found:
            box.add(each.plane)
        multipliers, height_s = box.highest()
        if height_s - bound_s <= close * abs(bound_s):
            break


def _least_s(found: tuple[_EndBound, ...]) -> float:
    """The bound for all that lies between the ends."""
    return min(each.bound_s for each in found)


def _end(problem: Problem) -> _End | None:
    """A problem without choices that need more than the limit for themselves, unless that leaves nothing.

    ``None`` where every assignment is forbidden.
    """
    model = build_model(problem)
    kept = None
    if problem.limit_bytes is not None:
        kept = restrict(model, [values <= problem.limit_bytes for values in model.transient])
    left = (None if kept is None else drop_forbidden(kept)) or drop_forbidden(model)
    if left is None:
        return None
    own = max((float(values.min()) for values in left.transient), default=0.0)
    return _End(left, Cheapest(left), left.limit_bytes - own + HALF_BYTE)
