"""Which layers the ranks of tensor axes share, and in which of the ways that other tools have for a layer.

A tool hooks layers one by one, so what surrounds each matters: whether what a layer makes goes on in parts to the next
product or attention, and whether a parameter that is whole meets parts of what it is used with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.interchange.parallelism import Lost
from planner.plan.document.detail import BlockDetail, Move, OpDetail
from planner.plan.document.document import Document

PRODUCTS = {"columns": "column", "rows": "row"}
LOOK_UPS = ("vocabulary", "features")
LAYER, LOOK_UP = "linear", "embedding"
"""Operators that are a layer's whole forward; another one that shares a weight is no layer that tools know."""
NUMBER = re.compile(r"\.(?:\*|\d+)(?=\.|$)")


def shared_layers(document: Document, axes: Sequence[int], lost: list[Lost]) -> dict[str, str]:
    """Module -> how its weight is shared (:attr:`planner.interchange.parallelism.Parallelism.products`).

    Args:
        axes: those of tensor parallelism.
        lost: gets what no tool says.
    """
    found: dict[str, str] = {}
    users: dict[str, set[str]] = {}
    for block, detail in zip(document.blocks, document.account.blocks, strict=False):
        for name, op in detail.ops.items():
            if not op.parameters or not op.path or name not in block.ops:
                continue
            for parameter in op.parameters:
                users.setdefault(parameter, set()).add(op.path)
            for at in axes:
                strips = block.ops[name].split()[at].partition("/")[2]
                if kind := _kind(document, detail, name, op, at):
                    found[op.path] = f"{kind}/{strips}" if strips else kind
    tied = {path for name, paths in users.items() if len(paths) > 1 or not _is_own(name, paths) for path in paths}
    for path in sorted(tied & found.keys()):
        lost.append(Lost(f"{path} by {found.pop(path)} -> whole", "its weight is another module's, too"))
    return _numbers_left_out(found)


def along_sequence(document: Document, axes: Sequence[int]) -> dict[str, str]:
    """Module of which each rank uses the weight with some tokens -> along which dim, and whether the result is gathered
    (:attr:`planner.interchange.parallelism.Parallelism.along_sequence`).
    """
    found: dict[str, str] = {}
    for block, detail in zip(document.blocks, document.account.blocks, strict=False):
        for name, op in detail.ops.items():
            if name in block.ops and op.path and _is_own_all(op) and op.results:
                for at in axes:
                    layout = op.results[0].split()[at]
                    if op.meaning[at] == "sequence" and layout.startswith("S("):
                        moves = [
                            *op.after,
                            *(m for reader in detail.ops.values() for m in reader.before if m.value == name),
                        ]
                        kind = "gathered along" if any(_gathers(move, at) for move in moves) else "along"
                        found[op.path] = f"{kind} {layout[2:-1].partition(',')[0]}"
    return _numbers_left_out(found)


def _is_own_all(op: OpDetail) -> bool:
    """Whether it reads parameters, and all are of its module."""
    return bool(op.parameters) and all(_is_own(name, {op.path}) for name in op.parameters)


def _is_own(parameter: str, paths: set[str]) -> bool:
    """Whether a parameter is called after the module that reads it."""
    return all(parameter.startswith(f"{path}.") for path in paths)


def _kind(document: Document, detail: BlockDetail, name: str, op: OpDetail, at: int) -> str:
    """How one operator shares what it reads on an axis; empty: it does not."""
    meaning, called = op.meaning[at], name.rpartition(": ")[2].partition(" #")[0]
    if meaning in LOOK_UPS:  # of positions, a module often has arguments of its own
        return meaning if called == LOOK_UP and any(value in document.inputs for value, _ in op.operands) else ""
    if meaning in PRODUCTS:
        kind, is_inside = PRODUCTS[meaning], NUMBER.search(op.path) is not None
        if called != LAYER:
            return f"{kind} of {called}"
        if kind == "column":
            return "gathered column" if not is_inside or _is_gathered(detail, name, at) else kind
        if _is_scattered(detail, name, at):
            return "scattered row"
        return "split row" if not is_inside or _is_split(op, at) else kind
    if meaning == "sequence" or not op.results or not op.results[0].split()[at].startswith("S("):
        return ""
    axis = document.mesh.axes[at].name
    summed = any(move.value in op.parameters and f"I>R {axis}" in move.steps for move in op.before)
    return f"along {op.results[0].split()[at][2:-1].partition(',')[0]}" if summed else ""


def _is_gathered(detail: BlockDetail, name: str, at: int) -> bool:
    """Whether what an operator makes is whole again before a product or attention takes it."""
    near, seen = [name], {name}
    while near:
        value = near.pop()
        if any(_gathers(move, at) for move in detail.ops[value].after):
            return True
        for reader, op in detail.ops.items():
            if value not in {operand for operand, _ in op.operands}:
                continue
            if any(move.value == value and _gathers(move, at) for move in op.before):
                return True
            if not op.flops and reader not in seen:
                seen.add(reader)
                near.append(reader)
    return False


def _gathers(move: Move, at: int) -> bool:
    return move.source.split()[at].startswith("S") and not move.target.split()[at].startswith("S")


def _is_split(op: OpDetail, at: int) -> bool:
    """Whether an operator takes parts along features of what comes whole, or in other parts."""
    return any(m.source.split()[at] != m.target.split()[at] for m in op.before if m.value not in op.parameters)


def _is_scattered(detail: BlockDetail, name: str, at: int) -> bool:
    """Whether of the sums that an operator makes each rank goes on with some features."""
    features = f"S({len(detail.ops[name].shape) - 1}"
    moves = [*detail.ops[name].after, *(move for op in detail.ops.values() for move in op.before if move.value == name)]
    return any(move.target.split()[at].startswith(features) for move in moves)


def _numbers_left_out(found: dict[str, str]) -> dict[str, str]:
    """The same by pattern, where all layers of one share it alike."""
    patterns: dict[str, set[str]] = {}
    for path, kind in found.items():
        patterns.setdefault(NUMBER.sub(".*", path), set()).add(kind)
    alike = {pattern for pattern, kinds in patterns.items() if len(kinds) == 1}
    return {pattern if (pattern := NUMBER.sub(".*", path)) in alike else path: kind for path, kind in found.items()}
