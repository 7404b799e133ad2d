"""Every operator that real models export to has a row, or is known to have none."""

from __future__ import annotations

import pytest

from planner.ops import FAMILIES, OPS, function

# Recorded with torch 2.13 and transformers 5.23: torch.export (non-strict, training mode, SDPA and eager attention),
# and the same after ``run_decompositions({})``, of small configurations of GPT-2, GPT-J, GPT-NeoX, OPT, Bloom,
# Falcon, MPT, Phi, Phi-3, Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma, Gemma 2, Olmo 2, Cohere, StableLM,
# DeepSeek-V3, GPT-OSS, Mamba, Mamba-2, BERT, RoBERTa, DistilBERT, DeBERTa-v2, ALBERT, ELECTRA, ModernBERT, T5, BART,
# Whisper, wav2vec 2.0, CLIP, ViT, DINOv2, Swin, SegFormer, ConvNeXt, ResNet, RegNet, MobileNetV2, and of torch.nn
# modules. Operators in place are made functional by the capture.
EXPORTED = """
    __and__.Tensor _assert_tensor_metadata _native_batch_norm_legit_functional _to_copy _unsafe_view _weight_norm
    abs adaptive_avg_pool1d adaptive_avg_pool2d add.Tensor addmm alias arange arange.start argmax baddbmm batch_norm
    bernoulli.p bitwise_not bmm cat chunk clamp clone contiguous conv1d conv2d conv_transpose2d.input copy cos
    cross_entropy_loss cumsum diff div.Scalar div.Tensor dropout einsum embedding empty_like eq.Scalar eq.Tensor exp
    expand fill.Tensor flatten.using_ints floor floor_divide full full_like gather ge.Scalar gelu group_norm
    gt.Scalar gt.Tensor hardtanh histc index.Tensor index_put layer_norm le.Scalar le.Tensor lift_fresh_copy linear
    log lt.Scalar masked_fill.Scalar matmul max.dim max_pool2d mean.dim min.other mul.Tensor native_dropout
    ne.Scalar neg new_empty new_ones new_zeros numpy_T ones pad permute pixel_shuffle pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor rand reciprocal relu repeat repeat_interleave.self_int reshape roll rsqrt
    scaled_dot_product_attention scatter.value select.int select_scatter sigmoid silu sin slice.Tensor slice_scatter
    softmax.int softplus sort split.Tensor split_with_sizes sqrt squeeze.dim stack sub.Tensor sum.dim_IntList t tanh
    to.device to.dtype to.dtype_layout topk transpose.int tril type_as unbind.int unflatten.int unsqueeze
    transformers.grouped_mm_fallback.default upsample_nearest2d.vec view where.ScalarOther where.self zeros zeros_like
"""

# Without a row on purpose: these run in full on every rank, and are reported.
REPLICATED = {
    "aten._weight_norm.default": "of small weights only: the position embedding of wav2vec 2.0",
    "transformers.grouped_mm_fallback.default": "the products of a mixture of experts, grouped by data",
}

# Without results: the lowering leaves them out.
DROPPED = {"aten._assert_tensor_metadata.default"}


def full_name(name: str) -> str:
    """``aten`` and ``default`` go without saying."""
    return {0: f"aten.{name}.default", 1: f"aten.{name}", 2: name}[name.count(".")]


@pytest.mark.parametrize("op", [full_name(name) for name in EXPORTED.split()])
def test_exported_operators_have_a_row(op: str) -> None:
    assert (op in OPS) + (op in REPLICATED) + (op in DROPPED) == 1


def test_no_operator_has_two_rows() -> None:
    assert sum(len(family.ROWS) for family in FAMILIES) == len(OPS)


def test_in_place_operators_have_no_row() -> None:
    assert not [op for op in OPS if op.split(".")[1].endswith("_") and not op.split(".")[1].endswith("__")]


def test_all_functions_share_a_row_however_it_is_asked_for() -> None:
    name = f"{function.PREFIX}Norm"
    assert name in OPS and OPS[name] is OPS.get(name) is function.ROW
    assert "aten.of_nobody.default" not in OPS and OPS.get("aten.of_nobody.default") is None
    with pytest.raises(KeyError, match="of_nobody"):
        OPS["aten.of_nobody.default"]
