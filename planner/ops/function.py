"""Functions that bring a backward of their own: ``torch.autograd.Function``s, called by a model as one operator.

What a Function computes is in its code, so each node says it itself, in arguments beside its tensors, as the capture
found it out or the user declared it. None of them is a size, so that the node means the same at other sizes:

* ``factors``: for each factor a seat for every operand, then result: ``(dim, product of the factors major to it)``;
  ``None`` where a tensor lacks it.
* ``strided``: for each factor, whether it may be sharded strip by strip.
* ``same``: for each factor, the results that lack it and are the same on every rank, not terms of a sum.
* ``linear``: sets of operands in which it is jointly linear, as in :class:`planner.ops.sharding_rule.Rule`.
* ``terms``: whether its backward is linear in the gradients that it is given, so that it may be given terms of them.
* ``saves``, ``holds``: operands and results that autograd saves for its backward; those that its own code holds, which
  are never let go and recomputed.
* ``kept``: what it keeps besides, as pairs of a tensor (a place among operands, then results) and bytes for each of its
  elements.
* ``flops``: forward operations for each element of the first result.
* ``moves``: passes over each of its operands and results, forward and backward, that it comes to.
* ``works``: as in :class:`planner.ops.table.Row`.
* ``why``: why it is computed in full on every rank; ``""`` if it need not be.
"""

from __future__ import annotations

import math
from typing import Any

from planner.ir.graph import Node, TensorType
from planner.ir.layout import R
from planner.ops.sharding_rule import Dims, Rule, Special
from planner.ops.signature import linear_sets
from planner.ops.table import Row

PREFIX = "function."
"""What names of these operators begin with."""

FOUND_OUT = frozenset(
    {"factors", "strided", "same", "linear", "terms", "saves", "holds", "kept", "flops", "moves", "works", "why"}
)
"""Arguments that follow from the Function, its other arguments and its operands."""

Operands = tuple[TensorType, ...]


def function(node: Node, operands: Operands) -> Rule:
    """The factors that the node states, and between them factors that are kept whole."""
    tensors = (*operands, *node.results)
    stated: Any = node["factors"]
    sizes, seats = {}, {}
    for number, places in enumerate(stated):
        name = f"f{number}"
        parts = (t.shape[at[0]] // at[1] for t, at in zip(tensors, places, strict=True) if at is not None)
        sizes[name] = math.gcd(*parts)
        seats[name] = places
    whole: set[str] = set()
    dims: list[Dims] = []
    for place, tensor in enumerate(tensors):
        dims.append(tuple(_parts(place, dim, size, seats, sizes, whole) for dim, size in enumerate(tensor.shape)))
    trained = any(t.grad for t in node.results)
    strided: Any = node["strided"]
    same: Any = node["same"]
    linear: Any = node["linear"]
    return Rule(
        sizes=sizes,
        operands=tuple(dims[: len(operands)]),
        results=tuple(dims[len(operands) :]),
        whole=frozenset(whole),
        linear=linear_sets(node, operands, linear),
        special={
            name: Special(results=dict.fromkeys(same[number], R), strided=strided[number])
            for number, name in enumerate(seats)
        },
        terms=not trained or bool(node["terms"]),
    )


def _parts(
    place: int, dim: int, size: int, seats: dict[str, Any], sizes: dict[str, int], whole: set[str]
) -> tuple[str, ...]:
    """The factors of one dim, major first; what lies between those that are stated is whole."""
    if size == 1:
        return ()
    found: list[str] = []
    major = 1

    def fill(count: int) -> None:
        if count > 1:
            name = f"t{place}d{dim}p{len(found)}"
            sizes[name] = count
            whole.add(name)
            found.append(name)

    here = sorted((at[place][1], name) for name, at in seats.items() if at[place] is not None and at[place][0] == dim)
    for start, name in here:
        fill(start // major)
        found.append(name)
        major = start * sizes[name]
    fill(size // major)
    return tuple(found)


def _flops(node: Node, operands: Operands, rule: Rule) -> int:
    each: Any = node["flops"]
    return round(each * node.results[0].numel)  # type: ignore[no-any-return]


def _saves(node: Node, operands: Operands) -> tuple[str, ...]:
    saves: Any = node["saves"]
    kept: Any = node["kept"]
    return (*saves, *(f"kept{number}" for number in range(len(kept))))


def kept(word: str, node: Node) -> tuple[int, float] | None:
    """What a word of ``saves`` keeps besides operands and results, as in ``kept``; ``None`` for another word."""
    every: Any = node["kept"]
    return every[int(word.removeprefix("kept"))] if word.startswith("kept") else None


def holds(node: Node) -> tuple[str, ...]:
    """Words for operands and results that the code of a Function holds until its backward ran."""
    found: Any = node["holds"]
    return found if node.op.startswith(PREFIX) else ()


def works(node: Node) -> int:
    """Tensors that backward of a Function needs while it runs; 0 for another operator."""
    found: Any = node["works"]
    return found if node.op.startswith(PREFIX) else 0


def moves(node: Node) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Passes over each of its tensors, forward and backward; ``None`` for another operator."""
    found: Any = node["moves"]
    return found if node.op.startswith(PREFIX) else None


def reason(node: Node) -> str:
    """Why a Function is computed in full on every rank; ``""`` if it need not be, or is another operator."""
    return str(node["why"]) if node.op.startswith(PREFIX) else ""


ROW = Row(function, _flops, saves=_saves)
"""The row of all of them."""
