"""Corrections: by how much steps that ran took longer than was predicted, and how much single predictions scatter.

``(predicted, observed) seconds of blocks and collectives -> Correction`` of each kind of work. Ratios of times scatter
as their logarithms do: a correction holds their mean, by which prices are multiplied, and their deviation, from which
the interval of a new prediction follows (that of one more value of a normal distribution whose mean and deviation were
estimated from so many: Student's t).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from planner.base.units import Described

Work = Literal["compute", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
CONFIDENCE = 0.9
"""Of intervals: so many of predictions are to lie in theirs."""
FEWEST = 4
"""Observations that an interval takes."""
KINDS_OF: Mapping[str, tuple[Work, ...]] = {
    "compute": ("compute",),
    "recompute": ("compute",),
    "optimizer": ("compute",),
    "communication": ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"),
    "gradients": ("reduce_scatter", "all_reduce"),
    "bubble": ("compute",),
}
"""Use of a step's seconds -> whose predictions it is made of."""


class Correction(Described):
    """What predictions of one kind of work are multiplied by.

    Attributes:
        work: computing, or a collective.
        ratio: observed over predicted, the geometric mean.
        spread: standard deviation of the logarithm of single ratios.
        count: how many there were, each a distinct block or call.
    """

    work: Work = Field(examples=["compute"])
    ratio: float = Field(gt=0, examples=["1.08"])
    spread: float = Field(ge=0, examples=["0.06"])
    count: int = Field(ge=1, examples=["12"])

    @property
    def factors(self) -> tuple[float, float] | None:
        """Between which multiples of a corrected prediction what is observed lies; ``None``: of too few."""
        if self.count < FEWEST:
            return None
        reach = student_t(CONFIDENCE, self.count - 1) * self.spread * math.sqrt(1 + 1 / self.count)
        return math.exp(-reach), math.exp(reach)


class Pair(NamedTuple):
    """Seconds of one block in one direction, or of all calls of one collective, as predicted and as observed."""

    work: Work
    predicted_s: float
    observed_s: float


def corrections(pairs: Iterable[Pair], before: Iterable[Correction] = ()) -> tuple[Correction, ...]:
    """The correction of each kind of work that was seen.

    Args:
        before: those that the predictions were multiplied by already.
    """
    logs: dict[Work, list[float]] = {}
    for pair in pairs:
        if pair.predicted_s > 0 and pair.observed_s > 0:
            logs.setdefault(pair.work, []).append(math.log(pair.observed_s / pair.predicted_s))
    earlier = {each.work: each for each in before}
    found = {
        work: Correction(
            work=work,
            ratio=math.exp(statistics.fmean(each)) * (earlier[work].ratio if work in earlier else 1.0),
            spread=statistics.stdev(each) if len(each) > 1 else 0.0,
            count=len(each),
        )
        for work, each in logs.items()
    }
    return tuple((earlier | found).values())


def interval_s(time_s: Mapping[str, float], known: Iterable[Correction]) -> tuple[float, float] | None:
    """Between which seconds a step lies, whose predicted seconds are given by use; ``None``: nothing is known of it.

    What is computed errs in one direction, and so does each use: their reaches add up, which errs on the wide side.
    """
    factors = {each.work: found for each in known if (found := each.factors) is not None}
    low = high = 0.0
    for use, seconds in time_s.items():
        ends = [factors[work] for work in KINDS_OF.get(use, ()) if work in factors] or [(1.0, 1.0)]
        low += seconds * min(end for end, _ in ends)
        high += seconds * max(end for _, end in ends)
    return (low, high) if factors else None


def student_t(confidence: float, freedom: int) -> float:
    """Within which multiple of the deviation so many of a Student-t distribution's values lie, on both sides of 0.

    Abramowitz and Stegun, 26.7.5: to a percent from three degrees of freedom on.
    """
    x = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return float(x + sum(term / freedom**power for power, term in enumerate(terms, 1)))
