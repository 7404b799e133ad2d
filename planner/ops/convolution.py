"""Rows of convolutions, pooling and resampling: batch and channels shard, windows stay whole."""

from __future__ import annotations

import math

from planner.graph import Node, TensorType
from planner.ops.factors import spanned, without_ones
from planner.ops.table import Row
from planner.rules import Dims, Rule, Special


def _is_transposed(node: Node) -> bool:
    return bool(node["transposed"]) or node.op.startswith("aten.conv_transpose")


@without_ones
def _convolution(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``x[n, (g, i), in..], w[(g, o), i, window..], bias[(g, o)] -> y[n, (g, o), out..]``.

    A transposed convolution has ``w[(g, i), o, window..]``. ``n`` is absent without a batch. Sharding
    the groups changes the static group count of the local op.
    """
    x, w, *bias = operands
    window = len(w.shape) - 2
    groups = node["groups"]
    assert isinstance(groups, int)
    in_sizes, in_dims = spanned("in", x.shape[-window:])
    out_sizes, out_dims = spanned("out", node.results[0].shape[-window:])
    window_sizes, window_dims = spanned("window", w.shape[2:])
    wide, narrow = ("i", "o") if _is_transposed(node) else ("o", "i")
    batch: Dims = (("n",),) if len(x.shape) == window + 2 else ()
    sizes = {"g": groups, wide: w.shape[0] // groups, narrow: w.shape[1]}
    if batch:
        sizes["n"] = x.shape[0]
    addends = frozenset(range(2, len(operands)))
    return Rule(
        sizes=sizes | in_sizes | out_sizes | window_sizes,
        operands=(
            (*batch, ("g", "i"), *in_dims),
            (("g", wide), (narrow,), *window_dims),
            *(((("g", "o"),),) * len(bias)),
        ),
        results=((*batch, ("g", "o"), *out_dims),),
        whole=frozenset({*in_sizes, *out_sizes, *window_sizes} | ({"i", "o"} if groups > 1 else set())),
        addends=addends,
        linear=(frozenset({0}) | addends, frozenset({1}) | addends),
        special={"g": Special()},
    )


def _convolution_flops(node: Node, operands: tuple[TensorType, ...], rule: Rule) -> int:
    """A multiply and an add per window position and channel pair of a group, at every output (input if transposed)."""
    window = operands[1].shape[2:]
    swept = operands[0] if _is_transposed(node) else node.results[0]
    pixels = math.prod(swept.shape[-len(window) :])
    return 2 * math.prod(rule.sizes.get(f, 1) for f in ("n", "g", "i", "o")) * pixels * math.prod(window)


def _windows(spatial: int) -> Row:
    """``x[.., in..] -> y[.., out..]`` over the last ``spatial`` dims; leading dims shard."""

    @without_ones
    def rule(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        shape = operands[0].shape
        leading, lead = spanned("m", shape[:-spatial])
        in_sizes, in_dims = spanned("in", shape[-spatial:])
        out_sizes, out_dims = spanned("out", node.results[0].shape[-spatial:])
        return Rule(
            sizes=leading | in_sizes | out_sizes,
            operands=((*lead, *in_dims),),
            results=((*lead, *out_dims),) * len(node.results),
            whole=frozenset(in_sizes) | frozenset(out_sizes),
            linear=(frozenset({0}),) if _is_linear(node) else (),
        )

    return Row(rule, saves=_saved)


def _is_linear(node: Node) -> bool:
    return "max_pool" not in node.op


def _saved(node: Node) -> tuple[str, ...]:
    """Only a maximum looks back at its input."""
    return () if _is_linear(node) else ("in0", *(("out1",) if len(node.results) > 1 else ()))


@without_ones
def _grid_sampler(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``x[n, c, in..], grid[n, out.., xy] -> y[n, c, out..]``; linear in ``x``."""
    x, grid = operands
    in_sizes, in_dims = spanned("in", x.shape[2:])
    out_sizes, out_dims = spanned("out", grid.shape[1:-1])
    return Rule(
        sizes={"n": x.shape[0], "c": x.shape[1], "xy": grid.shape[-1]} | in_sizes | out_sizes,
        operands=((("n",), ("c",), *in_dims), (("n",), *out_dims, ("xy",))),
        results=((("n",), ("c",), *out_dims),),
        whole=frozenset(in_sizes) | {"xy"},
        linear=(frozenset({0}),),
    )


_CONVOLUTION = Row(_convolution, _convolution_flops, saves=("in0", "in1"))

_CONVOLUTIONS = (
    "aten.convolution.default", *(f"aten.conv{k}d.{form}" for k in (1, 2, 3) for form in ("default", "padding")),
    "aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input",
)  # fmt: skip

_WINDOWS = {
    1: ("max_pool1d.default", "avg_pool1d.default", "adaptive_avg_pool1d.default", "upsample_nearest1d.default",
        "upsample_nearest1d.vec", "upsample_linear1d.default", "upsample_linear1d.vec"),
    2: ("max_pool2d.default", "max_pool2d_with_indices.default", "avg_pool2d.default", "adaptive_avg_pool2d.default",
        "_adaptive_avg_pool2d.default", "adaptive_max_pool2d.default", "upsample_nearest2d.default",
        "upsample_nearest2d.vec", "upsample_bilinear2d.default", "upsample_bilinear2d.vec",
        "upsample_bicubic2d.default", "upsample_bicubic2d.vec", "_upsample_bilinear2d_aa.default",
        "_upsample_bilinear2d_aa.vec", "_upsample_bicubic2d_aa.default", "_upsample_bicubic2d_aa.vec"),
    3: ("max_pool3d.default", "max_pool3d_with_indices.default", "avg_pool3d.default", "adaptive_avg_pool3d.default",
        "upsample_nearest3d.default", "upsample_nearest3d.vec", "upsample_trilinear3d.default",
        "upsample_trilinear3d.vec"),
}  # fmt: skip

ROWS: dict[str, Row] = {
    **dict.fromkeys(_CONVOLUTIONS, _CONVOLUTION),
    **{f"aten.{op}": _windows(spatial) for spatial, ops in _WINDOWS.items() for op in ops},
    "aten.grid_sampler.default": Row(_grid_sampler, saves=("in0", "in1")),
    "aten.grid_sampler_2d.default": Row(_grid_sampler, saves=("in0", "in1")),
}
