"""Describes a plan in the terms that other tools have, and says what of it these terms leave out.

Everything is read off the decisions, as the report's first sentence is (:mod:`planner.plan.document.axis_uses`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from planner.base.errors import PlanError
from planner.base.formatting import GATHERED_AGAIN
from planner.interchange.parallelism import Lost, Parallelism, Recomputation
from planner.ir.layers import LAYER, Layers
from planner.ir.layout import MICRO
from planner.ops.attention import QUERY, RING, ZIGZAG, ZIGZAG_RING
from planner.plan.document.axis_uses import (
    FEATURES,
    HEADS,
    LOOKED_UP,
    SHARED,
    kind_of,
    parted_by,
    stored_whole,
    work_of,
)
from planner.plan.document.document import EVALUATE, Document
from planner.plan.export.shared_layers import along_sequence, shared_layers

WAYS = {QUERY: "gather", ZIGZAG: "zigzag_gather", RING: "ring", ZIGZAG_RING: "zigzag"}
SHOWN = 3
"""So many parameters are named."""


def described(document: Document) -> tuple[Parallelism, list[Lost]]:
    """The description of a plan, and what of the plan it leaves out whatever the format.

    Raises:
        PlanError: the plan has no details of its operators.
    """
    if not document.account.blocks:
        raise PlanError(f"to say what a plan's axes are for, its details are needed: get them with {EVALUATE}")
    lost: list[Lost] = []
    layers = Layers.of({block.name: block.at for block in document.blocks})
    degrees = _degrees(document, lost)
    zero = _zero(document, degrees.pop("sharded"), lost)
    recompute, recompute_layers = _recompute(document, layers, lost)
    pipeline, shape, dtypes = document.pipeline, _input_shape(document), document.model.get("dtypes", {})
    axes = [at for at, kind in _kinds(document).items() if kind == "tensor"]
    if document.tables is not None and document.tables.in_slabs:
        lost.append(Lost("embedding tables in slabs", "no format places tables; look-ups are as in the model"))
    if document.offload == "auto":
        lost.append(Lost("offload of some blocks -> of all", "which blocks are offloaded is not said"))
    return (
        Parallelism(
            **degrees,  # type: ignore[arg-type]
            zero=zero,
            sequence_parallel=_is_sequence_parallel(document),
            context_kind=_context_kind(document),
            pipeline=1 if pipeline is None else pipeline.ranks,
            schedule="1f1b" if pipeline is None or pipeline.ranks == 1 else pipeline.schedule,
            virtual_stages=1 if pipeline is None else pipeline.virtual_stages,
            stage_layers=_stage_layers(document, layers, lost),
            micro_batches=document.mesh.micro_batches,
            recompute=recompute,
            recompute_layers=recompute_layers,
            dtype=dtypes.get("compute", "float32").partition(",")[0],
            stored=dtypes.get("parameters", "float32").partition(",")[0],
            offload={"auto": "host"}.get(document.offload, document.offload),
            products=shared_layers(document, axes, lost),
            along_sequence=along_sequence(document, axes),
            batch=shape[0] if shape else None,
            sequence=shape[1] if len(shape) > 1 else None,
            layers=len(layers.numbers) or None,
            layer_path=layers.path,
        ),
        lost,
    )


def _kinds(document: Document) -> dict[int, str]:
    """What every axis is for that has several ranks."""
    work = work_of(document)
    axes = enumerate(document.mesh.axes)
    return {at: kind_of(axis, work[at]) for at, axis in axes if axis.size > 1 and axis.name != MICRO}


def _degrees(document: Document, lost: list[Lost]) -> dict[str, int]:
    """Ranks by kind; ``sharded``: of those that share parameters."""
    axes, kinds = document.mesh.axes, _kinds(document)
    tables, experts, features = (parted_by(document, words) for words in (LOOKED_UP, SHARED, (FEATURES,)))
    whole = stored_whole(document, [set().union(*each) for each in zip(tables, experts, features, strict=True)])
    found = dict.fromkeys(("replicate", "data", "tensor", "context", "expert", "sharded"), 1)
    shares = [at for at, kind in kinds.items() if kind in ("data", "context", "idle") and not whole[at]]
    found["sharded"] = math.prod(axes[at].size for at in shares)
    expert_tensor = 1
    for at, kind in kinds.items():
        size = axes[at].size
        copies = bool(shares) and whole[at]
        found[{"data": "replicate" if copies else "data", "idle": "data"}.get(kind, kind)] *= size
        if experts[at]:
            found["expert"] *= size
        elif features[at] and kind != "tensor":
            expert_tensor *= size
        if kind == "idle":
            lost.append(Lost(f"{size} idle ranks -> data parallel", "every rank of an axis does the same"))
    on_tensor = any(kind == "tensor" and experts[at] for at, kind in kinds.items())
    found["expert_tensor"] = expert_tensor if expert_tensor > 1 else int(on_tensor)
    if sum(kind == "tensor" for kind in kinds.values()) > 1:
        lost.append(
            Lost(f"a grid of tensor-parallel axes -> {found['tensor']} ranks", "tensor parallelism has one axis")
        )
    return found


def _zero(document: Document, sharded: int, lost: list[Lost]) -> int:
    """The stage of ZeRO, and which parameters are an exception."""
    if sharded == 1:
        return 0
    shares = [at for at, kind in _kinds(document).items() if kind in ("data", "context")]
    whole = [
        name
        for name, layout in document.parameters.items()
        if not any(layout.split()[at].startswith("S") for at in shares)
    ]
    if whole:
        named = ", ".join(whole[:SHOWN]) + f" and {len(whole) - SHOWN} more" * (len(whole) > SHOWN)
        lost.append(Lost(f"{named} stored whole -> in shards", "ZeRO is said of all parameters alike"))
    if document.pipeline is not None:
        return 1 if document.unsharding.once_per_step else 3
    repeated = [block for block in document.blocks if block.count > 1] or list(document.blocks)
    gathering, count = sum(sum(b.recompute.values()) for b in repeated), sum(b.count for b in repeated)
    if 0 < gathering < count:
        told = f"ZeRO 3 in {gathering} of {count} blocks, 2 in the others -> {3 if 2 * gathering >= count else 2}"
        lost.append(Lost(told, "ZeRO has one stage for all blocks"))
    return 3 if 2 * gathering >= count else 2


def _is_sequence_parallel(document: Document) -> bool:
    work = work_of(document)
    return any(kind == "tensor" and work[at]["sequence"] > 0 for at, kind in _kinds(document).items())


def _context_kind(document: Document) -> str:
    """How most attention is shared by the ranks of a sequence."""
    axes = [at for at, kind in _kinds(document).items() if kind == "context"]
    found = {_way(document, at) for at in axes}
    return "hybrid" if len(found) > 1 and "ulysses" in found else next(iter(sorted(found - {""})), "")


def _way(document: Document, at: int) -> str:
    told = Counter[str]()
    for block, detail in zip(document.blocks, document.account.blocks, strict=False):
        for name, op in detail.ops.items():
            if name not in block.ops:
                continue
            way = block.ops[name].split()[at].partition(":")[2].partition("/")[0]
            if kind := "ulysses" if op.meaning[at] == HEADS else WAYS.get(way):
                told[kind] += block.count * op.flops
    return told.most_common(1)[0][0] if told else ""


def _stage_layers(document: Document, layers: Layers, lost: list[Lost]) -> tuple[int, ...]:
    """Layers of each stage, where these are not equally many."""
    pipeline = document.pipeline
    if pipeline is None or pipeline.ranks == 1 or not layers.numbers:
        return ()
    if layers.pieces:
        lost.append(Lost("stages that end within a layer", "stages are of whole layers"))
        return ()
    counts = [sum(low <= n < high for n in layers.numbers) for low, high in pairwise(pipeline.bounds)]
    return () if min(counts) == max(counts) else tuple(counts)


def _recompute(document: Document, layers: Layers, lost: list[Lost]) -> tuple[Recomputation, int | None]:
    """What layers recompute, by the level that comes nearest, and how many; ``None``: all."""
    levels = _levels(document, layers)
    count = len(layers.numbers) or sum(block.count for block in document.blocks)
    computed = {level: n for level, n in levels.items() if level not in GATHERED_AGAIN}
    if not computed:
        again = levels.get("resharded", 0)
        return ("resharded", None) if 2 * again >= count > 0 else ("none", None)
    keeps = {level: ops for block in document.blocks for level, ops in block.keeps.items()}
    nearest = Counter[Recomputation]()
    for level, n in computed.items():
        nearest["full" if level == "full" or (level in keeps and not _products_in(keeps[level])) else "selective"] += n
    kind: Recomputation = nearest.most_common(1)[0][0]
    if set(computed) != {kind}:
        told = ", ".join(f"{n} at {level}" for level, n in computed.items())
        lost.append(Lost(f"recomputation of {told} -> {kind}", "sets of operators of one's own have no name elsewhere"))
    total = sum(computed.values())
    return kind, None if total >= count else total


def _levels(document: Document, layers: Layers) -> Mapping[str, int]:
    if document.pipeline is not None:
        numbers = {*layers.numbers}
        recompute = document.pipeline.recompute
        return {level: sum(n in numbers for n in own) for level, own in recompute.items() if numbers & {*own}}
    found = Counter[str]()
    for block in document.blocks:
        if not layers.path or LAYER.fullmatch(block.name):
            found.update(block.recompute)
    return found


def _products_in(operators: tuple[str, ...]) -> bool:
    return any(name.partition(": ")[2] in ("linear", "addmm", "scaled_dot_product_attention") for name in operators)


def _input_shape(document: Document) -> tuple[int, ...]:
    """The whole shape of the first input."""
    shapes = (document.account.leaves[name].shape for name in document.inputs if name in document.account.leaves)
    return next(shapes, ())
