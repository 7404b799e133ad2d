"""Rows of matrix products: linear layers, matmul in all its forms, einsum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from planner.ir.graph import Node, TensorType
from planner.ir.layout import Shard
from planner.ops.sharding_rule import MECHANICAL, Dims, FactorWay, Inner, Rule
from planner.ops.signature import letters, rows, signature
from planner.ops.table import Between, Row, Share, contraction_flops

Operands = tuple[TensorType, ...]


def linear(node: Node, operands: Operands) -> Rule:
    """``x[.., k], w[n, k] (or w[k]), bias[n] -> y[.., n]``."""
    x, w, *bias = operands
    leading = [f"m{i}" for i in range(len(x.shape) - 1)]
    out = ["n"][: len(w.shape) - 1]
    addends = range(2, len(operands))
    rule = signature(
        node,
        operands,
        [[*leading, "k"], [*out, "k"], *([out] * len(bias))],
        [[*leading, *out]],
        broadcast=True,
        addends=addends,
        linear=[{0, *addends}, {1, *addends}],
    )
    return streamed(operands, rule, 0, 1) if leading and out else rule


RING, PANELS, SUMS = "n.ring", "n.panels", "k.ring"
"""Ways to stream a linear layer: what it reads goes around while it is multiplied, by tokens, or by input features as
in SUMMA (van de Geijn and Watts 1997); the sums that it makes go around while others are made, to the ranks of tokens.
"""


def streamed(operands: Operands, rule: Rule, read: int, weight: int) -> Rule:
    """With those ways to shard output and input features in which panels go around the ranks.

    Backward passes around what was gathered once more, and the sums of gradients.

    Args:
        read, weight: the places of what is read, tokens before input features, and of the matrix.
    """
    x, w, last = operands[read], operands[weight], len(operands[read].shape) - 1
    (tokens,), features = rule.operands[read][last - 1] or ("",), rule.operands[read][last]
    if features != ("k",) or not {tokens, "n"} <= rule.sizes.keys():
        return rule

    def around(tensor: TensorType, dims: Dims, way: str) -> Inner:
        factors = tuple(factor for dim in dims for factor in dim)
        return Inner("send", factors, tensor.item_bytes, shared=(way,), around=True)

    def gathering(way: str, dim: int, alone: str) -> FactorWay:
        sent = around(x, rule.operands[read], way)
        again = [replace(sent, phase="backward")] * (int(w.grad) + int(x.grad))
        name = way.partition(".")[2]
        alone_ = ("n", alone)
        return FactorWay(name, {read: Shard(dim)}, inner=(sent, *again), alone=alone_, in_turn=True, streamed=True)

    sent = around(x, rule.results[0], SUMS)
    sums = FactorWay(
        "ring",
        results={0: Shard(last - 1)},
        inner=(sent, replace(sent, phase="backward")),
        alone=("k", tokens),
        streamed=True,
    )
    gathered = gathering(RING, last - 1, tokens), gathering(PANELS, last, "k")
    return replace(rule, ways={"n": (MECHANICAL, *gathered), "k": (MECHANICAL, sums)})


def panels(
    node: Node, types: Sequence[TensorType], sizes: Sequence[int], share: Share, read: int, weight: int
) -> Between:
    """What a product that is streamed has while it runs (:mod:`autopar.runtime.layers.streamed_linear`), beside its
    operands, its result and their gradients, and what it passes over to cut panels and to add up what these give.

    Where a tensor goes around, a rank has a panel of it and one that comes; of sums, also one that goes.

    Args:
        read, weight: as in :func:`streamed`.
    """
    x, w, y = sizes[read], sizes[weight], sizes[-1]
    way, ranks = next(((way, share.parts[way]) for way in (RING, PANELS, SUMS) if share.parts.get(way, 1) > 1), ("", 1))
    come, again = min(2, ranks - 1), ranks - 1
    if way == RING:
        forward, backward = come * x + y // ranks, (2 * come + 1) * x + y // ranks
        return Between(0, forward, backward, 2 * y, 4 * y + again * (3 * x + 2 * w))
    if way == PANELS:
        forward, backward = 2 * come * x + 2 * w // ranks + y, (2 * come + 1) * x + 2 * w // ranks
        return Between(0, forward, backward, 2 * w + 3 * again * y, 4 * w + 3 * again * x)
    if way == SUMS:
        forward, backward = (come + 1) * y + x // ranks, (2 * come - 1) * y + x // ranks
        return Between(0, forward, backward, 2 * x + 3 * again * y, 4 * x + 2 * again * w)
    return Between(0, 0, 0, 0, 0)


def matmul(node: Node, operands: Operands) -> Rule:
    """``a[.., m, k], b[.., k, n] -> y[.., m, n]``; either may be a vector, batch dims broadcast."""
    left, right, out = _matmul_labels(node, *operands)
    return signature(node, operands, [left, right], [out], broadcast=True, linear=[{0}, {1}])


def added_matmul(node: Node, operands: Operands) -> Rule:
    """``c, a[.., m, k], b[.., k, n] -> beta c + alpha a b``; ``c`` broadcasts."""
    c, a, b = operands
    left, right, out = _matmul_labels(node, a, b)
    added = out[len(out) - len(c.shape) :]
    names, linear = [added, left, right], [{0, 1}, {0, 2}]
    rule = signature(node, operands, names, [out], broadcast=True, addends={0}, linear=linear)
    is_layer = left == ["m", "k"] and right == ["k", "n"] and added == ["n"]
    return streamed(operands, rule, 1, 2) if is_layer and node["beta"] == node["alpha"] == 1 else rule


def _matmul_labels(node: Node, a: TensorType, b: TensorType) -> tuple[list[str], list[str], list[str]]:
    """Labels of ``a``, ``b`` and ``a @ b``, by torch.matmul's rules."""
    m, n = ["m"][: len(a.shape) - 1], ["n"][: len(b.shape) - 1]
    batch = letters(len(node.results[0].shape) - len(m + n))

    def own(tensor: TensorType) -> list[str]:
        return batch[len(batch) - max(0, len(tensor.shape) - 2) :]

    return [*own(a), *m, "k"], [*own(b), "k", *n], [*batch, *m, *n]


def outer(node: Node, operands: Operands) -> Rule:
    """``a[m], b[n] -> y[m, n]``."""
    return signature(node, operands, [["m"], ["n"]], [["m", "n"]], linear=[{0}, {1}])


def einsum(node: Node, operands: Operands) -> Rule:
    """The equation itself; an implicit result, an ellipsis or a diagonal keeps every dim whole."""
    terms, output = _equation(node)
    if output is None:
        names = [[f"{t}.{d}" for d in range(len(o.shape))] for t, o in enumerate((*operands, node.results[0]))]
        return signature(node, operands, names[:-1], names[-1:], whole={name for dims in names for name in dims})
    each = [{i} for i in range(len(operands))]
    return signature(node, operands, [list(term) for term in terms], [list(output)], broadcast=True, linear=each)


def einsum_flops(node: Node, operands: Operands, rule: Rule) -> int:
    """A multiply and an add per point of each pair's space, operands contracted pairwise from left to right.

    An equation that the rule does not read counts as one pass over operands and result.
    """
    terms, output = _equation(node)
    if output is None or len(terms) == 1:
        return 2 * sum(tensor.numel for tensor in (*operands, *node.results))
    flops, held = 0, set(terms[0])
    for i, term in enumerate(terms[1:], start=1):
        space = held | set(term)
        flops += 2 * math.prod(rule.sizes.get(label, 1) for label in space)
        held = space & {*output, *"".join(terms[i + 1 :])}
    return flops


def _equation(node: Node) -> tuple[list[str], str | None]:
    """The terms and the result of an explicit equation; no result where the rule cannot read it."""
    inputs, arrow, output = str(node["equation"]).replace(" ", "").partition("->")
    terms = inputs.split(",")
    readable = arrow and "." not in inputs and all(len(set(term)) == len(term) for term in terms)
    return terms, output if readable else None


def every_operand(node: Node, operands: Operands) -> tuple[str, ...]:
    """Backward needs all operands."""
    return tuple(f"in{i}" for i in range(len(node.inputs)))


product = partial(Row, flops=contraction_flops, saves=("in0", "in1"), contracts=True, mutual=True, kernel="matmul")

ROWS: dict[str, Row] = {
    **rows("linear", product(linear, kernel="linear", views=(0, 1, 2), between=partial(panels, read=0, weight=1))),
    **rows("matmul", product(matmul, views=(0, 1))),
    **rows("mm bmm mv dot", product(matmul)),
    **rows("outer", product(outer)),
    **rows("addmm", product(added_matmul, saves=("in1", "in2"), between=partial(panels, read=1, weight=2))),
    **rows("addmv baddbmm", product(added_matmul, saves=("in1", "in2"))),
    **rows("einsum", Row(einsum, einsum_flops, saves=every_operand, kernel="other")),
}
