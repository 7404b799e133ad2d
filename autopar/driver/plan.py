"""``autopar.plan`` and ``autopar.evaluate``: from a model and a cluster to a plan, without a process group."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from autopar.capture.capture import LossFn
from autopar.driver.arguments import (
    Fold,
    check_arguments,
    check_progress,
    check_search,
    given_plan,
    say,
    training_of,
    warn,
)
from autopar.driver.outputs import Outputs, check_discards, check_outputs, discards_of
from autopar.driver.tables import with_tables
from autopar.driver.trace import Traced, trace
from planner.base.cpython import no_garbage, on_one_stack
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.context import with_ulysses
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Pins
from planner.formulation.pinned_space import pinned_space
from planner.formulation.training import Training
from planner.plan.plan import Plan, describe_search, refold, reprice, restage, restore
from planner.search.advice import Request, search_or_advise
from planner.search.search import GAP, TIME_LIMIT_S
from planner.search.search_context import Progress
from planner.solve.pipeline.schedule import schedule

if TYPE_CHECKING:
    from autopar.emit.build import MicroBatched


@no_garbage()
def plan(
    model: nn.Module,
    cluster: ClusterSpec,
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    pin: Mapping[str, Any] | None = None,
    optimizer_bytes_per_element: int = Training.optimizer_bytes_per_element,
    outputs: Outputs | None = None,
    fold: Fold = "capture",
    time_limit_s: float = TIME_LIMIT_S,
    gap: float = GAP,
    max_axes: int = MAX_AXES,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan found for training ``model`` on ``cluster``; needs no device and no process group.

    Args:
        model: a module on any device, the meta device included, in the mode (train or eval) it will run in.
        cluster: what to plan for.
        example_args, example_kwargs: inputs of one *global* batch; only shapes and dtypes matter. May be
            left out when the model brings ``dummy_inputs``.
        loss_fn: ``loss_fn(outputs, batch)`` when the model does not compute its loss itself.
        pin: decisions to fix, e.g. ``{"data": 2, "tensor": 4}``; see
            :class:`planner.formulation.constraints.pins.Pins`.
        optimizer_bytes_per_element: optimizer state per parameter element: Adam's is 8, and 12 where it steps masters
            in float32 (``master_dtype``, see :meth:`autopar.runtime.module.ParallelModule.optimizer`).
        outputs: names of the model's outputs that training steps keep, beside the loss and other single numbers:
            ``("loss", "logits")``, of nested ones also those above them (``"hidden_states"``); ``"all"`` keeps all.
            Left out: in a step of several micro-batches none, since they would be held for all of them; in another
            all. The others are returned under ``torch.no_grad()``; in training their use raises an error.
        fold: ``"capture"`` traces submodules that repeat once and decides once per distinct block, ``"graph"`` traces
            the whole model and decides once per distinct block, ``"off"`` decides for every operator of the model.
            The graph is the same in all three, and what ``"capture"`` cannot follow is traced whole.
        time_limit_s: when to stop proving; the plan then carries the proven gap.
        gap: part of a step that the proof may leave open: the plan is at most so much slower than the fastest; 0 proves
            that it is the fastest, which may take a minute where memory is tight.
        max_axes: how many axes a mesh may have at most that no pin makes, 1 to 3: the plan is the fastest of these.
            Three take about ten times as long as two.
        progress: called with a line of text as the search advances.

    Raises:
        InputError, CaptureError: the model or its inputs cannot be captured; it looks up positions past the end of a
            table; it is to be trained with micro-batches, and has no loss; it has a ``loss_fn``, and nothing to
            train; or it does not return what ``outputs`` names.
        PinError: the pins contradict each other, the model, or the cluster.
        InfeasibleError: no plan fits in memory.
    """
    check_arguments(model, cluster, example_args, example_kwargs, pin)
    check_search(fold, time_limit_s, gap, max_axes)
    check_progress(progress)
    check_outputs(outputs)
    training = training_of(optimizer_bytes_per_element)
    pins = Pins.parse(pin)
    say(progress, f"capturing {type(model).__name__}")
    traced = trace(model, example_args, example_kwargs, loss_fn, fold)
    found = plan_traced(
        traced,
        cluster,
        pins,
        replace(training, discards=discards_of(traced, outputs)),
        fold=fold,
        time_limit_s=time_limit_s,
        gap=gap,
        max_axes=max_axes,
        progress=progress,
    )
    warn(found.notes)
    return found


@on_one_stack
@no_garbage()
def plan_traced(
    traced: Traced,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    *,
    fold: Fold = "capture",
    time_limit_s: float = TIME_LIMIT_S,
    gap: float = GAP,
    max_axes: int = MAX_AXES,
    progress: Progress | None = None,
) -> Plan:
    """Plan a captured model; see :func:`plan`."""
    if pins.micro_batched:
        traced.check_micro_batched()
    pins, training = with_ulysses(pins, traced.graph, cluster), replace(training, compile=pins.compile)

    def search(traced: Traced, time_limit_s: float) -> Plan:
        """The fastest plan of a program whose tables lie where they shall be."""
        say(progress, f"planning {len(traced.graph.nodes)} graph nodes for {cluster.world_size} devices")
        request = Request(
            traced.graph,
            cluster,
            pins,
            training,
            folding=fold != "off",
            time_limit_s=time_limit_s,
            gap=gap,
            max_axes=max_axes,
        )
        found = search_or_advise(request, progress)
        seconds = {"capture": traced.capture_s}
        return describe_search(found, traced.facts, pins.to_dict(), seconds, max_axes, time_limit_s)

    return with_tables(traced, cluster, pins, training, time_limit_s, search, progress)


def evaluate(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str],
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
) -> Plan:
    """What a plan decides, priced again for the model at hand: for plans that were edited, or read from a file.

    Args:
        model, example_args, example_kwargs, loss_fn: as in :func:`plan`.
        plan: a plan, or the path of one's file.

    Raises:
        PlanError: the plan does not fit the model.
    """
    plan = given_plan(plan)
    check_arguments(model, plan.cluster, example_args, example_kwargs)
    traced = trace(model, example_args, example_kwargs, loss_fn).placing(plan.tables, plan.cluster)
    found = reprice(plan, assign(traced, plan))
    warn(found.notes)
    return found


def assign(traced: Traced, plan: Plan) -> Assignment:
    """The decisions of a plan, for the captured model at hand with tables as the plan has them.

    Raises:
        PlanError: the plan does not fit the model.
    """
    if plan.assignment is not None and plan.assignment.space.graph == traced.graph:
        return plan.assignment
    facts = traced.facts
    folded = refold(plan, traced.graph, facts)
    check_discards(traced, plan)
    pins, stages = plan.pins, 1 if plan.pipeline is None else plan.pipeline.ranks
    space = pinned_space(traced.graph, folded, plan.mesh, plan.cluster, pins, plan.training, stages)
    return restore(plan, space, facts)


def staged(plan: Plan, assignment: Assignment) -> tuple[Assignment, MicroBatched | None]:
    """An assignment as its plan recomputes, and how it runs if it does so with micro-batches.

    Raises:
        PlanError: the plan's pipeline does not fit the model's blocks.
    """
    from autopar.emit.build import MicroBatched  # with all that a plan runs with, which planning does not need

    found = restage(plan, assignment)
    if found is None:
        return assignment, None
    pipeline = found.pipeline
    actions = schedule(pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.virtual_stages)
    recomputing = replace(assignment, recompute=found.recompute(assignment.space.folded), prefetch=found.prefetch)
    return recomputing, MicroBatched(actions, found.cut.bounds, bubble=found.bubble)
