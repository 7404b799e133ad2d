"""What the axes of a plan are for, read off its decisions: which work each divides, and what it stores whole.

So it is said of any plan alike, whatever its axes are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from planner.formulation.constraints.labels import LABELS
from planner.ir.layout import Axis
from planner.ops.attention import QUERY_WAYS
from planner.plan.document.document import Document

LOOKED_UP = ("vocabulary", "features", LABELS["table"].word)
"""Words for look-ups of which each rank of an axis has some rows, features or tables."""
DISPATCHED = "dispatch"
"""The word for experts that are shared together with tokens, which go to where they are."""
EXPERTS, FEATURES = LABELS["expert"].word, LABELS["expert features"].word
"""Words for experts that are shared, or each of them, and see all tokens.

Beside any of these three the axis may share anything in all else, and is called for that."""
SHARED = (DISPATCHED, EXPERTS)
"""Words for mixtures of which each rank of an axis has some experts."""
WHOLE = ("whole", "terms")
"""Words for operators of which an axis shards nothing, by themselves."""
HEADS = "heads"
"""The word for attention of which each rank has some heads. It weighs most, but whether weights are shared or the
sequence is says what surrounds it."""
ATTENDS = {**QUERY_WAYS, HEADS: "Ulysses"}
"""Ways to attend across ranks, in words."""
MODELS = "model"
"""The axis that shares the models of an array, whatever dims of operators they are then."""
SEQUENCE = ("sequence", *(name for way in QUERY_WAYS if (name := way.partition(".")[2])))
"""The words for what shares a sequence."""


def work_of(document: Document) -> list[Counter[str]]:
    """For every axis, how much work what it shards is, in operations and elements; ``whole`` what every rank does."""
    found = [Counter[str]() for _ in document.mesh.axes]
    for block, detail in zip(document.blocks, document.account.blocks, strict=False):
        for op in detail.ops.values():
            numel = 1
            for size in op.shape:
                numel *= size
            for counter, word in zip(found, op.meaning, strict=True):
                counter[word] += block.count * (op.flops + numel)
    return found


def kind_of(axis: Axis, work: Mapping[str, int]) -> str:
    """What an axis is for: what most of the work that it divides is divided by; without details, by its name."""
    if axis.name == MODELS:
        return MODELS
    if not work:
        name = axis.name.partition("_")[0]
        return {"replicate": "data"}.get(name, name)
    shares = {"data": work.get("batch", 0), "context": sum(work.get(word, 0) for word in SEQUENCE)}
    beside = sum(work.get(word, 0) for word in (*WHOLE, HEADS, *SHARED, FEATURES))
    shares["tensor"] = sum(work.values()) - sum(shares.values()) - beside
    kind = max(shares, key=lambda name: shares[name])
    return kind if shares[kind] else "data" if work.get(DISPATCHED) else "idle"


def parted_by(document: Document, words: tuple[str, ...]) -> list[set[str]]:
    """For every axis, the parameters of operators of which its ranks run different parts, as one of the words says."""
    found: list[set[str]] = [set() for _ in document.mesh.axes]
    for block in document.account.blocks:
        for op in block.ops.values():
            for names, word in zip(found, op.meaning, strict=True):
                if word in words:
                    names.update(op.parameters)
    return found


def stored_whole(document: Document, parted: list[set[str]]) -> list[bool]:
    """Whether most elements of parameters are stored whole on each axis; without details, most parameters.

    Those of which the ranks of an axis run different parts are not counted there.
    """
    sharded, whole = ([0] * len(document.mesh.axes) for _ in range(2))
    for name, layout in document.parameters.items():
        leaf, numel = document.account.leaves.get(name), 1
        for size in () if leaf is None else (leaf.count, *leaf.shape):
            numel *= size
        for at, local_type in enumerate(layout.split()):
            if name in parted[at]:
                continue
            (sharded if local_type.startswith("S") else whole)[at] += numel
    return [mine >= theirs for mine, theirs in zip(whole, sharded, strict=True)]
