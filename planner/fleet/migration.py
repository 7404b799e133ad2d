"""What it costs to move a job: the seconds between two allocations in which it trains on nothing."""

from __future__ import annotations

from planner.cost.cluster import ClusterSpec
from planner.fleet.job import FleetJob


def migration_s(job: FleetJob, cluster: ClusterSpec, before: int, after: int) -> float:
    """Seconds to move a job from so many devices to others.

    The state is cut evenly over the devices that hold it, and over those that shall, and crosses the slowest link of
    the cluster: the fewer of both sides say how long that takes. A job that waited (``before`` is 0) reads its state
    back from where it was saved, over the same links.
    """
    link = min(level.bandwidth_bytes_per_s for level in cluster.levels if level.size > 1 or cluster.world_size == 1)
    return job.restart_s + job.state_bytes / (link * (min(before, after) or after))
