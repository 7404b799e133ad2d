"""Rows of products, attention, norms, losses, embedding, convolutions and random operators.

Every mechanical strategy is run by hand; those that need a layer are run in ``test_layers.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.emit.local_ops import SAMPLES
from autopar.runtime.layers import CONTRACTED, LOCAL_FORMS
from planner.ir.graph import Node, TensorType
from planner.ir.layout import P, R, Shard
from planner.ops import OPS
from planner.ops.sharding_rule import AxisStrategy, Rule, axis_strategies, find, replicated, shard_factor
from planner.ops.table import WHOLE, Share
from tests.autopar.sharding_oracle import (
    Call,
    check_row,
    check_rule,
    check_saves,
    check_strategy,
    strip_counts,
    tensor_type,
)

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def facts(op: Any, *args: Any, **kwargs: Any) -> tuple[Node, tuple[TensorType, ...], Rule]:
    """What the planner sees of one application."""
    call = Call.bind(op, args, kwargs)
    node = call.node(call.run())
    types = tuple(map(tensor_type, call.operands))
    return node, types, OPS[node.op].rule(node, types)


def flops(op: Any, *args: Any, **kwargs: Any) -> int:
    node, types, rule = facts(op, *args, **kwargs)
    return OPS[node.op].flops(node, types, rule)


def needs_layer(op: Any, rule: Rule, strategy: AxisStrategy) -> bool:
    """Whether the runtime replaces the operator under this strategy by one that computes something else."""
    form = LOCAL_FORMS.get(str(op))
    if form is None or not strategy.factor:
        return False
    factors = {factor for keyword, group in form.groups.items() if keyword != SAMPLES for factor in group}
    lacking = find(rule.results[0], strategy.factor, rule.sizes) is None
    return strategy.sharded in factors or (lacking and CONTRACTED in factors)


def check_mechanical(op: Any, *args: Any, **kwargs: Any) -> set[str]:
    """As :func:`check_row`, without the strategies that need a layer; the factors that were checked."""
    call = Call.bind(op, args, kwargs)
    results = call.run()
    node, _, rule = facts(op, *args, **kwargs)
    check_rule(rule, call.operands, results)
    check_saves(OPS[node.op].saved(node, tuple(map(tensor_type, call.operands))), call.operands, results)
    checked = set()
    for size in (2, 4):
        for strategy in axis_strategies(rule, size, strip_counts(rule)):
            if not needs_layer(op, rule, strategy):
                check_strategy(call, strategy, size)
                checked.add(strategy.factor)
    return checked - {""}


@pytest.mark.parametrize("op, args", [
    (aten.linear.default, (randn(2, 4, 8), randn(12, 8), randn(12))),
    (aten.linear.default, (randn(4, 8), randn(12, 8))),
    (aten.linear.default, (randn(8), randn(12, 8))),
    (aten.linear.default, (randn(4, 8), randn(8))),
    (aten.linear.default, (randn(1, 4, 8), randn(1, 8), randn(1))),
    (aten.mm.default, (randn(4, 8), randn(8, 12))),
    (aten.bmm.default, (randn(2, 4, 8), randn(2, 8, 12))),
    (aten.mv.default, (randn(4, 8), randn(8))),
    (aten.dot.default, (randn(8), randn(8))),
    (aten.outer.default, (randn(8), randn(4))),
    (aten.matmul.default, (randn(2, 1, 4, 8), randn(6, 8, 4))),
    (aten.matmul.default, (randn(4, 8), randn(2, 8, 4))),
    (aten.matmul.default, (randn(2, 4, 8), randn(8))),
    (aten.matmul.default, (randn(8), randn(2, 8, 4))),
    (aten.matmul.default, (randn(8), randn(8))),
    (aten.addmm.default, (randn(12), randn(4, 8), randn(8, 12))),
    (aten.addmm.default, (randn(4, 1), randn(4, 8), randn(8, 12))),
    (aten.addmm.default, (randn(4, 12), randn(4, 8), randn(8, 12))),
    (aten.addmv.default, (randn(4), randn(4, 8), randn(8))),
    (aten.baddbmm.default, (randn(2, 4, 12), randn(2, 4, 8), randn(2, 8, 12))),
    (aten.baddbmm.default, (randn(1, 1, 12), randn(2, 4, 8), randn(2, 8, 12))),
    (aten.einsum.default, ("bik,bkj->bij", [randn(2, 4, 8), randn(2, 8, 4)])),
    (aten.einsum.default, ("i,ij,j->", [randn(4), randn(4, 8), randn(8)])),
    (aten.einsum.default, ("ij -> j", [randn(4, 8)])),
    (aten.einsum.default, ("bi,bi->b", [randn(1, 8), randn(4, 8)])),
    (aten.einsum.default, ("...i,ij->...j", [randn(4, 8), randn(8, 4)])),
    (aten.einsum.default, ("ii->i", [randn(4, 4)])),
])  # fmt: skip
def test_products(op: Any, args: Any) -> None:
    check_mechanical(op, *args)


def test_scaled_addmm() -> None:
    check_row(aten.addmm.default, (randn(12), randn(4, 8), randn(8, 12)), {"beta": 0.5, "alpha": 3.0})


def test_a_contracted_factor_makes_the_bias_a_term() -> None:
    _, _, rule = facts(aten.linear.default, randn(4, 8), randn(12, 8), randn(12))
    row_parallel = shard_factor(rule, "k")
    assert row_parallel.operands == (Shard(1), Shard(1), P) and row_parallel.results == (P,)
    column_parallel = shard_factor(rule, "n")
    assert column_parallel.operands == (R, Shard(0), Shard(0)) and column_parallel.results == (Shard(1),)


def test_product_flops() -> None:
    assert flops(aten.linear.default, randn(2, 4, 8), randn(12, 8), randn(12)) == 2 * 2 * 4 * 8 * 12
    assert flops(aten.matmul.default, randn(2, 4, 8), randn(8, 3)) == 2 * 2 * 4 * 8 * 3
    # i,ij: 2 * 4 * 8 multiply-adds; the result j meets the next j: 2 * 8.
    assert flops(aten.einsum.default, "i,ij,j->", [randn(4), randn(4, 8), randn(8)]) == 2 * 4 * 8 + 2 * 8
    assert flops(aten.einsum.default, "...i,ij->...j", [randn(4, 8), randn(8, 4)]) == 2 * (32 + 32 + 16)


SDPA = aten.scaled_dot_product_attention.default
EXPERTS = torch.ops.autopar.experts.default


@pytest.mark.parametrize("mask", [None, (4, 8), (4, 1, 8), (2, 4, 4, 8), (2, 1, 1, 8), (1, 1, 4, 8)])
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_attention(mask: tuple[int, ...] | None, kind: str) -> None:
    attn_mask = None if mask is None else randn(*mask) if kind == "float" else torch.rand(*mask) < 0.8
    if attn_mask is not None and kind == "bool":
        attn_mask[..., 0] = True
    args = (randn(2, 4, 4, 6), randn(2, 4, 8, 6), randn(2, 4, 8, 10), attn_mask)
    assert check_mechanical(SDPA, *args) >= {"d0", "kv"}


@pytest.mark.parametrize("heads, kv", [(8, 2), (8, 8), (4, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_query_attention(heads: int, kv: int, masked: bool) -> None:
    mask = randn(2, heads, 4, 8) if masked else None
    args = (randn(2, heads, 4, 6), randn(2, kv, 8, 6), randn(2, kv, 8, 6), mask)
    checked = check_mechanical(SDPA, *args, enable_gqa=True)
    assert checked == {"d0"} | ({"kv"} if kv > 1 else set()) | ({"group"} if heads > kv else set())


@pytest.mark.parametrize("lead", [(), (4,), (2, 2, 4)])
def test_attention_with_other_batches(lead: tuple[int, ...]) -> None:
    check_mechanical(SDPA, randn(*lead, 4, 6), randn(*lead, 8, 6), randn(*lead, 8, 6))


def test_causal_attention_apart_from_query() -> None:
    args = (randn(2, 4, 8, 6), randn(2, 4, 8, 6), randn(2, 4, 8, 6), None, 0.0, True)
    assert check_mechanical(SDPA, *args) == {"d0", "kv"}


def test_attention_flops() -> None:
    shapes = (randn(2, 4, 8, 6), randn(2, 2, 16, 6), randn(2, 2, 16, 10))
    assert flops(SDPA, *shapes, enable_gqa=True) == 2 * (2 * 4 * 8 * 16) * (6 + 10)
    assert flops(SDPA, *shapes, None, 0.0, True, enable_gqa=True) == (2 * 4 * 8 * 16) * (6 + 10)


@pytest.mark.parametrize("op, args", [
    (aten.layer_norm.default, (randn(4, 8, 6), [6], randn(6), randn(6))),
    (aten.layer_norm.default, (randn(4, 8, 6), [8, 6])),
    (aten.native_layer_norm.default, (randn(4, 8, 6), [6], randn(6), randn(6), 1e-5)),
    (aten.rms_norm.default, (randn(4, 8, 6), [6], randn(6))),
    (aten._fused_rms_norm.default, (randn(4, 8, 6), [6], randn(6), 1e-6)),
    (aten.group_norm.default, (randn(4, 8, 6), 2, randn(8), randn(8))),
    (aten.instance_norm.default, (randn(4, 8, 6), randn(8), randn(8), None, None, True, 0.1, 1e-5, False)),
])  # fmt: skip
def test_norms(op: Any, args: Any) -> None:
    assert check_mechanical(op, *args)


def test_what_norms_keep_and_pass_over_where_ranks_share_their_dims() -> None:
    """Of four rows one float32 a statistic; of 384 bytes a rank 7 passes forward and 19 backward beside a kernel's."""
    x, affine = torch.randn(4, 8, 6), torch.randn(8, 6)
    node, types, rule = facts(aten.layer_norm.default, x, [8, 6], affine, affine)
    between = OPS[node.op].between
    assert between is not None
    assert between(node, types, [768, 192, 192, 768], WHOLE) == (16, 0, 0, 0, 0)
    for name in ("h", "h1"):
        shared = between(node, types, [384, 96, 96, 384], Share({name: 2}))
        assert shared == (16, 0, 2 * 384, 7 * 384, 19 * 384)
    node, types, _ = facts(aten.rms_norm.default, x, [8, 6], affine)
    between = OPS[node.op].between
    assert between is not None
    assert between(node, types, [384, 96, 384], Share({"h": 2})) == (16, 0, 2 * 384, 3 * 384, 13 * 384)
    *_, rule = facts(aten.layer_norm.default, randn(3, 2, 2, 2, 2, 2), [2] * 5)
    assert rule.whole == {"h4"} and rule.ways.keys() == {"h", "h1", "h2", "h3"}


@pytest.mark.parametrize("op", [aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit_no_training])
def test_batch_norm_in_eval(op: Any) -> None:
    mode = (False,) if op is aten._native_batch_norm_legit_functional else ()
    variance = torch.rand(8, dtype=torch.float64) + 0.5
    args = (randn(4, 8, 6), randn(8), randn(8), randn(8), variance, *mode, 0.1, 1e-5)
    with torch.no_grad():
        assert check_mechanical(op.default, *args) == ({"c"} if mode else {"n", "c"})


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("op, args", [
    (aten.mse_loss.default, (randn(4, 8), randn(4, 8))),
    (aten.l1_loss.default, (randn(4, 8), randn(4, 8))),
    (aten.smooth_l1_loss.default, (randn(4, 8), randn(4, 8))),
    (aten.huber_loss.default, (randn(4, 8), randn(4, 8))),
    (aten.kl_div.default, (randn(4, 8), randn(4, 8).softmax(1))),
    (aten.soft_margin_loss.default, (randn(4, 8), torch.ones(4, 8, dtype=torch.int64))),
])  # fmt: skip
def test_losses(op: Any, args: Any, reduction: int) -> None:
    checked = check_mechanical(op, *args, reduction)
    assert bool(checked) == (reduction == 0)


def test_cross_entropy_with_class_weights_keeps_the_vocabulary_whole() -> None:
    target = torch.randint(0, 8, (4,))
    _, _, rule = facts(aten.cross_entropy_loss.default, randn(4, 8), target, torch.rand(8, dtype=torch.float64))
    assert rule.whole == {"v"}
    _, _, rule = facts(aten.cross_entropy_loss.default, randn(4, 8), target)
    assert not rule.whole


@pytest.mark.parametrize("op", [aten.nll_loss.default, aten.nll_loss_forward.default, aten.cross_entropy_loss.default])
def test_replicated_class_losses(op: Any) -> None:
    call = Call.bind(op, (randn(4, 8), torch.randint(0, 8, (4,)), None, 1, -100), {})
    _, _, rule = facts(op, *call.args.values())
    check_rule(rule, call.operands, call.run())
    for strategy in replicated(rule):
        check_strategy(call, strategy, 2)


@pytest.mark.parametrize("ids", [(), (8,), (4, 8)])
def test_embedding(ids: tuple[int, ...]) -> None:
    checked = check_mechanical(aten.embedding.default, randn(12, 6), torch.randint(0, 12, ids), 3)
    assert checked == {"h", *(f"d{i}" for i in range(len(ids)))}


def test_embedding_that_counts_ids_stays_whole() -> None:
    assert not check_mechanical(aten.embedding.default, randn(12, 8), torch.randint(0, 12, (4,)), -1, True)


@pytest.mark.parametrize("op, args, factors", [
    (aten.conv1d.default, (randn(4, 8, 9), randn(12, 8, 3), randn(12), [2], [1]), {"n", "i", "o"}),
    (aten.conv2d.default, (randn(4, 8, 5, 5), randn(12, 8, 3, 3), None, [2, 2]), {"n", "i", "o"}),
    (aten.conv2d.padding, (randn(4, 8, 5, 5), randn(12, 8, 3, 3), randn(12), [1, 1], "same"), {"n", "i", "o"}),
    (aten.conv2d.default, (randn(8, 5, 5), randn(12, 8, 3, 3), randn(12)), {"i", "o"}),
    (aten.conv2d.default, (randn(4, 8, 5, 5), randn(8, 1, 3, 3), randn(8), [1, 1], [0, 0], [1, 1], 8), {"n"}),
    (aten.conv3d.default, (randn(2, 4, 3, 4, 5), randn(4, 4, 2, 2, 2), randn(4)), {"n", "i", "o"}),
    (aten.convolution.default,
     (randn(4, 8, 5), randn(12, 8, 3), randn(12), [1], [1], [1], False, [0], 1), {"n", "i", "o"}),
    (aten.convolution.default,
     (randn(4, 8, 5), randn(8, 12, 3), randn(12), [2], [1], [1], True, [0], 1), {"n", "i", "o"}),
    (aten.conv_transpose2d.input, (randn(4, 8, 5, 5), randn(8, 12, 3, 3), randn(12), [2, 2]), {"n", "i", "o"}),
])  # fmt: skip
def test_convolutions(op: Any, args: Any, factors: set[str]) -> None:
    assert check_mechanical(op, *args) == factors


def test_convolution_flops() -> None:
    x, w = randn(2, 8, 10, 10), randn(12, 4, 3, 3)
    counted = flops(aten.conv2d.default, x, w, None, [2, 2], [1, 1], [1, 1], 2)
    assert counted == 2 * (2 * 12 * 5 * 5) * 4 * 9
    counted = flops(aten.conv_transpose2d.input, x, randn(8, 12, 3, 3), None, [2, 2])
    assert counted == 2 * (2 * 8 * 10 * 10) * 12 * 9


@pytest.mark.parametrize("op, args", [
    (aten.max_pool1d.default, ([3],)),
    (aten.avg_pool1d.default, ([3], [2])),
    (aten.adaptive_avg_pool1d.default, ([2],)),
    (aten.upsample_nearest1d.vec, ([10], None)),
    (aten.max_pool2d.default, ([2, 2], [1, 1])),
    (aten.max_pool2d_with_indices.default, ([2, 2],)),
    (aten.avg_pool2d.default, ([2, 2],)),
    (aten.adaptive_avg_pool2d.default, ([2, 1],)),
    (aten.adaptive_max_pool2d.default, ([2, 1],)),
    (aten.upsample_nearest2d.vec, (None, [2.0, 2.0])),
    (aten.upsample_bilinear2d.vec, ([8, 9], False, None)),
    (aten._upsample_bilinear2d_aa.vec, ([3, 3], False, None)),
    (aten.max_pool3d.default, ([2, 2, 2],)),
    (aten.avg_pool3d.default, ([2, 2, 2],)),
])  # fmt: skip
def test_windows(op: Any, args: Any) -> None:
    spatial = int(next(c for c in str(op) if c.isdigit()))
    check_row(op, (randn(4, 8, *(5, 4, 4)[:spatial]), *args))


def test_grid_sampler() -> None:
    grid = 2 * torch.rand(4, 6, 4, 2, dtype=torch.float64) - 1
    check_row(aten.grid_sampler.default, (randn(4, 8, 5, 5), grid, 0, 0, False))


@pytest.mark.parametrize("op, args", [
    (aten.dropout.default, (randn(4, 8), 0.5, False)),
    (aten.alpha_dropout.default, (randn(4, 8), 0.5, False)),
    (aten.feature_dropout.default, (randn(4, 8, 6), 0.5, False)),
    (aten.native_dropout.default, (randn(4, 8), 0.5, False)),
    (aten.bernoulli.default, ((torch.rand(4, 8) < 0.5).double(),)),
    (aten.bernoulli.p, (torch.zeros(4, 8, dtype=torch.int64), 1.0)),
    (aten.normal.Tensor_float, (randn(4, 8), 0.0)),
    (aten.randint_like.default, (torch.zeros(4, 8, dtype=torch.int64), 1)),
    (aten.multinomial.default, (torch.eye(8, dtype=torch.float64), 1)),
    (aten.randint.default, (1, [4, 8])),
])  # fmt: skip
def test_random_operators_where_nothing_is_left_to_chance(op: Any, args: Any) -> None:
    assert OPS[str(op)].random
    check_row(op, args)


@pytest.mark.parametrize("gate", ["halves", "pairs", "none"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_experts(gate: str, transposed: bool, bias: bool) -> None:
    made = 8 if gate == "none" else 16
    up, down = ((4, 6, made), (4, 8, 6)) if transposed else ((4, made, 6), (4, 6, 8))
    biases = (randn(4, made), randn(4, 6)) if bias else (None, None)
    indices = torch.stack([torch.randperm(4)[:2] for _ in range(8)])
    args = (
        randn(8, 6),
        indices,
        randn(8, 2),
        randn(*up),
        randn(*down),
        *biases,
        "silu",
        gate,
        1.0,
        0.0,
        0.0,
        transposed,
    )
    assert check_mechanical(EXPERTS, *args) == {"t", "f"}


def test_experts_flops_and_terms() -> None:
    args = (randn(8, 6), torch.zeros(8, 2).long(), randn(8, 2), randn(4, 16, 6), randn(4, 6, 8), None, randn(4, 6))
    assert flops(EXPERTS, *args) == 2 * (8 * 2) * (16 * 6 + 6 * 8), "of the experts that tokens go to alone"
    _, _, rule = facts(EXPERTS, *args)
    hidden = shard_factor(rule, "f")
    assert hidden.operands == (R, R, R, Shard(1, 2), Shard(2), P) and hidden.results == (P,)
    whole = shard_factor(rule, "e")
    assert whole.operands == (R, R, R, Shard(0), Shard(0), Shard(0)) and whole.results == (P,)


@pytest.mark.parametrize("form", [
    ("silu", "halves"), ("silu", "pairs"), ("gelu", "none"), ("relu", "none"),
    ("silu", "halves", 1.0, 7.0), ("swish", "pairs", 1.7, 7.0, 1.0, True),
])  # fmt: skip
def test_what_experts_keep(form: tuple[Any, ...]) -> None:
    """To the last byte, beside their matrices."""
    made = 8 if form[1] == "none" else 16
    up, down = ((4, 6, made), (4, 8, 6)) if form[-1] is True else ((4, made, 6), (4, 6, 8))
    indices = torch.stack([torch.randperm(4)[:2] for _ in range(8)])
    tensors = (randn(8, 6), indices, randn(8, 2), randn(*up), randn(*down), randn(4, made), randn(4, 6))
    node, types, _ = facts(EXPERTS, *tensors, *form)
    given = [t.requires_grad_(t.is_floating_point()) for t in tensors]
    own, kept = {t.untyped_storage()._cdata for t in given}, {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = EXPERTS(*given, *form)
    sizes, between = [tensor.size_bytes for tensor in types], OPS[node.op].between
    assert between is not None
    whole = between(node, types, sizes, WHOLE)
    assert whole.kept == sum(kept[memory] for memory in kept.keys() - own)
    assert between(node, types, sizes, Share({"t": 2, "e": 2})).kept * 4 == whole.kept
    assert result.requires_grad


class Passing(TorchDispatchMode):
    """Counts the bytes of numbers that kernels other than products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        aliases = [each.alias_info for each in func._schema.returns if each.alias_info is not None]
        is_view = any(not alias.is_write for alias in aliases)
        if "mm" not in str(func) and "empty" not in str(func) and not is_view:
            tensors = pytree.tree_leaves((args, kwargs, None if aliases else found))
            self.bytes += sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.is_floating_point())
        return found


@pytest.mark.parametrize("form", [
    ("silu", "halves"), ("silu", "pairs"), ("gelu", "none"), ("silu", "halves", 1.0, 7.0),
    ("swish", "pairs", 1.7, 7.0, 1.0, True),
])  # fmt: skip
def test_what_experts_pass_over_beside_products(form: tuple[Any, ...]) -> None:
    """Of two choices a token, which is what a token's own reads and writes are counted at."""
    tokens, h, f = 512, 48, 64
    made = f if form[1] == "none" else 2 * f
    up, down = ((4, h, made), (4, f, h)) if form[-1] is True else ((4, made, h), (4, h, f))
    indices = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)])
    tensors = (randn(tokens, h), indices, randn(tokens, 2), randn(*up), randn(*down))
    node, types, _ = facts(EXPERTS, *tensors, None, None, *form)
    given = [t.requires_grad_(t.is_floating_point()) for t in tensors]
    with Passing() as forward:
        result = EXPERTS(*given, None, None, *form)
    gradient = torch.randn_like(result)
    with Passing() as backward:
        result.backward(gradient)
    between = OPS[node.op].between
    assert between is not None
    found = between(node, types, [tensor.size_bytes for tensor in types], WHOLE)
    assert found.passed_forward == pytest.approx(forward.bytes, rel=0.01)
    assert found.passed_backward == pytest.approx(backward.bytes, rel=0.01)
