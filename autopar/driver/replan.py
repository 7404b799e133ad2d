"""``autopar.replan``: how a training run goes on when its cluster changes, and what moving there takes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autopar.capture.capture import LossFn
from autopar.driver.arguments import check_arguments, check_progress, check_search, given_plan, say
from autopar.driver.plan import assign, plan_traced
from autopar.driver.trace import trace
from planner.base.cpython import no_garbage, on_one_stack
from planner.base.errors import InfeasibleError, PinError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.plan.moving.bill import moving_bill
from planner.plan.moving.replanned import MovedPlan, Replanned, undivided
from planner.plan.plan import Plan
from planner.plan.rebinding.rebind import rebind
from planner.search.search import GAP, TIME_LIMIT_S
from planner.search.search_context import Progress


@on_one_stack
@no_garbage()
def replan(
    plan: Plan | str | os.PathLike[str],
    model: nn.Module,
    cluster: ClusterSpec,
    *,
    was: Sequence[int | None] | None = None,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    pin: Mapping[str, Any] | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    gap: float = GAP,
    max_axes: int = MAX_AXES,
    progress: Progress | None = None,
) -> Replanned:
    """The best plan for the same training run on another cluster, beside the old plan's shape there: what a step takes
    under either, and the bill of moving to it. Needs no device and no process group.

    The global batch is the one that was planned, and its order does not depend on the ranks, so the run goes on as if
    nothing had changed.

    Args:
        plan: under which it ran, or the path of its file.
        model, example_args, example_kwargs, loss_fn: those it was made with.
        cluster: the devices that there are now.
        was: for every rank there the rank that it was, or ``None`` if it comes; left out: the first ranks stay.
        pin, time_limit_s, gap, max_axes, progress: of the search for the best plan, as of :func:`autopar.plan`; nothing
            that the old plan had pinned holds for it.

    Raises:
        PlanError: the plan is of another model or batch; says what differs. It has tables in slabs.
        InfeasibleError: the model does not fit there; says by how much, and what would.
        InputError: ``was`` does not say of each rank, once, which it was; or as :func:`autopar.plan`.
        CaptureError, PinError, ClusterError: as :func:`autopar.plan`.
    """
    plan = given_plan(plan)
    check_arguments(model, cluster, example_args, example_kwargs, pin)
    check_search("capture", time_limit_s, gap, max_axes)
    check_progress(progress)
    say(progress, f"capturing {type(model).__name__}")
    traced = trace(model, example_args, example_kwargs, loss_fn)
    old = replace(plan, decided=assign(traced.placing(plan.tables, plan.cluster), plan))
    discards = plan.discards if plan.mesh.micro_batches > 1 or plan.discards else None
    training = Training(plan.optimizer_bytes_per_element, discards=discards)
    limits: dict[str, Any] = {"time_limit_s": time_limit_s, "gap": gap, "max_axes": max_axes}
    best = plan_traced(traced, cluster, Pins.parse(pin), training, **limits, progress=progress)
    kept, why_not = None, ""
    try:
        carried = rebind(old, traced.graph, traced.facts, cluster, progress=progress)
        kept = MovedPlan(carried, moving_bill(old, carried, was))
    except (PlanError, PinError, InfeasibleError) as error:
        why_not = str(error)
    return Replanned(
        plan, MovedPlan(best, moving_bill(old, best, was)), kept, why_not, undivided(traced.graph, cluster)
    )
