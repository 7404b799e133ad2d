"""At which price of a link, a FLOP or a byte from memory one plan would overtake another.

The seconds of a plan are those of its computing, its communication and its memory traffic, each of them about linear in
what a unit of it costs. So the difference of two plans' seconds is nearly a line in each of these prices, and where it
crosses zero is found in a few steps of the secant. Every step prices both plans anew on a cluster that is changed so,
by the one definition of cost; what is linear only in parts is thus found as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from planner.analysis.pipeline.chain import chain_of, links_of
from planner.analysis.pipeline.staged import Staged, price
from planner.cost.cluster import ClusterSpec, Level
from planner.cost.model import CostModel
from planner.formulation.assignment import Assignment
from planner.formulation.certificate import Decided
from planner.formulation.remat.levels import used
from planner.solve.pipeline.stages import evaluate as cut_of
from planner.solve.problem import evaluate

STEPS = (2.0, 4.0, 16.0)
"""So many times faster, and slower, a thing is tried until the order of the plans turns."""
CLOSE = 1e-6
"""A factor is found to this part."""
TRIES = 60
"""So many steps are taken at most."""
PRODUCTS, MEMORY = "arithmetic", "device memory"
Point = tuple[float, float]
"""A factor, and the difference there."""


class PricedPlan(NamedTuple):
    """What a plan decides, and how it runs micro-batched, if it does."""

    assignment: Assignment
    staged: Staged | None


@dataclass(frozen=True)
class Flip:
    """Where two plans take equally long.

    Attributes:
        what: whose speed is changed: ``"node links"``, ``"arithmetic"``, ``"device memory"``.
        factor: it is so many times as fast as stated.
        bytes_per_s: of what moves bytes, as stated; 0 of arithmetic.
    """

    what: str
    factor: float
    bytes_per_s: float

    def __str__(self) -> str:
        before, after = (f"{rate / 1e9:.4g} GB/s" for rate in (self.bytes_per_s, self.factor * self.bytes_per_s))
        rate = f" ({after} instead of {before})" if self.bytes_per_s else ""
        return f"{self.what} {self.factor:.3g} times as fast{rate}"


def flips(one: PricedPlan, other: PricedPlan) -> tuple[Flip, ...]:
    """For each level of links, the device's arithmetic and its memory, the factor of its speed at which the order of
    two plans turns, where there is one within the largest of :data:`STEPS`; the one nearest to 1.

    Rates that a calibration has measured stay as they are.
    """
    cluster, found = one.assignment.space.cost.cluster, []
    rates = {f"{level.name} links": level.bandwidth_bytes_per_s for level in cluster.levels if level.size > 1}
    rates |= {PRODUCTS: 0.0, MEMORY: cluster.device.memory_bandwidth_bytes_per_s}
    for what, rate in rates.items():

        def difference_s(factor: float, what: str = what) -> float:
            cost = CostModel(at_speed(cluster, what, factor))
            return seconds_at(other, cost) - seconds_at(one, cost)

        factor = _crossing(difference_s)
        if factor is not None:
            found.append(Flip(what, factor, rate))
    return tuple(found)


def at_speed(cluster: ClusterSpec, what: str, factor: float) -> ClusterSpec:
    """The cluster with something of it so many times as fast, as :attr:`Flip.what` calls it."""
    device = cluster.device
    if what == MEMORY:
        rate = device.memory_bandwidth_bytes_per_s * factor
        return cluster.model_copy(update={"device": device.model_copy(update={"memory_bandwidth_bytes_per_s": rate})})
    if what == PRODUCTS:
        peaks = {dtype: peak * factor for dtype, peak in device.peak_flops_per_s if peak is not None}
        peak_flops = device.peak_flops_per_s.model_copy(update=peaks)
        return cluster.model_copy(update={"device": device.model_copy(update={"peak_flops_per_s": peak_flops})})
    return cluster.model_copy(
        update={
            "levels": tuple(_faster(each, factor) if what == f"{each.name} links" else each for each in cluster.levels)
        }
    )


def _faster(level: Level, factor: float) -> Level:
    """A level all of whose links, and switches that add up, are so many times as fast."""
    names = ("bandwidth_bytes_per_s", "in_switch_bytes_per_s")
    rates = {name: getattr(level, name) for name in names}
    return level.model_copy(update={name: rate * factor for name, rate in rates.items() if rate is not None})


def seconds_at(plan: PricedPlan, cost: CostModel) -> float:
    """Seconds of a step of the same decisions at other prices, with model data on the device."""
    space = plan.assignment.space.priced(cost)
    assignment, staged = replace(plan.assignment, space=space), plan.staged
    if staged is None:
        decided = Decided(assignment, space.decision_graph)
        return evaluate(decided.problem(None, assignment.recompute), (0,) * len(decided.variables.order)).time_s
    recompute = staged.recompute(space.folded)
    links = links_of(assignment, used(recompute, space.folded), staged.pipeline.schedule)
    savings = [link.levels.index(level) for link, level in zip(links, staged.levels, strict=True)]
    cut = cut_of(staged.pipeline, chain_of(links), staged.cut.bounds, savings)
    return price(links, staged.pipeline, cut, staged.prefetch).step_s


def _crossing(difference_s: Callable[[float], float]) -> float | None:
    """The factor nearest to 1 at which a difference changes its sign; ``None``: none is found, or there is no
    difference.
    """
    now = difference_s(1.0)
    if now == 0.0:
        return None
    before = {-1: (1.0, now), 1: (1.0, now)}
    for times in STEPS:
        for way in (-1, 1):
            factor = times**way
            found = difference_s(factor)
            if (found > 0) != (now > 0):
                return _root(difference_s, before[way], (factor, found))
            before[way] = factor, found
    return None


def _root(difference_s: Callable[[float], float], low: Point, high: Point) -> float:
    """Where a difference is 0 between two factors, by the secant of what a unit costs, and by halves where that does
    not come close: the difference is nearly linear in the price, which is one over the factor.
    """
    ends = [low, high]
    for number in range(TRIES):
        (a, at_a), (b, at_b) = ends
        if at_b == 0.0 or abs(a / b - 1) < CLOSE:
            break
        unit = 1 / a + (1 / b - 1 / a) * (at_a / (at_a - at_b) if number % 3 < 2 else 0.5)
        middle = 1 / unit
        point = middle, difference_s(middle)
        ends = [point, ends[1]] if (point[1] > 0) == (at_a > 0) else [ends[0], point]
    return ends[1][0]
