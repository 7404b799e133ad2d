"""Traces the least step time over memory per device: the fastest plan within each of several limits, by one search.

What the fastest plan takes within a limit is a step function, which falls where another plan comes to fit. Each search
within a limit finds one of its points: the plan, the memory that it needs, and a bound that holds from there up to the
limit. The limits are halved until nothing fits, so that the leanest plan is known; then the widest step between two
points is halved, until there are as many as wanted or none is left.

The model is folded, and each mesh formulated, once for all limits; the plan of a lower limit fits within a
higher one, where the search starts from it; and the bound of a higher limit holds within a lower one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from planner.base.errors import AutoparError, InfeasibleError
from planner.base.formatting import in_bytes, in_seconds
from planner.search.branch_and_bound import Searched
from planner.search.candidates import PROVED, Incumbent
from planner.search.search import SearchBegun

Stopped = Literal["complete", "open", "points", "time"]
"""Why no more points were sought: none between is faster by more than the gap, as was proved or not (open), there are
enough, or the time is over."""
HALVED = 0.5
"""Each limit on the way down is this part of what the leanest plan known takes."""


@dataclass(frozen=True)
class FrontPoint:
    """The fastest plan found within any limit from what it needs up to ``limit_bytes``.

    Attributes:
        memory_bytes: what it needs of each device.
        step_s, bound_s: what it takes, and what no plan within its memory beats.
        best: the plan, as the search knows it.
        found: the search's result; ``None`` of the plan that it started from.
    """

    memory_bytes: int
    limit_bytes: int
    step_s: float
    bound_s: float
    best: Incumbent
    found: Searched | None = None


def pareto_front(begun: SearchBegun, first: FrontPoint, most: int) -> tuple[tuple[FrontPoint, ...], Stopped]:
    """Points from the leanest to the fastest, each faster than the one before; and why there are no more.

    Args:
        begun: a search with model data on the device, with the time that it has for all limits together.
        first: the plan at the highest limit.
        most: so many points at most, 2 or more.
    """
    front = _KnownPoints(begun, first)
    while not begun.context.is_late():
        limit_bytes = front.lower_limit or front.limit_between
        if not limit_bytes:
            return front.bounded, "complete" if front.is_proved else "open"
        if len(front.points) == most:
            return front.bounded, "points"
        front.search(limit_bytes, most)
    return front.bounded, "time"


class _KnownPoints:
    """The points that are known so far, the leanest first, and what is proved within which limits."""

    def __init__(self, begun: SearchBegun, first: FrontPoint):
        self._begun, self._gap = begun, max(begun.context.gap, PROVED)
        self.points = [first]
        self._proved = [(first.limit_bytes, first.bound_s)]
        self._needed_bytes = 0
        """Below this no plan was found."""

    @property
    def bounded(self) -> tuple[FrontPoint, ...]:
        """The points, each with the bound of any limit from its memory on."""
        return tuple(
            replace(
                point,
                bound_s=min(
                    point.step_s,
                    max((bound_s for limit, bound_s in self._proved if limit >= point.memory_bytes), default=0.0),
                ),
            )
            for point in self.points
        )

    @property
    def is_proved(self) -> bool:
        """Whether no plan is faster than any of the points by more than the gap."""
        return all(each.bound_s >= each.step_s * (1 - self._gap) for each in self.bounded)

    @property
    def lower_limit(self) -> int:
        """The next limit on the way down; 0: the leanest plan is known."""
        least = self.points[0].memory_bytes
        limit = max(math.floor(least * HALVED), self._needed_bytes)
        return limit if limit < least else 0

    @property
    def limit_between(self) -> int:
        """The limit in the middle of the widest step between two points, in part of both; 0: all are near enough."""
        steps = [
            (math.log(high.memory_bytes / low.limit_bytes) * math.log(low.step_s / high.step_s), low, high)
            for low, high in pairwise(self.points)
            if low.step_s * (1 - self._gap) > high.step_s and low.limit_bytes + 1 < high.memory_bytes
        ]
        if not steps:
            return 0
        _, low, high = max(steps, key=lambda step: step[0])
        return min(high.memory_bytes - 1, math.ceil(math.sqrt(low.limit_bytes * high.memory_bytes)))

    def search(self, limit_bytes: int, most: int) -> None:
        """Search within one limit."""
        context, now = self._begun.context, time.monotonic()
        share_s = (context.deadline - now) / (1 + most - len(self.points))
        context.say(f"within {in_bytes(limit_bytes)} a device")
        known = next((each for each in reversed(self.points) if each.memory_bytes <= limit_bytes), None)
        within = context.within(limit_bytes, now + share_s)
        try:
            found = self._begun.plan(within, known=None if known is None else known.best)
        except InfeasibleError as error:
            self._nothing_within(limit_bytes, known, error)
            return
        step_s = found.evaluation.time_s
        context.say(f"  {in_seconds(step_s)} a step")
        self._proved.append((limit_bytes, found.bound_s))
        if known is not None and step_s >= known.step_s * (1 - PROVED):
            self._reaches(known, limit_bytes)
        else:
            point = FrontPoint(found.peak_bytes, limit_bytes, step_s, found.bound_s, found.best, found)
            self.points = _staircase([*self.points, point])

    def _nothing_within(self, limit_bytes: int, known: FrontPoint | None, error: AutoparError) -> None:
        """No plan was found within a limit: none but the one known, or none at all."""
        if known is not None:  # devices that share no operator share blocks, of which only some were looked at
            self._reaches(known, limit_bytes)
            return
        excess_bytes = error.excess_bytes if isinstance(error, InfeasibleError) else 0
        needed = limit_bytes + excess_bytes if excess_bytes > 0 else self.points[0].memory_bytes
        self._needed_bytes = max(self._needed_bytes + 1, needed)

    def _reaches(self, point: FrontPoint, limit_bytes: int) -> None:
        """Up to a limit nothing faster than a point was found."""
        far = replace(point, limit_bytes=limit_bytes)
        self.points = [far if each is point else each for each in self.points]


def _staircase(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """Those that no leaner one is as fast as, the leanest first."""
    kept: list[FrontPoint] = []
    for each in sorted(points, key=lambda each: (each.memory_bytes, each.step_s)):
        if not kept or each.step_s < kept[-1].step_s * (1 - PROVED):
            kept.append(each)
        else:
            kept[-1] = replace(kept[-1], limit_bytes=max(kept[-1].limit_bytes, each.limit_bytes))
    return kept
