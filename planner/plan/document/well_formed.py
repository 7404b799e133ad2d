"""Checks that what a plan says can be read: every name, layout and list is of the mesh, the pipeline and the blocks.

A plan that passes prints, explains itself, draws and saves. Whether its decisions are possible for a model is another
question, which :func:`planner.plan.plan.restore` answers with the model at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache

from planner.base.errors import PlanError, ScheduleError
from planner.formulation.decision_names import filled
from planner.ir.layout import MICRO, Mesh, parse_layout
from planner.plan.document.detail import Account, Move, OpDetail
from planner.plan.document.document import BlockPlan, Document
from planner.solve.pipeline.schedule import check_fits

MEND = "restore it, or plan again"
ROUNDING = 1e-9
"""Part of a step that is none."""
MOST_ACTIONS = 2**20
"""So many forwards a step has at most, over all stages: each is simulated."""


def check_well_formed(plan: Document) -> None:
    """Refuse a plan that speaks of axes, blocks or stages that it does not have.

    Raises:
        PlanError: names the field, what is wrong and the way out.
    """
    _check_mesh(plan.mesh)
    _check_pipeline(plan)
    for field, text in _layouts(plan):
        _check_layout(field, text, len(plan.mesh.axes))
    for block in plan.blocks:
        for name, label in block.ops.items():
            _check_strategy(f"block {block.name!r}, 'ops', {name!r}", label, plan.mesh.names)
        _check_instances(block)
    if plan.recorded is not None:
        _check_account(plan, plan.recorded)
    _check_prediction(plan)


def _check_mesh(mesh: Mesh) -> None:
    sizes = {axis.name: axis.size for axis in mesh.axes}
    if not mesh.axes or len(sizes) < len(mesh.axes) or any(size < 1 for size in sizes.values()):
        raise PlanError(
            f"the plan's field 'mesh' is {_axes(mesh)}, and takes axes of different names and sizes from 1: {MEND}"
        )
    for name in sizes:
        if not name or any(letter in name for letter in ": \t\n"):
            raise PlanError(
                f"the plan's field 'mesh' has an axis called {name!r}, and names have no blank or colon: {MEND}"
            )
    ranks = Mesh.of(**{name: size for name, size in sizes.items() if name != MICRO})
    wanted = ranks.micro_batched(sizes.get(MICRO, 1))
    if mesh != wanted:
        raise PlanError(
            f"the plan's field 'mesh' is {_axes(mesh)}, and its axes are major first, {MICRO!r} before all others: "
            f"with these sizes it is {_axes(wanted)}: {MEND}"
        )


def _axes(mesh: Mesh) -> str:
    return ", ".join(f"{axis.name!r} of {axis.size} {axis.stride} apart" for axis in mesh.axes) or "empty"


def _layouts(plan: Document) -> Iterator[tuple[str, str]]:
    """Every layout of the decisions, and where it stands."""
    for field in ("inputs", "parameters", "buffers", "values"):
        entries: Mapping[str, str] = getattr(plan, field)
        yield from ((f"field {field!r}, {name!r}", text) for name, text in entries.items())
    yield from (("field 'outputs'", text) for text in plan.outputs)
    for block in plan.blocks:
        yield from ((f"block {block.name!r}, 'values', {name!r}", text) for name, text in block.values.items())


def _check_layout(where: str, text: str, axes: int) -> None:
    problem = _wrong_layout(text, axes)
    if problem:
        raise PlanError(f"the plan's {where}: {problem}; {MEND}")


@cache
def _wrong_layout(text: str, axes: int) -> str:
    """What is wrong with a layout; empty where nothing is."""
    try:
        parse_layout(text, axes)
    except PlanError as error:
        return str(error)
    return ""


def _check_strategy(where: str, label: str, names: tuple[str, ...]) -> None:
    parts = [part.partition(":") for part in label.split(" ")]
    if tuple(name for name, _, _ in parts) != names or not all(strategy for _, _, strategy in parts):
        wanted = " ".join(f"{name}:..." for name in names)
        raise PlanError(f"the plan's {where} is {label!r}, and takes a strategy for each axis, as {wanted!r}; {MEND}")


def _check_instances(block: BlockPlan) -> None:
    """Refuse a block of which other instances are numbered, or more recompute, than there are."""
    where = f"block {block.name!r}"
    _check_counts(f"{where}, 'recompute',", block.recompute.values())
    if block.at and len(block.at) != block.count:
        raise PlanError(f"the plan's {where} has {len(block.at)} numbers ('at') for {block.count} instances: {MEND}")
    again = sum(block.recompute.values())
    if again > block.count:
        raise PlanError(f"the plan's {where} has {block.count} instances, of which {again} recompute: {MEND}")


# ---- details ---------------------------------------------------------------------------------------------------------


def _check_account(plan: Document, account: Account) -> None:
    if account.blocks and len(account.blocks) != len(plan.blocks):
        raise PlanError(
            f"the plan's field 'details' has {len(account.blocks)} entries, one for each of {len(plan.blocks)} blocks: "
            f"{MEND}"
        )
    for block, detail in zip(plan.blocks, account.blocks, strict=False):
        for name, op in detail.ops.items():
            _check_op(f"field 'details', block {block.name!r}, {name!r}", op, plan.mesh)
    for name, leaf in account.leaves.items():
        _check_moves(f"field 'leaves', {name!r}", leaf.after, plan.mesh)
        _check_names(f"field 'leaves', {name!r}", name, leaf.stands_for)
        _check_counts(f"field 'leaves', {name!r}", (*leaf.shape, leaf.count, leaf.local_bytes, leaf.state_bytes))


def _check_op(where: str, op: OpDetail, mesh: Mesh) -> None:
    if len(op.meaning) != len(mesh.axes):
        raise PlanError(f"the plan's {where}, 'meaning' has {len(op.meaning)} words for {len(mesh.axes)} axes: {MEND}")
    for layout in (*(layout for _, layout in op.operands), *op.results):
        _check_layout(where, layout, len(mesh.axes))
    _check_moves(where, (*op.before, *op.after), mesh)
    _check_names(where, op.path, op.stands_for)
    numbers = (*op.shape, op.flops, op.forward_s, op.backward_s, op.saved_bytes, op.transient_bytes, op.inner_s)
    _check_counts(where, numbers)


def _check_moves(where: str, moves: Iterable[Move], mesh: Mesh) -> None:
    for move in moves:
        for layout in (move.source, move.target):
            _check_layout(where, layout, len(mesh.axes))
        _check_counts(where, (move.forward_s, move.backward_s, move.times))


def _check_names(where: str, pattern: str, stands_for: str) -> None:
    try:
        filled(pattern, stands_for)
    except ValueError as error:
        raise PlanError(f"the plan's {where}, 'stands_for': {error}; {MEND}") from error


def _check_counts(where: str, numbers: Iterable[float]) -> None:
    for number in numbers:
        if number < 0:
            raise PlanError(f"the plan's {where} has {number}, and sizes, counts and seconds are not below 0: {MEND}")


# ---- prediction and pipeline -----------------------------------------------------------------------------------------


def _check_prediction(plan: Document) -> None:
    predicted = plan.predicted
    where = "field 'predicted'"
    for name, total, uses in (
        ("step_time_s", predicted.step_time_s, predicted.time_s),
        ("peak_bytes", predicted.peak_bytes, predicted.memory_bytes),
    ):
        # What is waited for is a difference, which rounding may leave a little below 0.
        parts = (part for part in uses.values() if abs(part) > ROUNDING * total)
        _check_counts(f"{where}, {name!r} or what it consists of,", (total, *parts))
        if any(uses.values()) and not total:
            raise PlanError(f"the plan's {where}, {name!r} is 0, and it consists of more: {MEND}")
    times = predicted.micro_batch_times
    if times is None:
        return
    stages = [len(each) for each in (times.forward_s, times.input_s, times.weight_s, (*times.send_s, 0.0))]
    ranks = [len(each) for each in (times.gather_s, times.reduce_s, times.update_s)]
    if len({*stages}) > 1 or len({*ranks}) > 1 or not all((*stages, *ranks)):
        raise PlanError(
            f"the plan's {where}, 'micro_batch_times' has forward_s, input_s and weight_s of {stages[:3]} stages, "
            f"send_s between {stages[3]}, and gather_s, reduce_s and update_s of {ranks} ranks, which must agree: "
            f"{MEND}"
        )
    for each in fields(times):
        _check_counts(f"{where}, 'micro_batch_times', {each.name!r}", getattr(times, each.name))


def _check_pipeline(plan: Document) -> None:
    pipeline, micro_batches = plan.pipeline, plan.mesh.micro_batches
    if pipeline is None:
        if micro_batches > 1:
            raise PlanError(
                f"the plan's field 'mesh' has {micro_batches} micro-batches, and it lacks the field 'pipeline', which "
                f"says how they run: {MEND}"
            )
        return
    try:
        check_fits(pipeline.schedule, pipeline.ranks, micro_batches, pipeline.virtual_stages)
    except ScheduleError as error:
        raise PlanError(f"the plan's field 'pipeline': {error}; or plan again") from error
    stages = pipeline.ranks * pipeline.virtual_stages
    if len(pipeline.bounds) - 1 != stages:
        raise PlanError(
            f"the plan's field 'pipeline' has {len(pipeline.bounds) - 1} 'stages', and {pipeline.ranks} ranks of "
            f"{pipeline.virtual_stages} are {stages}: {MEND}"
        )
    if stages * micro_batches > MOST_ACTIONS:
        raise PlanError(
            f"the plan's {stages} stages take {micro_batches} micro-batches, and more than {MOST_ACTIONS:,} forwards "
            f"are not simulated: {MEND}"
        )
