"""Local forms of operators whose sharding needs more than running the operator on local shapes.

A layer is a plain function on local tensors with the operator's own arguments; the mesh axes that shard a
factor come as tuples of process groups, major first. With no groups it is the operator. Its results have
the local types that the operator's row gives them. :data:`LOCAL_FORMS` says which operator needs which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.runtime.layers.attention import attention
from autopar.runtime.layers.classes import gather, one_hot, scatter
from autopar.runtime.layers.convolution import grouped_convolution
from autopar.runtime.layers.embedding import vocab_embedding
from autopar.runtime.layers.embedding_bag import sharded_embedding_bag
from autopar.runtime.layers.embedding_slabs import row_sharded_slabs
from autopar.runtime.layers.experts import begin_experts, experts
from autopar.runtime.layers.hidden_norm import group_norm, layer_norm, native_layer_norm, rms_norm
from autopar.runtime.layers.loss import cross_entropy_loss, nll_loss, partial_mean
from autopar.runtime.layers.normalization import (
    batch_norm,
    native_batch_norm,
    native_batch_norm_functional,
    native_batch_norm_no_stats,
)
from autopar.runtime.layers.random import draw, draw_attention
from autopar.runtime.layers.segment import run_segment
from autopar.runtime.layers.softmax import softmax
from autopar.runtime.layers.streamed_linear import added_matmul, linear
from autopar.runtime.spmd.rank_index import Groups
from planner.ops.attention import OURS, QUERY_WAYS, RINGS, ZIGZAGS
from planner.ops.contraction import PANELS, RING, SUMS
from planner.ops.normalization import HIDDEN
from planner.ops.reduction import CLASSES

CONTRACTED = "contracted"


@dataclass(frozen=True)
class LocalForm:
    """The layer that replaces an operator where one of some factors is sharded.

    Attributes:
        function: takes the operator's arguments as the operator does, and keywords.
        groups: for each keyword that takes process groups, the factors that may be sharded over them, in which way
            (``AxisStrategy.sharded``), or (:data:`CONTRACTED`,) for every factor that the first result lacks.
        strips: for each of these keywords, the one that takes the local strips each group cuts, if the layer
            needs to know.
        takes_op: the function's first argument is the operator.
        is_region: its first argument is the run state, and it is one region of it (:func:`RandomState.region`) that
            draws nothing: what it keeps for backward is made anew where it runs again. It always replaces the operator.
        begins: sends what the function then waits for, before others are computed
            (:mod:`planner.formulation.overlap`): takes the run state, of which it is a region too, the operands that it
            needs, the local length of the fourth, and the groups other than ``sample_groups``. What it returns is the
            function's keyword ``sent``.
        takes_path: a keyword ``path`` takes the path of the module, for errors. It always replaces the operator.
        always: it replaces the operator where no factor is sharded, too.
    """

    function: Callable[..., Any]
    groups: Mapping[str, tuple[str, ...]]
    strips: Mapping[str, str] = field(default_factory=dict)
    takes_op: bool = False
    is_region: bool = False
    begins: Callable[..., Any] | None = None
    takes_path: bool = False
    always: bool = False


_TOKENS = ("t", "d1", "d2", "d3")
_CLASSES = {"class_groups": ("classes",)}
_BATCH = {"batch_groups": ("n",)}
_PANELS = {"token_groups": (RING,), "feature_groups": (PANELS,), "sum_groups": (SUMS,)}
_HIDDEN = {"hidden_groups": HIDDEN}
_ATTENTION = LocalForm(
    attention,
    {"query_groups": tuple(QUERY_WAYS), "ring_groups": RINGS, "zigzag_groups": ZIGZAGS},
    strips={"query_groups": "query_strips"},
)
_GROUPED = LocalForm(grouped_convolution, {"channel_groups": ("g",)}, takes_op=True)
_MEAN = LocalForm(partial_mean, {"contracted_groups": (CONTRACTED,)}, takes_op=True)
_NLL = LocalForm(nll_loss, {"token_groups": _TOKENS}, takes_op=True)

LOCAL_FORMS: dict[str, LocalForm] = {
    "aten.embedding.default": LocalForm(vocab_embedding, {"vocab_groups": ("v",)}, takes_path=True),
    "autopar.embedding_bag.default": LocalForm(
        sharded_embedding_bag, {"vocab_groups": ("v",), "id_groups": ("n",)}, takes_path=True
    ),
    "autopar.embedding_slabs.default": LocalForm(row_sharded_slabs, {"row_groups": ("r",)}),
    "aten.cross_entropy_loss.default": LocalForm(
        cross_entropy_loss, {"token_groups": _TOKENS, "vocab_groups": ("v",)}, is_region=True
    ),
    "aten.one_hot.default": LocalForm(one_hot, _CLASSES),
    "aten.gather.default": LocalForm(gather, _CLASSES, takes_op=True),
    "aten.scatter.src": LocalForm(scatter, _CLASSES, takes_op=True),
    "aten.scatter.value": LocalForm(scatter, _CLASSES, takes_op=True),
    "aten.scaled_dot_product_attention.default": _ATTENTION,
    OURS: replace(_ATTENTION, always=True),
    "autopar.experts.default": LocalForm(
        experts,
        {
            "sample_groups": ("t", "t.dispatch"),
            "holding_groups": ("e", "t.dispatch"),
            "dispatch_groups": ("t.dispatch",),
        },
        is_region=True,
        begins=begin_experts,
    ),
    "aten.linear.default": LocalForm(linear, _PANELS),
    "aten.addmm.default": LocalForm(added_matmul, _PANELS),
    **{
        f"aten.{op}": LocalForm(softmax, {"shared_groups": (CLASSES,)}, takes_op=True)
        for op in ("softmax.int", "log_softmax.int", "_softmax.default", "_log_softmax.default")
    },
    "aten.layer_norm.default": LocalForm(layer_norm, _HIDDEN),
    "aten.native_layer_norm.default": LocalForm(native_layer_norm, _HIDDEN),
    "aten.rms_norm.default": LocalForm(rms_norm, _HIDDEN),
    "aten.group_norm.default": LocalForm(group_norm, {"channel_groups": ("g",), "hidden_groups": ("c", *HIDDEN)}),
    "aten.batch_norm.default": LocalForm(batch_norm, _BATCH),
    "aten._native_batch_norm_legit.default": LocalForm(native_batch_norm, _BATCH),
    "aten._native_batch_norm_legit.no_stats": LocalForm(native_batch_norm_no_stats, _BATCH),
    "aten._native_batch_norm_legit_functional.default": LocalForm(native_batch_norm_functional, _BATCH),
    **{
        f"aten.{op}.default": _NLL
        for op in ("nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward")
    },
    **{
        f"aten.{op}": _GROUPED
        for op in (
            "convolution.default", "conv1d.default", "conv1d.padding", "conv2d.default", "conv2d.padding",
            "conv3d.default", "conv3d.padding", "conv_transpose1d.default", "conv_transpose2d.input",
            "conv_transpose3d.input",
        )
    },
    **{
        f"aten.{op}": _MEAN
        for op in (
            "mean.default", "mean.dim", "mse_loss.default", "l1_loss.default", "smooth_l1_loss.default",
            "huber_loss.default", "binary_cross_entropy.default", "binary_cross_entropy_with_logits.default",
            "kl_div.default", "soft_margin_loss.default", "hinge_embedding_loss.default",
            "margin_ranking_loss.default", "poisson_nll_loss.default",
        )
    },
}  # fmt: skip

REGIONS = (
    draw,
    draw_attention,
    run_segment,
    *(function for form in LOCAL_FORMS.values() if form.is_region for function in (form.function, form.begins)),
)
"""The functions that enter a region of the run's random numbers, each once."""

__all__ = [
    "CONTRACTED",
    "LOCAL_FORMS",
    "REGIONS",
    "Groups",
    "LocalForm",
    "added_matmul",
    "attention",
    "batch_norm",
    "cross_entropy_loss",
    "experts",
    "group_norm",
    "grouped_convolution",
    "layer_norm",
    "linear",
    "native_batch_norm",
    "native_batch_norm_functional",
    "native_batch_norm_no_stats",
    "native_layer_norm",
    "nll_loss",
    "partial_mean",
    "rms_norm",
    "row_sharded_slabs",
    "sharded_embedding_bag",
    "softmax",
    "vocab_embedding",
]
