"""A fleet's schedule: which job had which devices from when to when, and what that comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.cost.cluster import ClusterSpec
from planner.fleet.job import Allocation, FleetJob
from planner.fleet.placement import Devices


@dataclass(frozen=True)
class FleetSegment:
    """A stretch in which a job has the same devices and batch.

    Attributes:
        moving_s: at its beginning, in which the job is moved here and trains on nothing.
        samples: that it trains on in the rest.
    """

    job: FleetJob
    allocation: Allocation
    devices: Devices
    start_s: float
    end_s: float
    moving_s: float

    @property
    def samples(self) -> float:
        """What is trained on, at the allocation's pace."""
        return (self.end_s - self.start_s - self.moving_s) * self.allocation.samples_per_s


@dataclass(frozen=True)
class FleetSchedule:
    """What every job of a fleet does.

    Attributes:
        segments: in the order of their starts.
        end_s: of every job, by name.
    """

    jobs: tuple[FleetJob, ...]
    cluster: ClusterSpec
    segments: tuple[FleetSegment, ...]
    end_s: Mapping[str, float]

    @cached_property
    def mean_completion_s(self) -> float:
        """From a job's arrival to its end, on average."""
        return sum(self.end_s[job.name] - job.arrival_s for job in self.jobs) / len(self.jobs)

    @cached_property
    def last_end_s(self) -> float:
        """When all are done."""
        return max(self.end_s.values())

    @property
    def moved_s(self) -> float:
        """Seconds that jobs were being moved, together."""
        return sum(each.moving_s for each in self.segments)

    @property
    def moves(self) -> int:
        """How often a job went on elsewhere than it was, or after it waited."""
        return len(self.segments) - len(self.jobs)

    @property
    def busy(self) -> float:
        """Share of the devices' time, from the first arrival to the last end, in which they train."""
        seconds = sum(len(each.devices) * (each.end_s - each.start_s - each.moving_s) for each in self.segments)
        whole_s = self.last_end_s - min(job.arrival_s for job in self.jobs)
        return seconds / (whole_s * self.cluster.world_size)
