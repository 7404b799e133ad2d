"""``plan.rebind``: a plan's decisions carried to another model, batch or cluster, without a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.capture.capture import LossFn
from autopar.driver.arguments import check_arguments, check_cluster, check_progress, say, warn
from autopar.driver.trace import trace
from planner.base.cpython import no_garbage, on_one_stack
from planner.base.errors import InputError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.plan.document.document import WITHOUT_GRAPH
from planner.plan.plan import Plan
from planner.plan.rebinding.rebind import rebind as carry
from planner.search.search_context import Progress


@on_one_stack
@no_garbage()
def rebind(
    plan: Plan,
    model: nn.Module | None = None,
    cluster: ClusterSpec | None = None,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    time_limit_s: float = 0.0,
    progress: Progress | None = None,
) -> Plan:
    """What :meth:`planner.plan.plan.Plan.rebind` does; arguments and errors are said there."""
    check_time_limit(time_limit_s)
    check_progress(progress)
    if plan.tables is not None and plan.tables.in_slabs:
        raise PlanError(
            f"the plan has {len(plan.tables.in_slabs)} embedding tables in slabs of its ranks, which are of this model "
            "on this cluster: plan again, with pin 'tables' if they shall be sharded alike"
        )
    cluster = plan.cluster if cluster is None else cluster
    if model is None:
        if example_args is not None or example_kwargs is not None or loss_fn is not None:
            raise InputError("inputs and a loss_fn are captured with their model: give model, too")
        check_cluster(cluster)
        if plan.assignment is None:
            raise PlanError(f"to stay with the model, {WITHOUT_GRAPH[0].lower()}{WITHOUT_GRAPH[1:]}; or give model")
        graph, facts, seconds = plan.assignment.space.graph, plan.model, {}
    else:
        check_arguments(model, cluster, example_args, example_kwargs)
        say(progress, f"capturing {type(model).__name__}")
        traced = trace(model, example_args, example_kwargs, loss_fn)
        if plan.pipeline is not None:
            traced.check_micro_batched()
        graph, facts, seconds = traced.graph, traced.facts, {"capture": traced.capture_s}
    found = carry(plan, graph, facts, cluster, time_limit_s=time_limit_s, seconds=seconds, progress=progress)
    warn(found.notes)
    return found


def check_time_limit(seconds: object) -> None:
    """Raises :class:`InputError` unless it is a number of seconds, or 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise InputError(
            f"time_limit_s is {seconds!r}; give the seconds that a fresh search may take for the bound beside the "
            "price, or 0 for none"
        )
