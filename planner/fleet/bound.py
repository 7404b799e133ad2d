"""What no schedule of a fleet beats."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from planner.fleet.job import FleetJob


def bound_s(jobs: Sequence[FleetJob], devices: int) -> float:
    """A bound of the average completion time, from a job's arrival to its end.

    The greater of two: every job alone on the cluster; and all jobs on one machine that works off the device-seconds
    that each takes where it is most efficient, of which the shortest remaining first is optimal (Schrage 1968).
    """
    alone_s = sum(job.least_s for job in jobs)
    return max(alone_s, _one_machine_s(jobs, devices)) / len(jobs)


def _one_machine_s(jobs: Sequence[FleetJob], devices: int) -> float:
    coming = sorted(jobs, key=lambda job: job.arrival_s)
    waiting: list[float] = []
    now_s, total_s, number = 0.0, 0.0, 0
    while number < len(coming) or waiting:
        if not waiting:
            now_s = max(now_s, coming[number].arrival_s)
        while number < len(coming) and coming[number].arrival_s <= now_s:
            heapq.heappush(waiting, coming[number].least_device_s / devices)
            number += 1
        work_s = heapq.heappop(waiting)
        until_s = now_s + work_s
        if number < len(coming) and coming[number].arrival_s < until_s:
            heapq.heappush(waiting, until_s - coming[number].arrival_s)
            until_s = coming[number].arrival_s
        else:
            total_s += until_s
        now_s = until_s
    return total_s - sum(job.arrival_s for job in jobs)
