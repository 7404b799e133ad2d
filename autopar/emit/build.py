"""Builds the :class:`ParallelModule` of one rank from a captured model and an assignment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.capture import Captured
from autopar.emit.block_program import COMPILER, OFFLOAD, STATE
from autopar.emit.initialization import own_part
from autopar.emit.rewrite import rewrite
from autopar.emit.stage_programs import Outline, stages_of
from autopar.graph import dump
from autopar.graph.module_walk import canonical_names
from autopar.runtime.host.disk import OffloadFiles
from autopar.runtime.layers.segment import Compiler
from autopar.runtime.module import ParallelModule, Program
from autopar.runtime.offload.executor import ChunkSpec, OffloadExecutor, SavedSpec
from autopar.runtime.optim.early_update import AtOnce, EarlyUpdates
from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.pipeline.outputs import Leaving
from autopar.runtime.pipeline.p2p import InProcessLinks, RankLinks
from autopar.runtime.pipeline.stage import Stage
from autopar.runtime.pipeline.step_spec import StepSpec, Tie, Trainers
from autopar.runtime.pipeline.trace import Recorder
from autopar.runtime.spmd.interface import Interface, LeafSpec, OutputSpec
from autopar.runtime.spmd.mesh import groups_of
from autopar.runtime.spmd.micro_batch import MicroBatches
from autopar.runtime.spmd.pipeline_ranks import PipelineRanks
from autopar.runtime.spmd.programs import Emitted, Maker
from autopar.runtime.spmd.random_state import RandomState
from autopar.runtime.spmd.run_state import RunState
from planner.analysis.memory import usage
from planner.analysis.offload.chunks import (
    SAVED,
    before,
    chunks_of,
    gradients,
    moments_of,
    of_micro_batch,
    parameters,
    saved_item,
)
from planner.analysis.offload.step_timing import saved_homes
from planner.base.errors import PlanError
from planner.formulation.assignment import Assignment
from planner.formulation.batch_norm import carried
from planner.formulation.stage_boundaries import ties
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, Layout, Mesh, P, R, Shard, over_micro_batches
from planner.plan.document.document import EVALUATE
from planner.solve.pipeline.schedule import Schedule
from planner.solve.transfers import ItemUse, TransferSchedule

MakePart = Callable[[LeafSpec], Tensor]
"""Makes this rank's part of a parameter, buffer or constant."""


@dataclass(frozen=True)
class MicroBatched:
    """How a micro-batched step runs.

    Attributes:
        schedule: the actions of every rank of the pipeline.
        bounds: where the blocks are cut into stages.
        pipeline: the ranks that hold the same part of every stage; ``None``: all stages are in this process.
        bubble: as it was predicted.
    """

    schedule: Schedule
    bounds: tuple[int, ...]
    pipeline: PipelineRanks | None = None
    bubble: float | None = None

    @property
    def rank(self) -> int | None:
        """Which rank of the pipeline this process is."""
        return None if self.pipeline is None else self.pipeline.rank

    @property
    def stages(self) -> tuple[int, ...]:
        """Those that this process runs."""
        home = self.schedule.rank_of
        return tuple(stage for stage, rank in enumerate(home) if self.rank is None or self.rank == rank)

    @property
    def blocks(self) -> frozenset[int]:
        """The numbers of their blocks."""
        ranges = (range(*self.bounds[stage : stage + 2]) for stage in self.stages)
        return frozenset(number for each in ranges for number in each)


def build(
    model: nn.Module,
    captured: Captured,
    assignment: Assignment,
    device_mesh: DeviceMesh,
    rank: int,
    make_part: MakePart,
    seed: int = 0,
    micro_batched: MicroBatched | None = None,
    transfer_schedule: TransferSchedule | None = None,
    disk: OffloadFiles | None = None,
    maker: Maker | None = None,
    compiles: bool = False,
) -> ParallelModule:
    """Emit the program and hold its parameters.

    Args:
        rank: of this process among those of its stage.
        make_part: this rank's part of a parameter, buffer or constant.
        seed: of dropout and other random operators, the same on all ranks.
        micro_batched: for a micro-batched plan.
        transfer_schedule: for a plan with model data on the host or on disk.
        disk: where it is on disk.
        maker: of programs for inputs of another form.
        compiles: whether blocks are compiled.
    """
    state = RunState(RandomState(seed))
    device = torch.device(device_mesh.device_type)
    offload = None
    if transfer_schedule is not None:
        offload = _offload(assignment, transfer_schedule, device, disk, micro_batched)
    training, early = assignment.space.training, None
    if training.updates_on_device:
        early = EarlyUpdates(AtOnce)
    elif offload is not None and offload.updates_in_backward:
        early = offload.early
    splits_backward = micro_batched is not None and any(micro_batched.schedule.late)
    compiler = Compiler(splits_backward) if compiles else None
    holder = {**groups_of(device_mesh), **_given({STATE: state, OFFLOAD: offload, COMPILER: compiler})}
    program, leaves = _program(captured, assignment, micro_batched, holder, device, offload)
    names = {
        name: first
        for name, first in canonical_names(model).items()
        if any(leaf == ("param", first) or leaf == ("buffer", first) for leaf in captured.leaves.values())
    }
    names |= {each.name: each.name for each in captured.slabs}
    interface = interface_of(captured, assignment, leaves)
    if micro_batched is not None and micro_batched.pipeline is not None:
        make_part = _made_together(interface_of(captured, assignment), interface, make_part)
    made = ParallelModule(
        program,
        interface,
        original=model,
        mesh=assignment.space.mesh.micro_batched(1),
        device_mesh=device_mesh,
        rank=rank,
        names=names,
        not_saved=_not_saved(model),
        make_part=make_part,
        state=state,
        pipeline=None if micro_batched is None else micro_batched.pipeline,
        offload=offload,
        early=early,
        state_bytes=training.optimizer_bytes_per_element,
        maker=maker,
        slabs=captured.slabs,
        compiler=compiler,
    )
    stage = "" if micro_batched is None or micro_batched.rank is None else f"_stage{micro_batched.rank}"
    dump.write(f"emitted{stage}_rank{rank}", made.code)
    return made


def further(
    module: ParallelModule, captured: Captured, assignment: Assignment, micro_batched: MicroBatched | None = None
) -> Emitted:
    """Emit a program for other inputs of the model, over the parameters of its parallel module."""
    device, mesh = torch.device(module.device_mesh.device_type), module.mesh
    holder = {**groups_of(module.device_mesh), **_given({STATE: module.state, COMPILER: module.compiler})}
    program, leaves = _program(captured, assignment, micro_batched, holder, device, is_further=True)
    interface = interface_of(captured, assignment, leaves)
    constants = {
        leaf.name: own_part(captured.constants[leaf.name], leaf, mesh, module.rank, device)
        for leaf in interface.leaves
        if leaf.kind == "const"
    }
    return Emitted(program, interface, constants)


def _given(parts: Mapping[str, Any]) -> dict[str, Any]:
    """What of the parts of programs there is."""
    return {name: part for name, part in parts.items() if part is not None}


def _program(
    captured: Captured,
    assignment: Assignment,
    micro_batched: MicroBatched | None,
    holder: Mapping[str, Any],
    device: torch.device,
    offload: OffloadExecutor | None = None,
    is_further: bool = False,
) -> tuple[Program, list[str]]:
    """What this process runs, and the names of the leaves that it takes.

    Args:
        is_further: leaves that nothing reads are where the first program has them, and not taken.
    """
    if micro_batched is None:
        leaves = [leaf.name for leaf in assignment.space.graph.leaves]
        return rewrite(captured, assignment, holder, device).module, leaves
    step = _pipeline_step(captured, assignment, micro_batched, holder, device, offload, is_further)
    return step, list(step.spec.leaves)


def _offload(
    assignment: Assignment,
    table: TransferSchedule,
    device: torch.device,
    disk: OffloadFiles | None,
    micro_batched: MicroBatched | None,
) -> OffloadExecutor:
    """What moves chunks of parameters and gradients as a transfer schedule says.

    Raises:
        PlanError: the transfer schedule is of other chunks or blocks than the plan's.
    """
    graph, items = assignment.space.graph, {item.name: item.bytes for item in table.trace.items}
    carried = []
    sizes: dict[str, int] = {}
    blocks, places = range(len(assignment.space.folded.instances)), table.trace.place
    stages = (
        {0: blocks}
        if micro_batched is None
        else {s: range(*micro_batched.bounds[s : s + 2]) for s in micro_batched.stages}
    )
    for chunk in chunks_of(assignment, None if micro_batched is None else micro_batched.blocks):
        if parameters(chunk) not in items:  # it stays on the device
            continue
        leaves = [graph.by_name[name] for name in chunk.leaves]
        starts = {leaf.target: start for leaf, start in zip(leaves, chunk.starts, strict=False)}
        trained = tuple(leaf.target for leaf in leaves if leaf.results[0].grad)
        item = gradients(chunk) if gradients(chunk) in items else None
        entered: tuple[int, ...] = (chunk.entered,)
        if chunk.is_before:
            entered = tuple(before(s) for s, own in stages.items() if any(n in own for n in chunk.readers))
        carried.append(ChunkSpec(parameters(chunk), chunk.bytes, starts, entered, item, trained))
        sizes |= {parameters(chunk): chunk.bytes} | ({item: chunk.gradient_bytes} if item else {})
    saved = _saved_specs(assignment, micro_batched, stages)
    sizes |= {each.name: sum(each.sizes) for each in saved}
    entering = {number for each in carried for number in each.entered}
    entering.update(number for own in stages.values() for number in own)
    count = 1 if micro_batched is None else len(micro_batched.bounds) - 1
    moments = {n: names for n, names in moments_of(assignment, count).items() if n in entering}
    own = {each.name for each in carried}
    for action, name in (done for entry in table.entries for done in entry.actions()):
        others = () if micro_batched is not None or name.startswith(SAVED) else ("fetch",)
        if action in (("evict", "make") if name in own else others):
            raise PlanError(
                f"the plan's transfer schedule has {action} {name}, but parameters are only fetched, and gradients "
                f"only made and evicted: it was edited; make another with {EVALUATE}"
            )
    numbers = (None,) if micro_batched is None else range(assignment.space.mesh.micro_batches)
    wanted = (of_micro_batch(name, number) for name, _ in moments.values() for number in numbers)
    is_fit = items == sizes and all(moment in places for moment in wanted)
    if not is_fit or any(_moments_of(each, table) != _needing(each, moments) for each in saved):
        raise PlanError(
            "the plan's transfer schedule is of other chunks or blocks than its layouts make: one of them was edited; "
            f"make another with {EVALUATE}"
        )
    _check_updates(table, carried)
    return OffloadExecutor(table, carried, moments, device, disk, micro_batched is not None, saved, saved_homes(table))


def _saved_specs(
    assignment: Assignment, micro_batched: MicroBatched | None, stages: Mapping[int, range]
) -> list[SavedSpec]:
    """What blocks of these stages save for backward and may leave in between, of each micro-batch."""
    if not assignment.space.training.activations:
        return []
    numbers = [None] if micro_batched is None else range(assignment.space.mesh.micro_batches)
    found = (each for own in stages.values() for each in usage(assignment, own).saved)
    return [
        SavedSpec(of_micro_batch(saved_item(assignment, each), number), each.sizes, each.left, each.savers, number)
        for each in found
        for number in numbers
    ]


def _needing(saved: SavedSpec, moments: Mapping[int, tuple[str, str]]) -> list[str]:
    """The moments in which it must be on the device."""
    found = [moments[saved.left][0], *(moments[number][1] for number in reversed(saved.savers))]
    return [of_micro_batch(name, saved.micro_batch) for name in found]


def _moments_of(saved: SavedSpec, table: TransferSchedule) -> list[str]:
    """The moments in which a transfer schedule has it on the device."""
    return [use.moment for use in table.trace.item[saved.name].uses]


def _check_updates(table: TransferSchedule, carried: Iterable[ChunkSpec]) -> None:
    """Raise :class:`PlanError` if a parameter were read in a step after its update, or fetched before all updates."""
    moments, place = table.trace.moments, table.trace.place
    for each in carried:
        uses = table.trace.item[each.name].uses
        last = max(place[use.moment] for use in uses if moments[place[use.moment]].on == "device")
        read = [] if each.gradients is None else table.trace.item[each.gradients].uses
        on_host = (place[use.moment] for use in read if moments[place[use.moment]].on == "host")
        updated = min(on_host, default=len(moments))
        if uses[-1] != ItemUse(moments[-1].name, "rw") or moments[-1].on != "host" or updated < last:
            raise PlanError(
                f"the plan's transfer schedule updates {each.name} before its last use in the step, or not before the "
                f"step ends: it was edited; make another with {EVALUATE}"
            )


def _made_together(whole: Interface, own: Interface, make_part: MakePart) -> MakePart:
    """Parts of the leaves of this process; all processes make those of all leaves, which they may do together."""
    wanted, parts = {leaf.name for leaf in own.leaves}, {}
    for leaf in whole.leaves:
        if leaf.kind != "input":
            part = make_part(leaf)
            if leaf.name in wanted:
                parts[leaf.name] = part
    return lambda leaf: parts.pop(leaf.name)


def _pipeline_step(
    captured: Captured,
    assignment: Assignment,
    micro_batched: MicroBatched,
    holder: Mapping[str, Any],
    device: torch.device,
    offload: OffloadExecutor | None,
    is_further: bool,
) -> PipelineStep:
    """What this process runs of a micro-batched step."""
    space, schedule, rank = assignment.space, micro_batched.schedule, micro_batched.rank
    micro_batches = MicroBatches(space.mesh.micro_batches)
    stages = stages_of(captured, assignment, micro_batched.bounds, {**holder, MICRO: micro_batches}, device)
    here = [each.stage() for each in stages if each.number in micro_batched.stages]
    links = (
        InProcessLinks()
        if micro_batched.pipeline is None
        else RankLinks(schedule, here, micro_batched.pipeline, device)
    )
    kept = _kept(() if is_further else space.graph.leaves, stages, here)
    leaves = [leaf for leaf in space.graph.leaves if leaf.name in kept or leaf.op == "input"]
    home, left = {position: stage.number for stage in stages for position in stage.outputs}, carried(assignment)
    split = {leaf.name: _micro_batch_dim(space.mesh, assignment.produced(Ref(leaf.name))) for leaf in leaves}
    spec = StepSpec(
        stages={stage.number: stage for stage in here},
        actions=schedule.flow.actions if rank is None else schedule.rows[rank],
        leaves=[leaf.name for leaf in leaves],
        split={name: dim for name, dim in split.items() if dim is not None},
        outputs=[
            _leaving(assignment, position, home[position], left.get(position)) for position in range(len(space.leaving))
        ],
        loss=space.graph.loss,
        micro_batches=micro_batches,
        state=holder[STATE],
        links=links,
        draws=[stage.draws for stage in stages],
        trained=any(leaf.results[0].grad for leaf in space.graph.leaves),
        recorder=Recorder(schedule, device, micro_batched.bubble),
        ties=[]
        if micro_batched.pipeline is None
        else _ties(assignment, micro_batched.bounds, schedule, micro_batched.pipeline),
        trainers=None
        if micro_batched.pipeline is None
        else _trainers(assignment, stages, schedule, micro_batched.pipeline),
        offload=offload,
        offloaded={leaf.target: leaf.name for leaf in leaves if leaf.op == "param"},
    )
    return PipelineStep(spec)


def _kept(leaves: Sequence[Node], stages: Sequence[Outline], here: Sequence[Stage]) -> set[str]:
    """The leaves that stages of this process read or change; those that none does are with the first stage."""
    reads = {stage.number: {*stage.parameters, *stage.leaves, *stage.updates} for stage in stages}
    own = {name for stage in here for name in reads[stage.number]}
    if any(stage.number == 0 for stage in here):
        own |= {leaf.name for leaf in leaves} - {name for names in reads.values() for name in names}
    return own


def _ties(assignment: Assignment, bounds: Sequence[int], schedule: Schedule, pipeline: PipelineRanks) -> list[Tie]:
    """Parameters that stages of several ranks read; every process takes part in making their groups."""
    found = []
    for holders, names in ties(assignment, schedule.rank_of, bounds).items():
        group = pipeline.group(holders)
        if group is not None:
            found.append(Tie(tuple(names), group, pipeline.rank == holders[0]))
    return found


def _trainers(
    assignment: Assignment, stages: Sequence[Outline], schedule: Schedule, pipeline: PipelineRanks
) -> Trainers | None:
    """The ranks that hold parameters that are trained; every process takes part in making their group."""
    graph, dtypes = assignment.space.graph, defaultdict[int, set[str]](set)
    for stage in stages:
        for ref in map(Ref, stage.parameters):
            if ref in graph.differentiated:
                dtypes[schedule.rank_of[stage.number]].add(graph.type_of(ref).dtype)
    if not dtypes:
        return None
    group = pipeline.ranks if len(dtypes) == pipeline.size else pipeline.group(dtypes)
    return None if group is None else Trainers(group, len({*map(frozenset, dtypes.values())}) == 1)


def _micro_batch_dim(mesh: Mesh, layout: Layout) -> int | None:
    """The dim along which micro-batches lie behind one another."""
    local_type = layout[0] if mesh.micro_batches > 1 else R
    return local_type.dim if isinstance(local_type, Shard) else None


def _leaving(assignment: Assignment, position: int, stage: int, buffer: str | None) -> Leaving:
    ref, space = assignment.space.leaving[position], assignment.space
    made = assignment.consumer_layout(ref)
    summed = space.mesh.micro_batches > 1 and made[0] == P
    dtype = getattr(torch, space.graph.type_of(ref).dtype)
    is_kept, is_differentiable = position not in space.discards, space.graph.type_of(ref).grad
    return Leaving(_micro_batch_dim(space.mesh, made), summed, stage, dtype, is_differentiable, is_kept, buffer)


def interface_of(captured: Captured, assignment: Assignment, leaf_names: Collection[str] | None = None) -> Interface:
    """How the program's flat inputs and outputs map onto the model's.

    Args:
        leaf_names: the leaves that the program takes, in order; left out: all.
    """
    graph, mesh = assignment.space.graph, assignment.space.mesh
    leaves = []
    for leaf in graph.leaves:
        if leaf_names is None or leaf.name in leaf_names:
            tensor = leaf.results[0]
            dtype = getattr(torch, tensor.dtype)
            name = leaf.name if leaf.op in ("input", "const") else leaf.target
            layout = over_micro_batches(assignment.produced(Ref(leaf.name)), mesh)
            leaves.append(LeafSpec(leaf.op, name, tensor.shape, dtype, layout, tensor.grad))
    outputs: list[OutputSpec | None] = []
    position = 0
    for output, name in zip(captured.outputs, captured.output_names, strict=True):
        if output is None:
            outputs.append(None)
            continue
        ref = graph.outputs[position]
        layout = assignment.output_layout(position)
        if mesh.micro_batches > 1:  # micro-batches are put together as they come, whatever the layout says of them
            layout = over_micro_batches((assignment.consumer_layout(ref)[0], *layout[1:]), mesh)
        is_kept = position not in assignment.space.discards
        outputs.append(OutputSpec(name, graph.type_of(ref).shape, layout, is_kept))
        position += 1
    return Interface(
        tuple(leaves),
        captured.input_names,
        captured.in_spec,
        tuple(outputs),
        captured.static_outputs,
        captured.out_spec,
        tuple(name for name, _ in captured.updates),
        captured.training,
        captured.static_inputs,
    )


def _not_saved(model: nn.Module) -> frozenset[str]:
    """Names of the buffers that the model keeps out of its state dict."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    )
