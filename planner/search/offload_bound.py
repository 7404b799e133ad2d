"""A lower bound of real steps with model data elsewhere: of what transfer schedules can say, whatever they move when.

A device computes and communicates as if memory cost nothing, nothing made again and nothing waited for; then parameters
are updated, where that is quickest of where they may be at home. Where the host takes longer than the device would, as
much must be updated there as devices have no room for. And what the first forward saves is made again in backward, or
it stays, or has left by the end of that forward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from statistics import mean
from typing import NamedTuple, cast

from planner.formulation.decisions import DecisionGraph
from planner.formulation.resharding import local_bytes
from planner.formulation.search_space import Space
from planner.ir.layout import Layout
from planner.search.branch_and_bound import ParallelConfigs
from planner.search.parallel_config import Arithmetic, ParallelConfig
from planner.search.pipeline_bounds import PipelineBounds
from planner.search.search_context import SearchContext
from planner.search.unfolding import may_differ, unfolded

WAITING = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Prices that are tried on what forward saves, in parts of the seconds that its bytes take to leave the device."""


def least_step_s(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, asked_s: float | None = None
) -> float:
    """Seconds below which no step of any plan of these configurations is predicted, offloaded as the context says.

    Equal blocks may differ where they may in the search: in small models, without micro-batches.

    Args:
        asked_s: whether it is so much is all that is asked; left out: as much as can be proved.
    """
    before = time.monotonic()
    context.say("proving what steps take at least, whatever moves when")
    training = replace(context.training, hides_transfers=True, activations=0)
    alike = apart = replace(context, training=training, spare_bytes=0)
    instances = decision_graph
    if may_differ(decision_graph.folded):
        apart, instances = alike.apart(decision_graph.blocks.numbers), unfolded(decision_graph)
    micro_batched_s = _least_of_all_s(alike, decision_graph, configs.micro_batched, asked_s)
    least_s = min(micro_batched_s, _least_of_all_s(apart, instances, configs.plain, asked_s))
    context.took("solve", before)
    return least_s


def _least_of_all_s(
    context: SearchContext, decision_graph: DecisionGraph, configs: Iterable[ParallelConfig], asked_s: float | None
) -> float:
    """The same of plans that decide on this graph; infinite where there are no configurations."""
    arithmetic, schedule = Arithmetic(decision_graph, context.cost, context.training), context.pins.schedule
    by_work = sorted(((arithmetic.bound_s(config, schedule), config) for config in configs), key=lambda each: each[0])
    least_s = math.inf
    for work_s, config in by_work:
        is_answered = asked_s is not None and not work_s < asked_s <= least_s
        if work_s >= least_s or is_answered or context.is_late():
            return min(work_s, least_s)
        least_s = min(least_s, max(work_s, _least_s(context, context.bounds(decision_graph, config), asked_s)))
    return least_s


class _Stays(NamedTuple):
    """A parameter on the device throughout: bytes that it takes, and seconds by which its update is quicker there."""

    bytes: int
    saves_s: float


def _least_s(context: SearchContext, bounds: PipelineBounds, asked_s: float | None) -> float:
    """Seconds of a step of one configuration at least, or so many as are asked.

    Under any price on bytes each parameter saves no more by staying than it does above the price of its bytes; so it
    loses the less of both, and gets back the price of all the room that backward leaves to what stays when it begins.
    Of one stage what forward saves has a price, too.
    """
    if math.isinf(bounds.free_s):
        return bounds.free_s
    space, room_bytes = bounds.costs.space, context.usable_bytes
    evict_bytes_per_s = context.cost.cluster.home(space.training.on_disk).evict_bytes_per_s
    parameters, found = _parameters(space), list[float]()
    staying_bytes = room_bytes - mean(bounds.costs.working_bytes(space.stages))
    prices = {each.saves_s / each.bytes for ways, _ in parameters for each in ways if each.saves_s > 0.0}
    for waiting in WAITING if space.stages == 1 else WAITING[:1]:
        if found and context.is_late():
            break
        byte_s = waiting / evict_bytes_per_s
        moving_s = bounds.moving_s(byte_s, evict_bytes_per_s, room_bytes) if waiting else bounds.free_s
        for price in (0.0, *prices):
            more = max(0.0, (1 - waiting) * price - byte_s)  # since what stays takes room even when nothing is saved
            found.append(moving_s + _lost_s(parameters, byte_s + more, 1 - waiting) - more * staying_bytes)
            if asked_s is not None and found[-1] >= asked_s:
                return found[-1]
    return max(found)


def _parameters(space: Space) -> list[tuple[list[_Stays], float]]:
    """Of the parameters that may stay, each in all its layouts, and how many like it a rank has on average."""
    if space.training.tier != "either" or space.training.update == "backward":
        return []
    return [
        (
            [_stays(space, names[0], cast(Layout, layout)) for layout in space.options[variable]],
            len(names) / space.stages,
        )
        for variable, names in space.members.items()
        if space.graph.by_name[names[0]].op == "param"
    ]


def _stays(space: Space, name: str, layout: Layout) -> _Stays:
    node = space.graph.by_name[name]
    size_bytes = local_bytes(node.results[0], layout, space.mesh)
    home_bytes = size_bytes * (1 + node.results[0].grad) + space.state_bytes(node, layout)
    saves_s = space.update_at_least_s(node, layout, "host") - space.update_s(node, layout)
    return _Stays(home_bytes, saves_s)


def _lost_s(parameters: Iterable[tuple[Iterable[_Stays], float]], price: float, counted: float = 1.0) -> float:
    """Seconds that parameters lose, or pay, on a rank, each in the layout in which that is least.

    Args:
        price: seconds per byte.
        counted: the part of what they lose that counts.
    """
    return math.fsum(
        count * min(min(counted * each.saves_s, price * each.bytes) for each in ways) for ways, count in parameters
    )
