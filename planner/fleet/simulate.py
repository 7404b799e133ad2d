"""Simulates a fleet under a rule that gives devices to jobs; the one definition of what a schedule costs.

The rule is asked whenever a job arrives or ends. Whoever goes from one allocation to another, or goes on after it
waited, is moved first (:mod:`planner.fleet.migration`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.cost.cluster import ClusterSpec
from planner.fleet.job import Allocation, FleetJob
from planner.fleet.migration import migration_s
from planner.fleet.placement import Devices, place
from planner.fleet.schedule import FleetSchedule, FleetSegment


@dataclass(frozen=True)
class ActiveJob:
    """A job that has arrived and not ended.

    Attributes:
        samples: that remain.
        allocation: what it runs on; ``None``: it waits.
        devices: those that it has.
        moving_s: of the move there, what is left.
        move_s: what the move takes in all.
        start_s: since when it is there.
        has_run: somewhere before, so that to go on is a move.
    """

    job: FleetJob
    samples: float
    allocation: Allocation | None = None
    devices: Devices = ()
    moving_s: float = 0.0
    move_s: float = 0.0
    start_s: float = 0.0
    has_run: bool = False

    def move_to_s(self, cluster: ClusterSpec, to: Allocation) -> float:
        """Seconds that it takes to bring it to other devices; to start for the first time is no move."""
        return migration_s(self.job, cluster, len(self.devices), to.devices) if self.has_run else 0.0

    @property
    def left_s(self) -> float:
        """Until it ends, if it stays as it is."""
        return self.moving_s + self.samples / self.allocation.samples_per_s if self.allocation else math.inf

    def after(self, seconds: float) -> ActiveJob:
        """The same later."""
        if self.allocation is None:
            return self
        trained_s = max(0.0, seconds - self.moving_s)
        left = max(0.0, self.samples - trained_s * self.allocation.samples_per_s)
        return replace(self, samples=left, moving_s=max(0.0, self.moving_s - seconds))


FleetRule = Callable[[float, Sequence[ActiveJob]], Sequence[Allocation | None]]
"""Gives each job one of its allocations, or ``None``, at a time; jobs are in the order of their arrival."""


def simulate(jobs: Sequence[FleetJob], cluster: ClusterSpec, rule: FleetRule) -> FleetSchedule:
    """What comes of a rule."""
    coming = sorted(jobs, key=lambda job: job.arrival_s)
    active: list[ActiveJob] = []
    segments: list[FleetSegment] = []
    ends: dict[str, float] = {}
    now_s = 0.0
    while coming or active:
        if not active:
            now_s = max(now_s, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now_s:
            job = coming.pop(0)
            active.append(ActiveJob(job, job.samples))
        active = _allocated(active, cluster, rule(now_s, active), now_s, segments)
        left_s = min(each.left_s for each in active)
        until_s = min(now_s + left_s, coming[0].arrival_s if coming else math.inf)
        assert math.isfinite(until_s), "jobs are left, and the rule lets none run"
        ended = {each.job.name for each in active if now_s + each.left_s <= until_s}
        active = [each.after(until_s - now_s) for each in active]
        now_s = until_s
        for each in active:
            if each.job.name in ended:
                segments.append(_segment(each, now_s))
                ends[each.job.name] = now_s
        active = [each for each in active if each.job.name not in ended]
    segments.sort(key=lambda each: each.start_s)
    return FleetSchedule(tuple(jobs), cluster, tuple(segments), ends)


def _allocated(
    active: Sequence[ActiveJob],
    cluster: ClusterSpec,
    given: Sequence[Allocation | None],
    now_s: float,
    segments: list[FleetSegment],
) -> list[ActiveJob]:
    """The jobs on what they are given; what they leave is added to the segments."""
    pairs = [*zip(active, given, strict=True)]
    wanted = {each.job.name: to.devices for each, to in pairs if to is not None}
    stays = {each.job.name: each.devices for each, to in pairs if to is not None and to == each.allocation}
    per_node = cluster.spans[0]
    placed = place(wanted, stays, cluster.world_size // per_node, per_node)
    found = []
    for each, to in pairs:
        devices = placed.get(each.job.name, ())
        if (to, devices) == (each.allocation, each.devices):
            found.append(each)
            continue
        if each.allocation is not None and now_s > each.start_s:
            segments.append(_segment(each, now_s))
        move_s = each.move_to_s(cluster, to) if to else 0.0
        found.append(
            replace(
                each,
                allocation=to,
                devices=devices,
                moving_s=move_s,
                move_s=move_s,
                start_s=now_s,
                has_run=each.has_run or to is not None,
            )
        )
    return found


def _segment(each: ActiveJob, end_s: float) -> FleetSegment:
    assert each.allocation is not None
    moving_s = each.move_s - each.moving_s
    return FleetSegment(each.job, each.allocation, each.devices, each.start_s, end_s, moving_s)
