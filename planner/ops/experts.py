"""Row of a mixture of experts (:func:`autopar.experts`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.ir.graph import Node, Ref, TensorType
from planner.ir.layout import Shard
from planner.ops.sharding_rule import MECHANICAL, Inner, Rule, Special
from planner.ops.signature import signature
from planner.ops.table import Row

Operands = tuple[TensorType, ...]

DISPATCH = "dispatch"
"""The way to shard tokens and experts on one axis: tokens go to where their experts are."""
COUNT_BYTES = 8

UNEVEN = ("e", f"t.{DISPATCH}")
"""The ways to run on an axis whose ranks have as many rows as tokens go to their experts."""

X, INDICES, WEIGHTS, UP, DOWN = range(5)
"""Places of its operands; biases follow."""
MADE = {"halves": "halves f", "pairs": "f halves", "none": "f"}
"""How what the first product makes is made up: gates before all ups, each before its up, or no gates."""


def experts(node: Node, operands: Operands) -> Rule:
    """``x[t, h], indices[t, k], weights[t, k], up[e, f, h], down[e, o, f] -> y[t, o]``, and biases ``[e, f], [e, o]``.

    Where experts are sharded, tokens are whole, and each rank adds what its experts make of them. Where tokens are
    sharded, they may be dispatched to experts that are sharded, too, and what these make of them comes back
    (:func:`autopar.runtime.layers.experts`).
    """
    made = MADE[str(node["gate"])]
    up, down = ["e", made, "h"], ["e", "o", "f"]
    if node["transposed"]:
        up, down = ["e", "h", made], ["e", "f", "o"]
    biases = {"up_bias": ["e", made], "down_bias": ["e", "o"]}
    present = [name for name in biases if isinstance(node[name], Ref)]
    rule = signature(
        node,
        operands,
        [["t", "h"], ["t", "k"], ["t", "k"], up, down, *(biases[name] for name in present)],
        [["t", "o"]],
        sizes={"halves": 2},
        whole=("k", "h", "o", "halves"),
        addends={DOWN + 1 + present.index("down_bias")} if "down_bias" in present else (),
    )
    if "e" not in rule.sizes:
        return rule
    # How many rows each rank has for each expert; then the rows, there and back; then the gradients of what comes back
    # and of what went there, where there are any. Weights multiply what has come back.
    counts = Inner("all_to_all", ("e",), COUNT_BYTES)
    each = operands[INDICES].shape[-1] * operands[X].shape[-1]
    rows = Inner("all_to_all", ("t",) if "t" in rule.sizes else (), operands[X].item_bytes, each, shared=("e",))
    back, trained = replace(rows, phase="backward"), [tensor.grad for tensor in operands]
    gradients = (back,) * (any((trained[X], *trained[UP:])) + trained[X])
    dispatch = Special(
        operands={place: Shard(0) for place in range(UP, len(operands))},
        inner=(counts, rows, rows, *gradients),
        strided=True,
        name=DISPATCH,
    )
    ways = {"e": (Special(),), "t": (*MECHANICAL, dispatch)}
    return replace(rule, special={name: ways[name] for name in ways.keys() & rule.sizes.keys()})


def flops(node: Node, operands: Operands, rule: Rule) -> int:
    """Two products for every token and each of its experts, however many there are."""
    rows = operands[INDICES].numel
    return 2 * rows * math.prod(operands[UP].shape[1:]) + 2 * rows * math.prod(operands[DOWN].shape[1:])


@dataclass(frozen=True)
class RowsBetween:
    """The rows that the experts of one rank work on, if every expert gets as many.

    Args:
        types: of the operands.
        shares: how many ranks, or micro-batches, share each factor, and how many do so in a way that has a name.
        imbalance: how many the busiest rank has over the average, where ranks share experts.
    """

    node: Node
    types: Sequence[TensorType]
    shares: Mapping[str, int]
    imbalance: float = 1.0

    @property
    def count(self) -> int:
        """One for each token and each of its experts that are here."""
        average = self.types[INDICES].numel // (self.shares.get("t", 1) * self.shares.get("e", 1))
        return (
            average if self.imbalance == 1 or self.shares.keys().isdisjoint(UNEVEN) else round(average * self.imbalance)
        )

    @property
    def hidden(self) -> int:
        """Hidden features of an expert on this rank."""
        return self.types[DOWN].shape[1 if self.node["transposed"] else 2] // self.shares.get("f", 1)

    @property
    def features_bytes(self) -> int:
        """Of a tensor like the tokens, with a row for each."""
        return self.count * self.types[X].shape[-1] * self.types[UP].item_bytes

    @property
    def hidden_bytes(self) -> int:
        """Of one hidden feature tensor."""
        return self.count * self.hidden * self.types[UP].item_bytes

    @property
    def kept_bytes(self) -> int:
        """What is kept for backward: what enters the first product and leaves the second, what lies between, its weight
        and where it goes.
        """
        gated, keeps_result = self.node["gate"] != "none", self.node["activation"] in ("relu", "sigmoid", "tanh")
        # Gate and up, the activation, their product; clamped, shifted and sigmoids are tensors of their own.
        between = 4 + (2 if self.node["limit"] else 1 if self.node["offset"] else 0) if gated else 2 - keeps_result
        between += self.node["activation"] == "swish"
        each = self.types[WEIGHTS].item_bytes + self.types[INDICES].item_bytes
        return 2 * self.features_bytes + between * self.hidden_bytes + each * self.count

    def scratch_bytes(self, sizes: Sequence[int]) -> tuple[int, int]:
        """What is needed beside while it runs: forward rows that are weighted and put in their places; backward, before
        there is any gradient of an operand, what it multiplies weights and rows by, and these.

        Args:
            sizes: bytes of its operands on this rank.
        """
        gradients = sum(size for size, tensor in zip(sizes, self.types, strict=False) if tensor.grad)
        forward = self.features_bytes * (1 + self.shares.get("e", 1))
        return forward, max(0, 3 * self.features_bytes - gradients)


ROWS: dict[str, Row] = {
    "autopar.experts.default": Row(
        experts, flops, saves=("in3", "in4", "between"), contracts=True, kernel="other", anew=True
    ),
}
