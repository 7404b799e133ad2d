"""``autopar.parallelize``: from a model and a cluster to this rank's share of a distributed module."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.capture.capture import LossFn
from autopar.driver.arguments import (
    check_arguments,
    check_progress,
    check_search,
    check_source,
    given_plan,
    say,
    training_of,
    warn,
)
from autopar.driver.further import ModelState, ProgramMaker, values_of
from autopar.driver.outputs import Outputs, check_outputs, discards_of
from autopar.driver.plan import assign, plan_traced, staged
from autopar.driver.process_group import share_host, start_process_group
from autopar.driver.rank_agreement import arguments, check_alike, planned_on_rank_0, traced_alike
from autopar.emit.build import build
from autopar.emit.initialization import Source, part_maker
from autopar.runtime.data.agreement import DataAgreement, calls_to_check
from autopar.runtime.host.disk import check_given, open_disk
from autopar.runtime.host.memory_check import check_room
from autopar.runtime.module import ParallelModule
from autopar.runtime.spmd.mesh import pipeline_mesh
from planner.analysis.offload.chunks import chunks_of, moving_bytes, parameters
from planner.analysis.offload.step_timing import saved_bytes
from planner.analysis.overlaps import overlaps, scheduled_overlaps
from planner.analysis.prediction import collectives_of_rank
from planner.base.cpython import on_one_stack
from planner.base.errors import InputError, PinError, PlanError
from planner.base.formatting import in_all_bytes
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.stored_layouts import tensors_of
from planner.formulation.training import Training
from planner.plan.document.document import EVALUATE
from planner.plan.further_stages import homes
from planner.plan.plan import Plan, memory_of_rank
from planner.search.search import GAP, TIME_LIMIT_S
from planner.search.search_context import Progress
from planner.solve.transfers import TransferSchedule

RANDOM = (
    "{} is on the meta device and no state_dict is given: its modules initialise themselves, at random from seed {}. "
    "To train on from weights, give state_dict= the original's dict, or the path of a file or checkpoint of it"
)


@on_one_stack
def parallelize(
    model: nn.Module,
    cluster: ClusterSpec,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    pin: Mapping[str, Any] | None = None,
    optimizer_bytes_per_element: int = Training.optimizer_bytes_per_element,
    outputs: Outputs | None = None,
    state_dict: Source | None = None,
    seed: int = 0,
    offload_path: str | os.PathLike[str] | None = None,
    compile: bool | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    gap: float = GAP,
    max_axes: int = MAX_AXES,
    progress: Progress | None = None,
) -> ParallelModule:
    """This rank's share of ``model``, ready to train; call it in every process that ``torchrun`` started.

    Rank 0 plans (or every rank brings the same ``plan``); all ranks give the same arguments. Parameters come from rank
    0's model, from ``state_dict``, or, for models on the meta device, from the modules' own initialisation.

    Args:
        model, cluster, example_args, example_kwargs, loss_fn, pin, optimizer_bytes_per_element, outputs,
            time_limit_s, gap, max_axes: as in :func:`plan`; the last six are of the search, where no plan is given.
        plan: a plan to apply without searching, or the path of one's file.
        state_dict: the original model's full state dict, or the path of a file that ``torch.save`` wrote of it, of a
            safetensors file, of a directory of such files with their index, or of what
            :func:`autopar.save_checkpoint` wrote.
        seed: of dropout, and of initialisation on the meta device.
        offload_path: of a directory for files, where the plan keeps model data on disk; ranks may give different ones.
            Where nothing pins ``offload``, it is used if nothing fits elsewhere.
        compile: whether what each distinct block computes between collectives is compiled, once for all of its
            instances; left out: as pin ``compile`` or the plan says. The first calls compile, see
            :attr:`autopar.runtime.module.ParallelModule.compilation`.
        progress: called on rank 0 with a line of text as the search advances.

    Raises:
        PlanError: the plan does not fit the model, the cluster or the process group; or ranks were given different
            ones, or different models, inputs, pins or seeds.
        InputError: the model does not return what ``outputs`` names, or they are given beside a plan; ``offload_path``
            is missing, not wanted, no directory, or not writable; or ``AUTOPAR_CHECK_DATA`` is neither 0 nor 1.
        InfeasibleError: it has no room for the model's data, or a machine or a GPU has less memory left than the plan
            takes of it.
    """
    check_arguments(model, cluster, example_args, example_kwargs, pin)
    check_search("capture", time_limit_s, gap, max_axes)
    check_progress(progress)
    check_source(state_dict, seed)
    check_outputs(outputs)
    training = training_of(optimizer_bytes_per_element)
    if plan is not None and pin:
        raise PinError("a plan is already decided, so pin has nothing left to fix: give plan or pin, not both")
    if plan is not None and outputs is not None:
        raise InputError(
            "a plan is already decided, and says which outputs it discards: give plan or outputs, not both. Plan again "
            f'with outputs={outputs!r}, or change "discards" in the plan\'s file and price it with {EVALUATE}'
        )
    plan = None if plan is None else given_plan(plan)
    if plan is not None and plan.cluster.world_size != cluster.world_size:
        raise PlanError(
            f"the plan is for {plan.cluster.world_size} devices, the cluster has {cluster.world_size}: plan again"
        )
    if plan is not None:
        _check_fits(plan, cluster)
    pins = Pins.parse(pin)
    if compile is not None:
        pins = replace(pins, compile=compile)
        plan = None if plan is None else _compiling(plan, compile)
    if plan is not None or pins.offload is not None:
        check_given(offload_path, (pins if plan is None else plan.pins).tier == "disk")
    calls = calls_to_check()
    device = start_process_group(cluster)
    check_alike(arguments(model, cluster, plan, pins, training, outputs, state_dict, seed))
    if dist.get_world_size() != cluster.world_size:
        raise PlanError(
            f"the cluster has {cluster.world_size} devices but {dist.get_world_size()} processes were started: "
            f"start {cluster.world_size} (torchrun --nproc-per-node), or describe the cluster that is there"
        )
    if dist.get_rank() == 0:
        say(progress, f"capturing {type(model).__name__}")
    traced = traced_alike(model, example_args, example_kwargs, loss_fn)
    if plan is None:
        training = replace(training, discards=discards_of(traced, outputs))
        limits: dict[str, Any] = {"time_limit_s": time_limit_s, "gap": gap, "max_axes": max_axes}
        search = partial(plan_traced, traced, cluster, pins, training, **limits, progress=progress)
        plan = planned_on_rank_0(search)
    tier = plan.pins.tier
    if tier == "disk":
        check_given(offload_path, True)
    if tier != "device":
        share_host(cluster)
    warn(plan.notes)
    if state_dict is None and any(parameter.is_meta for parameter in model.parameters()):
        warn([RANDOM.format(type(model).__name__, seed)])
    traced = traced.placing(plan.tables, plan.cluster)
    assignment = assign(traced, plan)
    assignment, micro_batched = staged(plan, assignment)
    stage_mesh = plan.mesh.micro_batched(1)
    mesh, pipeline = pipeline_mesh(stage_mesh, device.type, cluster.world_size // stage_mesh.size)
    rank = dist.get_rank() % stage_mesh.size
    make_part = part_maker(model, traced.captured, stage_mesh, rank, device, state_dict, seed)
    if micro_batched is not None:
        micro_batched = replace(micro_batched, pipeline=pipeline)
    table = None if not plan.transfer_schedules else plan.transfer_schedules[0 if pipeline is None else pipeline.rank]
    home = (
        0 if table is None else _home_bytes(assignment, table, None if micro_batched is None else micro_batched.blocks)
    )
    arena = table.high_water_bytes if table is not None and device.type == "cpu" else 0
    check_room(device, _device_bytes(plan), arena + (0 if tier == "disk" else home))
    disk = None
    if tier == "disk" and offload_path is not None:
        disk = open_disk(offload_path, home, plan.pins.update == "backward")
    held = {} if plan.pipeline is None else homes(assignment.space.folded, plan.pipeline)
    lines = progress if dist.get_rank() == 0 else None
    constants = values_of(traced.captured.held)
    maker = ProgramMaker(plan, loss_fn, ModelState.of(model), tensors_of(assignment), held, constants, lines)
    made = build(
        model,
        traced.captured,
        assignment,
        mesh,
        rank,
        make_part,
        seed,
        micro_batched,
        table,
        disk,
        maker,
        plan.pins.compile,
    )
    made.data_agreement = DataAgreement(stage_mesh, device, calls)
    made.planned = plan
    if pipeline is not None and not plan.transfer_schedules:
        made.planned_memory = partial(memory_of_rank, plan, assignment, pipeline.rank)
    if micro_batched is not None and pipeline is not None:
        schedule, bounds = micro_batched.schedule, micro_batched.bounds
        made.planned_calls = partial(collectives_of_rank, assignment, schedule, bounds, pipeline.rank)
    made.planned_overlaps = (
        overlaps(assignment)
        if micro_batched is None
        else scheduled_overlaps(assignment, micro_batched.schedule, micro_batched.bounds, micro_batched.rank)
    )
    return made


def _compiling(plan: Plan, compile: bool) -> Plan:
    """The same plan with blocks that are compiled, or are not."""
    others = {name: value for name, value in plan.pin.items() if name != "compile"}
    return replace(plan, pin={**others, "compile": True} if compile else others, decided=plan.assignment)


def _device_bytes(plan: Plan) -> int:
    """Bytes of a device within which a plan's step stays."""
    return max((table.budget_bytes for table in plan.transfer_schedules), default=plan.predicted.peak_bytes)


def _check_fits(plan: Plan, cluster: ClusterSpec) -> None:
    """Refuse a plan for devices with more memory.

    Raises:
        PlanError: it takes more than this cluster's devices can use.
    """
    needed_bytes, usable_bytes = _device_bytes(plan), cluster.device.usable_bytes
    if needed_bytes > usable_bytes:
        does = "moves model data within" if plan.transfer_schedules else "takes"
        raise PlanError(
            f"the plan {does} {in_all_bytes(needed_bytes)} of a device, and this cluster's "
            f"devices can use {in_all_bytes(usable_bytes)}: plan again for this cluster"
        )


def _home_bytes(assignment: Assignment, table: TransferSchedule, blocks: Collection[int] | None) -> int:
    """What this rank keeps at home of what moves.

    Args:
        blocks: the numbers of its own; ``None``: it has all.
    """
    items = {item.name for item in table.trace.items}
    moving = [chunk for chunk in chunks_of(assignment, blocks) if parameters(chunk) in items]
    return moving_bytes(assignment, moving) + saved_bytes(table)
