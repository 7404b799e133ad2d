"""What jobs may run on: allocations from tables of step times, or from their plans at other batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from planner.base.errors import FleetError, InfeasibleError, PlanError
from planner.base.formatting import in_bytes, in_duration
from planner.cost.cluster import ClusterSpec
from planner.fleet.job import Allocation, FleetJob, fastest_allocations
from planner.fleet.jobs_file import FleetFile, StatedJob
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.plan.plan import Plan, describe_search
from planner.search.advice import Request

PROVED = 0.05
"""Part of a step that the plan of a point may leave open."""
Captured = Callable[[int], tuple[Graph, Mapping[str, Any]]]


def sizes_of(cluster: ClusterSpec) -> tuple[int, ...]:
    """Numbers of devices for which a model is planned: halves of a node, and doublings of nodes up to all of them."""
    per_node, whole = cluster.spans[0], cluster.world_size
    inside = [per_node]
    while inside[-1] % 2 == 0:
        inside.append(inside[-1] // 2)
    nodes = [per_node << doubling for doubling in range(1, (whole // per_node).bit_length())]
    return tuple(sorted({*inside, *nodes, whole}))


def part_of(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """So many devices of a cluster, in as few units of each level as hold them."""
    levels = []
    for level in cluster.levels:
        size = min(level.size, devices)
        levels.append(level.model_copy(update={"size": size}))
        devices //= size
    return cluster.model_copy(update={"levels": tuple(levels)})


def batches_within(limits: tuple[int, int]) -> Iterator[int]:
    """The largest batch and its halves, as far as they are whole and not below the least."""
    least, batch = limits
    while batch >= least:
        yield batch
        if batch % 2:
            return
        batch //= 2


def planned_steps(
    job: StatedJob, cluster: ClusterSpec, captured: Captured, time_limit_s: float
) -> Iterator[Allocation]:
    """Step times of a job's model on parts of a cluster, at every batch that its limits allow.

    Plans are searched for at the largest and at the smallest batch that fit. Others have the decisions of one of them;
    a search for each may find faster ones.

    Args:
        captured: the model's graph and facts at a batch.
        time_limit_s: of each search.

    Raises:
        InfeasibleError: it fits on no part; says by how much.
    """
    training, none = Training(job.optimizer_bytes), Pins.parse({"offload": "none"})
    batches, graph_at = [*batches_within(job.limits)], cache(captured)
    refused: list[InfeasibleError] = []

    def planned(part: ClusterSpec, batch: int) -> Plan | None:
        graph, facts = graph_at(batch)
        try:
            found = Request(graph, part, none, training, time_limit_s=time_limit_s, gap=PROVED).search()
        except InfeasibleError as error:
            refused.append(error)
            return None
        return describe_search(found, facts, none.to_dict(), {}, MAX_AXES, time_limit_s)

    fits = False
    for devices in sizes_of(cluster):
        part, searched = part_of(cluster, devices), set[int]()
        for order in (batches, batches[::-1]):
            for batch in order:
                if batch in searched:
                    break
                searched.add(batch)
                if (plan := planned(part, batch)) is not None:
                    fits = True
                    yield Allocation(devices, batch, plan.predicted.step_time_s)
                    yield from _at_other_batches(plan, batch, batches)
                    break
    if not fits:
        error = refused[-1]
        short = f", {in_bytes(error.excess_bytes)} more than a device has" if error.excess_bytes > 0 else ""
        raise InfeasibleError(
            f"job {job.name!r} fits on no part of {cluster.name!r}, not even with batch {batches[-1]} on all "
            f"{cluster.world_size} devices{short}: {error}",
            error.excess_bytes,
        )


def _at_other_batches(plan: Plan, planned: int, batches: Iterable[int]) -> Iterator[Allocation]:
    """With as many micro-batches, and with micro-batches as large."""
    count = int(plan.mesh.micro_batches)
    for batch in batches:
        as_large = {count * batch // planned} if count > 1 and count * batch % planned == 0 else set()
        for micro_batches in {None, *as_large} if batch != planned else ():
            try:
                step = plan.at(batch=batch, micro_batches=micro_batches)
            except PlanError:
                continue  # what is cut evenly is not, or the step becomes one without micro-batches
            if step.peak_bytes <= plan.cluster.device.usable_bytes:
                yield Allocation(plan.cluster.world_size, batch, step.step_time_s)


def fleet_jobs(
    file: FleetFile, cluster: ClusterSpec, planned: Mapping[str, tuple[Sequence[Allocation], int]]
) -> tuple[FleetJob, ...]:
    """The jobs of a file with what they may run on.

    Args:
        planned: step times, and bytes of state, of every job that names a model.

    Raises:
        FleetError: sizes of jobs do not fit into nodes together.
        InfeasibleError: a job does not fit the cluster, or does not end in time; says which, and by how much.
    """
    jobs = tuple(_job(each, cluster, *planned.get(each.name, ((), 0))) for each in file.jobs)
    _check_sizes(jobs, cluster.spans[0])
    for job in jobs:
        if file.until_s is not None and job.arrival_s + job.least_s > file.until_s:
            late_s = job.arrival_s + job.least_s - file.until_s
            raise InfeasibleError(
                f"job {job.name!r} cannot end by until_s {file.until_s:g}: alone on all of {cluster.name!r} it takes "
                f"{in_duration(job.least_s)} and ends {in_duration(late_s)} late; give it more time, fewer samples or "
                "a larger cluster"
            )
    return jobs


def _job(stated: StatedJob, cluster: ClusterSpec, planned: Sequence[Allocation], state_bytes: int) -> FleetJob:
    steps = [Allocation(each.devices, each.batch, each.step_s) for each in stated.steps or ()]
    least, most = stated.limits
    possible = [each for each in (*steps, *planned) if least <= each.batch <= most]
    found = fastest_allocations(possible, cluster.world_size)
    if not found:
        fewest = min((each.devices for each in possible), default=0)
        raise InfeasibleError(
            f"job {stated.name!r} takes {fewest} devices at least, and {cluster.name!r} has {cluster.world_size}, "
            f"{fewest - cluster.world_size} fewer: give a larger cluster, or step times on fewer devices"
        )
    state = stated.state_bytes if stated.state_bytes is not None else state_bytes
    return FleetJob(stated.name, stated.samples, found, stated.arrival_s, state, stated.restart_s)


def _check_sizes(jobs: Sequence[FleetJob], per_node: int) -> None:
    """Refuse sizes of which some would not fit though enough devices are free."""
    first = {each.devices: job.name for job in reversed(jobs) for each in job.allocations}
    for less, more in pairwise(sorted({*first, per_node} if max(first) >= per_node else first)):
        unit = min(less, per_node)
        if more % unit:
            raise FleetError(
                f"{less} devices (job {first.get(less)!r}) and {more} (job {first.get(more)!r}) do not divide one "
                f"another, so that jobs may not fit into nodes of {per_node} though enough devices are free: give step "
                "times for such as do, 1, 2, 4 and so on, and beyond a node for whole nodes"
            )
