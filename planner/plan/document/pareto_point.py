"""A point of the curve of step time against memory: the fastest plan within some memory of each device."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from planner.plan.document.document import Document

AnyPlan = TypeVar("AnyPlan", bound=Document, covariant=True)
GIB = 2**30


@dataclass(frozen=True)
class ParetoPoint(Generic[AnyPlan]):
    """The fastest plan found that needs no more than ``memory_bytes`` of each device.

    Attributes:
        memory_bytes: its predicted peak.
        step_s: what a step takes.
        bound_s: no plan that needs so much is faster.
        plan: it can be saved and applied like any other.
    """

    memory_bytes: int
    step_s: float
    bound_s: float
    plan: AnyPlan

    @property
    def gap(self) -> float:
        """Part of its step by which it may be beaten."""
        return 1 - self.bound_s / self.step_s if self.step_s else 0.0


def memory_unit(memory_bytes: int) -> tuple[str, int]:
    """In which unit the price of memory is said beside so much of it, and the unit's bytes."""
    return ("GiB", GIB) if memory_bytes >= GIB else ("MiB", 2**20)


def seconds_per_gib(points: Iterable[ParetoPoint[Document]], point: ParetoPoint[Document]) -> float:
    """What a step takes longer, at least, for each GiB less than a point needs: the slope of the lower convex hull of
    the points to its left, which is the shadow price of memory there; infinite where none is leaner.
    """
    leaner = (each for each in points if each.memory_bytes < point.memory_bytes)
    slopes = ((each.step_s - point.step_s) / (point.memory_bytes - each.memory_bytes) for each in leaner)
    return min(slopes, default=math.inf) * GIB
