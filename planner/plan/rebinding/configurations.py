"""Lays the mesh, stages and micro-batches of a plan on another cluster, and on another batch.

Axes keep their sizes where these divide the devices, and stay inside a node where they were; the axis of the batch
takes the devices that are left. What does not fit in memory so may do with more micro-batches, or more stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from planner.base.errors import ScheduleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.grids import in_pins
from planner.formulation.constraints.mesh_candidates import pinned_mesh
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.roles import REST
from planner.formulation.strategies import rules_of
from planner.formulation.unsharding import PER_MICRO_BATCH, PER_STEP, Unsharding
from planner.ir.folding import Folded, fold
from planner.ir.graph import Graph
from planner.ir.layout import MICRO, Mesh
from planner.plan.document.document import Document
from planner.plan.document.rebinding import Change
from planner.search.block_splitting import finer
from planner.search.parallel_config import ParallelConfig, batch_of
from planner.solve.pipeline.schedule import VIRTUAL_STAGES, check_fits
from planner.solve.pipeline.stages import Pipeline

MOST = 10
"""So many configurations are tried at most, the plan's own among them."""
TOO_MUCH = "with fewer the step does not fit in memory"


@dataclass(frozen=True)
class Configuration:
    """How a rebound plan divides devices and batch.

    Attributes:
        config: stages, the mesh of each, and when parameters are gathered.
        pipeline: in which order they run; ``None``: forward once, backward once.
        folded: the blocks that the stages are made of.
        pin: the plan's, with sizes as they are here.
        changes: what is not as in the plan.
    """

    config: ParallelConfig
    pipeline: Pipeline | None
    folded: Folded
    pin: Mapping[str, object]
    changes: tuple[Change, ...]


def configurations(plan: Document, graph: Graph, cluster: ClusterSpec) -> Iterator[Configuration]:
    """The plan's own configuration as nearly as can be, then such as need less memory."""
    found = list[ParallelConfig]()
    for wanted in _wanted(plan):
        made = _Fitted(plan, graph, cluster, wanted).configuration()
        if made.config not in found and len(found) < MOST:
            found.append(made.config)
            yield made


@dataclass(frozen=True)
class _Wanted:
    """Stages and micro-batches to aim at; ``in_each``: parameters are gathered in each micro-batch."""

    stages: int
    micro_batches: int
    in_each: bool


def _wanted(plan: Document) -> Iterator[_Wanted]:
    """As planned; gathering in each micro-batch; more micro-batches; more stages."""
    stages = 1 if plan.pipeline is None else plan.pipeline.ranks
    micro_batches, in_each = plan.mesh.micro_batches, not plan.unsharding.once_per_step
    yield _Wanted(stages, micro_batches, in_each)
    if plan.pipeline is None:
        return
    each = (False, True) if not in_each and _gathers(plan) else (in_each,)
    yield from (_Wanted(stages, micro_batches, also) for also in each[1:])
    for doubling in range(1, MOST):
        yield from (_Wanted(stages, micro_batches << doubling, also) for also in each)
        if stages > 1:
            yield from (_Wanted(stages << doubling, micro_batches, also) for also in each)


def _gathers(plan: Document) -> bool:
    """Whether any parameter is cut over ranks that have different samples, so that it must be gathered."""
    cut = [name in _cutting_the_batch(plan) for name in plan.mesh.names]
    layouts = (layout.split() for layout in plan.parameters.values())
    return any(is_cut and t.startswith("S") for each in layouts for is_cut, t in zip(cut, each, strict=True))


class _Fitted:
    """What is aimed at, as the cluster, the batch and the model's blocks allow it."""

    def __init__(self, plan: Document, graph: Graph, cluster: ClusterSpec, wanted: _Wanted):
        self.plan, self.graph, self.cluster, self.wanted = plan, graph, cluster, wanted
        self.changes: list[Change] = []
        self.axes = [axis for axis in plan.mesh.axes if axis.name != MICRO and axis.size > 1]
        self.cut = _cutting_the_batch(plan)
        self.rest = next((axis.name for axis in self.axes if axis.name in self.cut), None)

    def configuration(self) -> Configuration:
        """Stages, mesh and micro-batches, one after the other."""
        inner, left = self._inner()
        pipeline, folded = self._pipeline(left)
        mesh, pin = self._mesh(inner, left // pipeline.ranks, pipeline.ranks)
        pipeline = replace(pipeline, micro_batches=self._micro_batches(mesh, pipeline))
        self._note_stages(pipeline, len(folded.instances))
        several = pipeline.ranks > 1 or pipeline.micro_batches > 1 or pipeline.schedule == "2bw"
        config = ParallelConfig(
            pipeline.ranks,
            mesh.micro_batched(pipeline.micro_batches),
            self._unsharding() if several else PER_STEP,
        )
        counts = {
            "pipeline": pipeline.ranks,
            "micro_batches": pipeline.micro_batches,
            "virtual_stages": pipeline.virtual_stages,
            "schedule": pipeline.schedule,
        }
        pin = {name: counts.get(name, value) for name, value in pin.items()}
        return Configuration(config, pipeline if several else None, folded, pin, tuple(self.changes))

    # ---- devices ----

    def _inner(self) -> tuple[dict[str, int], int]:
        """Sizes of the axes but that which takes the rest, and how many devices they leave for it and for stages."""
        left, reach, sizes = self.cluster.world_size, 1, dict[str, int]()
        node, level = self.cluster.spans[0], self.cluster.levels[0].name
        for axis in reversed(self.axes):
            if axis.name == self.rest:
                continue
            within = axis.stride * axis.size <= self.plan.cluster.spans[0]
            size = max(n for n in _divisors(axis.size) if left % n == 0 and not (within and node % (reach * n)))
            if size != axis.size:
                stays = f", and it was inside a {level}, which has {node} here" if within else ""
                self._note_axis(axis.name, axis.size, size, f"of {left} devices{stays}")
            sizes[axis.name], left, reach = size, left // size, reach * size
        return sizes, left

    def _mesh(self, inner: Mapping[str, int], left: int, stages: int) -> tuple[Mesh, dict[str, object]]:
        """The mesh of one of so many stages, and the pins with its sizes.

        Args:
            inner: sizes of the axes but that which takes the ``left`` devices.
        """
        rest = self.rest or next(name for name in (REST, "replicate", "rest") if name not in inner)
        planned = next((axis.size for axis in self.axes if axis.name == self.rest), 1)
        if left != planned:
            self._note_axis(
                rest, planned, left, f"what stages and other axes leave of {self.cluster.world_size} devices"
            )
        order = [*(() if self.rest else (rest,)), *(axis.name for axis in self.axes)]
        sizes = {name: size for name in order if (size := {**inner, rest: left}[name]) > 1}
        pin, pinned = dict(self.plan.pin), Pins.parse(self.plan.pin).sizes
        if not pinned:
            return Mesh.of(**(sizes or {"all": 1})), pin
        told = {name: sizes.get(name, 1) for name in {**pinned, **sizes} if name in pinned or name != REST}
        return pinned_mesh(self.cluster, told, stages), {**pin, **in_pins(told)}

    def _note_axis(self, name: str, old: int, new: int, why: str) -> None:
        self.changes.append(Change(f"mesh axis {name!r}", str(old), str(new), why))

    # ---- stages and micro-batches ----

    def _pipeline(self, left: int) -> tuple[Pipeline, Folded]:
        """As many stages as wanted, as far as there are devices and blocks for them; and the blocks."""
        coarse, planned = fold(self.graph), self.plan.pipeline
        if planned is None:
            return Pipeline("1f1b", 1, 1), coarse
        ranks = max(n for n in _divisors(self.wanted.stages) if left % n == 0)
        rules, virtual, schedule = rules_of(self.graph, coarse), planned.virtual_stages, planned.schedule
        folded, split = finer(coarse, rules, ranks), finer(coarse, rules, ranks * virtual)
        if len(split.instances) == planned.bounds[-1]:
            folded = split  # the plan has cut its layers for these stages, too
        blocks = len(folded.instances)
        fitting = [n for n in range(VIRTUAL_STAGES[schedule][0], virtual + 1) if ranks * n <= blocks]
        if fitting and (ranks > 1 or schedule == "2bw"):
            return Pipeline(schedule, ranks, 1, max(fitting)), folded
        if ranks > 1 and len(split.instances) >= ranks * virtual:
            return Pipeline(schedule, ranks, 1, virtual), split
        ranks = max(n for n in _divisors(ranks) if n <= blocks)
        return Pipeline("2bw" if schedule == "2bw" else "1f1b", ranks, 1), folded

    def _unsharding(self) -> Unsharding:
        """When parameters are gathered."""
        planned, allowed = self.plan.unsharding, Pins.parse(self.plan.pin).unshardings
        if not self.wanted.in_each or not planned.once_per_step or PER_MICRO_BATCH not in allowed:
            return planned
        why = "else the step does not fit in memory"
        self.changes.append(Change("gathering of parameters", "once a step", "in each micro-batch", why))
        return PER_MICRO_BATCH

    def _micro_batches(self, mesh: Mesh, pipeline: Pipeline) -> int:
        """As many as wanted, or near that, so that ranks share each evenly."""
        if self.plan.pipeline is None:
            return 1
        wanted, planned, batch = self.wanted.micro_batches, self.plan.mesh.micro_batches, max(1, batch_of(self.graph))
        ranks = math.prod(axis.size for axis in mesh.axes if axis.name in self.cut or axis.name == REST)
        fitting = [count for count in _divisors(batch) if _fits(pipeline, count)] or [1]
        even = [count for count in fitting if batch // count % ranks == 0] or fitting
        found = max((count for count in even if count <= wanted), default=min(even))
        if found != planned:
            why = f"so many do not cut a batch of {batch} into equal parts, one for each of {ranks} ranks"
            why = why if wanted == planned else TOO_MUCH
            self.changes.append(Change("micro-batches", str(planned), str(found), why))
        return found

    def _note_stages(self, pipeline: Pipeline, blocks: int) -> None:
        planned = self.plan.pipeline
        if planned is None:
            return
        if pipeline.ranks != planned.ranks:
            world = self.cluster.world_size
            why = f"of {world} devices, with the other axes, and as many blocks as the model can be cut into"
            why = why if pipeline.ranks <= planned.ranks else TOO_MUCH
            self.changes.append(Change("pipeline ranks", str(planned.ranks), str(pipeline.ranks), why))
        before, after = (f"{each.schedule}, {each.virtual_stages} a rank" for each in (planned, pipeline))
        if before != after:
            why = f"every stage needs a block, of which the model has {blocks}"
            why = why if pipeline.ranks > 1 else "one rank has no other"
            self.changes.append(Change("stages", before, after, why))


def _fits(pipeline: Pipeline, micro_batches: int) -> bool:
    try:
        check_fits(pipeline.schedule, pipeline.ranks, micro_batches, pipeline.virtual_stages)
    except ScheduleError:
        return False
    return True


def _cutting_the_batch(plan: Document) -> frozenset[str]:
    """The axes that cut any input."""
    found = (zip(plan.mesh.names, layout.split(), strict=True) for layout in plan.inputs.values())
    return frozenset(name for each in found for name, local_type in each if local_type.startswith("S")) - {MICRO}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
