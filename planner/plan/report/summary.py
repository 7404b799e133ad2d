"""What the text and the page of a plan both say, as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from planner.analysis.offload.chunks import ALIGN_BYTES, SAVED
from planner.base.formatting import GATHERED_AGAIN, IN_EACH, again, in_bytes, in_seconds
from planner.formulation.constraints.roles import ROLES
from planner.formulation.resharding import Collective
from planner.formulation.training import Training
from planner.ir.graph import ITEM_BYTES
from planner.ir.layout import PIPELINE
from planner.plan.document.detail import BlockDetail, Move, OpDetail
from planner.plan.document.document import BlockPlan, Document
from planner.search.parallel_config import mesh_text
from planner.solve.pipeline.schedule import versions
from planner.tables.tables_plan import SLABS_NAME, TablesPlan

CHANGES = 8
"""So many changes of a rebound plan are listed."""


@dataclass(frozen=True)
class Traffic:
    """All calls of one kind on one axis in one phase: how many, and bytes passed in by each rank."""

    phase: str
    kind: str
    axis: str
    calls: int
    bytes_in: int


@dataclass(frozen=True)
class BlockSummary:
    """A distinct block over all its instances, on one rank; of a pipeline, on the average one.

    ``share`` of the step is its computing, its communication, and its part of the gradients' reduction that
    backward does not hide.
    """

    plan: BlockPlan
    detail: BlockDetail
    compute_s: float
    communication_s: float
    gradients_s: float
    saved_bytes: int
    share: float


@dataclass(frozen=True)
class SharedLeaf:
    """A leaf that is converted once for several readers, as a tied parameter: how it is stored, what that communicates,
    and its ``share`` of the step.
    """

    name: str
    layout: str
    calls: tuple[tuple[Collective, int], ...]
    share: float


def traffic(calls: Iterable[tuple[Collective, int]]) -> list[Traffic]:
    """Calls by phase, kind and axis; forward first, most bytes first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for call, count in calls:
        entry = found.setdefault((call.phase, call.kind, call.axis), [0, 0])
        entry[0] += count
        entry[1] += count * call.bytes_in
    rows = [Traffic(*key, *entry) for key, entry in found.items()]
    return sorted(rows, key=lambda row: (row.phase != "forward", -row.bytes_in, row.kind, row.axis))


def blocks(document: Document) -> list[BlockSummary]:
    """The distinct blocks in execution order; without details where the plan holds none."""
    details = document.account.blocks or (BlockDetail(),) * len(document.blocks)
    exposed, ranks = document.exposed_share, 1 if document.pipeline is None else document.pipeline.ranks
    micro_batches = document.mesh.micro_batches
    found = []
    for plan, detail in zip(document.blocks, details, strict=True):
        ops, moves = detail.ops.values(), [m for op in detail.ops.values() for m in (*op.before, *op.after)]
        compute = micro_batches * sum(op.forward_s + op.backward_s for op in ops) * plan.count / ranks
        moved, gradients = (seconds / ranks for seconds in _moved_s(document, moves, exposed))
        communication = micro_batches * sum(op.inner_s for op in ops) * plan.count / ranks + moved
        share = (compute + communication + gradients) / (document.predicted.step_time_s or 1.0)
        saved = sum(op.saved_bytes for op in ops) * plan.count
        found.append(BlockSummary(plan, detail, compute, communication, gradients, saved, share))
    return found


def shared(document: Document) -> list[SharedLeaf]:
    """Leaves whose resharding belongs to no block, as several read what it gives."""
    exposed, ranks = document.exposed_share, 1 if document.pipeline is None else document.pipeline.ranks
    layouts, found = {**document.inputs, **document.parameters, **document.buffers}, []
    for name, leaf in document.account.leaves.items():
        calls = tuple((call, move.times) for move in leaf.after for call in move.calls)
        if calls:
            seconds = sum(_moved_s(document, leaf.after, exposed)) / ranks
            share = seconds / (document.predicted.step_time_s or 1.0)
            found.append(SharedLeaf(name, layouts.get(name, "?"), calls, share))
    return found


def _moved_s(document: Document, moves: Sequence[Move], exposed: float) -> tuple[float, float]:
    """Seconds of reshardings in a step, and of reducing gradients what backward does not hide."""
    once = [m for m in moves if m.value in document.parameters and document.unsharding.once_per_step]
    each = [m for m in moves if m.value not in document.parameters or not document.unsharding.once_per_step]
    communication = document.mesh.micro_batches * sum((m.forward_s + m.backward_s) * m.times for m in each)
    communication += sum(m.forward_s * m.times for m in once)
    return communication, exposed * sum(m.backward_s * m.times for m in once)


def is_notable(op: OpDetail) -> bool:
    """Whether an operator carries the plan: it has parameters, does the heavy work, or communicates."""
    computes = bool(op.parameters) and (op.forward_s > 0 or op.flops > 0)
    return computes or op.flops > 0 or bool(op.inner) or any(move.calls for move in (*op.before, *op.after))


def op_calls(op: OpDetail, count: int) -> list[tuple[Collective, int]]:
    """Collectives of one operator over all instances of its block, reshardings and its own."""
    calls = [(call, count) for call in op.inner]
    return calls + [(call, move.times) for move in (*op.before, *op.after) for call in move.calls]


def local_name(parameter: str, path: str) -> str:
    """A parameter's name below the module that uses it: ``weight``."""
    return parameter.removeprefix(path + ".") if path else parameter


def stored(document: Document, op: OpDetail) -> list[tuple[str, str]]:
    """(short name, layout as stored) of the parameters that an operator reads, whichever block they are decided for."""
    names = [(local_name(name.partition(" #")[0], op.path), name) for name in op.parameters]
    return [(short, document.parameters.get(name, "?")) for short, name in names]


def candidate_name(candidate: Mapping[str, Any]) -> str:
    """What a candidate is called."""
    return mesh_text(candidate["mesh"]) + IN_EACH * (candidate.get("gathers") == "each")


def candidate_cells(candidate: Mapping[str, Any]) -> tuple[str, str]:
    """A candidate's status, and its seconds or what they are at least."""
    seconds, bound = candidate["step_time_s"], candidate["bound_s"]
    if candidate["status"] == "infeasible" or (seconds is None and bound is None):
        return "does not fit", ""
    if candidate["status"] in ("pruned", "not tried", "none found") or seconds is None:
        return candidate["status"], f"at least {in_seconds(bound)}"
    return candidate["status"], in_seconds(seconds)


def standing(document: Document) -> str:
    """How many candidates there were, how many were pruned and by what, which came next and by how much."""
    candidates = document.search.candidates
    away = Counter(c.get("proof", "search") for c in candidates if c["status"] == "pruned")
    fits = [c for c in candidates if c["status"] != "infeasible"]
    count = len(candidates) + document.search.unseen
    axes = "" if not ROLES.keys().isdisjoint(document.pin) else f" of up to {document.search.max_axes} axes"
    parts = [f"{count:,} mesh{'es' * (count != 1)}{axes}"]
    if away:
        proofs = ", ".join(f"{count} by {proof}" for proof, count in sorted(away.items()))
        parts.append(f"{sum(away.values())} pruned ({proofs})")
    if len(fits) < len(candidates):
        parts.append(f"{len(candidates) - len(fits)} that cannot fit")
    untried = sum(c["status"] == "not tried" for c in candidates) + document.search.unseen
    if untried:
        parts.append(f"{untried:,} not tried before the time limit")
    pipelines = [c for c in fits if PIPELINE in c["mesh"] and c["status"] != "not tried"]
    if pipelines and PIPELINE not in document.sizes:
        parts.append(f"no faster pipeline found ({len(pipelines)} looked at or pruned)")
    own = document.sizes, document.unsharding.name if not document.transfer_schedules else "once"
    others = [c for c in fits if (c["mesh"], c.get("gathers", "once")) != own]
    if others:
        following = min(others, key=lambda c: c["bound_s"])
        more = following["bound_s"] / (document.predicted.step_time_s or 1.0) - 1
        at_least = "" if following["status"] == "optimal" else "at least "
        if more < 0:
            parts.append(f"not excluded: {candidate_name(following)}, up to {-more * 100:.2g} % faster")
        else:
            parts.append(f"next {candidate_name(following)}, {at_least}{more * 100:.2g} % slower")
    return "; ".join(parts)


def counted(steps: Mapping[str, float]) -> float:
    """The sum of seconds by step."""
    return sum(steps.values())


def stages(document: Document) -> list[tuple[str, str]]:
    """The blocks of every stage of a pipeline, stages with the same ones together: ``("0-3", "9 x layers.*")``."""
    assert document.pipeline is not None
    names = {number: block.name for block in document.blocks for number in block.at}
    found: list[tuple[list[int], str]] = []
    for stage, (low, high) in enumerate(pairwise(document.pipeline.bounds)):
        runs = [(name, len([*each])) for name, each in groupby(names.get(number, "?") for number in range(low, high))]
        text = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs)
        if found and found[-1][1] == text:
            found[-1][0].append(stage)
        else:
            found.append(([stage], text))
    return [(str(own[0]) if len(own) == 1 else f"{own[0]}-{own[-1]}", text) for own, text in found]


def dtypes(document: Document) -> str:
    """In which dtypes a model trains, and how large optimizer state was taken to be; ``""`` of files that do not say.

    Adam keeps two moments in the dtype of what it steps: the parameters, or masters in float32.
    """
    uses = document.model.get("dtypes", {})
    alike: dict[str, list[str]] = {}
    for use, dtype in uses.items():
        alike.setdefault(dtype, []).append(use)
    told = "; ".join(f"{', '.join(names)} {dtype}" for dtype, names in alike.items())
    if "gradients" not in uses:
        return told
    count, wide_bytes = document.optimizer_bytes_per_element, ITEM_BYTES["float32"]
    item_bytes = ITEM_BYTES.get(uses["gradients"].partition(",")[0], wide_bytes)
    told += f"; optimizer state {count} bytes per element"
    if count == 2 * item_bytes:
        return f"{told} (Adam's moments)"
    if item_bytes < wide_bytes and count == 3 * wide_bytes:
        return f"{told} (Adam's moments and masters, float32)"
    if count != Training.optimizer_bytes_per_element:
        return told
    with_masters = f", {3 * wide_bytes} with float32 masters" if item_bytes < wide_bytes else ""
    return (
        f"{told}, but Adam takes {2 * item_bytes}{with_masters}: plan with optimizer_bytes_per_element "
        "(--optimizer-bytes) as it will be"
    )


def pinned(document: Document) -> list[str]:
    """What the user had fixed, pin by pin, and which has nothing to say of this mesh."""
    stores = any(name in ROLES and ROLES[name].parameters == "zero" for name in document.mesh.names)
    idle = {"zero": "" if stores else " (there is no data axis to store parameters on)"}
    return [f"{name} {value}{idle.get(name, '')}" for name, value in document.pin.items()]


def rebound(document: Document) -> list[str]:
    """Where a rebound plan comes from, what of that plan did not hold, and what it is compared with."""
    rebinding = document.rebinding
    if rebinding is None:
        return []
    changes = rebinding.changes
    count = f"with {len(changes)} changes" if len(changes) != 1 else "with 1 change"
    rest = len(changes) - CHANGES
    told = [f"from {rebinding.source}, {count if changes else 'as it was'}", *map(str, changes[:CHANGES])]
    told += [f"and {rest} more: plan.changes"] if rest > 0 else []
    if rebinding.bound_by == "search":
        took, limit_s = document.search.seconds.get("search", 0.0), document.search.time_limit_s or 0.0
        best = f"{in_seconds(rebinding.fresh_step_s)} a step" if rebinding.fresh_step_s is not None else "nothing"
        told.append(f"a fresh search of {took:.1f} s (limit {limit_s:g} s) found {best}")
    else:
        told.append("not compared with a fresh search, which time_limit_s asks for")
    return told


def offloads(document: Document) -> str:
    """What has its home on the host or on disk, and what a step moves, on all ranks of a pipeline together."""
    tables = document.transfer_schedules
    moved = [(way, size) for table in tables for (_, way), size in table.bytes_moved.items()]
    sizes = {way: sum(size for each, size in moved if each == way) for way in ("fetch", "evict")}
    chunks = [item.bytes for table in tables for item in table.trace.items if item.name.startswith("parameters ")]
    home = "on disk" if document.offload == "disk" else "on the host"
    count = sum(moment.on == "host" for table in tables for moment in table.trace.moments[:-1])
    early = f", and updates {count} of them in backward" if count else ""
    saved = sum(item.name.startswith(SAVED) for table in tables for item in table.trace.items)
    entries = (entry for table in tables for entry in table.entries)
    left = sum(name.startswith(SAVED) for entry in entries for name in entry.evict)
    data = (
        [f"parameters, gradients and optimizer state of {_chunks(document, chunks)} with their home {home}"]
        if chunks
        else []
    )
    micro_batches = "" if document.pipeline is None else "forwards of "
    data += (
        [f"activations of {left} of {saved} {micro_batches}blocks {home} between forward and backward"] if saved else []
    )
    if not data:
        return "nothing: all model data stays on the device"
    return f"{'; '.join(data)}; a step fetches {in_bytes(sizes['fetch'])} and evicts {in_bytes(sizes['evict'])}{early}"


def _chunks(document: Document, sizes: Sequence[int]) -> str:
    """How many chunks of parameters there are, of which sizes, and what of them is between parameters."""
    low, high = in_bytes(min(sizes)), in_bytes(max(sizes))
    told = low if low == high else f"{low} to {high}"
    details = [document.account.leaves[name] for name in document.parameters if name in document.account.leaves]
    padding = sum(leaf.count * (-leaf.local_bytes % ALIGN_BYTES) for leaf in details)
    whole = padding + sum(leaf.count * leaf.local_bytes for leaf in details)
    wasted = f", {f'{100 * padding / whole:.2f} %' if padding else 'none'} of it padding" if details else ""
    return f"{len(sizes)} chunks ({told} of parameters{wasted})"


def outputs(document: Document) -> str:
    """Which outputs of the model training steps do not keep."""
    shown, more = document.discards[:3], len(document.discards) - 3
    names = ", ".join(shown) + f" and {more} more" * (more > 0)
    return f"{names} not kept by training steps; outputs='all' (--outputs all) keeps every output"


def micro_batched(document: Document) -> str:
    """How a step runs micro-batched: the schedule, the cut, and what is recomputed."""
    pipeline, micro_batches = document.pipeline, document.mesh.micro_batches
    assert pipeline is not None
    parts = [f"{micro_batches} micro-batch{'es' * (micro_batches != 1)}"]
    if pipeline.ranks > 1:
        each = f" of {pipeline.virtual_stages} stages" if pipeline.virtual_stages > 1 else ""
        sizes = [high - low for low, high in pairwise(pipeline.bounds)]
        blocks_ = str(min(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        parts.append(f"{pipeline.ranks} pipeline ranks{each}, {pipeline.schedule}, {blocks_} blocks a stage")
    if document.times is not None:
        bubble = document.times.bubble(micro_batches, document.predicted.step_time_s)
        parts.append(f"bubble {bubble * 100:.1f} % of all ranks' time")
    if versions(pipeline.schedule) > 1:
        parts.append("this changes training: an update takes the gradient of the batch before, found one update ago")
    if micro_batches > 1 and document.pin.get("batch_norm") is not None:
        parts.append(
            "this changes training: batch norms normalise each micro-batch by its own statistics, and update running "
            "statistics after each"
        )
    if not pipeline.unsharding.once_per_step and document.mesh.micro_batched(1).size > 1:
        ahead = ", none ahead" * (not pipeline.unsharding.prefetch)
        parts.append(f"parameters gathered and gradients reduced in each micro-batch{ahead}")
    counts = {level: len(numbers) for level, numbers in pipeline.recompute.items()}
    found = [f"{count} {again(level)}" for level, count in counts.items() if level not in GATHERED_AGAIN]
    if found:
        parts.append(f"of {pipeline.bounds[-1]} blocks recomputed in backward: {', '.join(found)}")
    for level in (level for level in GATHERED_AGAIN if level in counts):
        parts.append(f"of {pipeline.bounds[-1]} blocks {GATHERED_AGAIN[level]}: {counts[level]}")
    return "; ".join(parts)


def placed(tables: TablesPlan, document: Document) -> str:
    """Where embedding tables lie, and how the slabs are stored: only along dim 0 each on the ranks it was placed on."""
    slabs = [f"{name} {layout}" for name, layout in document.parameters.items() if name.startswith(SLABS_NAME)]
    return f"{tables}; stored {', '.join(slabs)}" if slabs else str(tables)
