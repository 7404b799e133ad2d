"""The plan of a fleet: its schedule, with what is proved about it and what rules without a search would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from planner.base.formatting import in_duration, in_lines, in_percent, labelled
from planner.fleet.schedule import FleetSchedule
from planner.fleet.svg import svg
from planner.fleet.text import drawing, stretches

GAP = 1e-3
"""Relative; closer than this to the bound a schedule is called optimal."""


@dataclass(frozen=True)
class FleetPlan:
    """A fleet's schedule.

    Attributes:
        bound_s: no schedule has a shorter average completion time.
        found_by: the rule or the search that it comes from.
        others_s: average completion times by rules without a search.
        until_s: by when all shall have ended, if there is such a time.
    """

    schedule: FleetSchedule
    bound_s: float
    found_by: str
    others_s: Mapping[str, float]
    until_s: float | None = None

    @property
    def gap(self) -> float:
        """Part of the average completion time that the bound leaves open."""
        return 1 - self.bound_s / self.schedule.mean_completion_s

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        """Whether it is proved that none is better, but for :data:`GAP`."""
        return "optimal" if self.gap <= GAP else "feasible"

    def __str__(self) -> str:
        """The schedule as a drawing in characters, and what every job does when."""
        found = self.schedule
        cluster, count = found.cluster, len(found.jobs)
        proof = "none is shorter" if self.status == "optimal" else f"none is shorter than {in_duration(self.bound_s)}"
        others = in_lines(
            f"{name} {in_duration(seconds)} ({seconds / found.mean_completion_s:.2f}x)"
            for name, seconds in self.others_s.items()
        )
        rows = [
            ("average", f"{in_duration(found.mean_completion_s)} from arrival to end; {proof} (gap {self.gap:.1%})"),
            ("all by", in_duration(found.last_end_s)),
            ("by", self.found_by),
            ("instead", others),
            ("devices", f"{in_percent(found.busy)} of their time trained on"),
            ("moves", f"{found.moves}" + f", {in_duration(found.moved_s)} together" * bool(found.moves)),
        ]
        title = f"{count} job{'s' * (count > 1)} on {cluster.name}, {cluster.world_size} x {cluster.device.kind}"
        return "\n".join([title, labelled(rows), "", *drawing(found), "", *stretches(found)])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.to_svg()

    def to_svg(self) -> str:
        """A picture: a row per device, a colour per job."""
        return svg(self.schedule)
