"""Parallel configurations: pipeline stages, micro-batches and mesh axes, enumerated before any layout is chosen.

A configuration is a number of pipeline stages, and the mesh of each with the number of micro-batches on it. All that is
known of it without a problem is :class:`Arithmetic`: no plan computes faster than all devices at their best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

from planner.base.errors import PinError
from planner.base.formatting import IN_EACH, sizes_text
from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import Product, Scaling, kernel_of
from planner.cost.model import CostModel
from planner.formulation.constraints.mesh_candidates import candidate_meshes, pinned_mesh
from planner.formulation.constraints.pins import FREE_AXES, Pins
from planner.formulation.constraints.roles import REST, described, ranks_sharing, sharing
from planner.formulation.decisions import DecisionGraph
from planner.formulation.float8 import may_scale
from planner.formulation.pipeline_pace import PipelinePace, pace_of, packing
from planner.formulation.training import Training
from planner.formulation.unsharding import PER_STEP, Unsharding
from planner.ir.graph import Graph, Node
from planner.ir.layout import Mesh
from planner.ops import OPS
from planner.ops.attention import is_causal
from planner.solve.pipeline.schedule import VIRTUAL_STAGES
from planner.solve.pipeline.stages import Pipeline

FAR = 2.75
"""So many doublings from enough stages shapes are evaluated first."""
SLOW = 2.0
"""None of these are so many times slower by arithmetic than others."""
SCHEDULES = ("1f1b", "interleaved_1f1b")
"""Schedules that are tried where none is pinned."""
VIRTUAL = (1, 2, 4, 8)
"""So many stages a rank may have where their number is not pinned."""
MOST_MICRO_BATCHES = 16
"""So many numbers of micro-batches are tried at most; of more divisors, those that leave ranks 1, 2, 4, ... samples."""


@dataclass(frozen=True)
class ParallelConfig:
    """So many pipeline stages, each on its own ranks laid out as ``mesh``, which may have an axis of micro-batches.

    With micro-batches, ``unsharding`` says when parameters are gathered.
    """

    stages: int
    mesh: Mesh
    unsharding: Unsharding = PER_STEP

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Found once: a search looks thousands of configurations up thousands of times."""
        return hash((self.stages, self.mesh, self.unsharding))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}  # other processes' differ

    @property
    def micro_batched(self) -> bool:
        """Whether a step is more than one forward and one backward on every rank."""
        return self.stages > 1 or self.mesh.micro_batches > 1

    def pace(self, schedule: str | None = None) -> PipelinePace:
        """That of the average rank of all its pipelines."""
        return pace_of(self.stages, self.mesh.micro_batches, schedule)

    @property
    def in_flight(self) -> float:
        """Micro-batches that the average rank holds, about: half as many as stages, where there are so many."""
        return min(self.mesh.micro_batches, (self.stages + 1) / 2)

    @cached_property
    def any_micro_batches(self) -> ParallelConfig:
        """What is the same of configurations that differ in micro-batches."""
        return replace(self, mesh=self.mesh.micro_batched(1))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by name, pipeline first."""
        stages = {"pipeline": self.stages} if self.stages > 1 else {}
        return {**stages, **dict(zip(self.mesh.names, self.mesh.sizes, strict=True))}

    def distance(self, other: ParallelConfig) -> float:
        """How far another one is: doublings of stages, micro-batches and the last axis, or instead of these how many
        axes more or less, if that is more: an axis that is divided is one step away.
        """
        stages, micro_batches, last, axes = (
            abs(mine - theirs) for mine, theirs in zip(self._measures, other._measures, strict=True)
        )
        return stages + micro_batches + max(last, axes)

    @cached_property
    def _measures(self) -> tuple[float, ...]:
        sizes = self.stages, self.mesh.micro_batches, self.mesh.sizes[-1]
        return *map(math.log2, sizes), float(len(self.mesh.micro_batched(1).axes))

    def __str__(self) -> str:
        return mesh_text(self.sizes) + IN_EACH * (not self.unsharding.once_per_step)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """``"data 2 x tensor 4"`` from sizes by name; of axes that no plan has given a meaning the sizes, ``"2 x 4"``."""
    axes = (str(size) if name in FREE_AXES[1:] else sizes_text({name: size}) for name, size in sizes.items())
    return " x ".join(axes)


def without_micro_batches(cluster: ClusterSpec, pins: Pins, max_axes: int) -> tuple[ParallelConfig, ...]:
    """Every configuration of one stage and one micro-batch that the pins allow; steps of one micro-batch have no
    gradient to leave.
    """
    if pins.micro_batched:
        return ()
    return tuple(ParallelConfig(1, mesh) for mesh in _meshes(cluster, pins, max_axes, 1))


def micro_batched(
    cluster: ClusterSpec, pins: Pins, graph: Graph, blocks: int, max_axes: int
) -> tuple[ParallelConfig, ...]:
    """Every other configuration: stages among which so many blocks can be cut, and micro-batches that divide the batch.

    Of those whose parameters may be gathered once a step and in each micro-batch, the former.

    Raises:
        PinError: more stages are pinned than there are blocks, or micro-batches that do not divide the batch.
    """
    found, samples = [], batch_of(graph) // (pins.micro_batches or 1)
    counts = _stage_counts(cluster, pins, blocks)
    meshes = {stages: _meshes(cluster, pins, max_axes, stages) for stages in counts}
    for stages in [each for each in counts if samples % _data(meshes[each]) == 0] or counts:
        for mesh in meshes[stages]:
            found_meshes = (
                mesh.micro_batched(micro_batches) for micro_batches in _micro_batch_counts(pins, graph, mesh)
            )
            found += [ParallelConfig(stages, each, pins.unshardings[0]) for each in found_meshes]
    names, virtual = schedules(pins), pins.virtual_stages
    runs = [
        s for s in found if s.micro_batched and pipelines_of(s.stages, s.mesh.micro_batches, blocks, names, virtual)
    ]
    if not runs and pins.schedule == "2bw" and found:
        raise PinError(
            "pin 'schedule' is '2bw', which needs 2 micro-batches or more, at least as many as stages, and a block for "
            f"each stage: with the other pins there are at most {max(s.mesh.micro_batches for s in found)} "
            f"micro-batches, at least {min(s.stages for s in found)} stages, and {blocks} blocks; pin more "
            "micro-batches, fewer stages, or 1f1b"
        )
    if not runs and (pins.schedule or pins.virtual_stages):
        raise PinError(
            f"pins 'schedule' and 'virtual_stages' leave no pipeline ({' or '.join(names)}, {virtual or 'any'} stages "
            f"a rank): every stage needs a block, and this model can be cut into {blocks} at most: pin fewer stages"
        )
    return tuple(runs)


def check_pinned(pins: Pins, cluster: ClusterSpec, config: ParallelConfig, pipeline: Pipeline | None) -> None:
    """Refuse a configuration, and how it runs if with micro-batches, that the pins leave no room for.

    Raises:
        PinError: names the pin and what there is instead.
    """
    pairs: list[tuple[str, object, object]] = [
        ("pipeline", pins.stages, config.stages),
        ("micro_batches", pins.micro_batches, config.mesh.micro_batches),
    ]
    if config.stages > 1 or pins.schedule == "2bw":  # one stage has no other schedule, whatever is pinned
        pairs.append(("schedule", pins.schedule, None if pipeline is None else pipeline.schedule))
    if config.stages > 1:
        pairs.append(("virtual_stages", pins.virtual_stages, None if pipeline is None else pipeline.virtual_stages))
    for name, pinned, found in pairs:
        if pinned not in (None, found):
            raise PinError(f"pin {name!r} is {pinned!r}, but it is {found!r}")
    if config.micro_batched and pins.tier == "device":
        words = {"once": "once a step", "each": "in each micro-batch"}
        allowed, has = [words[each.name] for each in pins.unshardings], words[config.unsharding.name]
        if has not in allowed:
            raise PinError(
                f"pin 'zero' is {pins.zero}, which gathers parameters {allowed[0]}, but they are gathered {has}"
            )
    if pins.sizes:
        mesh, of_stage = pinned_mesh(cluster, pins.sizes, config.stages), config.mesh.micro_batched(1)
        if (mesh.names, mesh.sizes) != (of_stage.names, of_stage.sizes):
            raise PinError(
                f"the mesh is {ParallelConfig(config.stages, of_stage)}, but what is pinned makes it "
                f"{ParallelConfig(config.stages, mesh)}"
            )


def dividing(configs: Iterable[ParallelConfig], graph: Graph) -> tuple[ParallelConfig, ...]:
    """Those whose axes for the batch, as far as they are pinned, divide it."""
    return tuple(each for each in configs if batch_of(graph) % _data([each.mesh]) == 0)


def _data(meshes: Iterable[Mesh]) -> int:
    """The most ranks that share a micro-batch, as pinned."""
    return max((ranks_sharing(mesh, "batch") for mesh in meshes), default=1)


def _meshes(cluster: ClusterSpec, pins: Pins, max_axes: int, stages: int) -> tuple[Mesh, ...]:
    """Those of one of so many stages; where these are pinned, of stages that cut across nodes too."""
    if pins.sizes:
        return (pinned_mesh(cluster, pins.sizes, stages),)
    return candidate_meshes(cluster, max_axes, cluster.world_size // stages, crossing=pins.stages is not None)


def _stage_counts(cluster: ClusterSpec, pins: Pins, blocks: int) -> list[int]:
    world = cluster.world_size
    if pins.stages is None:
        leaves_all_to_data = REST not in pins.sizes and all(size == 1 for size in pins.sizes.values())
        is_free = not pins.sizes or leaves_all_to_data
        return [n for n in range(1, min(blocks, world) + 1) if world % n == 0] if is_free else [1]
    if world % pins.stages:
        raise PinError(
            f"pin 'pipeline' is {pins.stages}, which does not divide the {world} devices of {cluster.name!r}"
        )
    if pins.stages > blocks:
        raise PinError(
            f"pin 'pipeline' is {pins.stages}, but every stage needs a block, and this model can be cut into {blocks} "
            "at most: pin fewer stages"
        )
    return [pins.stages]


def stages_wanted(pins: Pins) -> int:
    """So many stages, those of all ranks together, the least pipeline that the pins allow has."""
    least = min(VIRTUAL_STAGES[name][0] for name in schedules(pins))
    return (pins.stages or 2) * (pins.virtual_stages or least)


def schedules(pins: Pins) -> tuple[str, ...]:
    """The schedules that the pins leave."""
    if pins.schedule is not None:
        return (pins.schedule,)
    return SCHEDULES if pins.virtual_stages is None else SCHEDULES[:1] if pins.virtual_stages == 1 else SCHEDULES[1:]


def pipelines_of(
    stages: int, micro_batches: int, blocks: int, names: Iterable[str] = SCHEDULES, virtual_stages: int | None = None
) -> list[Pipeline]:
    """The schedules for a chain of so many blocks, with :data:`VIRTUAL` stages a rank unless their number is given.

    One stage has only micro-batch after micro-batch; 2bw is another rule of training there too.
    """
    if stages == 1 and "2bw" not in names:
        return [Pipeline("1f1b", 1, micro_batches)]
    found = []
    for name in names:
        if name == "2bw" and micro_batches < stages:
            continue
        least, most = VIRTUAL_STAGES[name]
        counts = [n for n in VIRTUAL if least <= n <= (most or n)] if virtual_stages is None else [virtual_stages]
        found += [Pipeline(name, stages, micro_batches, v) for v in counts if stages * v <= blocks]
    return found


def batch_of(graph: Graph) -> int:
    """The global batch: what divides dim 0 of every input that has one; 0: none has."""
    shapes = (leaf.results[0].shape for leaf in graph.leaves if leaf.op == "input")
    return math.gcd(*(shape[0] for shape in shapes if shape and shape[0] > 1))


def _micro_batch_counts(pins: Pins, graph: Graph, mesh: Mesh) -> list[int]:
    """Numbers of micro-batches that the pins allow, each of which the ranks pinned to share it divide among them."""
    batch, ranks = batch_of(graph) or 1, _data([mesh])
    if pins.micro_batches is not None:
        if batch % pins.micro_batches:
            raise PinError(
                f"pin 'micro_batches' is {pins.micro_batches}, which does not divide the batch of {batch}: change one"
            )
        if pins.micro_batches > 1 and batch // pins.micro_batches % ranks:
            data = f"the other pins leave {ranks} ranks to {REST!r}"
            if not pins.sizes.keys().isdisjoint(sharing("batch")):
                data = f"{described('batch', mesh.names)} is {ranks}"
            raise PinError(
                f"{data}, which does not divide a micro-batch: pin 'micro_batches' cuts the batch of "
                f"{batch} into {pins.micro_batches} of {batch // pins.micro_batches}: change one"
            )
        return [pins.micro_batches]
    found = [n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or batch // n % ranks == 0)]
    if len(found) > MOST_MICRO_BATCHES:
        found = _some_micro_batch_counts(found, batch, mesh)[:MOST_MICRO_BATCHES]
    return found


def _some_micro_batch_counts(counts: list[int], batch: int, mesh: Mesh) -> list[int]:
    """Those of many that leave each rank of all axes, or of all but the last, 1, 2, 4, ... samples of a micro-batch; or
    powers of two, where the batch is not divided so.
    """
    shares = {batch // ranks for ranks in (mesh.size, mesh.size // mesh.sizes[-1]) if batch % ranks == 0}
    found = [n for n in counts if n == 1 or any(share % n == 0 and _is_power_of_two(share // n) for share in shares)]
    return found if len(found) > 1 else [n for n in counts if _is_power_of_two(n)]


def _is_power_of_two(number: int) -> bool:
    """Whether it is 1, 2, 4, ..."""
    return number & (number - 1) == 0


def seeds(
    bounds: Mapping[ParallelConfig, float], cluster: ClusterSpec, graph: Graph
) -> tuple[list[ParallelConfig], set[ParallelConfig]]:
    """Shapes to evaluate first, in order, two for each number of stages and two of a step without micro-batches; and of
    the former others, whose micro-batches are larger, which are also given by themselves. Those whose stages are each
    within a node lead: most have one axis, with which to evaluate them takes a tenth of the time.

    The last axis is a node or half of one, or what there is of it. Micro-batches have one sample on each rank of the
    others, as where the last axis shares weights; the others' one on each of all ranks, as where every axis shares the
    batch, if there are as many as stages. The first have just so many stages that the parameters of one, shared by the
    last axis, and their gradients take at most half of the memory; then come those with fewer or more. Shapes that are
    :data:`SLOW` are none of them: with samples that are little work, so many micro-batches would only begin operators.

    Args:
        bounds: of every configuration what a step takes at least, by arithmetic.
    """
    enough_s = SLOW * min(bounds.values(), default=0.0)
    batch, found = batch_of(graph) or 1, dict[_Seed, tuple[tuple[float, ...], ParallelConfig]]()
    parameters = sum(leaf.results[0].size_bytes for leaf in graph.leaves if leaf.op == "param")
    needed = 4 * parameters / max(1, cluster.device.usable_bytes)
    for config in (config for config, bound_s in bounds.items() if bound_s <= enough_s):
        ranks, axes = config.mesh.size, config.mesh.micro_batched(1).axes
        for part, is_larger in itertools.product((1, 2), (False, True)):
            inner = max(1, min(ranks, cluster.spans[0] // part))
            micro_batches = max(1, batch // (ranks if is_larger else ranks // inner))
            if is_larger and (not config.micro_batched or micro_batches < config.stages):
                continue
            off = (
                abs(math.log(axes[-1].size / inner)),
                abs(math.log(config.mesh.micro_batches / micro_batches)),
                float(len(axes)),
            )
            far = abs(math.log2(config.stages / max(1.0, needed / inner)) - 0.5)
            if far > FAR:
                continue
            key = _Seed(ranks > cluster.spans[0], part, is_larger, far, config.stages, config.micro_batched)
            if key not in found or off < found[key][0]:
                found[key] = off, config
    usual = {config for key, (_, config) in found.items() if not key.is_larger}
    ordered = dict.fromkeys(found[key][1] for key in sorted(found))
    return [*ordered], {config for config in ordered if config not in usual}


class _Seed(NamedTuple):
    """What tells the shapes to evaluate first apart, in their order: whether stages are across nodes, and ``far``,
    doublings from enough stages.
    """

    is_across: bool
    part: int
    is_larger: bool
    far: float
    stages: int
    micro_batched: bool


class Arithmetic:
    """What a step takes at least, however divided: the work of every operator, cut as well as can be, and the start of
    every operator that runs.

    Of rates that were measured nothing is known beforehand.
    """

    def __init__(self, decision_graph: DecisionGraph, cost: CostModel, training: Training):
        self._decision_graph = decision_graph
        self._kinds = [instance.kind for instance in decision_graph.folded.instances]
        self._of = {kind: Least() for kind in self._kinds}
        for variable, names in decision_graph.variables.members.items():
            node = decision_graph.graph.by_name[names[0]]
            if variable[0] == "op":
                compiled = training.compiles(cost.cluster, decision_graph.blocks.repeats(node))
                scaling = may_scale(training, decision_graph.blocks, node)
                work_s, runs = _work_s(node, decision_graph, cost, compiled, scaling)
                kind = cast(int, variable[1])
                self._of[kind] += Least(work_s / cost.cluster.world_size, runs * cost.least_start_s)
        self._step = sum((self._of[kind] for kind in self._kinds), Least())

    def bound_s(self, config: ParallelConfig, schedule: str | None = None) -> float:
        """Seconds of a step at least, at the pace of the average rank or of equal blocks."""
        pace = config.pace(schedule)
        average = self._step * pace.rounds
        average += sum((self._of[k] * times for times, k in zip(pace.waits, self._kinds, strict=False)), Least())
        packed, found = packing(pace, self._decision_graph), [average]
        if packed is not None:
            found.append(self._of[self._kinds[min(packed.instances)]] * packed.most)
        return max(each.work_s * pace.stages / pace.micro_batches + each.starts_s for each in found)


@dataclass(frozen=True)
class Least:
    """Seconds of work, by all devices of a cluster together, and of starting operators."""

    work_s: float = 0.0
    starts_s: float = 0.0

    def __add__(self, other: Least) -> Least:
        return Least(self.work_s + other.work_s, self.starts_s + other.starts_s)

    def __mul__(self, times: float) -> Least:
        return Least(self.work_s * times, self.starts_s * times)


def _work_s(
    node: Node, decision_graph: DecisionGraph, cost: CostModel, compiled: bool, scaling: Scaling | None
) -> tuple[float, int]:
    """Seconds of all devices together that an operator takes at least, both ways, and how often it starts."""
    row, operands = OPS.get(node.op), decision_graph.graph.input_types(node)
    flops = 0.0 if row is None else row.flops(node, operands, decision_graph.rules[node.name])
    dtype = node.results[0].dtype if node.results else "float32"
    kernel = kernel_of(node.op, [t.shape for t in operands], causal=is_causal(node))
    if isinstance(kernel, Product):
        kernel = replace(kernel, scaling=scaling)
    traffic = decision_graph.blocks.traffic(node, on_cpu=cost.cluster.on_cpu, compiled=compiled)
    sizes = [tensor.size_bytes for tensor in (*operands, *node.results)]
    forward, backward, besides = (
        sum(times * size for times, size in zip(passes, sizes, strict=True))
        for passes in (traffic.forward, traffic.backward, traffic.besides)
    )
    work_s, starts = cost.least_s(0.0, besides, dtype, None), traffic.starts
    if traffic.fused is not None:
        fused_s = sum(cost.least_s(0.0, each, dtype, None) for each in (forward, backward))
        return work_s + fused_s, starts + sum(traffic.fused)
    if traffic.runs:
        work_s, starts = work_s + cost.least_s(flops, forward, dtype, kernel), starts + 1
    if backward:
        work_s += cost.least_s(2 * flops, backward, dtype, kernel and kernel.backward)
        starts += 1
    return work_s, starts
