"""The front door: plan a model, and parallelize it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from autopar.capture.capture import Captured, LossFn, capture
from autopar.capture.lowering import lower
from autopar.driver.rank_agreement import arguments, captured, check_alike
from autopar.emit.build import InTurns, build
from autopar.emit.initialization import Source, part_maker
from autopar.emit.stage_programs import check_in_turns
from autopar.graph.interpreter import no_garbage, on_one_stack
from autopar.runtime.host.disk import check_given, open_disk
from autopar.runtime.host.memory_check import check_room
from autopar.runtime.module import ParallelModule
from autopar.runtime.spmd.mesh import pipeline_mesh
from planner.analysis.memory import usage
from planner.analysis.offload.chunks import chunks_of, moving_bytes, parameters
from planner.analysis.offload.step_timing import saved_bytes
from planner.analysis.prediction import predict, predict_in_turns
from planner.base import host as machine
from planner.base.errors import ClusterError, InputError, PinError, PlanError
from planner.base.formatting import in_all_bytes
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.filters import filters
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Pins
from planner.formulation.pipeline_pace import pace_of
from planner.formulation.search_space import Space, rules_of
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, Search, describe, refold, reprice, restage, restore
from planner.search.advice import Request, search_or_advise
from planner.search.search import GAP, check_axes, check_gap, check_time_limit
from planner.sizes.position_limits import check_positions
from planner.solve.pipeline.schedule import schedule
from planner.solve.transfers import Timetable

Progress = Callable[[str], None]
Fold = Literal["capture", "graph", "off"]


@dataclass(frozen=True)
class Traced:
    """A captured model and its planner graph."""

    captured: Captured
    graph: Graph
    name: str
    capture_s: float

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the model in a plan."""
        return model_facts(self.graph, self.name, "train" if self.captured.training else "eval")


@on_one_stack
@no_garbage()
def trace(
    model: nn.Module,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    fold: Fold = "capture",
) -> Traced:
    """Capture and lower a model; see :func:`autopar.capture.capture.capture`, and :func:`plan` for ``fold``."""
    start = time.monotonic()
    captured = capture(model, example_args, example_kwargs, loss_fn, fold=fold == "capture")
    graph = lower(captured)
    check_positions(graph)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if loss_fn is not None and model.training and not trains:
        raise InputError(
            f"loss_fn is given, {type(model).__name__} is in train mode, and none of its parameters has requires_grad, "
            "so that there is nothing to train: set requires_grad on what is to be trained, or call model.eval() to "
            "have the loss computed alone"
        )
    if loss_fn is not None and trains and not graph.roots:
        raise InputError(
            "the loss that loss_fn returned depends on no parameter that is trained: compute it from the model's "
            "outputs, and do not detach them"
        )
    return Traced(captured, graph, type(model).__name__, time.monotonic() - start)


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
    fold: Fold = "capture",
    pipelines: bool = False,
    time_limit_s: float = 60.0,
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
        :class:`planner.formulation.constraints.pins.Pins`. optimizer_bytes_per_element: optimizer state per parameter
        element: Adam's is 8, and 12 where it steps
            masters in float32 (``master_dtype``, see :meth:`autopar.runtime.module.ParallelModule.optimizer`).
        fold: ``"capture"`` traces submodules that repeat once and decides once per distinct block, ``"graph"`` traces
            the whole model and decides once per distinct block, ``"off"`` decides for every operator of the model.
            The graph is the same in all three, and what ``"capture"`` cannot follow is traced whole.
        pipelines: also look at pipeline stages and micro-batches, as where ``pin`` asks for them.
        time_limit_s: when to stop proving; the plan then carries the proven gap.
        gap: part of a step that the proof may leave open: the plan is at most so much slower than the fastest; 0 proves
            that it is the fastest, which may take a minute where memory is tight.
        max_axes: how many axes a mesh may have at most that no pin makes, 1 to 3: the plan is the fastest of these.
            Three take about ten times as long as two.
        progress: called with a line of text as the search advances.

    Raises:
        InputError, CaptureError: the model or its inputs cannot be captured; it looks up positions past the end of a
            table; it is to be trained in turns, and has no loss; or it has a ``loss_fn``, and nothing to train.
        PinError: the pins contradict each other, the model, or the cluster.
        InfeasibleError: no plan fits in memory.
    """
    check_arguments(model, cluster, example_args, example_kwargs, pin)
    _check_search(fold, time_limit_s, gap, max_axes)
    training = _training(optimizer_bytes_per_element)
    pins = Pins.parse(pin)
    _say(progress, f"capturing {type(model).__name__}")
    traced = trace(model, example_args, example_kwargs, loss_fn, fold)
    return plan_traced(
        traced,
        cluster,
        pins,
        training,
        fold=fold,
        pipelines=pipelines,
        time_limit_s=time_limit_s,
        gap=gap,
        max_axes=max_axes,
        progress=progress,
    )


def _runs_in_turns(traced: Traced) -> bool:
    """Whether steps in turns can train the model."""
    try:
        check_in_turns(traced.captured, traced.graph)
    except (InputError, PlanError):
        return False
    return True


@on_one_stack
@no_garbage()
def plan_traced(
    traced: Traced,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    *,
    fold: Fold = "capture",
    pipelines: bool = False,
    time_limit_s: float = 60.0,
    gap: float = GAP,
    max_axes: int = MAX_AXES,
    progress: Progress | None = None,
) -> Plan:
    """Plan a captured model; see :func:`plan`."""
    if pipelines or pins.in_turns:
        check_in_turns(traced.captured, traced.graph)
    _say(progress, f"planning {len(traced.graph.nodes)} graph nodes for {cluster.world_size} devices")
    request = Request(
        traced.graph,
        cluster,
        pins,
        training,
        folding=fold != "off",
        time_limit_s=time_limit_s,
        gap=gap,
        max_axes=max_axes,
        pipelines=pipelines,
        runs_in_turns=partial(_runs_in_turns, traced),
    )
    found = search_or_advise(request, progress)
    assignment, staged = found.assignment, found.staged
    timetables: tuple[Timetable, ...] = ()
    if pins.tier != "device":
        timetables, predicted = found.offloaded
    elif staged is None:
        predicted = predict(assignment, found.evaluation.time_s, found.memory or usage(assignment))
    else:
        predicted = predict_in_turns(assignment, staged)
    looked = [c for c in found.candidates if c.proof != "arithmetic" or c.status != "not tried"]
    seen = tuple(candidate.facts() for candidate in looked)
    seconds, unseen = {"capture": traced.capture_s, **found.seconds}, len(found.candidates) - len(seen)
    return describe(
        assignment,
        traced.facts,
        pins.to_dict(),
        predicted,
        Search(found.status, found.gap, seconds, seen, unseen, max_axes, time_limit_s),
        staged,
        timetables,
    )


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
    return reprice(plan, assign(trace(model, example_args, example_kwargs, loss_fn), plan))


def assign(traced: Traced, plan: Plan) -> Assignment:
    """The decisions of a plan, for the captured model at hand.

    Raises:
        PlanError: the plan does not fit the model.
    """
    if plan.assignment is not None and plan.assignment.space.graph == traced.graph:
        return plan.assignment
    facts = traced.facts
    folded = refold(plan, traced.graph, facts)
    rules = rules_of(traced.graph)
    pins = Pins.parse(plan.pin)
    kept, stages = filters(pins, traced.graph, rules, plan.mesh), 1 if plan.pipeline is None else plan.pipeline.ranks
    training = Training(plan.optimizer_bytes_per_element, pins.tier, pins.update, plan.activations, plan.gathers)
    pace = pace_of(stages, plan.mesh.micro_batches, pins.schedule)
    space = Space(folded, plan.mesh, CostModel(plan.cluster), training, rules, *kept, pace=pace)
    return restore(plan, space, facts)


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
    pipelines: bool = False,
    state_dict: Source | None = None,
    seed: int = 0,
    offload_path: str | os.PathLike[str] | None = None,
    time_limit_s: float = 60.0,
    gap: float = GAP,
    max_axes: int = MAX_AXES,
    progress: Progress | None = None,
) -> ParallelModule:
    """This rank's share of ``model``, ready to train; call it in every process that ``torchrun`` started.

    Rank 0 plans (or every rank brings the same ``plan``); all ranks give the same arguments. Parameters come from rank
    0's model, from ``state_dict``, or, for models on the meta device, from the modules' own initialisation.

    Args:
        model, cluster, example_args, example_kwargs, loss_fn, pin, optimizer_bytes_per_element, pipelines,
            time_limit_s, gap, max_axes: as in :func:`plan`; the last six are of the search, where no plan is given.
        plan: a plan to apply without searching, or the path of one's file.
        state_dict: the original model's full state dict, or the path of a file that ``torch.save`` wrote of it, of a
            safetensors file, of a directory of such files with their index, or of what
            :func:`autopar.save_checkpoint` wrote.
        seed: of dropout, and of initialisation on the meta device.
        offload_path: of a directory for files, where the plan keeps model data on disk; ranks may give different ones.
        progress: called on rank 0 with a line of text as the search advances.

    Raises:
        PlanError: the plan does not fit the model, the cluster or the process group; or ranks were given different
            ones, or different models, inputs, pins or seeds.
        InputError: ``offload_path`` is missing, not wanted, no directory, or not writable.
        InfeasibleError: it has no room for the model's data, or a machine or a GPU has less memory left than the plan
            takes of it.
    """
    check_arguments(model, cluster, example_args, example_kwargs, pin)
    training = _training(optimizer_bytes_per_element)
    if plan is not None and pin:
        raise PinError("a plan is already decided, so pin has nothing left to fix: give plan or pin, not both")
    plan = None if plan is None else given_plan(plan)
    if plan is not None and plan.cluster.world_size != cluster.world_size:
        raise PlanError(
            f"the plan is for {plan.cluster.world_size} devices, the cluster has {cluster.world_size}: plan again"
        )
    if plan is not None:
        _check_fits(plan, cluster)
    pins = Pins.parse(pin)
    pinned = pins if plan is None else Pins.parse(plan.pin)
    tier = pinned.tier
    check_given(offload_path, tier == "disk")
    device = start_process_group(cluster, tier != "device")
    check_alike(arguments(model, cluster, plan, pins, training, pipelines, state_dict, seed))
    if dist.get_world_size() != cluster.world_size:
        raise PlanError(
            f"the cluster has {cluster.world_size} devices but {dist.get_world_size()} processes were started: "
            f"start {cluster.world_size} (torchrun --nproc-per-node), or describe the cluster that is there"
        )
    if dist.get_rank() == 0:
        _say(progress, f"capturing {type(model).__name__}")
    traced = _traced_alike(model, example_args, example_kwargs, loss_fn)
    if plan is None:
        plan = _plan_on_rank_0(traced, cluster, pins, training, pipelines, time_limit_s, gap, max_axes, progress)
    assignment = assign(traced, plan)
    assignment, in_turns = staged(plan, assignment)
    stage_mesh = plan.mesh.in_turns(1)
    mesh, pipeline = pipeline_mesh(stage_mesh, device.type, cluster.world_size // stage_mesh.size)
    rank = dist.get_rank() % stage_mesh.size
    make_part = part_maker(model, traced.captured, stage_mesh, rank, device, state_dict, seed)
    if in_turns is not None:
        in_turns = replace(in_turns, pipeline=pipeline)
    table = None if not plan.timetables else plan.timetables[0 if pipeline is None else pipeline.rank]
    home = 0 if table is None else _home_bytes(assignment, table, None if in_turns is None else in_turns.blocks)
    arena = table.high_water_bytes if table is not None and device.type == "cpu" else 0
    check_room(device, _device_bytes(plan), arena + (0 if tier == "disk" else home))
    disk = None if offload_path is None else open_disk(offload_path, home, pinned.update == "backward")
    return build(model, traced.captured, assignment, mesh, rank, make_part, seed, in_turns, table, disk)


def _device_bytes(plan: Plan) -> int:
    """Bytes of a device within which a plan's step stays."""
    return max((table.budget_bytes for table in plan.timetables), default=plan.predicted.peak_bytes)


def _check_fits(plan: Plan, cluster: ClusterSpec) -> None:
    """Refuse a plan for devices with more memory.

    Raises:
        PlanError: it takes more than this cluster's devices can use.
    """
    needed_bytes, usable_bytes = _device_bytes(plan), cluster.device.usable_bytes
    if needed_bytes > usable_bytes:
        does = "moves model data within" if plan.timetables else "takes"
        raise PlanError(
            f"the plan {does} {in_all_bytes(needed_bytes)} of a device, and this cluster's "
            f"devices can use {in_all_bytes(usable_bytes)}: plan again for this cluster"
        )


def _home_bytes(assignment: Assignment, table: Timetable, blocks: Collection[int] | None) -> int:
    """What this rank keeps at home of what moves.

    Args:
        blocks: the numbers of its own; ``None``: it has all.
    """
    items = {item.name for item in table.trace.items}
    moving = [chunk for chunk in chunks_of(assignment, blocks) if parameters(chunk) in items]
    return moving_bytes(assignment, moving) + saved_bytes(table)


def staged(plan: Plan, assignment: Assignment) -> tuple[Assignment, InTurns | None]:
    """An assignment as its plan recomputes, and how it runs if it does so in turns.

    Raises:
        PlanError: the plan's pipeline does not fit the model's blocks.
    """
    found = restage(plan, assignment)
    if found is None:
        return assignment, None
    pipeline = found.pipeline
    actions = schedule(pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.virtual_stages)
    recomputing = replace(assignment, recompute=found.recompute(assignment.space.folded), waits=found.waits)
    return recomputing, InTurns(actions, found.cut.bounds, bubble=found.bubble)


def start_process_group(cluster: ClusterSpec, offloads: bool = False) -> torch.device:
    """Initialise the default process group if ``torchrun`` prepared one and nobody has; returns this rank's device.

    Args:
        offloads: whether gradients on the host are communicated too, such as their norm; beside GPUs the host's cores
            are then shared out among the processes, which step with them.

    Raises:
        PlanError: not started by ``torchrun``, or no GPU where the cluster has them; or the process group that there is
            communicates on GPUs alone, and the plan offloads.
    """
    on_gpu = cluster.backend == "nccl"
    if on_gpu and not torch.cuda.is_available():
        raise PlanError(
            f"cluster {cluster.name!r} communicates over nccl, but this machine has no GPU: use ClusterSpec.local"
        )
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if on_gpu and offloads:  # torchrun leaves each process one thread, and now the host updates
        share = machine.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(share, torch.get_num_threads()))
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise PlanError(
                f"autopar.parallelize runs in {cluster.world_size} processes, but no process group is initialised: "
                f"start the program with `torchrun --nproc-per-node {cluster.world_size} ...`; to check a plan in one "
                "process use autopar.verify, to only plan use autopar.plan"
            )
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu and offloads else cluster.backend)
    elif offloads and torch.device("cpu") not in distributed_c10d._get_default_group()._device_types:
        raise PlanError(
            "the plan keeps gradients on the host, where this process group does not communicate: initialise it with "
            "torch.distributed.init_process_group('cpu:gloo,cuda:nccl'), or leave that to autopar.parallelize"
        )
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _traced_alike(
    model: nn.Module,
    example_args: tuple[Any, ...] | None,
    example_kwargs: Mapping[str, Any] | None,
    loss_fn: LossFn | None,
) -> Traced:
    """Capture; an error where ranks do not all find the same."""
    try:
        traced = trace(model, example_args, example_kwargs, loss_fn)
    except Exception as error:
        check_alike({"model": f"one that cannot be captured ({type(error).__name__})"})
        raise
    check_alike(captured(traced.graph, traced.facts))
    return traced


def _plan_on_rank_0(
    traced: Traced,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    pipelines: bool,
    time_limit_s: float,
    gap: float,
    max_axes: int,
    progress: Progress | None,
) -> Plan:
    """Search once; an error is raised on every rank."""
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            limits: dict[str, Any] = {"time_limit_s": time_limit_s, "gap": gap, "max_axes": max_axes}
            found = plan_traced(traced, cluster, pins, training, pipelines=pipelines, **limits, progress=progress)
            message = [found.to_dict()]
        except Exception as error:
            message = [error]
    dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    return Plan.from_dict(message[0])


def given_plan(plan: object, name: str = "plan", taken: str = "a Plan,") -> Plan:
    """A plan that was given as one, or as the path of its file.

    Args:
        name, taken: of the argument, and what it takes beside a path, in words.

    Raises:
        PlanError: it is neither, or the file holds none.
    """
    if isinstance(plan, (str, os.PathLike)):
        return Plan.load(plan)
    if not isinstance(plan, Plan):
        decoded = " (of what plan.to_dict() gave: Plan.from_dict)" if isinstance(plan, dict) else ""
        raise PlanError(f"{name} is {_kind(plan)}; give {taken} or the path of a file that plan.save wrote{decoded}")
    return plan


def check_arguments(
    model: object,
    cluster: object,
    example_args: object = None,
    example_kwargs: object = None,
    pin: Mapping[str, Any] | None = None,
) -> None:
    """Refuse arguments of the wrong kind before anything is captured.

    Raises:
        InputError, ClusterError, PinError: names the argument and what it should be.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {_kind(model)}; give a torch.nn.Module")
    if not isinstance(cluster, ClusterSpec):
        raise ClusterError(
            f"cluster is {_kind(cluster)}; give a ClusterSpec, e.g. ClusterSpec.local(4), "
            "ClusterSpec.preset('dgx-h100', nodes=4) or ClusterSpec.load('cluster.yaml')"
        )
    if example_args is not None and not isinstance(example_args, (tuple, list)):
        raise InputError(f"example_args is {_kind(example_args)}; give a tuple of positional inputs: example_args=(x,)")
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise InputError(f"example_kwargs is {_kind(example_kwargs)}; give a dict of inputs by name")
    Pins.parse(pin)


def _check_search(fold: str, time_limit_s: float, gap: float, max_axes: int) -> None:
    if fold not in get_args(Fold):
        raise InputError(
            f"fold is {fold!r}; it is 'capture' (trace and decide once per distinct block), 'graph' (trace the whole "
            "model, decide once per distinct block) or 'off' (decide for every operator)"
        )
    check_time_limit(time_limit_s)
    check_gap(gap)
    check_axes(max_axes)


def _training(optimizer_bytes_per_element: object) -> Training:
    given = optimizer_bytes_per_element
    if not isinstance(given, int) or given < 0:
        raise InputError(f"optimizer_bytes_per_element is {given!r}; give bytes, at least 0")
    return Training(given)


def _kind(value: object) -> str:
    return f"{value!r}" if isinstance(value, (str, int, float)) else f"of type {type(value).__name__}"


def _say(progress: Progress | None, text: str) -> None:
    if progress is not None:
        progress(text)
