"""Rows of normalisations. Statistics run over whole dims, except that batch norm can share its batch."""

from __future__ import annotations

from planner.graph import Node, TensorType
from planner.layout import I, R
from planner.ops.factors import positions, without_ones
from planner.ops.table import Row
from planner.rules import Dims, Inner, Rule, Special


@without_ones
def _trailing(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``x[lead.., norm..], weight[norm..], bias[norm..] -> y[lead.., norm..], statistics[lead.., 1..]``."""
    x, *affine = operands
    normalized = node["normalized_shape"]
    assert isinstance(normalized, tuple)
    leading = len(x.shape) - len(normalized)
    factors = [f"m{i}" if i < leading else f"k{i - leading}" for i in range(len(x.shape))]
    dims: Dims = tuple((factor,) for factor in factors)
    lead, norm = dims[:leading], dims[leading:]
    statistics: Dims = (*lead, *((),) * len(norm))
    return Rule(
        sizes=dict(zip(factors, x.shape, strict=True)),
        operands=(dims, *((norm,) * len(affine))),
        results=(dims, *((statistics,) * (len(node.results) - 1))),
        whole=frozenset(factors[leading:]),
    )


def _channels(node: Node, operands: tuple[TensorType, ...]) -> tuple[dict[str, int], Dims]:
    """Factor sizes and dims of ``x[n, c, spatial..]``."""
    factors = ("n", "c", *(f"s{i}" for i in range(len(operands[0].shape) - 2)))
    return dict(zip(factors, operands[0].shape, strict=True)), tuple((factor,) for factor in factors)


@without_ones
def _group_norm(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``x[n, c, spatial..], weight[c], bias[c] -> y[n, c, spatial..]``; only ``n`` may be sharded."""
    sizes, x = _channels(node, operands)
    return Rule(
        sizes=sizes,
        operands=(x, *(((("c",),),) * (len(operands) - 1))),
        results=(x,),
        whole=frozenset(sizes) - {"n"},
    )


@without_ones
def _instance_norm(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``x[n, c, spatial..]`` and per-channel operands; running statistics average over ``n``."""
    sizes, x = _channels(node, operands)
    whole = frozenset(sizes) - {"n", "c"}
    if node["use_input_stats"] and node["running_mean"] is not None:
        whole |= {"n"}
    return Rule(sizes=sizes, operands=(x, *(((("c",),),) * (len(operands) - 1))), results=(x,), whole=whole)


@without_ones
def _batch_norm(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``x[n, c, spatial..]`` and per-channel operands ``-> y[n, c, spatial..], per-channel statistics``.

    In training, ranks that share a batch share its statistics: forward the means, then the variances
    around the common mean; backward the sums of ``dy`` and ``dy * x_hat`` (Ioffe and Szegedy 2015,
    section 3). Every rank holds as many samples. The running statistics stay invariant.
    """
    sizes, x = _channels(node, operands)
    per_channel: Dims = (("c",),)
    statistics: tuple[Dims, ...] = tuple(
        per_channel if result.shape == (sizes["c"],) else (("empty",),) for result in node.results[1:]
    )
    if (("empty",),) in statistics:
        sizes["empty"] = 0
    outputs = range(1, len(node.results))
    if node["training"]:
        item_bytes = max(4, operands[0].item_bytes)
        at = positions(node)
        special = Special(
            operands={at[name]: I for name in ("running_mean", "running_var") if name in at},
            results=dict.fromkeys(outputs, I),
            inner=(
                Inner("all_reduce", ("c",), item_bytes),
                Inner("all_reduce", ("c",), item_bytes),
                Inner("all_reduce", ("c",), item_bytes, count=2, phase="backward"),
            ),
        )
    else:
        special = Special(results=dict.fromkeys(outputs, R))
    return Rule(
        sizes=sizes,
        operands=(x, *((per_channel,) * (len(operands) - 1))),
        results=(x, *statistics),
        whole=frozenset(sizes) - {"n", "c"},
        special={"n": special},
    )


ROWS: dict[str, Row] = {
    "aten.layer_norm.default": Row(_trailing, saves=("in0",)),
    "aten.native_layer_norm.default": Row(_trailing, saves=("in0", "out1", "out2")),
    "aten.rms_norm.default": Row(_trailing, saves=("in0",)),
    "aten._fused_rms_norm.default": Row(_trailing, saves=("in0", "out1")),
    "aten.group_norm.default": Row(_group_norm, saves=("in0",)),
    "aten.instance_norm.default": Row(_instance_norm, saves=("in0",)),
    "aten.batch_norm.default": Row(_batch_norm, saves=("in0",)),
    "aten._native_batch_norm_legit.default": Row(_batch_norm, saves=("in0", "out1", "out2")),
    "aten._native_batch_norm_legit_no_training.default": Row(_batch_norm, saves=("in0",)),
    "aten._native_batch_norm_legit_functional.default": Row(_batch_norm, saves=("in0", "out1", "out2")),
}
