"""Step time against memory per device: the fastest plans of one model on one cluster, from the leanest on.

:func:`pareto` turns a plan into a :class:`ParetoCurve`, by one search within several limits to memory
(:mod:`planner.search.pareto_front`); every point of it is a plan of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from planner.analysis.pipeline.staged import Staged, in_one_piece
from planner.base.errors import InputError, PlanError
from planner.base.files import check_path, write_text
from planner.base.formatting import in_bytes, in_seconds
from planner.formulation.assignment import Assignment
from planner.plan.document.document import WITHOUT_GRAPH, Document
from planner.plan.document.pareto_point import AnyPlan, ParetoPoint, seconds_per_gib
from planner.search.branch_and_bound import Searched
from planner.search.candidates import Incumbent
from planner.search.pareto_front import FrontPoint, Stopped, pareto_front
from planner.search.search import begin_search
from planner.search.search_context import Progress

Made = TypeVar("Made", bound=Document)
STOPPED: dict[Stopped, str] = {
    "complete": "between two points no plan can be faster by more than the gap",
    "open": "between two points none was found that is faster by more than the gap; bounds of some are open",
    "points": "more points would show more",
    "time": "the time limit came first",
}


@dataclass(frozen=True, repr=False)
class ParetoCurve(Generic[AnyPlan]):
    """Step time against memory per device; prints as a table, and is a picture in a notebook.

    Attributes:
        points: the leanest first, each faster than the one before.
        plan: the one that was asked.
        stopped: why there are no more points; see :data:`STOPPED`.
    """

    points: tuple[ParetoPoint[AnyPlan], ...]
    plan: AnyPlan
    stopped: Stopped

    def within(self, memory_bytes: int) -> ParetoPoint[AnyPlan]:
        """The fastest point that needs no more memory.

        Raises:
            InputError: the leanest needs more.
        """
        found = [point for point in self.points if point.memory_bytes <= memory_bytes]
        if not found:
            raise InputError(
                f"the leanest plan on the curve needs {in_bytes(self.points[0].memory_bytes)} a device, and was asked "
                f"for within {in_bytes(memory_bytes)}: ask for as much, or plan for more devices"
            )
        return found[-1]

    def seconds_per_gib(self, point: ParetoPoint[Document]) -> float:
        """What a step would take longer for each GiB less than the point needs, the shadow price of memory: the slope
        of the curve's lower convex hull to the left of the point; of the leanest infinite.
        """
        return seconds_per_gib(self.points, point)

    def price_for(self, plan: Document) -> float:
        """The shadow price of memory where a plan of the curve's model and cluster is; 0 where none is leaner.

        Raises:
            InputError: the plan is of another model or cluster.
        """
        if (plan.model, plan.cluster) != (self.plan.model, self.plan.cluster):
            raise InputError(
                f"the curve is of {self.plan.model['class']} on {self.plan.cluster.name!r}, and the plan of "
                f"{plan.model['class']} on {plan.cluster.name!r}: give the curve that this plan's pareto() returns"
            )
        price = self.seconds_per_gib(self.within(plan.predicted.peak_bytes))
        return price if math.isfinite(price) else 0.0

    def __repr__(self) -> str:
        least, most = self.points[0], self.points[-1]
        return (
            f"<ParetoCurve of {self.plan.model['class']} on {self.plan.cluster.name}: {len(self.points)} points, "
            f"{in_seconds(least.step_s)} within {in_bytes(least.memory_bytes)} to {in_seconds(most.step_s)} within "
            f"{in_bytes(most.memory_bytes)}>"
        )

    def __str__(self) -> str:
        """A row for each point: memory, step, the bound of what its memory allows, the price of a GiB, and the plan."""
        from planner.plan.report.pareto import table

        return table(self.plan, self.points, STOPPED[self.stopped])

    def _repr_html_(self) -> str:
        """The curve; its points can be chosen, and show what their plans do."""
        from planner.plan.page.curve import fragment

        return fragment(self.plan, self.points, STOPPED[self.stopped])

    def to_html(self) -> str:
        """The plan's page with the curve on it, and the plans of its points as files to download."""
        from planner.plan.page.curve import page

        return page(self.plan, self.points, STOPPED[self.stopped])

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_html`, atomically; raises :class:`PlanError` where the file cannot be written."""
        check_path(path, "file to save the curve in", PlanError)
        try:
            write_text(Path(path), self.to_html())
        except OSError as error:
            raise PlanError(f"cannot write {os.path.abspath(path)!r}: {error.strerror}") from error


def pareto(
    plan: Made,
    staged: Staged | None,
    described: Callable[[Searched, int], Made],
    *,
    points: int,
    time_limit_s: float,
    gap: float,
    progress: Progress | None = None,
) -> ParetoCurve[Made]:
    """The curve of a plan.

    Args:
        staged: how it runs micro-batched, if it does.
        described: writes what a search found within so many bytes down as a plan.
        points, time_limit_s, gap, progress: see :meth:`planner.plan.plan.Plan.pareto`.

    Raises:
        PlanError: the plan was read from a file, without its model.
        InputError: fewer than 2 points, or no time.
    """
    if plan.assignment is None:
        raise PlanError(WITHOUT_GRAPH)
    if type(points) is not int or points < 2:
        raise InputError(f"points is {points!r}; give how many plans the curve may have, 2 or more")
    space = plan.assignment.space
    with begin_search(
        space.graph,
        plan.cluster,
        replace(plan.pins, offload="none"),
        space.training,
        max_axes=plan.search.max_axes,
        time_limit_s=time_limit_s,
        gap=gap,
        progress=progress,
    ) as begun:
        front, stopped = pareto_front(begun, _first_point(plan, plan.assignment, staged), points)
    found = (
        ParetoPoint(
            each.memory_bytes,
            each.step_s,
            each.bound_s,
            plan if each.found is None else described(each.found.bounded(each.bound_s), each.memory_bytes),
        )
        for each in front
    )
    return ParetoCurve(tuple(found), plan, stopped)


def _first_point(plan: Document, assignment: Assignment, staged: Staged | None) -> FrontPoint:
    """The plan as the fastest within all that a device can use, as far as is known."""
    space, limit_bytes = assignment.space, plan.cluster.device.usable_bytes
    choices = tuple(space.options[each].index(assignment.chosen[each]) for each in space.variables)  # type: ignore[arg-type]
    best = Incumbent(space, choices, staged or in_one_piece(assignment))
    step_s = best.evaluation.time_s
    return FrontPoint(plan.predicted.peak_bytes, limit_bytes, step_s, step_s * (1 - plan.search.gap), best)
