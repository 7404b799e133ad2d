"""Advice where nothing fits: what would, each proposal planned before it is said.

A refusal knows how large a device must be. Whether micro-batches, a smaller batch, more devices, the host's memory or
fewer pins would do depends on all that is pinned and on the model, so each is searched for, within some seconds
together.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from planner.base.errors import AutoparError, InfeasibleError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.search.branch_and_bound import Searched
from planner.search.left_out import why_no_pipelines
from planner.search.search import search
from planner.search.search_context import Progress
from planner.sizes.capacity import max_batch
from planner.sizes.rescale import OtherSizes

ADVICE_S = 10.0
"""So long is looked for what would fit."""
DOUBLINGS = 6
"""To double the number of devices more often is no way out."""
ROUGH = 0.9
"""Part of a step that need not be proved: that a plan fits is enough."""
TRIES = 3
"""So many doublings are tried, from the first that might do."""


Found = Callable[..., Searched | None]
"""The plan of a request that is changed so, field by field, if there is one."""


@dataclass(frozen=True)
class Request:
    """What a plan is asked for with (:func:`planner.search.search.search`)."""

    graph: Graph
    cluster: ClusterSpec
    pins: Pins
    training: Training
    folding: bool = True
    max_axes: int = MAX_AXES
    time_limit_s: float = 60.0
    gap: float = 0.0

    def search(self, progress: Progress | None = None) -> Searched:
        """The fastest plan that fits."""
        asked = {each.name: getattr(self, each.name) for each in fields(self)}
        return search(**asked, progress=progress)


def search_or_advise(request: Request, progress: Progress | None = None) -> Searched:
    """The fastest plan that fits, as :func:`planner.search.search.search` finds it.

    Raises:
        InfeasibleError: nothing fits; says by how much, and what of that which was tried would.
    """
    try:
        return request.search(progress)
    except InfeasibleError as error:
        if error.excess_bytes <= 0:
            raise
        if progress is not None:
            progress("nothing fits: trying what would")
        ways = [*_ways(request, error.excess_bytes)]
        if not ways:
            raise
        raise InfeasibleError(
            f"{error} Planned to see, and fits, too: {'; '.join(ways)}.", error.excess_bytes
        ) from error


def _ways(request: Request, excess_bytes: int) -> Iterator[str]:
    """What fits, in words."""
    until = time.monotonic() + ADVICE_S

    def found(**changes: object) -> Searched | None:
        """The plan of a changed request, if there is one; half of the time that is left is for it."""
        left_s = (until - time.monotonic()) / 2
        if left_s <= 0:
            return None
        limit_s = min(left_s, request.time_limit_s)
        changed = replace(request, time_limit_s=limit_s, gap=ROUGH, **changes)  # type: ignore[arg-type]
        with contextlib.suppress(AutoparError):
            return changed.search()
        return None

    yield from _micro_batched(request, found)
    yield from _with_fewer_pins(request.pins, found)
    yield from _on_the_host(request, found)
    yield from _of_a_smaller_batch(request, excess_bytes, found)
    yield from _on_more_devices(request.cluster, excess_bytes, found)


def _micro_batched(request: Request, found: Found) -> Iterator[str]:
    """More micro-batches than are pinned."""
    pinned = request.pins.micro_batches
    if pinned is None or why_no_pipelines(request.graph, Pins(), request.folding):
        return
    for count in (pinned << doubling for doubling in range(1, TRIES + 1)):
        if found(pins=replace(request.pins, micro_batches=count)):
            yield f"{count} micro-batches (pin 'micro_batches')"
            return


def _with_fewer_pins(pins: Pins, found: Found) -> Iterator[str]:
    """Without any pin but those that say where model data is at home."""
    kept = Pins(
        offload=pins.offload,
        update=pins.update,
        activations=pins.activations,
        reduce_dtype=pins.reduce_dtype,
        float8=pins.float8,
    )
    if pins != kept:
        plan = found(pins=kept)
        if plan is not None:
            implied = (
                {"tensor"} if pins.zero is not None and pins.sizes == {"tensor": 1} else set()
            )  # by ``Pins.parse``
            names = [name for name in pins.to_dict() if name not in {*kept.to_dict(), *implied}]
            yield f"leaving out pins {', '.join(map(repr, names))} ({plan.best.config})"


def _on_the_host(request: Request, found: Found) -> Iterator[str]:
    """Model data on the host, where the cluster has one and a pin keeps it away from there."""
    if request.cluster.host is None or request.pins.offload != "none":
        return
    if found(pins=replace(request.pins, offload="auto")) is not None:
        yield "model data on the host (without pin 'offload')"


def _of_a_smaller_batch(request: Request, excess_bytes: int, found: Found) -> Iterator[str]:
    """The largest global batch at which the plan for a device that is large enough fits into this one."""
    device = request.cluster.device
    needed = math.ceil((device.usable_bytes + excess_bytes) / (1 - device.reserve_fraction))
    larger = request.cluster.model_copy(update={"device": device.model_copy(update={"memory_bytes": needed})})
    plan = found(cluster=larger) if request.pins.tier == "device" else None
    if plan is not None and plan.staged is None and plan.best.space.training.tier == "device":
        try:
            batch = max_batch(OtherSizes(plan.assignment, lambda _: None), None, device.usable_bytes)
        except PlanError:
            return
        yield f"a global batch of {batch}"


def _on_more_devices(cluster: ClusterSpec, excess_bytes: int, found: Found) -> Iterator[str]:
    """More units of the outermost level, by doubling; from the number among which the bytes would be divided on."""
    usable = cluster.device.usable_bytes
    if not usable:
        return
    first = math.ceil(math.log2((usable + excess_bytes) / usable))
    for doubling in range(first, min(first + TRIES, DOUBLINGS + 1)):
        *inner, outermost = cluster.levels
        levels = (*inner, outermost.model_copy(update={"size": outermost.size << doubling}))
        if found(cluster=cluster.model_copy(update={"levels": levels})) is not None:
            yield f"{cluster.world_size << doubling} devices like these"
            return
