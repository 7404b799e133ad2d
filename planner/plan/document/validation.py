"""Checks that the parts of a plan agree, whether it was searched, read or edited."""

from __future__ import annotations

import json

from planner.base.errors import PinError, PlanError
from planner.plan.document.document import Document
from planner.plan.document.well_formed import check_well_formed
from planner.search.parallel_config import ParallelConfig, check_pinned
from planner.solve.pipeline.stages import Pipeline

MEND = "one of them was edited; restore it, or plan again"


def check_consistent(plan: Document) -> None:
    """Refuse a plan of which one part was changed, and another that goes with it was not.

    Raises:
        PlanError: names both.
    """
    check_well_formed(plan)
    pinned, has = plan.pin.get("offload", plan.offload), "a" if plan.transfer_schedules else "no"
    if pinned != plan.offload:
        raise PlanError(f"the plan's pin 'offload' is {pinned!r}, and its 'offload' {plan.offload!r}: {MEND}")
    if (pinned == "none") != (has == "no"):
        raise PlanError(f"the plan's pin 'offload' is {pinned!r}, and it has {has} transfer_schedule: {MEND}")
    early = (moment.on == "host" for table in plan.transfer_schedules for moment in table.trace.moments[:-1])
    if any(early) and plan.pin.get("update") != "backward":
        raise PlanError(
            f"the plan's transfer schedule updates in backward, and its pin 'update' is not 'backward': {MEND}"
        )
    if plan.transfer_schedules and plan.pipeline is not None and plan.unsharding.once_per_step:
        raise PlanError(
            "the plan has transfer schedules, by which parameters come for each micro-batch, and its pipeline gathers "
            f"them {plan.unsharding.name!r}: {MEND}"
        )
    stages = 1 if plan.pipeline is None else plan.pipeline.ranks
    if plan.transfer_schedules and len(plan.transfer_schedules) != stages:
        raise PlanError(
            f"the plan has {len(plan.transfer_schedules)} transfer schedules, and {stages} pipeline ranks: {MEND}"
        )
    ranks, devices = plan.mesh.size * stages, plan.cluster.world_size
    if ranks != devices:
        alone = " and no pipeline" if plan.pipeline is None else ""
        raise PlanError(
            f"the plan's mesh has {ranks} ranks{alone}, but its cluster has {devices} devices: plan again for it"
        )
    _check_pin(plan, stages)


def _check_pin(plan: Document, stages: int) -> None:
    """Refuse a mesh, or a pipeline, other than is pinned."""
    order = None
    if plan.pipeline is not None:
        order = Pipeline(plan.pipeline.schedule, stages, plan.mesh.micro_batches, plan.pipeline.virtual_stages)
    try:
        check_pinned(plan.pins, plan.cluster, ParallelConfig(stages, plan.mesh, plan.unsharding), order)
    except PinError as error:
        raise PlanError(
            f"the plan does not respect its pin {json.dumps(dict(plan.pin))}: {error}. One of them was edited: restore "
            "it, or plan again with that pin"
        ) from error
