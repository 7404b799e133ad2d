"""Refusal: why there is no plan, by how much it fails, and what would help."""

from __future__ import annotations

import math
import time

from planner.chain import links_of
from planner.division import Division
from planner.errors import ClusterError, InfeasibleError, PinError
from planner.formulate import Assignment
from planner.graph import Graph
from planner.looks import GRACE_S, Look, Setting
from planner.memory import usage
from planner.offload import largest_working_set
from planner.problem import Problem, evaluate
from planner.solve import lightest, lower_bounds, solve
from planner.strategy import Choice
from planner.turns import stage

LEANEST_S = 3.0
"""How long the leanest plan of all is looked for when nothing fits; the leanest found is told."""


def check_divisible(setting: Setting, graph: Graph, looks: list[Look]) -> None:
    """Refuse a number of devices among which nothing of the model can be divided: each would do all the work."""
    cluster = setting.cost.cluster
    if cluster.world_size == 1 or setting.pins.sizes:
        return
    if any(look.posed is None or look.space.stages > 1 for look in looks):  # stages divide the blocks among them
        return
    choices = (option for look in looks for options in look.space.options.values() for option in options)
    if any(isinstance(choice, Choice) and any(s.factor for s in choice.axes) for choice in choices):
        return
    sizes = sorted({size for node in graph.nodes for t in node.results for size in t.shape if size > 1})
    raise ClusterError(
        f"{cluster.world_size} devices of {cluster.name!r} cannot share this model: no axis of them divides any size "
        f"in it ({', '.join(map(str, sizes[:12]))}{', ...' if len(sizes) > 12 else ''}), so each would do all the "
        "work. Use a number of devices with a divisor in common with the batch or the widths, or change the batch"
    )


def nothing_fits(setting: Setting, graph: Graph, looks: list[Look]) -> InfeasibleError:
    """The error that says by how much the leanest plan exceeds the limit, and what would fit.

    Raises:
        PinError: there are no plans at all, whatever they need.
    """
    cluster, limit = setting.cost.cluster, setting.limit_bytes
    begun = [look for look in looks if look.posed is not None]
    if all(math.isinf(lower_bounds(look.space.problem(None)).time_s) for look in begun):
        raise PinError(
            "no micro-batches can be cut from this model's batch: an operator mixes its samples (batch norm, a mean "
            "over the batch), or an input has another dim 0 than the others; pin 'micro_batches' 1"
        )
    open_ = [look for look in looks if math.isfinite(look.candidate.bound_s)]
    if setting.training.tier != "device":
        return _nothing_works(setting, looks, bool(open_))
    least, _, division = min(_lean(setting, looks), key=lambda each: each[0])
    if open_:
        return InfeasibleError(
            f"no plan that fits {cluster.name!r} was found before the time limit, but none was ruled out either: "
            f"the leanest one seen ({division}) needs {least:,} bytes of {limit:,}. Give a longer "
            "time_limit_s, or pin decisions to narrow the search.",
            least - limit,
        )
    params = sum(t.size_bytes for node in graph.leaves if node.op == "param" for t in node.results)
    needed = math.ceil(least / (1 - cluster.device.reserve_fraction))
    pinned = " Relaxing the pins may also help." if setting.pins.to_dict() else ""
    return InfeasibleError(
        f"no plan fits {cluster.name!r}: each of its {cluster.world_size} devices can use {limit:,} bytes, and the "
        f"leanest plan found ({division}) needs {least:,}, {least - limit:,} too many "
        f"(the parameters alone are {params:,} bytes in all, {setting.training.optimizer_bytes_per_element} more per "
        f"element for the optimizer). What would fit: devices with memory_bytes of at least {needed:,}, "
        f"about {math.ceil(cluster.world_size * least / limit)} devices like these, or a smaller global "
        f"batch.{pinned}",
        least - limit,
    )


def _nothing_works(setting: Setting, looks: list[Look], is_open: bool) -> InfeasibleError:
    """The same of plans with model data on the host: what a device must hold is the largest working set."""
    cluster = setting.cost.cluster
    limit = cluster.device.usable_bytes
    found = [(assignment, division) for _, assignment, division in _lean(setting, looks) if assignment is not None]
    sets = [(largest_working_set(assignment, usage(assignment)), division) for assignment, division in found]
    least, division = min(sets, key=lambda each: each[0].bytes)
    needed = math.ceil(least.bytes / (1 - cluster.device.reserve_fraction))
    excess = least.bytes - limit
    head = (
        f"no plan that fits {cluster.name!r} was found before the time limit, but none was ruled out either"
        if is_open
        else f"no plan with model data on the host fits {cluster.name!r}"
    )
    recompute = "" if setting.pins.recompute in (None, "full") else "pin 'recompute' 'full', "
    return InfeasibleError(
        f"{head}: each of its {cluster.world_size} devices can use {limit:,} bytes, and the largest working set of the "
        f"leanest plan found ({division}) takes {least.bytes:,}, {excess:,} too many: {least.moment} needs "
        f"{least.chunk_bytes:,} of parameters and gradients at once, and {least.beside_bytes:,} beside them for "
        f"activations and what operators need. What would lower it: a smaller global batch, {recompute}parameters "
        "sharded over more devices (pin 'zero' 3 or 'tensor'). What would fit: devices with memory_bytes of at least "
        f"{needed:,}",
        excess,
    )


def _lean(setting: Setting, looks: list[Look]) -> list[tuple[int, Assignment | None, Division]]:
    """Lean plans: what each needs by the search's reckoning, its decisions unless it runs in turns, and its division.

    A light plan of each division comes first, in the order of what they need at least, then the leanest is looked for
    while there is time.
    """
    found: list[tuple[int, Assignment | None, Division]] = []
    until = min(setting.deadline, time.monotonic() + LEANEST_S)

    def leanest(problem: Problem) -> tuple[int, ...]:
        return solve(problem, time_limit_s=max(GRACE_S, until - time.monotonic())).choices

    for pick in (lightest, leanest):
        begun = [look for look in looks if look.posed is not None]
        for look in sorted(begun, key=lambda look: look.candidate.peak_bytes):
            least = min((peak_bytes for peak_bytes, _, _ in found), default=math.inf)
            if found and (look.candidate.peak_bytes >= least or time.monotonic() > until):
                break
            for step in dict.fromkeys((look.high, look.low)):
                division = look.candidate.division
                space = look.space.holding(division.in_flight) if division.in_turns else look.space
                recompute = look.ladder.steps[step]
                problem = space.problem(setting.limit_bytes, recompute)
                choices = pick(problem)
                if choices is not None:
                    peak_bytes = _peak_bytes(setting, look, problem, choices)
                    assignment = None if division.in_turns else space.assignment(choices, recompute)
                    found.append((peak_bytes, assignment, division))
    return found


def _peak_bytes(setting: Setting, look: Look, problem: Problem, choices: tuple[int, ...]) -> int:
    """What choices need; in turns, with all that can be made again."""
    if not look.candidate.division.in_turns:
        return evaluate(problem, choices).peak_bytes
    chain = links_of(look.space.assignment(choices), setting.pins.recompute, setting.pins.schedule)
    links = [link.leanest for link in chain]
    found = stage(links, setting.pipelines(look.candidate.division, len(links)), None)
    assert found is not None
    return found.peak_bytes
