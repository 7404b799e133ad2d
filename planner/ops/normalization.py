"""Rows of normalisations. Statistics run over whole dims, except that batch norm can share its batch."""

from __future__ import annotations

from dataclasses import replace

from planner.ir.graph import Node, Ref, TensorType
from planner.ir.layout import I
from planner.ops.sharding_rule import FactorWay, Inner, Rule
from planner.ops.signature import letters, rows, signature, static_ints
from planner.ops.table import Row, RuleOf

Operands = tuple[TensorType, ...]


def trailing(node: Node, operands: Operands) -> Rule:
    """``x[lead.., norm..], weight[norm..], bias[norm..] -> y[lead.., norm..], statistics[lead.., 1..]``."""
    names = letters(len(operands[0].shape))
    lead = len(names) - len(static_ints(node["normalized_shape"]))
    return signature(
        node,
        operands,
        [names, *([names[lead:]] * (len(operands) - 1))],
        [names, *([names] * (len(node.results) - 1))],
        whole=names[lead:],
        broadcast=True,
    )


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
    """Statistics over the channels of a group."""
    return per_channel(node, operands, ("n",))


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


def norm(rule: RuleOf, *saves: str, normalizes: bool = False) -> Row:
    """Backward needs the input, and the statistics if they are results."""
    return Row(rule, saves=("in0", *saves), kernel="normalization", normalizes=normalizes)


def averaged(rule: RuleOf, *saves: str) -> Row:
    """A norm whose backward keeps centred and scaled inputs while it averages over ranks."""
    return replace(norm(rule, *saves), works=2)


ROWS: dict[str, Row] = {
    **rows("layer_norm", norm(trailing, "rows", "rows", normalizes=True)),
    **rows("rms_norm", norm(trailing, "rows", normalizes=True)),
    **rows("_fused_rms_norm", norm(trailing, "out1")),
    **rows("native_layer_norm", norm(trailing, "out1", "out2", normalizes=True)),
    **rows("group_norm", norm(group_norm)),
    **rows("instance_norm", norm(instance_norm)),
    **rows("batch_norm _native_batch_norm_legit_no_training", averaged(batch_norm)),
    **rows(
        "_native_batch_norm_legit _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional",
        averaged(batch_norm, "out1", "out2"),
    ),
}
