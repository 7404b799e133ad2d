"""A plan in one sentence: what is divided among which devices, what that takes, and how good it is.

Everything is read off the decisions, not off pins or the names of axes, so that it is said of any plan alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from planner.base.formatting import GATHERED_AGAIN, in_bytes, in_percent, in_seconds
from planner.cost.cluster import ClusterSpec
from planner.ir.layout import MICRO, Axis
from planner.plan.document.axis_uses import (
    ATTENDS,
    FEATURES,
    HEADS,
    LOOKED_UP,
    MODELS,
    SHARED,
    kind_of,
    parted_by,
    stored_whole,
    work_of,
)
from planner.plan.document.document import Document, PipelinePlan

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "zero_bubble": "zero bubble",
    "zbv": "ZBV",
    "dualpipev": "DualPipeV",
    "2bw": "2BW",
}
WEIGHS = 0.02
"""Part of a step from which on it is said what it is lost to."""


def sentence(document: Document) -> str:
    """``"Shards parameters over the 8 GPUs of a node (FSDP), copies over 4 nodes; 1.84 s a step, ..."``"""
    done = _listed([*_stages(document), *_axes(document), *_recomputes(document), *_offloads(document)])
    told = "; ".join([done, ", ".join(_figures(document))])
    return f"{told[0].upper()}{told[1:]}."


def _listed(parts: list[str]) -> str:
    return ", ".join(parts) or "runs whole on one device"


# ---- what is divided -------------------------------------------------------------------------------------------------


def _stages(document: Document) -> Iterator[str]:
    """How a pipeline is cut, and into how many micro-batches a step is."""
    pipeline, count = document.pipeline, document.mesh.micro_batches
    micro_batches = f"{count} micro-batch{'es' * (count != 1)}"
    if pipeline is None:
        return
    if pipeline.ranks == 1:
        yield f"takes the batch in {micro_batches}" + ", one version of weights late" * (pipeline.schedule == "2bw")
        return
    sizes = [high - low for low, high in pairwise(pipeline.bounds)]
    low, high = min(sizes), max(sizes)
    blocks = f"{low} block{'s' * (low != 1)}" if low == high else f"{low} to {high} blocks"
    stages = f"runs {len(sizes)} stages of {blocks}"
    ranks = f" on {pipeline.ranks} pipeline ranks" if pipeline.virtual_stages > 1 else ""
    yield f"{stages}{ranks} ({SCHEDULES.get(pipeline.schedule, pipeline.schedule)} with {micro_batches})"


def _axes(document: Document) -> Iterator[str]:
    """What the axes divide, from neighbours outwards: first what needs the fastest links."""
    axes, work = document.mesh.axes, work_of(document)
    tables, experts, features = (parted_by(document, words) for words in (LOOKED_UP, SHARED, (FEATURES,)))
    parted = [set().union(*each) for each in zip(tables, experts, features, strict=True)]
    whole = stored_whole(document, parted)
    kinds = {at: kind_of(axis, work[at]) for at, axis in enumerate(axes) if axis.size > 1 and axis.name != MICRO}
    is_sharded = any(kind == "data" and not whole[at] for at, kind in kinds.items())
    attends = _attends(document, [at for at, kind in kinds.items() if kind == "context"])
    places: dict[tuple[str, str], list[str]] = {}
    for at, kind in reversed([*kinds.items()]):
        if experts[at]:
            called = "shards experts", " (expert parallel)"
            places.setdefault(called, []).append(f"over {_place(document, axes, at)}")
        elif features[at] and kind != "tensor":
            called = "shards each expert", " (expert tensor parallel)"
            places.setdefault(called, []).append(f"over {_place(document, axes, at)}")
        if kind == "data" and tables[at]:
            places.setdefault(("shards embedding tables", ""), []).append(f"over {_place(document, axes, at)}")
        if kind == "data" and not whole[at]:
            what = "shards parameters", f" ({_fsdp(document)})"
        elif kind == "data":
            rest = "copies the rest of the model" if tables[at] else "copies the model"
            what = ("copies", "") if is_sharded else (rest, " (data parallel)")
        elif kind == "tensor":
            what = "splits weights", f" (tensor parallel{', sequence parallel' * (work[at]['sequence'] > 0)})"
        elif kind == MODELS:
            what = "shares the models of the array", ""
        elif kind == "context":
            what = "splits the sequence", f" (context parallel{attends})"
        else:
            what = ("repeats the work" if kind == "idle" else "divides the work"), ""
        places.setdefault(what, []).append(f"over {_place(document, axes, at)}")
    yield from (f"{does} {' and '.join(where)}{called}" for (does, called), where in places.items())


def _attends(document: Document, axes: Sequence[int]) -> str:
    """How the ranks of context axes attend to one another's keys, inner ones first: what most attention does."""
    told = dict[str, None]()
    for at in reversed(axes):
        found = Counter[str]()
        for block, detail in zip(document.blocks, document.account.blocks, strict=False):
            for name, op in detail.ops.items():
                if name not in block.ops:
                    continue
                way = block.ops[name].split()[at].partition(":")[2].partition("/")[0]
                if how := ATTENDS.get(HEADS if op.meaning[at] == HEADS else way):
                    found[how] += block.count * op.flops
        told.update(dict.fromkeys(how for how, _ in found.most_common(1)))
    is_hybrid = len(told) > 1 and ATTENDS[HEADS] in told
    return f": {'hybrid of ' * is_hybrid}{' and '.join(told)}" if told else ""


def _fsdp(document: Document) -> str:
    """FSDP, and which stage of ZeRO: whether backward finds parameters gathered still, or gathers them again."""
    if document.pipeline is not None:
        again = not document.unsharding.once_per_step
        return f"FSDP, ZeRO {3 if again else 2}"
    repeated = [block for block in document.blocks if block.count > 1] or list(document.blocks)
    gathering, count = sum(sum(b.recompute.values()) for b in repeated), sum(b.count for b in repeated)
    return "FSDP, ZeRO " + ("2" if not gathering else "3" if gathering >= count else "2 and 3")


def _place(document: Document, axes: tuple[Axis, ...], at: int) -> str:
    """Which devices an axis goes over: ``"the 8 GPUs of a node"``, ``"4 nodes"``, ``"2 groups of 4 GPUs"``."""
    cluster, ranks, axis = document.cluster, document.mesh.size, axes[at]
    devices = "processes" if cluster.device.kind == "cpu" else "GPUs"
    is_staged = document.pipeline is not None and document.pipeline.ranks > 1
    if axis.size == ranks:
        return f"the {ranks:,} {devices} of each pipeline rank" if is_staged else f"all {ranks:,} {devices}"
    if axis.stride == 1:
        level = _level(cluster, axis.size)
        return f"the {axis.size:,} {devices} of a {level}" if level else f"groups of {axis.size:,} {devices}"
    if level := _level(cluster, axis.stride):
        return f"{axis.size:,} {level}s"
    inner = axes[at + 1]
    return f"{axis.size:,} such groups" if inner.stride == 1 else f"{axis.size:,} groups of {axis.stride:,} {devices}"


def _level(cluster: ClusterSpec, devices: int) -> str:
    """The level of the network whose units have so many devices; empty where there is none of its own."""
    spans = zip(cluster.levels, cluster.spans, strict=True)
    return next((level.name for level, span in spans if span == devices and level.size > 1), "")


# ---- what else is done -----------------------------------------------------------------------------------------------


def _recomputes(document: Document) -> Iterator[str]:
    """How many blocks recompute, and how much of the step that is."""
    levels = _recomputed(document.pipeline, document)
    count, total = sum(levels.values()), sum(block.count for block in document.blocks)
    if not count:
        return
    share = document.predicted.time_s.get("recompute", 0.0) / (document.predicted.step_time_s or 1.0)
    of = f"all {total}" if count == total else f"{count} of {total}"
    yield f"recomputes {of} blocks in backward" + (f" ({in_percent(share)} of the step)" if share >= WEIGHS else "")


def _recomputed(pipeline: PipelinePlan | None, document: Document) -> dict[str, int]:
    """How many blocks recompute at each level; those that gather alone do not."""
    found = Counter[str]()
    if pipeline is not None:
        found.update({level: len(numbers) for level, numbers in pipeline.recompute.items()})
    else:
        for block in document.blocks:
            found.update(block.recompute)
    return {level: count for level, count in found.items() if level not in GATHERED_AGAIN}


def _offloads(document: Document) -> Iterator[str]:
    if not document.transfer_schedules:
        if document.pins.update == "backward":
            yield "updates parameters during backward"
        return
    home = "on disk" if document.offload == "disk" else "on the host"
    early = any(moment.on == "host" for table in document.transfer_schedules for moment in table.trace.moments[:-1])
    yield f"keeps model data {home} and updates it there" + " during backward" * early


# ---- what it takes ---------------------------------------------------------------------------------------------------


def _figures(document: Document) -> Iterator[str]:
    """Seconds, what of them is lost to waiting, memory, and how far the best may be."""
    predicted, usable, search = document.predicted, document.cluster.device.usable_bytes, document.search
    yield f"{in_seconds(predicted.step_time_s)} a step"
    for use, why in (("bubble", "in the bubble"), ("offload", "waiting for transfers")):
        share = predicted.time_s.get(use, 0.0) / (predicted.step_time_s or 1.0)
        if share >= WEIGHS:
            yield f"{in_percent(share)} of it {why}"
    yield f"{in_percent(predicted.peak_bytes / usable)} of {in_bytes(usable).replace('.0 ', ' ')}"
    best = "the best with these pins" if document.pin else "the best"
    if search.status == "optimal":
        yield f"proven {best}{f' {document.qualified}' if document.qualified else ''}"
    elif document.rebinding is not None and document.rebinding.bound_by == "arithmetic":
        yield "rebound, and compared with no other"
    else:
        limited = f" {document.limited}" if document.limited else ""
        percent = max(search.gap * 100, 0.01)
        yield f"within {percent:{'.0f' if percent >= 10 else '.2g'}} % of {best}{limited}"
