"""Functions that bring a backward of their own: ``torch.autograd.Function``s, called by a model as one operator.

What a Function computes is in its code, so each node says it itself, in arguments beside its tensors, as the user
declared it and the capture saw it run. None of them is a size, so that the node means the same at other sizes:

* ``dims``: for each operand, then result, a name for every dim; equal names are one factor, ``""`` is never sharded.
* ``terms``: whether its backward is linear in the gradients that it is given, so that it may be given terms of them.
* ``saves``, ``holds``: operands and results that autograd saves for its backward; those that its own code holds, which
  are never let go and recomputed.
* ``kept``: what it keeps besides, as pairs of a tensor (a place among operands, then results) and bytes for each of its
  elements.
* ``flops``: forward operations for each element of the first result.
* ``moves``: passes over its operands and results, forward and backward.
* ``works``: as in :class:`planner.ops.table.Row`.
* ``registered``: whether anybody said what its dims mean; else it is computed in full on every rank.
"""

from __future__ import annotations

from typing import Any

from planner.ir.graph import Node, TensorType
from planner.ops.sharding_rule import Dims, FactorWay, Rule
from planner.ops.table import Row, Saved

PREFIX = "function."
"""What names of these operators begin with."""

FOUND_OUT = frozenset({"dims", "terms", "saves", "holds", "kept", "flops", "moves", "works", "registered"})
"""Arguments that follow from the Function, its other arguments and its operands."""

Operands = tuple[TensorType, ...]


def function(node: Node, operands: Operands) -> Rule:
    """The names that the node states are factors; other dims are kept whole."""
    stated: Any = node["dims"]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    tensors: list[Dims] = []
    for place, (tensor, names) in enumerate(zip((*operands, *node.results), stated, strict=True)):
        factors = [name or f"tensor {place} dim {dim}" for dim, name in enumerate(names)]
        sized = list(zip(factors, names, tensor.shape, strict=True))
        sizes |= {factor: size for factor, _, size in sized if size != 1}
        whole |= {factor for factor, name, size in sized if size != 1 and not name}
        tensors.append(tuple((factor,) if size != 1 else () for factor, _, size in sized))
    return Rule(
        sizes=sizes,
        operands=tuple(tensors[: len(operands)]),
        results=tuple(tensors[len(operands) :]),
        whole=frozenset(whole),
        ways={name: (FactorWay(strided=False),) for name in sizes},
        terms=not any(t.grad for t in node.results) or bool(node["terms"]),
    )


def _flops(node: Node, operands: Operands, rule: Rule) -> int:
    each: Any = node["flops"]
    return round(each * node.results[0].numel)  # type: ignore[no-any-return]


def _saves(node: Node, operands: Operands) -> tuple[str, ...]:
    saves: Any = node["saves"]
    kept: Any = node["kept"]
    return (*saves, *(f"kept{number}" for number in range(len(kept))))


def kept(saved: Saved, node: Node) -> tuple[int, float] | None:
    """What it keeps besides operands and results, as in ``kept``; ``None`` for anything else that it saves."""
    every: Any = node["kept"]
    return every[saved.place] if saved.kind == "kept" else None


def holds(node: Node) -> tuple[Saved, ...]:
    """Operands and results that the code of a Function holds until its backward ran."""
    found: Any = node["holds"]
    return tuple(map(Saved.parse, found)) if node.op.startswith(PREFIX) else ()


def works(node: Node) -> int:
    """Tensors that backward of a Function needs while it runs; 0 for another operator."""
    found: Any = node["works"]
    return found if node.op.startswith(PREFIX) else 0


def moves(node: Node) -> tuple[float, float] | None:
    """Passes over its tensors, forward and backward; ``None`` for another operator."""
    found: Any = node["moves"]
    return found if node.op.startswith(PREFIX) else None


def is_unregistered(node: Node) -> bool:
    """Whether a node is a Function of which nobody said what its dims mean."""
    return node.op.startswith(PREFIX) and not node["registered"]


ROW = Row(function, _flops, saves=_saves)
"""The row of all of them."""
