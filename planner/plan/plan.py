"""The plan: decisions as a document that a person can read, edit, diff, and apply again.

A plan names everything by module path and operator, never by internal ids, and every distinct block
once. :func:`describe` writes an assignment down; :func:`restore` turns the document back into one for
the same model, checking every entry.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.analysis.memory import usage
from planner.analysis.memory.storages import PeakReport
from planner.analysis.pipeline.chain import chain_of, links_of
from planner.analysis.pipeline.peak_report import RankReport, peak_micro_batched
from planner.analysis.pipeline.staged import Staged, price
from planner.analysis.planned_step import planned_step
from planner.analysis.prediction import Prediction
from planner.base.errors import PlanError, ScheduleError
from planner.base.files import check_path, write_text
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import TIERS
from planner.formulation.constraints.zero import check_together
from planner.formulation.decision_names import variable_names
from planner.formulation.remat.levels import Recompute, at_levels, used
from planner.formulation.search_space import Space
from planner.formulation.strategies import Choice, rules_of
from planner.formulation.unsharding import Unsharding
from planner.formulation.variables import Variable
from planner.ir.folding import Folded, fold, fold_off, relabel
from planner.ir.graph import Graph, Ref
from planner.ir.layout import Layout, format_layout
from planner.plan.document.document import WITHOUT_GRAPH, BlockPlan, Document, PipelinePlan, Search
from planner.plan.document.encoding import decisions, decode, dump, encode
from planner.plan.document.encoding import parse as parse_json
from planner.plan.document.entries import check_entries, stray
from planner.plan.document.fingerprint import coverage
from planner.plan.document.model_mismatch import difference
from planner.plan.document.notes import notes, unknown_share
from planner.plan.document.remat_names import Stated, read_amounts, read_by_number
from planner.plan.document.validation import check_consistent
from planner.search.block_splitting import finer
from planner.solve.pipeline.stages import Pipeline
from planner.solve.pipeline.stages import evaluate as cut_of
from planner.solve.problem import evaluate
from planner.solve.transfers import TransferSchedule

if TYPE_CHECKING:
    from planner.analysis.whole_parameters import WholeParameterBill
    from planner.cost.cluster import ClusterSpec
    from planner.plan.export.export import Export
    from planner.plan.pareto import ParetoCurve
    from planner.plan.report.explain import Explanation
    from planner.plan.report.why_not import WhyNot
    from planner.plan.timeline.rank_memory import RankMemory
    from planner.search.branch_and_bound import Searched
    from planner.search.search_context import Progress
    from planner.sizes.closed_form import Formulas
    from planner.sizes.rescale import OtherSizes

__all__ = ["BlockPlan", "Plan", "Search", "describe", "describe_search", "refold", "reprice", "restore"]


@dataclass(frozen=True, repr=False)
class Plan(Document):
    """A plan for one model on one cluster: the document, and its doors. See
    :class:`planner.plan.document.document.Document`.

    Raises:
        PlanError: it was changed in one part, and not in another that goes with it, such as its pin.
    """

    def __post_init__(self, decided: Assignment | None) -> None:
        super().__post_init__(decided)
        check_consistent(self)

    # ---- files -------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The document, of JSON values only. What decides comes first, what was predicted of it last."""
        return encode(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically: the file is either whole or as it was.

        Raises:
            PlanError: a number of the plan is not finite, or the file cannot be written.
        """
        check_path(path, "file to save the plan in", PlanError)
        try:
            text = dump(self.to_dict())
        except ValueError as error:
            raise PlanError(
                "the plan holds a number that is NaN or infinite; check the cluster's rates and plan again"
            ) from error
        _save(Path(path), text)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan.

        Raises:
            PlanError: no such file, not JSON, not a plan, of another version, or with a field missing or wrong.
        """
        check_path(path, "plan", PlanError)
        name = os.fspath(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan {name!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{name!r} is not a plan: it is not text ({error.reason})") from error
        try:
            return Plan.from_dict(parse_json(text))
        except PlanError as error:
            raise PlanError(f"{name!r}: {error}") from error

    @staticmethod
    def from_dict(data: Any) -> Plan:
        """The inverse of :meth:`to_dict`; raises :class:`PlanError` as :meth:`load` does."""
        return Plan(**decode(data))

    def digest(self) -> str:
        """A short name of what the plan decides; equal on all ranks that run the same plan."""
        decided = [dict(self.model), decisions(self)]
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]

    # ---- views -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """One line; ``print(plan)`` shows the whole."""
        from planner.plan.report import line

        return f"<Plan of {line(self)}>"

    def __str__(self) -> str:
        """A page of text: what was planned, what it costs, how every block is laid out."""
        from planner.plan.report import text

        return text(self)

    @property
    def sentence(self) -> str:
        """What is divided among which devices, what that takes, and how good it is, as :func:`print` begins."""
        from planner.plan.report import sentence

        return sentence(self)

    def to_html(self) -> str:
        """A page of its own that needs nothing else: the step over time, memory, the model, collectives, the search."""
        from planner.plan.page import page

        return page(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from planner.plan.page import fragment

        return fragment(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_html`, atomically."""
        _save(Path(path), self.to_html())

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the simulated step for https://ui.perfetto.dev, atomically; raises as :meth:`timeline` does, and
        :class:`planner.base.errors.InputError` where the file cannot be written.
        """
        self.timeline().save_trace(path)

    def explain(self, name: str, *, time_limit_s: float = 10.0) -> Explanation:
        """Why a module, operator or parameter is laid out as it is, what the next best would cost, and what of it is
        alive when memory is fullest.

        Args:
            name: a module path, with ``*`` and ``?`` if you like (``"model.layers.0.mlp.down_proj"``), the name
                of an operator as the plan writes it, or of a parameter.
            time_limit_s: for finding what the next best would cost, over all operators that match.

        Raises:
            PlanError: nothing of that name; says what is close.
        """
        from planner.plan.report.explain import explain

        is_known = self.assignment is not None and not self.transfer_schedules
        return explain(self, name, time_limit_s=time_limit_s, fullest=self.fullest if is_known else None)

    def why_not(
        self, pin: Mapping[str, Any], *, time_limit_s: float = 60.0, pareto: ParetoCurve[Plan] | None = None
    ) -> WhyNot:
        """What the best plan around a pinned recipe would cost more, by block, and at which speeds of links, arithmetic
        and memory it would be as fast; or which limits rule it out.

        Args:
            pin: the recipe, as :func:`autopar.plan` takes it: ``{"tensor": 8}``, ``{"zero": 3}``. It stands by
                itself, without what this plan had pinned.
            time_limit_s: for every search that it takes.
            pareto: this plan's curve; then the answer says what a GiB of memory is worth.

        Raises:
            PlanError: the plan was read from a file: ask the plan that ``autopar.evaluate`` returns; or it offloads.
            PinError: the recipe is malformed, or offloads, or pins a schedule without a pipeline.
            InputError: no time; or ``pareto`` is of another model or cluster.
        """
        from planner.plan.report.why_not import why_not

        self._check_on_device("plan with the recipe and pin 'offload', and compare what the two plans predict")
        staged = None if self.assignment is None else restage(self, self.assignment)
        price = 0.0 if pareto is None else pareto.price_for(self)
        return why_not(self, pin, staged, time_limit_s=time_limit_s, seconds_per_gib=price)

    @cached_property
    def fullest(self) -> PeakReport:
        """The fullest moment of a step on the rank with the highest peak, and every tensor that is alive then.

        Raises:
            PlanError: the plan was read from a file, without its model; or it offloads.
        """
        self._check_on_device("read plan.transfer_schedules, which say moment by moment what is on the device")
        if self.assignment is None:
            raise PlanError(WITHOUT_GRAPH)
        staged = restage(self, self.assignment)
        return usage(self.assignment).fullest if staged is None else peak_micro_batched(self.assignment, staged)

    @cached_property
    def memory_over_step(self) -> tuple[RankMemory, ...]:
        """What is alive through a step, stretch by stretch of :meth:`timeline`: on the one rank that stands for all; of
        a pipeline on those that hold most and least, the first and the last.

        Raises:
            PlanError: the plan was read from a file, without its model, and no model data moves; or has no timeline.
            ScheduleError: as :meth:`timeline`.
        """
        from planner.plan.timeline.memory import memory_over_step

        if self.transfer_schedules or self.assignment is None:
            return super().memory_over_step
        return memory_over_step(self.assignment, restage(self, self.assignment), self.timeline())

    def export(self, to: str, *, time_limit_s: float = 10.0) -> Export:
        """This plan as a configuration of another tool, what of it that does not say, and what the difference costs.

        Args:
            to: ``fsdp2``, ``hf``, ``accelerate``, ``torchtitan``, ``megatron`` or ``deepspeed``.
            time_limit_s: of the search for what the configuration takes, where it is not what the plan takes.

        Raises:
            ConfigError: there is no such format, or it has nothing that comes near with this batch.
            PlanError: the plan was read from a file whose details of operators were taken out.
            InputError: the time limit is not positive.
        """
        from planner.plan.export.export import export

        return export(self, to, time_limit_s=time_limit_s)

    def whole_parameters(self) -> WholeParameterBill:
        """What an optimizer that goes by whole parameters takes beside an elementwise one: seconds, bytes and state.

        Raises:
            PlanError: the plan was read from a file whose details of parameters were taken out; or it keeps parameters
                beside the device, where none are stepped whole.
        """
        from planner.plan.report.whole_parameters import bill_of

        return bill_of(self)

    # ---- against memory --------------------------------------------------------------------------------------------

    def pareto(
        self,
        points: int = 8,
        *,
        time_limit_s: float = 60.0,
        gap: float = 0.01,
        progress: Progress | None = None,
    ) -> ParetoCurve[Plan]:
        """Step time against memory per device, for the same model, cluster and pins, with model data on the device: the
        fastest plans from the leanest on, each with a bound, and each a plan like this one.

        Args:
            points: so many plans at most.
            time_limit_s: for all of them together; what is not proved by then has a lower bound.
            gap: part of a step that each proof may leave open.
            progress: called with a line of text as it advances.

        Raises:
            PlanError: the plan was read from a file: ask the plan that ``autopar.evaluate`` returns; or it offloads.
            InputError: fewer than 2 points, no time, or no gap.
        """
        from planner.plan.pareto import pareto

        self._check_on_device("plan for a cluster with another memory_bytes")
        staged = None if self.assignment is None else restage(self, self.assignment)

        def described(found: Searched, limit_bytes: int) -> Plan:
            plan = describe_search(found, self.model, self.pin, {}, self.search.max_axes, time_limit_s, limit_bytes)
            tables = None if self.tables is None or not self.tables.in_slabs else replace(self.tables, other_s=None)
            return replace(plan, tables=tables, decided=found.assignment)

        return pareto(self, staged, described, points=points, time_limit_s=time_limit_s, gap=gap, progress=progress)

    # ---- for another model, or on another cluster ----------------------------------------------------------------

    def rebind(
        self,
        model: Any = None,
        cluster: ClusterSpec | None = None,
        *,
        example_args: tuple[Any, ...] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        time_limit_s: float = 0.0,
        progress: Progress | None = None,
    ) -> Plan:
        """The decisions of this plan for a model of another depth, width, batch or sequence, or on another cluster.

        What holds is taken over: strategies and layouts by block and operator, the number of stages, what recomputes,
        the sizes of all axes but that which takes the devices that are left. What does not is decided anew with all
        else held fixed, and is listed in :attr:`changes` with the reason.

        Args:
            model: the other model, a ``torch.nn.Module``; left out: this plan's own, which a plan read from a file does
                not have.
            cluster: the other cluster; left out: this plan's.
            example_args, example_kwargs, loss_fn: as in :func:`autopar.plan`, for the other model, or the same one with
                another batch.
            time_limit_s: of a fresh search around the same pins, whose bound and whose plan's seconds are stated beside
                the price; 0: there is none, and the gap is that to what arithmetic alone says.
            progress: called with a line of text as it advances.

        Raises:
            PlanError: the model has hardly an operator in common with this plan's; says what both have.
            PinError: nothing can run on the mesh that is left.
            InfeasibleError: it does not fit in memory with all recomputation, and more micro-batches and stages where
                the plan has some.
            InputError, CaptureError, ClusterError: as in :func:`autopar.plan`.
        """
        from autopar.driver.rebind import rebind

        return rebind(
            self,
            model,
            cluster,
            example_args=example_args,
            example_kwargs=example_kwargs,
            loss_fn=loss_fn,
            time_limit_s=time_limit_s,
            progress=progress,
        )

    # ---- at other sizes ----------------------------------------------------------------------------------------

    def at(
        self, *, batch: int | None = None, sequence: int | None = None, micro_batches: int | None = None
    ) -> Prediction:
        """A step of the same decisions at another global batch or sequence length, or in another number of
        micro-batches, without planning again.

        Args:
            batch, sequence: dim 0 and dim 1 of every input; left out: as planned.
            micro_batches: of a micro-batched plan, into how many the batch is cut; left out: as planned.

        Raises:
            PlanError: a size is not a whole number from 1, the decisions do not divide it, or the model cannot be
                followed to it, see :mod:`planner.sizes.size_propagation`; the schedule does not take so many
                micro-batches, or the plan has one; or the plan was read from a file, without its model.
        """
        return self._sizes.at(batch, sequence, micro_batches)

    def max_batch(self, *, sequence: int | None = None) -> int:
        """The largest global batch at which these decisions fit into the devices' memory; raises as :meth:`at`."""
        from planner.sizes.capacity import max_batch

        return max_batch(self._sizes, sequence, self.cluster.device.usable_bytes)

    def max_sequence(self, *, batch: int | None = None) -> int:
        """The longest sequence at which these decisions fit into the devices' memory, and the model has positions;
        raises as :meth:`at`.
        """
        from planner.sizes.capacity import max_sequence

        return max_sequence(self._sizes, batch, self.cluster.device.usable_bytes)

    @cached_property
    def formulas(self) -> Formulas:
        """Time and memory of a step as formulas in batch, sequence length and micro-batches; raises as :meth:`at`."""
        from planner.sizes.closed_form import formulas

        return formulas(self._sizes)

    @cached_property
    def _sizes(self) -> OtherSizes:
        from planner.sizes.rescale import OtherSizes

        self._check_on_device("plan again at the other size")
        if self.assignment is None:
            raise PlanError(WITHOUT_GRAPH)
        return OtherSizes(self.assignment, partial(restage, self))

    def _check_on_device(self, instead: str) -> None:
        """Refuse what only a plan with all model data on the device can be asked; ``instead``: another way to know."""
        if self.transfer_schedules:
            raise PlanError(
                "this plan keeps model data on the host or on disk, and only one with all of it on the device can be "
                f"asked this: plan with pin 'offload' 'none', or {instead}"
            )


def _save(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise PlanError(f"cannot write {str(path.absolute())!r}: {error.strerror}") from error


# ---- from assignments to documents and back --------------------------------------------------------------------------


def describe(
    assignment: Assignment,
    model: Mapping[str, Any],
    pin: Mapping[str, Any],
    predicted: Prediction,
    search: Search,
    staged: Staged | None = None,
    transfer_schedules: tuple[TransferSchedule, ...] = (),
) -> Plan:
    """Write an assignment down; ``staged``: how it runs micro-batched; ``transfer_schedules``: what moves to and from
    the device.
    """
    space = assignment.space
    names = variable_names(space)
    sections: dict[str, dict[str, str]] = {"inputs": {}, "parameters": {}, "buffers": {}, "values": {}}
    ops: dict[int, dict[str, str]] = {}
    values: dict[int, dict[str, str]] = {}
    outputs: list[str] = []
    for variable in space.variables:
        text = _write(assignment.chosen[variable])
        section, name = names[variable]
        if section == "outputs":
            outputs.append(text)
        elif isinstance(section, tuple):
            {"ops": ops, "values": values}[section[0]].setdefault(section[1], {})[name] = text
        else:
            sections[section][name] = text
    at: dict[int, list[int]] = {}
    for number, instance in enumerate(space.folded.instances):
        at.setdefault(instance.kind, []).append(number)
    stated = Stated.of(assignment, staged)
    unknown, stages = coverage(space.graph), 1 if staged is None else staged.pipeline.ranks
    return Plan(
        model=model,
        cluster=space.cost.cluster,
        mesh=space.mesh,
        pin=pin,
        inputs=sections["inputs"],
        parameters=sections["parameters"],
        buffers=sections["buffers"],
        values=sections["values"],
        blocks=tuple(
            BlockPlan(
                name,
                len(at[kind]),
                ops.get(kind, {}),
                values.get(kind, {}),
                tuple(at[kind]),
                {stated.name(kind, level): len(numbers) for level, numbers in assignment.recompute.levels(kind)},
                stated.keeps(kind),
            )
            for kind, name in enumerate(space.folded.names)
        ),
        outputs=tuple(outputs),
        discards=space.discarded_names,
        predicted=predicted,
        search=replace(search, candidates=tuple(_finite(c) for c in search.candidates)),
        pipeline=None if staged is None else _pipeline(staged, stated.by_number(staged, assignment), space.unsharding),
        transfer_schedules=transfer_schedules,
        optimizer_bytes_per_element=space.training.optimizer_bytes_per_element,
        coverage=unknown,
        unknown_share=unknown_share(assignment, predicted, stages) if unknown else 0.0,
        notes=notes(assignment, model, unknown, predicted, stages),
        offload=next(name for name, tier in TIERS.items() if tier == space.training.tier),
        decided=assignment,
    )


def describe_search(
    found: Searched,
    model: Mapping[str, Any],
    pin: Mapping[str, Any],
    seconds: Mapping[str, float],
    max_axes: int,
    time_limit_s: float,
    limit_bytes: int | None = None,
) -> Plan:
    """Write down what a search found.

    Args:
        seconds: of what came before it, by step.
        limit_bytes: the memory of a device that it was given, if that is less than there is.
    """
    transfer_schedules, predicted = found.planned_step
    seen = tuple(candidate.facts() for candidate in found.evaluated)
    search = Search(
        found.status,
        found.gap,
        {**seconds, **found.seconds},
        seen,
        len(found.candidates) - len(seen),
        max_axes,
        time_limit_s,
        found.left_out,
        limit_bytes,
    )
    return describe(found.assignment, model, pin, predicted, search, found.staged, transfer_schedules)


def _pipeline(staged: Staged, recompute: Mapping[str, tuple[int, ...]], unsharding: Unsharding) -> PipelinePlan:
    each, bounds = staged.pipeline, tuple(staged.cut.bounds)
    decided = Unsharding(unsharding.once_per_step, staged.prefetch)
    return PipelinePlan(each.schedule, each.ranks, each.virtual_stages, bounds, recompute, decided)


def memory_of_rank(plan: Plan, assignment: Assignment, rank: int) -> dict[str, int]:
    """Bytes by use on one rank of a pipeline at its fullest, and ``peak``, all of them; arguments as of
    :func:`restage`.
    """
    staged = restage(plan, assignment)
    assert staged is not None
    return {**RankReport(assignment, staged, rank).fullest().by_use(), "peak": staged.rank_bytes[rank]}


def restage(plan: Plan, assignment: Assignment) -> Staged | None:
    """How the decisions of a plan run micro-batched, if they do.

    Args:
        assignment: those decisions for the model at hand, see :func:`restore`.

    Raises:
        PlanError: the plan's pipeline does not fit the model's blocks, its schedule or its mesh.
    """
    found = plan.pipeline
    if found is None:
        return None
    folded, size = assignment.space.folded, len(assignment.space.folded.instances)
    micro_batches = assignment.space.mesh.micro_batches
    pipeline = Pipeline(found.schedule, found.ranks, int(micro_batches), found.virtual_stages)
    if len(found.bounds) != pipeline.stages + 1 or found.bounds[-1] != size:
        raise PlanError(
            f"the plan's pipeline cuts {found.bounds[-1]} blocks into {len(found.bounds) - 1} stages, but the model "
            f"has {size} blocks, and {found.ranks} ranks of {found.virtual_stages} are {pipeline.stages} stages: mend "
            '"stages", or plan again'
        )
    levels = read_by_number(plan, assignment.space)
    links = links_of(assignment, used(at_levels(folded, levels), folded), found.schedule)
    come_to = (assignment.comes_to(each.kind, level) for each, level in zip(folded.instances, levels, strict=True))
    savings = [link.levels.index(level) for link, level in zip(links, come_to, strict=True)]
    try:
        cut = cut_of(pipeline, chain_of(links), found.bounds, savings)
        return replace(price(links, pipeline, cut, found.unsharding.prefetch), micro_batches=micro_batches)
    except ScheduleError as error:
        raise PlanError(f"the plan's pipeline: {error}") from error


def _finite(candidate: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers that JSON can hold: infinity, a bound that proves infeasibility, becomes ``None``."""
    return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in candidate.items()}


def refold(plan: Plan, graph: Graph, model: Mapping[str, Any]) -> Folded:
    """The graph cut into the blocks of a plan: equal blocks apart where the plan decides them apart.

    Args:
        model: facts of the model at hand, see :func:`model_facts`.

    Raises:
        PlanError: the plan is of another model, or its blocks are not those of the model; says what differs.
    """
    if plan.model.get("fingerprint") != model["fingerprint"]:
        raise PlanError(difference(plan, fold(graph), model))
    kind_at = {number: kind for kind, block in enumerate(plan.blocks) for number in block.at}
    for folded in _foldings(graph, len(kind_at)):
        if sorted(kind_at) == list(range(len(folded.instances))):
            return relabel(folded, [kind_at[number] for number in range(len(folded.instances))])
    raise PlanError(
        f'the plan numbers {len(kind_at)} blocks ("at"), the model has {len(fold(graph).instances)}: restore them, '
        "or plan again"
    )


def _foldings(graph: Graph, blocks: int) -> Iterator[Folded]:
    """The ways in which a plan of so many blocks may have folded."""
    coarse = fold(graph)
    yield coarse
    yield fold_off(graph)
    yield finer(coarse, rules_of(graph, coarse), blocks)


def restore(plan: Plan, space: Space, model: Mapping[str, Any]) -> Assignment:
    """The assignment that a plan describes, for the model at hand.

    Args:
        space: every decision to take for this model on the plan's mesh.
        model: facts of the model at hand, see :func:`model_facts`.

    Raises:
        PlanError: the plan is of another model, or an entry is missing or impossible; names what differs.
    """
    if plan.model.get("fingerprint") != model["fingerprint"]:
        raise PlanError(difference(plan, space.folded, model))
    check_together(space.folded, plan.pin.get("zero"))
    names = variable_names(space)
    chosen: dict[Variable, Choice | Layout] = {}
    for variable in space.variables:
        section, name = names[variable]
        if section == "outputs":
            text, where = _entry(plan.outputs, int(name)), f"outputs[{name}]"
        elif isinstance(section, tuple):
            block = plan.blocks[section[1]] if section[1] < len(plan.blocks) else None
            entries = getattr(block, section[0]) if block is not None else {}
            text, where = entries.get(name), f"block {space.folded.names[section[1]]!r}, {section[0]}, {name!r}"
        else:
            text, where = getattr(plan, section).get(name), f"{section}, {name!r}"
        if text is None:
            near = stray(plan, names.values(), section, name)
            raise PlanError(f"the plan has no entry for {where}{near}; restore it, or plan again")
        chosen[variable] = _read(text, space.options[variable], where, plan.pin)
    check_entries(plan, names.values())
    assignment = Assignment(space, chosen, Recompute(read_amounts(plan, space)))
    _check_routes(assignment)
    return assignment


def _check_routes(assignment: Assignment) -> None:
    """Refuse neighbours whose layouts no resharding connects."""
    space = assignment.space

    def check(ref: Ref, source: Layout, target: Layout) -> None:
        table = space.table(ref)
        if not math.isfinite(table.forward_s[table.index[source], table.index[target]]):
            producer = space.describe(space.variable_of[ref.node])
            raise PlanError(
                f"the plan leaves no way from {format_layout(source)} to {format_layout(target)} for the result of "
                f"{producer}: change its strategy or that of its readers"
            )

    for node in space.graph.nodes:
        for index in range(len(node.results)):
            check(Ref(node.name, index), assignment.produced(Ref(node.name, index)),
                  assignment.consumer_layout(Ref(node.name, index)))  # fmt: skip
        for position, ref in enumerate(node.inputs):
            check(ref, assignment.consumer_layout(ref), assignment.choice(node).operands[position])
    for position, ref in enumerate(space.leaving):
        check(ref, assignment.consumer_layout(ref), assignment.output_layout(position))


def reprice(plan: Plan, assignment: Assignment) -> Plan:
    """A plan with the predictions and details of what it decides now: of one that was edited, or read from a file.

    Args:
        assignment: its decisions for the model at hand, see :func:`restore`.
    """
    space = assignment.space
    problem = space.problem(plan.cluster.device.usable_bytes, assignment.recompute)
    chosen = tuple(space.options[variable].index(assignment.chosen[variable]) for variable in space.variables)  # type: ignore[arg-type]
    staged = restage(plan, assignment)
    transfer_schedules, predicted = planned_step(assignment, staged, evaluate(problem, chosen).time_s)
    step_s, search = predicted.step_time_s, plan.search
    if not math.isclose(step_s, plan.predicted.step_time_s, rel_tol=1e-9):
        bound = plan.predicted.step_time_s * (1 - search.gap)
        search = replace(search, status="edited", gap=max(0.0, 1 - bound / step_s))
    found = describe(assignment, plan.model, plan.pin, predicted, search, staged, transfer_schedules)
    return replace(found, rebinding=plan.rebinding, tables=plan.tables, decided=assignment)


def _entry(values: tuple[str, ...], position: int) -> str | None:
    return values[position] if position < len(values) else None


def _write(decision: Choice | Layout) -> str:
    return decision.label if isinstance(decision, Choice) else format_layout(decision)


def _read(text: str, options: Iterable[Choice | Layout], where: str, pin: Mapping[str, Any]) -> Choice | Layout:
    known = {_write(option): option for option in options}
    if text not in known:
        near = difflib.get_close_matches(text, known, n=12, cutoff=0.0)
        more = f" and {len(known) - len(near)} more" if len(known) > len(near) else ""
        pinned = f" under its pin {json.dumps(dict(pin))}" if pin else ""
        raise PlanError(
            f"the plan says {text!r} for {where}, which is impossible there{pinned}; possible: "
            + ", ".join(map(repr, near))
            + more
        )
    return known[text]
