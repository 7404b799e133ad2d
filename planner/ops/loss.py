"""Rows of losses. A reduction over a sharded dim leaves a partial sum; a mean needs its global count.

``reduction`` is torch's: 0 none, 1 mean, 2 sum.
"""

from __future__ import annotations

from planner.graph import Node, TensorType
from planner.layout import I
from planner.ops.factors import aligned, positions, spanned, without_ones
from planner.ops.table import Row
from planner.rules import Dims, Inner, Rule, Special

MEAN = 1


def _tokens(operands: tuple[TensorType, ...]) -> tuple[dict[str, int], Dims, Dims]:
    """Factor sizes, scores dims and class-index dims of ``scores[t, v, d1..]`` (or ``[v]``)."""
    shape = operands[0].shape
    if len(shape) == 1:
        return {"v": shape[0]}, (("v",),), ()
    factors = ("t", "v", *(f"d{i}" for i in range(1, len(shape) - 1)))
    scores: Dims = tuple((factor,) for factor in factors)
    return dict(zip(factors, shape, strict=True)), scores, (scores[0], *scores[2:])


def _count(node: Node, operands: tuple[TensorType, ...]) -> tuple[Inner, ...]:
    """The all-reduce of a mean's denominator: how many tokens count, or the sum of their class weights."""
    if node["reduction"] != MEAN:
        return ()
    at = positions(node)
    item_bytes = max(4, operands[at["weight"]].item_bytes) if "weight" in at else 8
    return (Inner("all_reduce", (), item_bytes),)


@without_ones
def _cross_entropy(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``logits[t, v, d1..], target[t, d1..], weight[v] -> loss`` (``[t, d1..]`` without a reduction).

    A sharded vocabulary leaves the complete loss on every rank: the local form shares, per token, the
    largest logit, then the sum of exponentials and the target's logit (Shoeybi et al. 2019, section 3),
    and the sum of all logits when labels are smoothed. With class probabilities as the target the mean
    divides by the (static) number of tokens.
    """
    sizes, scores, tokens = _tokens(operands)
    target, *weight = operands[1:]
    soft = target.dtype.startswith(("float", "bfloat"))
    special: dict[str, Special] = {}
    if not soft and (inner := _count(node, operands)):
        special |= {factor: Special(inner=inner, strided=True) for factor in sizes if factor != "v"}
    if not soft and not weight:
        item_bytes = max(4, operands[0].item_bytes)
        sums = 3 if node["label_smoothing"] else 2
        special["v"] = Special(
            results={0: I},
            inner=tuple(
                Inner("all_reduce", tuple(dim[0] for dim in tokens), item_bytes, count=count) for count in (1, sums)
            ),
        )
    return Rule(
        sizes=sizes,
        operands=(scores, scores if soft else tokens, *(((("v",),),) * len(weight))),
        results=(tokens if node.results[0].shape else (),),
        whole=frozenset() if "v" in special else frozenset({"v"}),
        special=special,
    )


@without_ones
def _nll(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``log_probs[t, v, d1..], target[t, d1..], weight[v] -> loss (, total weight [])``."""
    sizes, scores, tokens = _tokens(operands)
    inner = _count(node, operands)
    return Rule(
        sizes=sizes,
        operands=(scores, tokens, *(((("v",),),) * (len(operands) - 2))),
        results=(tokens if node.results[0].shape else (), *(((),) * (len(node.results) - 1))),
        whole=frozenset({"v"}),
        special={factor: Special(inner=inner, strided=True) for factor in sizes if factor != "v"} if inner else {},
    )


@without_ones
def _pointwise(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``input[..], target[..] -> loss``, broadcast; a mean divides by the (static) number of elements."""
    rank = max(len(operand.shape) for operand in operands)
    shape = [1] * rank
    for operand in operands:
        for d, size in enumerate(reversed(operand.shape), start=1):
            shape[-d] = max(shape[-d], size)
    sizes, dims = spanned("d", tuple(shape))
    return Rule(
        sizes=sizes,
        operands=tuple(aligned(operand.shape, dims, sizes) for operand in operands),
        results=(dims if node["reduction"] == 0 else (),),
    )


def _saved(node: Node) -> tuple[str, ...]:
    return tuple(f"in{i}" for i in range(len(node.inputs)))


_POINTWISE = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss", "poisson_nll_loss",
)  # fmt: skip

ROWS: dict[str, Row] = {
    "aten.cross_entropy_loss.default": Row(_cross_entropy, saves=("in0", "in1")),
    **{f"aten.{op}.default": Row(_nll, saves=("in1",)) for op in ("nll_loss", "nll_loss_nd", "nll_loss2d")},
    **{f"aten.{op}.default": Row(_nll, saves=("in1",)) for op in ("nll_loss_forward", "nll_loss2d_forward")},
    **{f"aten.{op}.default": Row(_pointwise, saves=_saved) for op in _POINTWISE},
}
