"""From a plan and another model, batch or cluster to a plan that decides alike, as far as that holds.

What has to change is listed with its reason. Whether a fresh search would find a better one is told by a bound beside
the price: of arithmetic, or of a search of some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.analysis.planned_step import planned_step
from planner.base.errors import InfeasibleError, PinError
from planner.base.formatting import in_all_bytes, in_count
from planner.cost.cluster import ClusterSpec
from planner.formulation.certificate import Decided
from planner.formulation.constraints.dtypes import check_float8, check_reduce_dtype
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.zero import pinned_apart
from planner.formulation.pinned_space import pinned_space
from planner.formulation.search_space import Space
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.plan.document.document import Search
from planner.plan.document.rebinding import Change, Rebinding
from planner.plan.plan import Plan, describe
from planner.plan.rebinding.bound import FreshBound, arithmetic_bound, searched_bound
from planner.plan.rebinding.carried import CarriedDecisions
from planner.plan.rebinding.configurations import Configuration, configurations
from planner.plan.rebinding.fitting import Fitted, Fitting, recomputing, recomputing_text, stages_text
from planner.plan.rebinding.matching import Blocks, Matching, matched_blocks
from planner.search.search_context import Progress
from planner.solve.problem import evaluate

EVERYWHERE = ("offload", "update", "activations", "compile", "reduce_dtype", "float8")
"""Pins that fit every mesh."""
SIZELESS = (*EVERYWHERE, "recompute", "batch_norm", "pipeline", "micro_batches", "schedule", "virtual_stages")
"""Pins that fit whatever sizes of axes there are."""
REBOUND = "rebound"
"""How a search ended that was not made."""


@dataclass(frozen=True)
class _Made:
    """A configuration with its decisions.

    Attributes:
        pin: those of the configuration's pins that fit.
        changes: what is not as in the plan.
    """

    configuration: Configuration
    pin: Mapping[str, Any]
    fitted: Fitted
    changes: tuple[Change, ...]

    @property
    def space(self) -> Space:
        return self.fitted.assignment.space


def rebind(
    plan: Plan,
    graph: Graph,
    model: Mapping[str, Any],
    cluster: ClusterSpec,
    *,
    time_limit_s: float = 0.0,
    seconds: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan's decisions for another model, batch or cluster.

    Args:
        graph, model: of the other model, or of the same one for another batch, and its facts, see :func:`model_facts`.
        cluster: the other cluster, or the plan's.
        time_limit_s: of a fresh search for the bound that the plan is compared with; 0: that of arithmetic.
        seconds: what was taken before, by step.

    Raises:
        PlanError: the models have hardly an operator in common.
        PinError: nothing can run on the mesh that is left.
        InfeasibleError: the step does not fit in memory, whatever it recomputes, in whatever micro-batches.
    """
    start = time.monotonic()
    pinned = _with_home(plan)
    made = _first_that_fits(pinned, graph, cluster)
    if progress is not None:
        progress(f"rebound to {made.configuration.config}")
    rebound = _described(plan, model, made, {**(seconds or {}), "rebind": time.monotonic() - start})
    fresh = _bound(plan, made, time_limit_s, progress)
    least_s = rebound.predicted.step_time_s
    gap = max(0.0, 1 - fresh.seconds / least_s) if least_s else 0.0
    search = replace(
        rebound.search,
        gap=gap,
        seconds={**rebound.search.seconds, **fresh.took},
        candidates=fresh.candidates,
        unseen=fresh.unseen,
        time_limit_s=time_limit_s if fresh.by == "search" else None,
    )
    otherwise = _runs_otherwise(plan, rebound, made.fitted.recomputes_alike)
    source = Rebinding(_source(plan), (*made.changes, *otherwise), fresh.by, fresh.step_s)
    return replace(rebound, search=search, rebinding=source, decided=rebound.assignment)


# ---- decisions -------------------------------------------------------------------------------------------------------


def _with_home(plan: Plan) -> Plan:
    """The plan with the home of its model data pinned, which a search may have chosen."""
    if plan.offload == plan.pin.get("offload", "none"):
        return plan
    return replace(plan, pin={**plan.pin, "offload": plan.offload}, decided=plan.assignment)


def _first_that_fits(plan: Plan, graph: Graph, cluster: ClusterSpec) -> _Made:
    """The decisions in the plan's configuration, or in the first that needs less memory and fits."""
    usable, least = cluster.device.usable_bytes, None
    for configuration in configurations(plan, graph, cluster):
        made = _made(plan, graph, cluster, configuration)
        if made.fitted.needed_bytes <= usable:
            return made
        if least is None or made.fitted.needed_bytes < least.fitted.needed_bytes:
            least = made
    assert least is not None
    needed = least.fitted.needed_bytes
    raise InfeasibleError(
        f"the plan's decisions take {in_all_bytes(needed)} of a device of {cluster.name!r} for this model, with all "
        f"recomputation that there is, on {least.configuration.config}, and a device can use {in_all_bytes(usable)}: "
        "rebind to more devices or a smaller batch, or let autopar.plan decide anew",
        needed - usable,
    )


def _made(plan: Plan, graph: Graph, cluster: ClusterSpec, configuration: Configuration) -> _Made:
    """The plan's decisions in one configuration, with as many of its pins as fit.

    Raises:
        PinError: nothing can run on this mesh.
    """
    whole = configuration.pin
    ways = [whole, *({name: whole[name] for name in whole if name in kept} for kept in (SIZELESS, EVERYWHERE))]
    why, dropped = "", dict[str, Any]()
    for number, pin in enumerate(ways):
        dropped = {name: value for name, value in plan.pin.items() if name not in pin}
        try:
            found = _decided(plan, graph, cluster, configuration, Pins.parse(pin))
        except PinError as error:
            why = why or str(error)
            if number == len(ways) - 1:
                raise
        else:
            break
    gone = (Change(f"pin {name!r}", str(value), "", why) for name, value in dropped.items())
    return replace(found, pin=pin, changes=(*configuration.changes, *gone, *found.changes))


def _decided(plan: Plan, graph: Graph, cluster: ClusterSpec, configuration: Configuration, pins: Pins) -> _Made:
    """The plan's decisions under some pins."""
    blocks, space = _space(plan, graph, cluster, configuration, pins)
    matching = Matching(plan, blocks, space)
    fitting, carried = Fitting(matching, space, pins), CarriedDecisions(matching, plan.mesh, space)
    assignment = carried.decided(fitting.planned, cluster.device.usable_bytes)
    if configuration.pipeline is None:
        fitted = fitting.without_micro_batches(assignment, cluster)
    else:
        fitted = fitting.in_stages(assignment, configuration.pipeline, cluster)
    gone = (Change(what, label, "", "the model has nothing like it") for what, label in matching.gone())
    return _Made(configuration, configuration.pin, fitted, (*carried.changes(assignment), *gone))


def _space(
    plan: Plan, graph: Graph, cluster: ClusterSpec, configuration: Configuration, pins: Pins
) -> tuple[Blocks, Space]:
    """The model's blocks, matched, and every decision to take for it."""
    config, pipeline = configuration.config, configuration.pipeline
    blocks = matched_blocks(plan, pinned_apart(configuration.folded, pins.zero))
    schedule = None if pipeline is None else pipeline.schedule
    said = plan.mesh.micro_batches > 1 or plan.discards  # else all may be kept since a step has one micro-batch
    training = Training(
        plan.optimizer_bytes_per_element,
        pins.tier,
        pins.update,
        plan.activations,
        config.unsharding,
        plan.discards if said else None,
        pins.compile,
        pins.reduce_dtype,
        pins.float8,
    )
    ordered = replace(pins, schedule=schedule)
    space = pinned_space(graph, blocks.folded, config.mesh, cluster, ordered, training, config.stages)
    check_reduce_dtype(pins, graph)
    check_float8(pins, graph, space.decision_graph.blocks, cluster)
    return blocks, space


# ---- the document ----------------------------------------------------------------------------------------------------


def _described(plan: Plan, model: Mapping[str, Any], made: _Made, seconds: Mapping[str, float]) -> Plan:
    """The decisions written down, with what is predicted of them."""
    fitted, space = made.fitted, made.space
    time_s = 0.0
    if fitted.staged is None:
        decided, recompute = Decided(fitted.assignment, space.decision_graph), fitted.assignment.recompute
        time_s = evaluate(decided.problem(None, recompute), (0,) * len(space.variables.order)).time_s
    tables, predicted = planned_step(fitted.assignment, fitted.staged, time_s, fitted.memory)
    search = Search(REBOUND, 0.0, seconds)
    return describe(fitted.assignment, model, made.pin, predicted, search, fitted.staged, tables)


def _runs_otherwise(plan: Plan, rebound: Plan, recomputes_alike: bool) -> Iterator[Change]:
    """What a rebound plan recomputes, and which blocks its stages have, where that is not as in the plan."""
    is_free = not recomputes_alike and "recompute" not in rebound.pin
    if is_free and (recomputing(plan) or recomputing(rebound)):
        before, after = map(recomputing_text, (plan, rebound))
        yield Change("recomputation", before, after, "the least that the memory asks for")
    if plan.pipeline is None or rebound.pipeline is None or plan.pipeline.ranks == 1:
        return
    old, new = plan.pipeline.bounds, rebound.pipeline.bounds
    if old != new:
        why = "those of the plan would not fit in memory"
        if old[-1] != new[-1]:
            why = f"the model has {new[-1]} blocks to cut between, and had {old[-1]}"
        elif len(old) != len(new):
            why = f"there are {len(new) - 1} stages"
        yield Change("blocks of the stages", stages_text(old), stages_text(new), why)


def _source(plan: Plan) -> str:
    """A plan in words."""
    model = plan.model
    return (
        f"the plan {plan.digest()} of {model.get('class')}, {in_count(int(model['parameters']))} parameters, on "
        f"{plan.cluster.world_size} x {plan.cluster.device.kind}"
    )


# ---- beside a fresh search -------------------------------------------------------------------------------------------


def _bound(plan: Plan, made: _Made, time_limit_s: float, progress: Progress | None) -> FreshBound:
    """What no plan under the same pins can beat."""
    pins, space = Pins.parse(made.pin), made.space
    found = None
    if time_limit_s > 0:
        given = space.training
        training = Training(plan.optimizer_bytes_per_element, discards=given.discards, compile=given.compile)
        found = searched_bound(space.graph, space.cost.cluster, pins, training, time_limit_s, progress)
    return found or arithmetic_bound(made.fitted.assignment, made.configuration.config, pins)
