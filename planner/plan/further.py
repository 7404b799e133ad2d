"""Plans of further programs: the same model on the same devices, for inputs of other shapes, names or values.

``(plan, graph for other inputs) -> plan``. Parameters and buffers stay where the first plan stores them. Where the
other graph has the structure of the first, and its sizes divide as those did, everything else is decided as it was;
otherwise it is searched for, on the one mesh that there is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.analysis.prediction import predict_micro_batched
from planner.base.errors import InfeasibleError, InputError, PinError, PlanError
from planner.formulation.assignment import assignment_of
from planner.formulation.batch_norm import may_be_by_micro_batch
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.stored_layouts import PlannedInputs, PlannedTensor, StoredLayouts
from planner.formulation.decision_names import filled
from planner.formulation.pinned_space import pinned_space
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.ir.folding import Folded, fold
from planner.ir.graph import Graph
from planner.ir.layout import Mesh, over_micro_batches, parse_layout
from planner.plan.document.document import EVALUATE
from planner.plan.further_stages import Homes, stage_further
from planner.plan.plan import Plan, Search, describe, refold, reprice, restore
from planner.search.block_splitting import finer
from planner.search.search_context import Progress
from planner.search.stored_search import search_stored
from planner.solve.choices import lower_bounds

TIME_LIMIT_S, GAP = 20.0, 0.01
"""What a search for a further program may take, and leave open."""
KEPT = "kept"
"""How a search ended that was not needed."""


def planned_inputs(plan: Plan) -> PlannedInputs:
    """How a plan cuts its inputs."""
    axes = len(plan.mesh.axes)
    return PlannedInputs(plan.mesh, {name: parse_layout(text, axes) for name, text in plan.inputs.items()})


def stored_tensors(plan: Plan) -> dict[str, PlannedTensor]:
    """How a plan stores every parameter and buffer, by name.

    Raises:
        PlanError: it was edited, and does not say of which tensors an entry is.
    """
    found = {}
    for name, text in (*plan.parameters.items(), *plan.buffers.items()):
        if name not in plan.account.leaves:
            raise PlanError(
                f'the plan has no entry {name!r} in "leaves", or was changed since: price it with {EVALUATE}'
            )
        leaf = plan.account.leaves[name]
        layout = over_micro_batches(parse_layout(text, len(plan.mesh.axes)), plan.mesh)
        stored = PlannedTensor(layout, leaf.shape, leaf.dtype)
        found.update(dict.fromkeys(filled(name.partition(" #")[0], leaf.stands_for), stored))
    return found


def further_plan(
    plan: Plan,
    graph: Graph,
    model: Mapping[str, Any],
    mesh: Mesh,
    stored: StoredLayouts,
    held: Homes,
    progress: Progress | None = None,
) -> Plan:
    """The plan of a further program.

    Args:
        plan: that of the first one.
        graph, model: the model's for the other inputs, and its facts, see :func:`model_facts`.
        mesh: as :meth:`PlannedInputs.cut` has it.
        stored: how parameters and buffers lie, and the inputs are cut.
        held: of a pipeline, see :func:`planner.plan.further_stages.homes`; empty for others.

    Raises:
        PlanError: the plan keeps model data on the host, or a tensor lies as the other graph cannot use it.
        InputError: the model was changed since; or its blocks cannot be cut into the plan's stages.
        InfeasibleError: no plan on this mesh fits in memory.
    """
    check_may_have_further(plan)
    unknown = stored.unknown(graph)
    if unknown:
        raise InputError(
            f"the model has {', '.join(unknown[:3])}{' ...' * (len(unknown) > 3)}, which it did not have when it was "
            "planned, so that no rank holds it: leave the model as it was, or plan it again"
        )
    changed = stored.changed(graph)
    if changed:
        others = f", and {len(changed) - 1} more were changed" if len(changed) > 1 else ""
        raise InputError(f"{changed[0]}{others}: leave the model as it was when it was planned, or plan it again")
    is_staged = mesh.micro_batches > 1 or (plan.pipeline is not None and plan.pipeline.ranks > 1)
    found = _as_decided(plan, graph, model, mesh, stored)
    if found is None and is_staged:
        found = _in_stages(plan, graph, model, mesh, stored, held)
    if found is None:
        found = _searched(plan, graph, model, mesh, stored, progress)
    assert found.assignment is not None
    stored.check(found.assignment)
    return found


def check_may_have_further(plan: Plan) -> None:
    """Raise :class:`PlanError` for plans whose steps are tied to the inputs that they were planned for."""
    if plan.transfer_schedules:
        raise PlanError(
            "the plan keeps model data on the host or on disk, and its transfer schedule holds for the inputs that it "
            "was planned with alone: drop or pad a last batch that is smaller (DataLoader(drop_last=True)), evaluate "
            "with batches of the planned form (labels included) under torch.no_grad(), or load "
            "pmodel.full_state_dict() into a module that is planned for the other inputs"
        )
    if plan.pipeline is not None and plan.pipeline.schedule == "2bw":
        raise PlanError(
            "the plan's schedule 2bw leaves backwards of each batch to the next one, which must have the same form: "
            "drop or pad a last batch that is smaller, or plan with another schedule"
        )


def _as_decided(plan: Plan, graph: Graph, model: Mapping[str, Any], mesh: Mesh, stored: StoredLayouts) -> Plan | None:
    """The decisions of the first plan, where they make sense for the other graph and fit in memory."""
    pin = {**plan.pin, **({"micro_batches": mesh.micro_batches} if "micro_batches" in plan.pin else {})}
    try:
        like = replace(plan, model=model, pin=pin, mesh=mesh)
        space = _space(plan, refold(like, graph, model), mesh, stored, Pins.parse(pin))
        found = reprice(like, restore(like, space, model))
    except (PinError, PlanError):
        return None
    if found.predicted.peak_bytes > plan.cluster.device.usable_bytes:
        return None
    gap = max(0.0, 1 - lower_bounds(space.problem(None)).time_s / found.predicted.step_time_s)
    return replace(found, search=Search(KEPT, gap, {}), decided=found.assignment)


def _space(plan: Plan, folded: Folded, mesh: Mesh, stored: StoredLayouts, pins: Pins) -> Space:
    """Every decision that the stored layouts and pins leave."""
    stages, schedule = (1, None) if plan.pipeline is None else (plan.pipeline.ranks, plan.pipeline.schedule)
    pins = replace(pins, schedule=schedule)
    return pinned_space(folded.graph, folded, mesh, plan.cluster, pins, plan.training, stages, stored)


def _in_stages(
    plan: Plan, graph: Graph, model: Mapping[str, Any], mesh: Mesh, stored: StoredLayouts, held: Homes
) -> Plan:
    """The fastest decisions for the average rank, in the stages that there are."""
    assert plan.pipeline is not None
    coarse, start = fold(graph), time.monotonic()
    rules = rules_of(graph, coarse)
    folded = stored.apart(finer(coarse, rules, plan.pipeline.bounds[-1]))
    # Sizes need not divide these inputs; by whose statistics batch norms normalise is no matter of sizes.
    has_statistics = any(map(may_be_by_micro_batch, rules.values()))
    pins = Pins(batch_norm=Pins.parse(plan.pin).batch_norm if has_statistics else None)
    space = _space(plan, folded, mesh, stored, pins)
    bounds = lower_bounds(space.problem(None))
    if bounds.choices is None:
        raise InputError(
            f"these inputs leave the model no way to run in {mesh.micro_batches} micro-batches, since an operator "
            "needs more of the batch than one of them at a time: give inputs of the planned form or a batch of one "
            "sample, or load pmodel.full_state_dict() into a module that is planned for these"
        )
    assignment = assignment_of(space, bounds.choices)
    staged = stage_further(plan, assignment, held)
    predicted = predict_micro_batched(assignment, staged)
    gap = max(0.0, 1 - bounds.time_s / staged.step_s)
    search = Search("feasible", gap, {"solve": time.monotonic() - start})
    return describe(assignment, model, pins.to_dict(), predicted, search, staged)


def _searched(
    plan: Plan, graph: Graph, model: Mapping[str, Any], mesh: Mesh, stored: StoredLayouts, progress: Progress | None
) -> Plan:
    """The fastest plan found for the other graph."""
    limits = {"time_limit_s": TIME_LIMIT_S, "gap": GAP}
    try:
        found = search_stored(graph, plan.cluster, mesh, stored, plan.training, **limits, progress=progress)
    except InfeasibleError as error:
        raise InfeasibleError(
            f"a further program does not fit beside what is stored as planned: {error} Or give these inputs in a "
            "smaller batch, or in one that the ranks divide (DataLoader(drop_last=True) leaves out a last one)",
            error.excess_bytes,
        ) from error
    _, predicted = found.planned_step
    candidates = tuple(candidate.facts() for candidate in found.candidates)
    search = Search(found.status, found.gap, found.seconds, candidates, time_limit_s=TIME_LIMIT_S)
    return describe(found.assignment, model, {}, predicted, search)
