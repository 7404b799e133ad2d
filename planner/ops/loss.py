"""Rows of losses. A reduction over a sharded dim leaves a partial sum; a mean needs its global count.

``reduction`` is torch's: 0 none, 1 mean, 2 sum.
"""

from __future__ import annotations

from dataclasses import replace

from planner.ir.graph import Node, TensorType
from planner.ir.layout import I
from planner.ops.contraction import every_operand
from planner.ops.sharding_rule import FactorWay, Inner, Rule
from planner.ops.signature import is_floating, letters, rows, signature
from planner.ops.table import Row

Operands = tuple[TensorType, ...]

MEAN = 1


def by_class(node: Node, operands: Operands) -> Rule:
    """``scores[t, v, d1..] (or [v]), target[t, d1..], weight[v] -> loss (, total weight [])``.

    A mean over sharded tokens first shares its denominator: how many tokens count, or the sum of their
    class weights. A target may also hold probabilities, like the scores; then the denominator is static.
    """
    scores, target, *weight = operands
    rank = len(scores.shape)
    names = ["v"] if rank == 1 else ["t", "v", *(f"d{i}" for i in range(1, rank - 1))]
    tokens = [name for name in names if name != "v"]
    soft = is_floating(target)
    rule = signature(
        node,
        operands,
        [names, names if soft else tokens, *([["v"]] * len(weight))],
        [tokens if node.results[0].shape else [], *([[]] * (len(node.results) - 1))],
        whole={"v"},
    )
    if soft or node["reduction"] != MEAN:
        return rule
    denominator = Inner("all_reduce", (), max(4, weight[0].item_bytes) if weight else 8)
    shared = FactorWay(inner=(denominator,), strided=True)
    return replace(rule, ways={name: (shared,) for name in tokens if name in rule.sizes})


def cross_entropy(node: Node, operands: Operands) -> Rule:
    """As :func:`by_class`, of logits, and the vocabulary may be sharded if classes weigh the same.

    That leaves the complete loss on every rank. The local form shares, per token, the largest logit, then
    the sum of exponentials and the target's logit (Shoeybi et al. 2019, section 3), and the sum of all
    logits when labels are smoothed.
    """
    rule = by_class(node, operands)
    if "v" not in rule.sizes or node["weight"] is not None or is_floating(operands[1]):
        return rule
    tokens = tuple(name for name in rule.sizes if name != "v")
    largest = Inner("all_reduce", tokens, max(4, operands[0].item_bytes))
    sums = replace(largest, count=3 if node["label_smoothing"] else 2)
    vocabulary = FactorWay(results={0: I}, inner=(largest, sums))
    return replace(rule, whole=rule.whole - {"v"}, ways={**rule.ways, "v": (vocabulary,)})


def pointwise(node: Node, operands: Operands) -> Rule:
    """``input[..], target[..] -> loss``, broadcast; a mean divides by the (static) number of elements."""
    names = letters(max(len(operand.shape) for operand in operands))
    ins = [names[len(names) - len(operand.shape) :] for operand in operands]
    return signature(node, operands, ins, [[] if node["reduction"] else names], broadcast=True)


NLL = "nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward"
POINTWISE = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
    soft_margin_loss hinge_embedding_loss margin_ranking_loss poisson_nll_loss
"""

ROWS: dict[str, Row] = {
    **rows("cross_entropy_loss", Row(cross_entropy, saves=("own", "in1"), works=1, kernel="loss", anew=True)),
    **rows(NLL, Row(by_class, saves=("in1",), kernel="loss")),
    **rows(POINTWISE, Row(pointwise, saves=every_operand)),
}
