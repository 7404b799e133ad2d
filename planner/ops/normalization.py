"""Rows of normalisations. What statistics run over may be shared by ranks, which then add up their sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from planner.ir.graph import Node, Ref, TensorType
from planner.ir.layout import I
from planner.ops.sharding_rule import FactorWay, Inner, Rule
from planner.ops.signature import letters, rows, signature, static_ints
from planner.ops.table import Between, Row, RuleOf, Share

Operands = tuple[TensorType, ...]
HIDDEN = ("h", "h1", "h2", "h3")
"""Those of the factors that a norm of trailing dims runs over which ranks may share; further ones are whole."""


def trailing(node: Node, operands: Operands, centers: bool) -> Rule:
    """``x[lead.., h..], weight[h..], bias[h..] -> y[lead.., h..], statistics[lead.., 1..]``.

    Ranks that share the dims it runs over add up two sums for each of the others: forward the mean, then the variance
    around the common mean, which does not cancel; backward, together, the sums of ``dy`` and ``dy * x_hat``. What does
    not center has no means, and half of these.
    """
    hidden = [f"h{i or ''}" for i in range(len(static_ints(node["normalized_shape"])))]
    lead = letters(len(operands[0].shape) - len(hidden))
    names = [*lead, *hidden]
    rule = signature(
        node,
        operands,
        [names, *([hidden] * (len(operands) - 1))],
        [names, *([names] * (len(node.results) - 1))],
        whole={*hidden} - {*HIDDEN},
        broadcast=True,
    )
    kept = tuple(name for name in lead if name in rule.sizes)
    average = Inner("all_reduce", kept, max(4, operands[0].item_bytes))
    sums = (average, average) if centers else (average,)
    way = FactorWay(
        results=dict.fromkeys(range(1, len(node.results)), I),
        inner=(*sums, replace(average, count=len(sums), phase="backward")),
        strided=True,
    )
    return replace(rule, ways={name: (way,) for name in HIDDEN if name in rule.sizes})


def layer_norm(node: Node, operands: Operands) -> Rule:
    """By the mean and the variance of trailing dims."""
    return trailing(node, operands, centers=True)


def rms_norm(node: Node, operands: Operands) -> Rule:
    """By the mean square of trailing dims."""
    return trailing(node, operands, centers=False)


def whole_norm(node: Node, operands: Operands) -> Rule:
    """As :func:`rms_norm`, of what lets gradients through its statistics: over whole dims."""
    rule = rms_norm(node, operands)
    return replace(rule, whole=rule.whole | rule.ways.keys(), ways={})


def in_passes(node: Node, types: Sequence[TensorType], sizes: Sequence[int], share: Share, centers: bool) -> Between:
    """What a norm of trailing dims keeps of one statistic, and what :mod:`autopar.runtime.layers.hidden_norm` has
    beside what a kernel has, where ranks share these dims.

    Forward, statistics are a pass over the operand, and centering, scaling, weight and bias two each; a kernel has two
    in all. Backward, ``x_hat`` is made again (two, four if it is centered) and ``dy * weight`` (two, as a copy without
    one); two products are summed, for the weight and along ``h`` (four each), and ``dy`` for the bias (one); the
    gradient is made of these in place (three and two), and if it centers, of the sum of ``dy`` (one and two). A kernel
    has four.
    """
    hidden, item, affine = static_ints(node["normalized_shape"]), types[0].item_bytes, len(types) - 1
    parts = math.prod(share.parts.get(name, 1) for name in HIDDEN)
    wide, is_narrow = sizes[0] // item * max(4, item), item < 4
    kept = wide // (math.prod(hidden) // parts)
    if parts == 1:
        return Between(kept, 0, 0, 0, 0)
    forward = 1 + 2 * (1 + centers + affine) - 2
    x_hat, product, weight, bias, made = 2 + 2 * centers, 2, 4 * (affine > 0), affine > 1, 4 + 3 + 2 + 3 * centers
    backward = x_hat + product + weight + bias + made - 4
    return Between(kept, 2 * is_narrow * wide, (2 + 2 * is_narrow) * wide, forward * wide, backward * wide)


def per_channel(node: Node, operands: Operands, shards: tuple[str, ...]) -> Rule:
    """``x[n, c, spatial..]`` and per-channel operands ``-> y[n, c, spatial..]`` and per-channel statistics."""
    names = ["n", "c", *(f"s{i}" for i in range(len(operands[0].shape) - 2))]
    statistics = [["c"] if result.shape == operands[0].shape[1:2] else ["empty"] for result in node.results[1:]]
    return signature(
        node,
        operands,
        [names, *([["c"]] * (len(operands) - 1))],
        [names, *statistics],
        whole={*names, "empty"} - set(shards),
    )


def group_norm(node: Node, operands: Operands) -> Rule:
    """``x[n, g c, h..], weight[g c], bias[g c] -> y[n, g c, h..]``: statistics over the channels ``c`` of each group
    ``g``, and over ``h..``; ranks that share these add up as those of :func:`trailing` do.
    """
    x, groups = operands[0], node["num_groups"]
    assert isinstance(groups, int)
    hidden = [f"h{i or ''}" for i in range(len(x.shape) - 2)]
    names, whole = ["n", "g c", *hidden], {*hidden} - {*HIDDEN}
    given = [names, *([["g c"]] * (len(operands) - 1))]
    rule = signature(node, operands, given, [names], whole=whole, sizes={"g": groups})
    kept = tuple(name for name in ("n", "g") if name in rule.sizes)
    average = Inner("all_reduce", kept, max(4, x.item_bytes))
    way = FactorWay(inner=(average, average, replace(average, count=2, phase="backward")), strided=True)
    return replace(rule, ways={name: (way,) for name in ("c", *HIDDEN) if name in rule.sizes})


def instance_norm(node: Node, operands: Operands) -> Rule:
    """Statistics over the spatial dims; running ones average over the batch too."""
    averages = node["use_input_stats"] and node["running_mean"] is not None
    return per_channel(node, operands, ("c",) if averages else ("n", "c"))


def batch_norm(node: Node, operands: Operands) -> Rule:
    """Statistics over batch and spatial dims, which ranks that share a batch share.

    Forward they average the means, then the variances around the common mean; backward the sums of ``dy``
    and ``dy * x_hat`` (Ioffe and Szegedy 2015, section 3). The running statistics stay invariant. In
    evaluation they are operands like the others, and ranks need not agree on anything.
    """
    rule = per_channel(node, operands, ("n", "c"))
    if "n" not in rule.sizes:
        return rule
    if not node["training"]:
        copies_statistics = any(result.shape == operands[0].shape[1:2] for result in node.results[1:])
        return replace(rule, whole=rule.whole | {"n"}) if copies_statistics else rule
    present = [name for name, value in node.args if isinstance(value, Ref)]
    channels = ("c",) if "c" in rule.sizes else ()
    average = Inner("all_reduce", channels, max(4, operands[0].item_bytes))
    way = FactorWay(
        operands={i: I for i, name in enumerate(present) if name.startswith("running")},
        results=dict.fromkeys(range(1, len(node.results)), I),
        inner=(average, average, replace(average, count=2, phase="backward")),
        strided=True,
        by_micro_batch=True,
    )
    return replace(rule, ways={"n": (way,)})


def norm(rule: RuleOf, *saves: str) -> Row:
    """Backward needs the input, and the statistics if they are results."""
    return Row(rule, saves=("in0", *saves), kernel="normalization")


def of_tokens(rule: RuleOf, *saves: str, centers: bool) -> Row:
    """A norm of every token over its hidden dim."""
    return replace(norm(rule, *saves), normalizes=True, between=partial(in_passes, centers=centers))


def averaged(rule: RuleOf, *saves: str) -> Row:
    """A norm whose backward keeps centred and scaled inputs while it averages over ranks."""
    return replace(norm(rule, *saves), works=2)


ROWS: dict[str, Row] = {
    **rows("layer_norm", of_tokens(layer_norm, "rows", "rows", centers=True)),
    **rows("rms_norm", of_tokens(rms_norm, "rows", centers=False)),
    **rows("_fused_rms_norm", norm(whole_norm, "out1")),
    **rows("native_layer_norm", of_tokens(layer_norm, "out1", "out2", centers=True)),
    **rows("group_norm", norm(group_norm)),
    **rows("instance_norm", norm(instance_norm)),
    **rows("batch_norm _native_batch_norm_legit_no_training", averaged(batch_norm)),
    **rows(
        "_native_batch_norm_legit _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional",
        averaged(batch_norm, "out1", "out2"),
    ),
}
