"""Row of a mixture of experts (:func:`autopar.experts`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.ir.graph import Node, Ref, TensorType
from planner.ir.layout import Shard
from planner.ops.sharding_rule import MECHANICAL, FactorWay, Inner, Rule
from planner.ops.signature import signature
from planner.ops.table import Between, Row, Share

Operands = tuple[TensorType, ...]

DISPATCH = "dispatch"
"""The way to shard tokens and experts on one axis: tokens go to where their experts are."""
COUNT_BYTES = 8

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
    go, trained = replace(rows, needs=(X, INDICES)), [tensor.grad for tensor in operands]
    of_made, of_tokens = replace(rows, phase="backward"), replace(go, phase="backward")
    gradients = (of_made,) * any((trained[X], *trained[UP:])) + (of_tokens,) * trained[X]
    dispatch = FactorWay(
        DISPATCH,
        operands={place: Shard(0) for place in range(UP, len(operands))},
        inner=(counts, go, rows, *gradients),
        strided=True,
        uneven=True,
    )
    ways = {"e": (FactorWay(uneven=True),), "t": (MECHANICAL, dispatch)}
    return replace(rule, ways={name: ways[name] for name in ways.keys() & rule.sizes.keys()})


def flops(node: Node, operands: Operands, rule: Rule) -> int:
    """Two products for every token and each of its experts, however many there are."""
    rows = operands[INDICES].numel
    return 2 * rows * math.prod(operands[UP].shape[1:]) + 2 * rows * math.prod(operands[DOWN].shape[1:])


@dataclass(frozen=True)
class _Rows:
    """The rows that the experts of one rank work on: one for each token and each of its experts that are there.

    Of dispatched tokens those that came, as uneven as the load says; what they become comes back for the rank's own
    tokens, of which there are as many on every rank.
    """

    node: Node
    types: Sequence[TensorType]
    share: Share

    @property
    def average(self) -> int:
        """Of a rank."""
        return self.types[INDICES].numel // (self.share.parts.get("t", 1) * self.share.parts.get("e", 1))

    @property
    def count(self) -> int:
        return self.average if self.share.load == 1 else round(self.average * self.share.load)

    @property
    def is_dispatched(self) -> bool:
        return f"t.{DISPATCH}" in self.share.ways

    @property
    def back(self) -> int:
        """Rows that come back."""
        return self.average if self.is_dispatched else self.count

    def features_bytes(self, rows: int) -> int:
        """Of a tensor like the tokens, with so many rows."""
        return rows * self.types[X].shape[-1] * self.types[UP].item_bytes

    @property
    def hidden_bytes(self) -> int:
        """Of one hidden feature tensor."""
        hidden = self.types[DOWN].shape[1 if self.node["transposed"] else 2] // self.share.parts.get("f", 1)
        return self.count * hidden * self.types[UP].item_bytes

    @property
    def kept_bytes(self) -> int:
        """What enters the first product and leaves the second, what lies between, its weight and where it goes."""
        gated, keeps_result = self.node["gate"] != "none", self.node["activation"] in ("relu", "sigmoid", "tanh")
        # Gate and up, the activation, their product; clamped, shifted and sigmoids are tensors of their own.
        between = 4 + (2 if self.node["limit"] else 1 if self.node["offset"] else 0) if gated else 2 - keeps_result
        between += self.node["activation"] == "swish"
        each = self.types[WEIGHTS].item_bytes + self.types[INDICES].item_bytes
        features = self.features_bytes(self.count + self.back)
        return features + between * self.hidden_bytes + each * self.count

    @property
    def passed_bytes(self) -> tuple[int, int]:
        """What is read and written beside products, forward and backward, as :mod:`autopar.operators.experts` does it.

        Forward rows are taken (2), weighted (2), put in their places (2) and summed (1); in backward they are put back
        (2), weighted and multiplied by rows for the gradients of weights (6), and rows are put and summed (3). What is
        dispatched is sorted anew where it arrives, and back (2 and 2, in backward alike). Of hidden features an
        activation is 2, and 3 backward; a product with ups 3, 6 backward, and 4 to join the gradients of both; a clamp
        of gates 2 and 3, of ups 2 and 4; an offset 2 and 0; swish 7 and 14 in place of an activation.
        """
        gated, swish = self.node["gate"] != "none", self.node["activation"] == "swish"
        features, dispatched = self.features_bytes(self.count), 4 * self.is_dispatched
        limited, shifted = bool(self.node["limit"]), gated and bool(self.node["offset"])
        forward = (7 if swish else 2) + 3 * gated + (2 + 2 * gated) * limited + 2 * shifted
        backward = (14 if swish else 3) + 10 * gated + (3 + 4 * gated) * limited
        return (
            (7 + dispatched) * features + forward * self.hidden_bytes,
            (11 + dispatched) * features + backward * self.hidden_bytes,
        )


def between(node: Node, types: Sequence[TensorType], sizes: Sequence[int], share: Share) -> Between:
    """What experts have of their rows: what is kept for backward; needed forward, rows that are weighted and put in
    their places; backward, before there is any gradient of an operand, what multiplies weights and rows, and these.
    """
    rows, gradients = _Rows(node, types, share), sum(b for b, tensor in zip(sizes, types, strict=False) if tensor.grad)
    features = rows.features_bytes(rows.count)
    forward = features * (1 + share.parts.get("e", 1))
    return Between(rows.kept_bytes, forward, max(0, 3 * features - gradients), *rows.passed_bytes)


ROWS: dict[str, Row] = {
    "autopar.experts.default": Row(
        experts,
        flops,
        saves=("in3", "in4", "between"),
        contracts=True,
        kernel="other",
        anew=True,
        between=between,
        labels={"expert": "e", "expert features": "f"},
    ),
}
