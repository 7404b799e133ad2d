"""The table: how each operator is stacked.

What it lacks is stacked by what the planner's op table says of batches, or runs once for each member.
"""

from __future__ import annotations

import torch

from autopar.arrays.rules.attention import attention
from autopar.arrays.rules.calls import StackingRule
from autopar.arrays.rules.folds import by_channel
from autopar.arrays.rules.lookups import embedding, index, index_add, index_select
from autopar.arrays.rules.losses import by_class
from autopar.arrays.rules.losses import pointwise as pointwise_loss
from autopar.arrays.rules.norms import per_channel, trailing
from autopar.arrays.rules.products import added_product, convolution, einsum, linear, matmul
from autopar.arrays.rules.shapes import (
    along,
    along_new,
    broadcast,
    drawn,
    expanded,
    in_front,
    new,
    over,
    padded,
    permuted,
    pointwise,
    repeated,
    reshaped,
    rolled,
    several_along,
    transposed,
)
from planner.ops import convolution as windows
from planner.ops import elementwise, loss

aten = torch.ops.aten


def operators(names: str) -> list[str]:
    """Names of operators as nodes have them; an overload that is not named is the default one."""
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split()]


def rules(names: str, rule: StackingRule) -> dict[str, StackingRule]:
    """One rule for several operators."""
    return dict.fromkeys(operators(names), rule)


NOT_BROADCAST = {*operators("prelu _prelu_kernel glu type_as to.other")}
"""Rows of the planner's elementwise family that do not broadcast their operands."""

STACKING: dict[str, StackingRule] = {
    **dict.fromkeys(elementwise.ROWS.keys() - NOT_BROADCAST, pointwise),
    **rules("rand_like randn_like bernoulli dropout native_dropout one_hot type_as", in_front),
    **rules("pixel_shuffle pixel_unshuffle tril triu adjoint mT", in_front),
    **rules("pad constant_pad_nd", padded),
    **rules("rand randn randint randint.low", drawn),
    **rules("new_zeros new_ones new_empty new_full", new),
    **rules("view reshape _unsafe_view flatten.using_ints unflatten.int squeeze squeeze.dim squeeze.dims", reshaped),
    **rules("unsqueeze view_as ravel", reshaped),
    **rules("expand", expanded),
    **rules("broadcast_tensors", broadcast),
    **rules("repeat", repeated),
    **rules("t numpy_T", transposed),
    **rules("permute", permuted),
    **rules("transpose.int swapdims", along("dim0", "dim1")),
    **rules("movedim.int moveaxis.int movedim.intlist", along("source", "destination")),
    **rules("flip", along("dims")),
    **rules("roll", rolled),
    **rules("select.int slice.Tensor narrow cat select_scatter slice_scatter", along("dim")),
    **rules("stack", along_new("dim")),
    **rules("unfold", along("dimension")),
    **rules("softmax.int _softmax log_softmax.int _log_softmax _safe_softmax cumsum cumprod glu", along("dim")),
    **rules("sort topk max.dim min.dim argsort gather scatter.src scatter.value scatter_add", along("dim")),
    **rules("unbind.int split.Tensor split_with_sizes split.sizes chunk tensor_split.sections", several_along("dim")),
    **rules("sum sum.dim_IntList", over("dim", aten.sum.dim_IntList)),
    **rules("mean mean.dim", over("dim", aten.mean.dim)),
    **rules("max amax", over("dim", aten.amax.default)),
    **rules("min amin", over("dim", aten.amin.default)),
    **rules("any any.dim any.dims", over("dim", aten.any.dims)),
    **rules("all all.dim all.dims", over("dim", aten.all.dims)),
    **rules("logsumexp", over("dim", aten.logsumexp.default)),
    **rules("var.correction", over("dim", aten.var.correction)),
    **rules("std.correction", over("dim", aten.std.correction)),
    **rules("var_mean.correction", over("dim", aten.var_mean.correction)),
    **rules("linalg_vector_norm", over("dim", aten.linalg_vector_norm.default)),
    **rules("linear", linear),
    **rules("matmul", matmul("self", "other")),
    **rules("mm bmm", matmul("self", "mat2")),
    **rules("mv", matmul("self", "vec")),
    **rules("dot", matmul("self", "tensor")),
    **rules("addmm", added_product("mat1", "mat2")),
    **rules("baddbmm", added_product("batch1", "batch2")),
    **rules("addmv", added_product("mat", "vec")),
    **rules("einsum", einsum),
    **rules(windows.CONVOLUTIONS, convolution),
    **{
        name: by_channel(spatial)
        for table in (windows.LINEAR_WINDOWS, windows.MAX_WINDOWS)
        for spatial, names in table.items()
        for name in operators(names)
    },
    **rules("layer_norm rms_norm", trailing),
    **rules("group_norm instance_norm batch_norm", per_channel),
    **rules("_native_batch_norm_legit_functional _native_batch_norm_legit_no_training", per_channel),
    **rules("_native_batch_norm_legit.no_stats", per_channel),
    **rules("scaled_dot_product_attention", attention),
    **rules("embedding", embedding),
    **rules("index.Tensor", index),
    **rules("index_select", index_select),
    **rules("index_add", index_add),
    **rules(loss.POINTWISE, pointwise_loss),
    **rules("cross_entropy_loss nll_loss nll_loss_nd", by_class),
}
