"""Rows of convolutions, pooling and resampling: batch and channels shard, windows stay whole."""

from __future__ import annotations

import math
from dataclasses import replace

from planner.ir.graph import Node, TensorType
from planner.ops.sharding_rule import FactorWay, Rule
from planner.ops.signature import letters, rows, signature, static_int
from planner.ops.table import Row

Operands = tuple[TensorType, ...]


def convolution(node: Node, operands: Operands) -> Rule:
    """``x[n, (g, i), in..], w[(g, o), i, window..], bias[(g, o)] -> y[n, (g, o), out..]``.

    A transposed convolution has ``w[(g, i), o, window..]``. ``n`` is absent without a batch. Sharding
    the groups changes the static group count of the local operator.
    """
    x, w, *bias = operands
    spatial = len(w.shape) - 2
    ins, outs, window = (numbered(prefix, spatial) for prefix in ("in", "out", "window"))
    batch = ["n"][: len(x.shape) - spatial - 1]
    channels = ["g i", "o"] if is_transposed(node) else ["g o", "i"]
    groups = static_int(node["groups"])
    addends = range(2, len(operands))
    rule = signature(
        node,
        operands,
        [[*batch, "g i", *ins], [*channels, *window], *([["g o"]] * len(bias))],
        [[*batch, "g o", *outs]],
        sizes={"g": groups},
        whole=[*ins, *outs, *window, *(("i", "o") if groups > 1 else ())],
        addends=addends,
        linear=[{0, *addends}, {1, *addends}],
    )
    return replace(rule, ways={"g": (FactorWay(),)} if groups > 1 else {})


def convolution_flops(node: Node, operands: Operands, rule: Rule) -> int:
    """A multiply and an add per window position and channel pair of a group, at every output.

    A transposed convolution visits every input instead.
    """
    window = operands[1].shape[2:]
    swept = operands[0] if is_transposed(node) else node.results[0]
    pixels = math.prod(swept.shape[-len(window) :])
    return 2 * math.prod(rule.sizes.get(f, 1) for f in ("n", "g", "i", "o")) * pixels * math.prod(window)


def is_transposed(node: Node) -> bool:
    """Whether the weight's first dim belongs to the input channels."""
    return bool(node["transposed"]) or node.op.startswith("aten.conv_transpose")


def numbered(prefix: str, count: int) -> list[str]:
    """``in0``, ``in1``, ..."""
    return [f"{prefix}{i}" for i in range(count)]


def windows(spatial: int, *linear: set[int]) -> Row:
    """``x[.., in..] -> y[.., out..]`` over the last ``spatial`` dims; a maximum looks back at its input."""
    ins, outs = numbered("in", spatial), numbered("out", spatial)

    def rule(node: Node, operands: Operands) -> Rule:
        lead = letters(len(operands[0].shape) - spatial)
        results = [[*lead, *outs]] * len(node.results)
        return signature(node, operands, [[*lead, *ins]], results, whole=[*ins, *outs], linear=linear)

    def looks_back(node: Node, operands: Operands) -> tuple[str, ...]:
        return ("in0", "out1") if len(node.results) > 1 else ("in0", "out0")

    return Row(rule, saves=() if linear else looks_back)


def grid_sampler(node: Node, operands: Operands) -> Rule:
    """``x[n, c, in..], grid[n, out.., xy] -> y[n, c, out..]``; linear in ``x``."""
    spatial = len(operands[0].shape) - 2
    ins, outs = numbered("in", spatial), numbered("out", spatial)
    labels = [["n", "c", *ins], ["n", *outs, "xy"]]
    return signature(node, operands, labels, [["n", "c", *outs]], whole=[*ins, "xy"], linear=[{0}])


CONVOLUTIONS = """
    convolution conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input
"""
LINEAR_WINDOWS = {
    1: """avg_pool1d adaptive_avg_pool1d upsample_nearest1d upsample_nearest1d.vec upsample_linear1d
        upsample_linear1d.vec""",
    2: """avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d upsample_nearest2d upsample_nearest2d.vec
        upsample_bilinear2d upsample_bilinear2d.vec upsample_bicubic2d upsample_bicubic2d.vec
        _upsample_bilinear2d_aa _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec""",
    3: """avg_pool3d adaptive_avg_pool3d upsample_nearest3d upsample_nearest3d.vec upsample_trilinear3d
        upsample_trilinear3d.vec""",
}
MAX_WINDOWS = {
    1: "max_pool1d",
    2: "max_pool2d max_pool2d_with_indices adaptive_max_pool2d",
    3: "max_pool3d max_pool3d_with_indices",
}

ROWS: dict[str, Row] = {
    **rows(CONVOLUTIONS, Row(convolution, convolution_flops, saves=("in0", "in1"), mutual=True, kernel="other")),
    **{op: row for n, names in LINEAR_WINDOWS.items() for op, row in rows(names, windows(n, {0})).items()},
    **{op: row for n, names in MAX_WINDOWS.items() for op, row in rows(names, windows(n)).items()},
    **rows("grid_sampler grid_sampler_2d", Row(grid_sampler, saves=("in0", "in1"))),
}
