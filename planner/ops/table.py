"""The shape of an op-table row, and the helpers that most rows are made of.

A row says three things about an operator: its factor rule, its forward flops, and which tensors its
backward needs; and what sets some apart: the kernel that they run, the sizes and numbers that they make.
Rows live in the modules of this package, one per family; :data:`planner.ops.OPS` collects them. Adding
an operator is adding a row (see ``docs/adding_an_op.md``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

from planner.ir.graph import Node, TensorType
from planner.ops.sharding_rule import Rule

RuleOf = Callable[[Node, tuple[TensorType, ...]], Rule]
FlopsOf = Callable[[Node, tuple[TensorType, ...], Rule], int]
SavesOf = Callable[[Node, tuple[TensorType, ...]], tuple[str, ...]]


def no_flops(node: Node, operands: tuple[TensorType, ...], rule: Rule) -> int:
    """Memory-bound: priced by bytes alone."""
    return 0


def contraction_flops(node: Node, operands: tuple[TensorType, ...], rule: Rule) -> int:
    """A multiply and an add for every point of the iteration space."""
    return 2 * math.prod(rule.sizes.values())


OWN = ("own", "mask", "rows", "scores", "between")
"""What backward may need besides operands and results: a tensor like the first operand; what was drawn for each of its
elements; a float32 for each of its rows (along the last dim); attention's scores, where there is no flash kernel; what
an operator made of several makes between these (:attr:`Row.between`)."""


class Share(NamedTuple):
    """How much of an operator one rank has: one of so many ``parts`` of each factor that is sharded, in these ``ways``
    (as ``t.dispatch``), and its ``load``, how many times the average that is where parts are uneven
    (:attr:`planner.ops.sharding_rule.FactorWay.uneven`).
    """

    parts: Mapping[str, int]
    ways: frozenset[str] = frozenset()
    load: float = 1.0


WHOLE = Share({})


class Between(NamedTuple):
    """What an operator that is made of several has on a rank between these, in bytes: kept for backward, needed only
    while it runs, and passed over.
    """

    kept: int
    forward: int
    backward: int
    passed_forward: int
    passed_backward: int


BetweenOf = Callable[[Node, Sequence[TensorType], Sequence[int], Share], Between]
"""Of a node, the types of its operands, the bytes of these on the rank, and how much of it the rank has."""


class Saved(NamedTuple):
    """A tensor that backward of an operator needs.

    Attributes:
        kind: ``in``, an operand; ``out``, a result; one of :data:`OWN`; ``copy`` of an operand; ``kept``, what a
            Function
            keeps besides (:func:`planner.ops.function.kept`).
        place: which operand or result; which of the things kept.
    """

    kind: str
    place: int = 0

    @staticmethod
    @cache
    def parse(word: str) -> Saved:
        """What a row calls ``in0``, ``out1`` or ``mask``."""
        kind = word.rstrip("0123456789")
        return Saved(kind, int(word[len(kind) :] or 0))

    def among(self, operands: int) -> int | None:
        """Its place among so many operands, then results; ``None`` for what is neither."""
        return {"in": self.place, "out": operands + self.place}.get(self.kind)


Family = Literal[
    "add", "multiply", "activation", "normalization", "softmax", "loss", "embedding", "random", "copy", "reduction",
    "optimizer",
]  # fmt: skip
"""Operators that stream bytes, by what they do with them: they run at different rates where arithmetic, not memory, is
the limit (a CPU)."""

Resize = Literal["", "given", "pieces", "element", "slice", "pad", "join"]
"""What says how large a new dim is: an argument; how many pieces there are; that one element is taken, or a slice; how
much padding there is; the dims that are joined."""


@dataclass(frozen=True)
class Row:
    """What the planner knows of one operator.

    Attributes:
        rule: factors of an application (node, operand types) -> :class:`Rule`. Operands are the tensor
            arguments in schema order, as in ``node.inputs``.
        flops: forward floating-point operations of the whole (global) operator.
        saves: tensors that backward needs: ``"in0"`` is the first tensor operand, ``"out0"`` the first
            result; what it keeps besides these is one of :data:`OWN`. A tuple, or a function of the node and its
            operands.
        contracts: it is a matrix product: sums of products of two tensors, nothing else.
        mutual: each saved operand serves the gradients of the other saved ones alone, as in a product.
        passes: operands whose gradient is the result's gradient itself, not a new tensor.
        views: operands whose gradient is a view of another tensor.
        works: tensors of the size of the first operand that backward needs while it runs.
        view: the result aliases the first operand; it costs nothing and saves nothing.
        random: draws random numbers (ranks that hold different data must draw differently).
        anew: what it keeps for backward besides operands and results is not held where it runs again, but made anew, as
            what is drawn at random is.
        drops: the argument that says what share of elements is dropped; where that is 0, nothing is drawn.
        kernel: what it runs: a product as in ``linear`` or ``matmul``, attention, a kernel whose flops say enough
            (``other``), or a stream of bytes of some family.
        normalizes: a norm of every token, or the mean that one is written with: sequence parallelism shards it along
            the sequence.
        bags: a look-up by itself, of which each id, or each row of ids, is a bag, so that its table may be placed.
        looks_up: the argument ``indices`` picks ``rows`` of a table, or is a tuple with a tensor for each of the
            ``dims`` that it indexes.
        numbers: what the numbers in the result are: ``counted`` from ``start`` to ``end``; all those of the operand
            (``kept``), or these with others added (``added``).
        resize: how large dims are that no operand has.
        between: what it has between the operators that it is made of, where ``saves`` says that it keeps this.
        labels: by label (:data:`planner.formulation.constraints.labels.LABELS`), the factor that is of it by itself,
            not because a neighbour's is.
    """

    rule: RuleOf
    flops: FlopsOf = no_flops
    saves: tuple[str, ...] | SavesOf = ()
    contracts: bool = False
    mutual: bool = False
    passes: tuple[int, ...] = ()
    views: tuple[int, ...] = ()
    works: int = 0
    view: bool = False
    random: bool = False
    anew: bool = False
    drops: str = ""
    kernel: Literal["linear", "matmul", "attention", "other"] | Family = "multiply"
    normalizes: bool = False
    looks_up: Literal["", "rows", "dims"] = ""
    bags: Literal["", "ids", "rows"] = ""
    numbers: Literal["", "counted", "kept", "added"] = ""
    resize: Resize = ""
    between: BetweenOf | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def saved(self, node: Node, operands: tuple[TensorType, ...]) -> tuple[Saved, ...]:
        """What backward of this application needs."""
        words = self.saves(node, operands) if callable(self.saves) else self.saves
        found = tuple(map(Saved.parse, words))
        if not self.mutual:
            return found
        flows = {Saved("in", i) for i, tensor in enumerate(operands) if tensor.grad}
        return tuple(saved for saved in found if flows & ({*found} - {saved}))
