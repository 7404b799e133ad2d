"""Searches plans with model data on the device; with its home on the host, or on disk, where none fits or where that
may be faster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import TIERS, Offload, Pins
from planner.ir.graph import Graph
from planner.ir.layout import Layout
from planner.search.branch_and_bound import Searched
from planner.search.candidates import cutoff_s
from planner.search.micro_batch_search import fits_whole
from planner.search.search_context import SearchContext
from planner.solve.pipeline.schedule import OUT_OF_ORDER

ON_DEVICE = "plans with all model data on the device, since none was found that fits"
"""What a plan with another home that nobody pinned leaves out."""
NOT_SEARCHED = "plans with model data elsewhere than on the device, since there was no time left to search them"
NOT_PROVED = "a proof for plans with model data elsewhere than on the device, of which none was found that is faster"
"""What a plan on the device leaves out where others may be faster."""
AGAIN = 0.25
"""Part of the time limit that a search with another home has, however long the one before took; where a plan fits on
the device, so much of what is left of it.
"""


def search_homes(context: SearchContext, graph: Graph, plan: Callable[..., Searched]) -> Searched:
    """The fastest plan at the first home of model data at which one fits: the device, the host, the disk; on the host
    also where that is faster by more than the gap; or at the home that is pinned.

    Args:
        plan: searches with the home that a context has; it may be given a plan that fits as ``known``.

    Raises:
        InfeasibleError: none fits; says what is lacking on the device.
    """
    limit_s, elsewhere = context.deadline - time.monotonic(), _elsewhere(context.cost.cluster, context.pins)
    refused: InfeasibleError | None = None
    if not elsewhere or _may_fit(context, graph):
        try:
            found = plan(context)
        except InfeasibleError as error:
            if not elsewhere:
                raise
            refused = error
        else:
            may_be_faster = elsewhere and not (fits_whole(graph, context) and _updates_sooner(found))
            return _or_on_host(context, plan, found) if may_be_faster else found
    for home in elsewhere:
        context.say(f"nothing fits with all model data on the device: trying 'offload' {home!r}")
        with contextlib.suppress(InfeasibleError):
            deadline = max(context.deadline, time.monotonic() + AGAIN * limit_s)
            found = _leaving_out(ON_DEVICE, plan(_at(home, context, deadline)))
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


def _or_on_host(context: SearchContext, plan: Callable[..., Searched], on_device: Searched) -> Searched:
    """The plan on the device, or one with model data on the host that is faster by more than the gap, sought for a part
    of the time that is left. What is on disk is no faster than on the host.
    """
    if context.is_late():
        return _leaving_out(NOT_SEARCHED, on_device)
    now = time.monotonic()
    deadline = now + AGAIN * (context.deadline - now)
    context.say("whether steps are shorter with 'offload' 'auto'")
    found = plan(_at("auto", context, deadline), known=on_device.best)
    bound_s = min(on_device.bound_s, found.bound_s)
    if found.best.space.training.tier != "device" and found.planned_step_s < cutoff_s(context, on_device.best):
        return found.bounded(bound_s, found.planned_step_s)
    if found.bound_s < cutoff_s(context, on_device.best):
        return _leaving_out(NOT_PROVED, on_device)
    return on_device.bounded(bound_s)


def _updates_sooner(found: Searched) -> bool:
    """Whether the device updates no parameter more slowly than the host would, in no layout on a mesh of all devices:
    where memory decides nothing, either, no plan with a home elsewhere is faster than the same one on the device.
    """
    space = found.best.space
    if not space.cost.is_closed or space.training.update == "backward" or space.stages > 1:
        return False
    laid_out = (
        (space.graph.by_name[names[0]], cast(Layout, layout))
        for variable, names in space.members.items()
        if space.graph.by_name[names[0]].op == "param"
        for layout in space.options[variable]
    )
    return all(space.update_s(*each, "device") <= space.update_at_least_s(*each, "host") for each in laid_out)


def _leaving_out(what: str, found: Searched) -> Searched:
    """The same, saying that it leaves out this, too."""
    return replace(found, left_out="; ".join(filter(None, (what, found.left_out))))


def _at(home: Offload, context: SearchContext, deadline: float) -> SearchContext:
    """The context of a search with another home."""
    training, pins = replace(context.training, tier=TIERS[home]), replace(context.pins, offload=home)
    return replace(context, pins=pins, training=training, deadline=deadline)


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
