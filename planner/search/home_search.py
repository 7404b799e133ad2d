"""Searches plans with model data on the device, and where none fits with its home on the host, or on disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import TIERS, Offload, Pins
from planner.formulation.pipeline_pace import OUT_OF_ORDER
from planner.ir.graph import Graph
from planner.search.branch_and_bound import Searched
from planner.search.search_context import SearchContext

ON_DEVICE = "plans with all model data on the device, since none was found that fits"
"""What a plan with another home that nobody pinned leaves out."""
AGAIN = 0.25
"""Part of the time limit that a search with another home has at least, however long the one before took."""


def search_homes(context: SearchContext, graph: Graph, plan: Callable[[SearchContext], Searched]) -> Searched:
    """The fastest plan at the first home of model data at which one fits: the device, the host, the disk; or at the one
    that is pinned.

    Args:
        plan: searches with the home that a context has.

    Raises:
        InfeasibleError: none fits; says what is lacking on the device.
    """
    limit_s, elsewhere = context.deadline - time.monotonic(), _elsewhere(context.cost.cluster, context.pins)
    refused: InfeasibleError | None = None
    if not elsewhere or _may_fit(context, graph):
        try:
            return plan(context)
        except InfeasibleError as error:
            if not elsewhere:
                raise
            refused = error
    for home in elsewhere:
        with contextlib.suppress(InfeasibleError):
            found = plan(_at(home, context, time.monotonic() + AGAIN * limit_s))
            found = replace(found, left_out="; ".join(filter(None, (ON_DEVICE, found.left_out))))
            found.planned_step  # noqa: B018  raises where the home does not hold it
            return found
    if refused is None:
        return plan(context)  # says what is lacking
    where = " or ".join("on disk" if home == "disk" else "on the host" for home in elsewhere)
    raise InfeasibleError(f"{refused} Nor is there one with model data {where}.", refused.excess_bytes) from refused


def _elsewhere(cluster: ClusterSpec, pins: Pins) -> list[Offload]:
    """Where else model data may be at home, best first."""
    if pins.offload is not None or pins.schedule in OUT_OF_ORDER or cluster.host is None:
        return []
    return ["auto"] if cluster.disk is None else ["auto", "disk"]


def _at(home: Offload, context: SearchContext, deadline: float) -> SearchContext:
    """The context of a search with another home."""
    context.say(f"nothing fits with all model data on the device: trying 'offload' {home!r}")
    training = replace(context.training, tier=TIERS[home])
    pins, deadline = replace(context.pins, offload=home), max(context.deadline, deadline)
    return replace(context, pins=pins, training=training, deadline=deadline, formulated={})


def _may_fit(context: SearchContext, graph: Graph) -> bool:
    """Whether devices have room for parameters, gradients that are kept and optimizer state, shared by all of them."""
    cluster, state_bytes = context.cost.cluster, 0
    for kind in (leaf.results[0] for leaf in graph.leaves if leaf.op == "param"):
        state_bytes += kind.size_bytes
        if kind.grad:
            state_bytes += (
                kind.size_bytes * (not context.training.updates_on_device)
                + kind.numel * context.training.optimizer_bytes_per_element
            )
    return state_bytes <= cluster.world_size * context.limit_bytes
