"""Operators along dims: sums, extrema, norms, softmax, scans, sorting.

Sums split: a reduced dim is a factor that the result lacks, so sharding it leaves a partial sum. A mean
does too, if each rank divides its sum by the *global* count: its local form is the local sum over the
count of the whole tensor. Everything else needs all elements of a reduced dim at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from planner.ir.graph import Node, TensorType
from planner.ops.sharding_rule import FactorWay, Inner, Rule
from planner.ops.signature import axes, axis, letters, rows, signature
from planner.ops.table import Between, Row, RuleOf, Share

Operands = tuple[TensorType, ...]
CLASSES = "classes"
"""The factor that a softmax runs over."""


def reduce(node: Node, operands: Operands, whole: bool, *linear: Collection[int]) -> Rule:
    """Reduced dims (all if there is no ``dim``) are factors that results lack; other dims pass."""
    names = letters(len(operands[0].shape))
    reduced = {names[i] for i in axes(node, len(names))} if names else set()
    outs = [names if node["keepdim"] else [name for name in names if name not in reduced]] * len(node.results)
    kept = reduced if whole else ()
    return signature(node, operands, [names], outs, whole=kept, broadcast=True, linear=linear)


def sums(node: Node, operands: Operands) -> Rule:
    """Sums and means: linear, and a sharded dim leaves a partial sum."""
    return reduce(node, operands, False, {0})


def counts(node: Node, operands: Operands) -> Rule:
    """Sums of something that is not linear: a sharded dim leaves a partial sum."""
    return reduce(node, operands, False)


def wholes(node: Node, operands: Operands) -> Rule:
    """Reductions that need every element of the reduced dims."""
    return reduce(node, operands, True)


def along(*linear: Collection[int]) -> RuleOf:
    """Results with the dims of the operand, of which ``dim`` is computed as a whole (and may change size)."""

    def rule(node: Node, operands: Operands) -> Rule:
        names = letters(len(operands[0].shape))
        whole = [names[i] for i in axes(node, len(names))] if names else ()
        return signature(node, operands, [names], [names] * len(node.results), whole=whole, linear=linear)

    return rule


def softmax(node: Node, operands: Operands) -> Rule:
    """Ranks that share the dim add up one sum for each of the others: forward the largest element, then the sum of
    exponentials; backward that of ``y * dy``, or, of logarithms, of ``dy``.
    """
    names = letters(len(operands[0].shape))
    if names:
        names[axis(node, len(names))] = CLASSES
    rule = signature(node, operands, [names], [names])
    kept = tuple(name for name in rule.sizes if name != CLASSES)
    sums = Inner("all_reduce", kept, max(4, operands[0].item_bytes, node.results[0].item_bytes))
    way = FactorWay(inner=(sums, sums, replace(sums, phase="backward")), strided=True)
    return replace(rule, ways={CLASSES: (way,)})


def in_passes(node: Node, types: Sequence[TensorType], sizes: Sequence[int], share: Share) -> Between:
    """What :mod:`autopar.runtime.layers.softmax` has, and passes over, beside what a kernel does, where ranks share the
    dim: forward seven passes in place of two, as it looks for the largest element, takes it off, and takes exponentials
    that it sums and divides by; backward six in place of three. Of narrow numbers wide copies are there.
    """
    if share.parts.get(CLASSES, 1) == 1:
        return Between(0, 0, 0, 0, 0)
    item = node.results[0].item_bytes
    wide = sizes[-1] // item * max(4, item)
    besides = wide * (item < 4)
    return Between(0, besides, 2 * besides, 5 * wide, 3 * wide)


def diff(node: Node, operands: Operands) -> Rule:
    """Differences along a dim of what is put before, the tensor, and what is put behind: all whole there."""
    names = letters(len(operands[0].shape))
    whole = [names[axis(node, len(names))]]
    together = [range(len(operands))]
    return signature(node, operands, [names] * len(operands), [names], whole=whole, linear=together)


def histogram(node: Node, operands: Operands) -> Rule:
    """Counts, which sum up over shards, of values between given bounds; bounds may not come from the data."""
    names = letters(len(operands[0].shape))
    whole = ["bins", *(names if node["min"] == node["max"] else ())]
    return signature(node, operands, [names], [["bins"]], whole=whole)


COUNTS = "nansum count_nonzero count_nonzero.dim_IntList"
PREDICATES = "any any.dim any.dims all all.dim all.dims argmax argmin"

# Reductions of whole dims, by what their backward needs.
NEEDS_INPUT = "var var.dim var.correction var_mean var_mean.dim var_mean.correction nanmean"
NEEDS_BOTH = """
    amax amin max min median prod prod.dim_int std std.dim std.correction std_mean std_mean.dim std_mean.correction
    norm.Scalar norm.ScalarOpt_dim
    norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype linalg_vector_norm frobenius_norm.dim
"""
NEEDS_INDICES = "max.dim min.dim median.dim kthvalue mode"

SOFTMAX = "softmax.int _softmax log_softmax.int _log_softmax"
WHOLE_SOFTMAX = "_safe_softmax special_softmax special_log_softmax"

ROWS: dict[str, Row] = {
    **rows("sum sum.dim_IntList mean", Row(sums, kernel="reduction")),
    **rows("mean.dim", Row(sums, kernel="reduction", normalizes=True)),
    **rows(COUNTS, Row(counts)),
    **rows("histc", Row(histogram)),
    **rows(PREDICATES, Row(wholes, kernel="reduction")),
    **rows(NEEDS_INPUT, Row(wholes, saves=("in0",), kernel="reduction")),
    **rows(NEEDS_BOTH, Row(wholes, saves=("in0", "out0"), kernel="reduction")),
    **rows("logsumexp special_logsumexp", Row(wholes, saves=("in0", "out0"), kernel="softmax")),
    **rows(NEEDS_INDICES, Row(wholes, saves=("out1",), kernel="reduction")),
    **rows("aminmax", Row(wholes, saves=("in0", "out0", "out1"), kernel="reduction")),
    **rows(SOFTMAX, Row(softmax, saves=("out0",), kernel="softmax", between=in_passes)),
    **rows(WHOLE_SOFTMAX, Row(along(), saves=("out0",), kernel="softmax")),
    **rows("cumsum", Row(along({0}), kernel="reduction")),
    **rows("cumprod logcumsumexp", Row(along(), saves=("in0", "out0"))),
    **rows("cummax cummin sort sort.stable topk", Row(along(), saves=("out1",))),
    **rows("argsort argsort.stable", Row(along())),
    **rows("diff", Row(diff)),
}
