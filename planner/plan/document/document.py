"""The document that a plan is: decisions, and next to them what was predicted of each.

``planner.plan.plan`` gives the document its doors (files, views); ``planner.plan.report`` and
``planner.plan.report.explain`` read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Any

from planner.analysis.offload.chunks import SAVED
from planner.analysis.pipeline.staged import MicroBatchTimes
from planner.analysis.prediction import Prediction
from planner.base.errors import PlanError
from planner.base.formatting import in_bytes
from planner.cost.cluster import ClusterSpec
from planner.cost.correction import interval_s
from planner.formulation.assignment import Assignment
from planner.formulation.certificate import Certificate, certify, of_part
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Offload, Pins
from planner.formulation.training import Activations, Training
from planner.formulation.unsharding import PER_STEP, Unsharding
from planner.ir.layout import Mesh
from planner.plan.document.account import account
from planner.plan.document.block_seconds import BlockOccurrence, block_seconds, micro_batch_seconds
from planner.plan.document.detail import Account
from planner.plan.document.rebinding import Change, Rebinding
from planner.plan.timeline import StepTimeline, predicted, whole_step
from planner.plan.timeline.rank_memory import RankMemory
from planner.plan.timeline.transfer_memory import memory_of_transfers
from planner.plan.timeline.transfer_step import transfer_step
from planner.plan.timeline.whole_step import BlockSeconds
from planner.search.parallel_config import ParallelConfig
from planner.solve.pipeline.schedule import schedule
from planner.solve.pipeline.simulate import simulate
from planner.solve.transfers import TransferSchedule
from planner.tables.tables_plan import TablesPlan

EVALUATE = "autopar.evaluate(model, plan, example_kwargs=batch), with the loss_fn it was made with, if any"
WITHOUT_GRAPH = (
    f"this plan was read from a file, or changed, and does not carry its model's graph: give it one with {EVALUATE}, "
    "and ask the plan that returns"
)

WEIGHS = 0.01
"""The share of a step from which on operators that no table knows weigh."""


@dataclass(frozen=True)
class Search:
    """What the search did: ``status`` is ``optimal`` with gap 0, or ``feasible`` with the proven gap.

    ``seconds`` is by step of planning; every candidate is a mesh with its ``status``, ``step_time_s`` (``None``: no
    plan of it was looked for, or none fits), ``bound_s`` (``None``: proven infeasible), ``peak_bytes`` (of that plan,
    or at least), ``gathers`` where that is in ``each`` micro-batch (see :class:`PipelinePlan`), and the ``proof`` of
    the bound, see :class:`planner.search.candidates.Candidate`. ``unseen`` further ones were not looked at; they
    count in the gap. Meshes of more than ``max_axes`` axes were no candidates. ``time_limit_s`` is what the search
    could have taken after capture; ``None`` if that is not known. ``left_out`` says what was not searched, and why,
    see :mod:`planner.search.left_out`. ``limit_bytes`` is the memory within which it is the best, where a
    device has more.
    """

    status: str
    gap: float
    seconds: Mapping[str, float]
    candidates: tuple[Mapping[str, Any], ...] = ()
    unseen: int = 0
    max_axes: int = MAX_AXES
    time_limit_s: float | None = None
    left_out: str = ""
    limit_bytes: int | None = None


@dataclass(frozen=True)
class BlockPlan:
    """One distinct block: how often it occurs, and the decision of each of its operators and values.

    ``ops`` maps ``"module path: operator"`` to the strategy on every axis (``"data:m tensor:n"``);
    ``values`` maps the same keys to the layout in which a result with several readers is found by them;
    ``at`` numbers its instances among all blocks in execution order; ``recompute`` says how many of them (the first
    ones) recompute in backward what they computed or gathered: ``{"full": 3, "selective": 2, "gathered": 1}``, see
    :mod:`planner.formulation.remat.levels`. For levels that are none of these, ``keeps`` has the operators whose
    results are kept, as ``ops`` names them: ``{"part 1": ("self_attn: scaled_dot_product_attention",)}``.
    """

    name: str
    count: int
    ops: Mapping[str, str]
    values: Mapping[str, str]
    at: tuple[int, ...] = ()
    recompute: Mapping[str, int] = field(default_factory=dict)
    keeps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class PipelinePlan:
    """How a step runs micro-batched: micro-batch after micro-batch, through the stages of a pipeline if there are
    several.

    ``schedule`` says in which order, see :mod:`planner.solve.pipeline.schedule`; each of ``ranks`` pipeline ranks,
    which are meshes of devices, has ``virtual_stages``. Stage ``s`` has the blocks from ``bounds[s]`` up to, not
    including, ``bounds[s + 1]``, numbered in execution order as in :class:`BlockPlan`; ``recompute`` says which of them
    recompute in backward what they computed, by level, of which there are those in :class:`BlockPlan`;
    ``unsharding`` says when parameters are gathered and their gradients reduced. Files call that ``gathers``, which is
    ``once`` a step or in ``each`` micro-batch, and ``waits``, where nothing is prefetched.
    """

    schedule: str
    ranks: int
    virtual_stages: int
    bounds: tuple[int, ...]
    recompute: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unsharding: Unsharding = PER_STEP


@dataclass(frozen=True)
class Document:
    """A plan for one model on one cluster.

    Attributes:
        model: class name, number of parameters, and fingerprint of the captured graph.
        cluster: what it was planned for.
        mesh: the axes, major first; of one stage, where there are several.
        pin: what the user had fixed.
        offload: where model data is at home, in the words of the pin, whether that was pinned or chosen.
        optimizer_bytes_per_element: of optimizer state, per parameter element, that it was planned with.
        inputs, parameters, buffers: layout of every leaf, one local type per axis, by original name
            (``*`` where the instances of a block share it).
        values: layout in which leaves with several readers are found by them.
        blocks: every distinct block once.
        outputs: layout of every output.
        discards: names of the outputs that a training step does not keep.
        predicted: the step's time, memory and collectives.
        search: status, bound and seconds.
        pipeline: how a step runs micro-batched; ``None``: forward once, backward once.
        transfer_schedules: what a step moves between device and host, on each rank of the pipeline; empty: nothing, all
            model data is on the device.
        coverage: operators that the op table does not know -> how often they occur; they run replicated.
        unknown_share: of the step that these take.
        notes: what of it may not have been meant, see :mod:`planner.plan.document.notes`.
        recorded: the details that a file brought along.
        rebinding: of a plan that was made of another one's decisions, of which; ``None``: it was searched for.
        tables: where embedding tables lie that were placed; ``None``: all are decided as any other operator.
        assignment: the decisions themselves, where the plan was made in this process, as ``decided``; not part of the
            file, nor of what :func:`dataclasses.replace` makes of a plan, since that may decide otherwise.
    """

    model: Mapping[str, Any]
    cluster: ClusterSpec
    mesh: Mesh
    pin: Mapping[str, Any]
    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    values: Mapping[str, str]
    blocks: tuple[BlockPlan, ...]
    outputs: tuple[str, ...]
    predicted: Prediction
    search: Search
    pipeline: PipelinePlan | None = None
    transfer_schedules: tuple[TransferSchedule, ...] = ()
    optimizer_bytes_per_element: int = Training.optimizer_bytes_per_element
    discards: tuple[str, ...] = ()
    coverage: Mapping[str, int] = field(default_factory=dict)
    unknown_share: float = 0.0
    notes: tuple[str, ...] = ()
    offload: Offload = "none"
    recorded: Account | None = field(default=None, compare=False, repr=False)
    rebinding: Rebinding | None = None
    tables: TablesPlan | None = None
    assignment: Assignment | None = field(default=None, init=False, compare=False, repr=False)
    decided: InitVar[Assignment | None] = None

    def __post_init__(self, decided: Assignment | None) -> None:
        object.__setattr__(self, "assignment", decided)

    @property
    def qualified(self) -> str:
        """What the word optimal is to be taken with: less memory than there is, and what the search decided nothing
        about; empty: nothing.
        """
        unknown = "but for operators that no table knows" if self.unknown_share > WEIGHS else ""
        return " ".join(filter(None, (self.limited, unknown)))

    @property
    def limited(self) -> str:
        """Within which memory the plan is the best, where a device has more; empty: within all."""
        limit_bytes = self.search.limit_bytes
        return "" if limit_bytes is None else f"within {in_bytes(limit_bytes)} a device"

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the axes by name, pipeline ranks first."""
        return ParallelConfig(1 if self.pipeline is None else self.pipeline.ranks, self.mesh).sizes

    @property
    def pins(self) -> Pins:
        """What the user had fixed, and where model data is at home, which may have been chosen."""
        return replace(Pins.parse(self.pin), offload=self.offload)

    @property
    def changes(self) -> tuple[Change, ...]:
        """What of the plan that this one was rebound from did not hold; empty: it was searched for, or all did."""
        return () if self.rebinding is None else self.rebinding.changes

    @property
    def transfer_schedule(self) -> TransferSchedule | None:
        """That of the first rank, which is the only one where there is no pipeline."""
        return self.transfer_schedules[0] if self.transfer_schedules else None

    @property
    def unsharding(self) -> Unsharding:
        """When a micro-batched step gathers parameters, see :class:`PipelinePlan`."""
        return PER_STEP if self.pipeline is None else self.pipeline.unsharding

    @property
    def training(self) -> Training:
        """What a step of this plan keeps besides the model, and how it reduces and multiplies."""
        pins = self.pins
        return Training(
            self.optimizer_bytes_per_element,
            pins.tier,
            pins.update,
            self.activations,
            self.unsharding,
            self.discards,
            pins.compile,
            pins.reduce_dtype,
            pins.float8,
        )

    @property
    def activations(self) -> Activations:
        """Of how many blocks what they save for backward may leave: as pinned, or all that the transfer schedule
        has.
        """
        pinned = self.pin.get("activations")
        if pinned is not None:
            return 0 if pinned == "none" else pinned
        return (
            "all" if any(item.name.startswith(SAVED) for t in self.transfer_schedules for item in t.trace.items) else 0
        )

    @cached_property
    def certificate(self) -> Certificate:
        """The decisions priced again on the unfolded graph, and what of a step that is; worked out when somebody asks.

        Raises:
            PlanError: the plan was read from a file, without its model.
        """
        if self.assignment is None:
            raise PlanError(WITHOUT_GRAPH)
        step_s = self.predicted.step_time_s
        found = certify(self.assignment, step_s * (1 - self.search.gap))
        if self.pipeline is None and not self.transfer_schedules:
            return found
        again = 0 if self.pipeline is None else sum(map(len, self.pipeline.recompute.values()))
        return of_part(found, self.assignment, step_s, again)

    @property
    def exposed_share(self) -> float:
        """The share of the gradients' reduction that backward does not hide."""
        moves = [m for block in self.account.blocks for op in block.ops.values() for m in (*op.before, *op.after)]
        moves += [m for leaf in self.account.leaves.values() for m in leaf.after]
        total = sum(m.backward_s * m.times for m in moves if m.value in self.parameters)
        return self.predicted.time_s.get("gradients", 0.0) / total if total else 0.0

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Between which seconds nine steps of ten are predicted to lie; ``None``: no step was observed to say it.

        See :meth:`autopar.runtime.module.ParallelModule.compare`.
        """
        measured = self.cluster.calibration
        return None if measured is None else interval_s(self.predicted.time_s, measured.corrections)

    @property
    def block_seconds(self) -> list[BlockSeconds]:
        """What every instance of a block takes, forward and backward, of a step or of each micro-batch.

        Raises:
            PlanError: it was read from a file without details.
        """
        if not self.account.blocks:
            raise PlanError(
                f"this plan was read from a file that does not say what its operators take: price it with {EVALUATE}, "
                "and ask the plan that returns"
            )
        blocks = [BlockOccurrence(block.name, block.at, self._levels(block), block.keeps) for block in self.blocks]
        if self.pipeline is None:
            return block_seconds(blocks, self.account, self.parameters, self.predicted.time_s)
        if self.times is None:
            raise PlanError(f"this plan does not say what its stages take: price it with {EVALUATE}")
        how = self.pipeline.unsharding.of_step(micro_batched=True, on_device=self.offload == "none")
        return micro_batch_seconds(blocks, self.account, self.parameters, self.times, self.pipeline.bounds, how)

    def _levels(self, block: BlockPlan) -> list[str]:
        """At which level each instance of a block recomputes; empty: it keeps everything."""
        if self.pipeline is not None:
            at = {number: level for level, numbers in self.pipeline.recompute.items() for number in numbers}
            return [at.get(number, "") for number in block.at]
        first = [level for level, count in block.recompute.items() for _ in range(count)]
        return first + [""] * (len(block.at) - len(first))

    @property
    def times(self) -> MicroBatchTimes | None:
        """What each stage takes; ``None``: the plan does not say, or says it of other stages than it has since."""
        times, pipeline = self.predicted.micro_batch_times, self.pipeline
        if times is None or pipeline is None:
            return None
        counted = len(times.forward_s) == pipeline.ranks * pipeline.virtual_stages == len(times.send_s) + 1
        return times if counted and len(times.update_s) == pipeline.ranks else None

    def timeline(self) -> StepTimeline:
        """The step as it is predicted: every rank's actions, what it waits for, and what comes once a step; without
        micro-batches block by block.

        Raises:
            PlanError: it was read from a file without details, or has no :attr:`times`.
            ScheduleError: it was edited, and its schedule does not exist or fit.
        """
        told = self.predicted.fullest.replace("\n", " ") if self.predicted.fullest_at else ""
        if self.pipeline is None:
            return self._whole_step(told)
        times, pipeline = self.times, self.pipeline
        if times is None:
            raise PlanError(
                "this plan was read from a file that does not say what its stages take, or was edited since: price it "
                f"with {EVALUATE}, and ask the plan that returns"
            )
        actions = schedule(pipeline.schedule, pipeline.ranks, self.mesh.micro_batches, pipeline.virtual_stages)
        found = simulate(actions, times.of_stages)
        return predicted(found, times.gather_s, times.reduce_s, times.update_s, told)

    def _whole_step(self, fullest: str) -> StepTimeline:
        if self.transfer_schedule is not None and not self.cluster.on_cpu:  # where data moves beside computing
            return transfer_step(self.transfer_schedule, fullest)
        return whole_step(self.block_seconds, self.predicted.time_s, fullest)

    @property
    def memory_over_step(self) -> tuple[RankMemory, ...]:
        """What ranks hold through a step: a document knows where model data moves.

        Raises:
            PlanError: all model data stays on the device, so that the model's graph alone says it.
        """
        if not self.transfer_schedules:
            raise PlanError(WITHOUT_GRAPH)
        bounds = () if self.pipeline is None else self.pipeline.bounds
        return memory_of_transfers(self.transfer_schedules, self.timeline(), bounds)

    @cached_property
    def account(self) -> Account:
        """What each operator does and costs; worked out when somebody asks."""
        if self.recorded is not None:
            return self.recorded
        return account(self.assignment) if self.assignment is not None else Account()
