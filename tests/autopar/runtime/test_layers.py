"""Layers against the unsharded operator: every rank simulated in one process, types checked, collectives counted.

What is cut how, and which layer runs, comes from the operator's row and from ``LOCAL_FORMS``; so a case is
an operator, its arguments, and which factor each mesh axis shards.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.operators.attention import attention as windowed
from autopar.runtime.layers import (
    CONTRACTED,
    LOCAL_FORMS,
    attention,
    cross_entropy_loss,
    partial_attention,
)
from autopar.runtime.layers.random import draw
from autopar.runtime.spmd.random_state import RandomState
from autopar.runtime.spmd.run_state import RunState
from autopar.verification.collective_counter import is_one_message
from planner.ir.layout import I, LocalType, P, R, Shard
from planner.ops import OPS
from planner.ops.sharding_rule import AxisStrategy, Inner, Rule, find, shard_factor
from tests.autopar.sharding_oracle import Call, cut, gradient_types, join, tensor_type, tensors, vjp

aten = torch.ops.aten
BUFFERS = ("running_mean", "running_var")
STATE = RunState(RandomState(0))
CONSTANTS = {*BUFFERS, "pos_weight", "class weight"}


@contextlib.contextmanager
def simulated(*sizes: int) -> Iterator[tuple[LocalTensorMode, DeviceMesh]]:
    """A mesh whose ranks all run in this process."""
    world = math.prod(sizes)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with LocalTensorMode(world) as mode:
            yield mode, init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"axis{i}" for i in range(len(sizes))))
    finally:
        dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Records the kind and the input bytes of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional") and kind not in ("wait_tensor", "_wrap_tensor_autograd"):
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            kind = "send" if is_one_message(given) else kind
            self.seen.append((kind, args[0].numel() * args[0].element_size()))
        return func(*args, **(kwargs or {}))


def check_layer(
    op: Any,
    args: Sequence[Any],
    sizes: Sequence[int],
    factors: Sequence[str],
    outers: Sequence[int] = (),
    **kwargs: Any,
) -> None:
    """Assert that the layer of ``op``, with ``factors`` sharded on the axes of a mesh, computes what ``op`` computes.

    Checks results, gradients and updated buffers to 1e-12, the local types, and that the collectives are
    exactly those that the row declares.
    """
    call = Call.bind(op, args, kwargs)
    names = [name for name, value in call.args.items() for _ in tensors(value)]
    if "ignore_index" in call.args:
        names = [name.replace("weight", "class weight") for name in names]
    node = call.node(call.on([x.clone() for x in call.operands]).run())
    rule = OPS[node.op].rule(node, tuple(map(tensor_type, call.operands)))
    ways = [f.partition(".")[::2] for f in factors]
    strategies = [
        shard_factor(rule, factor, outer, next(way for way in rule.ways_of(factor) if way.name == name))
        for (factor, name), outer in itertools.zip_longest(ways, outers, fillvalue=1)
    ]

    wanted = [x.is_floating_point() and name not in CONSTANTS for name, x in zip(names, call.operands, strict=True)]
    wholes = [x.clone().requires_grad_(w) for x, w in zip(call.operands, wanted, strict=True)]
    results = call.on(wholes).run()
    cotangents = [torch.randn_like(y) if y.is_floating_point() else y for y in results]
    gradients = vjp(results, cotangents, wholes)

    with simulated(*sizes) as (mode, mesh):
        groups = [mesh.get_group(i) for i in range(len(sizes))]

        def local(whole: Tensor, types: Sequence[LocalType]) -> Tensor:
            parts = [whole.detach()]
            for local_type, size in zip(types, sizes, strict=True):
                parts = [piece for part in parts for piece in cut(part, local_type, size)]
            return mode.rank_map(lambda rank: parts[rank].clone(memory_format=torch.contiguous_format))

        def restored(part: Tensor, types: Sequence[LocalType]) -> Tensor:
            parts = [part._local_tensors[rank] for rank in range(mesh.size())]
            for local_type, size in reversed(list(zip(types, sizes, strict=True))):
                parts = [join(parts[i : i + size], local_type) for i in range(0, len(parts), size)]
            return parts[0]

        operand_types = list(zip(*(s.operands for s in strategies), strict=True))
        result_types = list(zip(*(s.results for s in strategies), strict=True))
        operands = [local(x, types) for x, types in zip(call.operands, operand_types, strict=True)]
        for operand, w in zip(operands, wanted, strict=True):
            operand.requires_grad_(w)
        with Collectives() as forward, typecheck():
            for operand, types in zip(operands, operand_types, strict=True):
                spmd.assert_type(operand, {group: checked(t) for group, t in zip(groups, types, strict=True)})
            local_results = run_form(call.on(operands), rule, strategies, groups)
            for y, types in zip(local_results, result_types, strict=True):
                actual = spmd.get_local_type(y)
                expected = {spmd.normalize_axis(g): checked(t) for g, t in zip(groups, types, strict=True)}
                assert actual == expected, f"layer returns {actual}, the row says {expected}"
        with Collectives() as backward:
            local_cotangents = [
                local(g, gradient_types(types)) for g, types in zip(cotangents, result_types, strict=True)
            ]
            local_gradients = vjp(local_results, local_cotangents, operands)

        for y, part, types in zip(results, local_results, result_types, strict=True):
            assert_equal(restored(part.detach(), types), y.detach(), "result")
        for name, w, g, part, types in zip(names, wanted, gradients, local_gradients, operand_types, strict=True):
            if w:
                assert_equal(restored(part, gradient_types(types)), g, f"gradient of {name}")
        for name, x, part, types in zip(names, wholes, operands, operand_types, strict=True):
            if name in BUFFERS:
                assert_equal(restored(part, types), x, name)

    for phase, observed in (("forward", forward.seen), ("backward", backward.seen)):
        assert sorted(observed) == declared(rule, strategies, sizes, phase), f"{phase} collectives"


def run_form(call: Call, rule: Rule, strategies: Sequence[AxisStrategy], groups: Sequence[Any]) -> list[Tensor]:
    """Run the local form of a call as the emitter would."""
    form = LOCAL_FORMS[str(call.op)]
    keywords: dict[str, Any] = {}
    for keyword, factors in form.groups.items():
        axes = [
            i
            for i, s in enumerate(strategies)
            if s.sharded in factors
            or (factors == (CONTRACTED,) and find(rule.results[0], s.factor, rule.sizes) is None)
        ]
        keywords[keyword] = tuple(groups[i] for i in axes)
        if keyword in form.strips and axes:
            keywords[form.strips[keyword]] = tuple(strategies[i].outer for i in axes)
    schema = call.op._schema.arguments
    positional = [call.args[a.name] for a in schema if not a.kwarg_only]
    keywords |= {a.name: call.args[a.name] for a in schema if a.kwarg_only}
    first = (call.op,) if form.takes_op else (STATE,) if form.is_region else ()
    return list(tensors(form.function(*first, *positional, **keywords)))


def checked(local_type: LocalType) -> Any:
    """The type checker's name of a local type."""
    return spmd.V if isinstance(local_type, Shard) else {R: spmd.R, I: spmd.I, P: spmd.P}[local_type]


def declared(rule: Rule, strategies: Sequence[AxisStrategy], sizes: Sequence[int], phase: str) -> list[tuple[str, int]]:
    """The collectives of the strategies: kind and input bytes."""
    local, ways = dict(rule.sizes), dict.fromkeys((s.sharded for s in strategies), 1)
    for strategy, size in zip(strategies, sizes, strict=True):
        local[strategy.factor] //= size
        ways[strategy.sharded] *= size
    return sorted(
        (inner.kind, inner.count * inner.item_bytes * math.prod(local[f] for f in inner.factors) * share // divided)
        for strategy, size in zip(strategies, sizes, strict=True)
        for inner in strategy.inner
        for divided in [inner.parts * math.prod(ways[way] for way in inner.shared)]
        for share in shares_sent(rule, inner, size)
        if inner.phase == phase
    )


def shares_sent(rule: Rule, inner: Inner, ranks: int) -> list[float]:
    """Of what a collective moves at most, what each call does."""
    if not inner.around:
        return [1]
    if inner.reach is None:
        return [1] * (ranks - 1)
    keys = rule.sizes[inner.factors[-1]] // ranks
    back = [min(keys, inner.reach - step * keys) / keys for step in range(ranks - 1)]
    return [share for share in back if share > 0]


def assert_equal(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


MESHES = [((2,), "a"), ((4,), "a"), ((2, 2), "aa")]


def meshes(a: str, b: str) -> list[Any]:
    """Two and four ranks with ``a`` or ``b`` sharded, and 2x2 with each pair."""
    single = [((n,), (f,)) for n in (2, 4) for f in (a, b)]
    return [*single, *(((2, 2), pair) for pair in itertools.product((a, b), repeat=2))]


@pytest.mark.parametrize("sizes, factors", [((2,), "v"), ((4,), "v"), ((2, 2), "vv")])
@pytest.mark.parametrize("padding_idx", [-1, 5])
def test_vocab_embedding(sizes: Any, factors: str, padding_idx: int) -> None:
    ids = torch.randint(0, 12, (3, 7))
    ids[0, :2] = 5
    check_layer(aten.embedding.default, (randn(12, 6), ids, padding_idx), sizes, factors)


@pytest.mark.parametrize("factor", ["d0", "d1", "h"])
def test_vocab_embedding_with_another_factor(factor: str) -> None:
    args = (randn(12, 6), torch.randint(0, 12, (4, 8)), 3)
    check_layer(aten.embedding.default, args, (2, 2), ("v", factor))
    check_layer(aten.embedding.default, args, (2, 2), (factor, "v"))


def labels(*shape: int, classes: int, rank_without: bool = True) -> Tensor:
    """Class indices, unevenly ignored; the first quarter of tokens entirely."""
    target = torch.randint(0, classes, shape)
    target[torch.rand(shape) < 0.3] = -100
    if rank_without:
        target[: shape[0] // 4] = -100
    return target


@pytest.mark.parametrize("sizes, factors", meshes("t", "v"))
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(sizes: Any, factors: Any, reduction: int, smoothing: float) -> None:
    args = (3 * randn(16, 12), labels(16, classes=12), None, reduction, -100, smoothing)
    check_layer(aten.cross_entropy_loss.default, args, sizes, factors)


@pytest.mark.parametrize("sizes, factors", [*meshes("d1", "v"), ((2, 2), ("t", "d1")), ((2, 2), ("d2", "t"))])
@pytest.mark.parametrize("reduction", [0, 1])
def test_cross_entropy_with_classes_in_the_middle(sizes: Any, factors: Any, reduction: int) -> None:
    args = (randn(4, 8, 4, 2), labels(4, 4, 2, classes=8), None, reduction)
    check_layer(aten.cross_entropy_loss.default, args, sizes, factors)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_with_class_weights(reduction: int, smoothing: float) -> None:
    weight = torch.rand(6, dtype=torch.float64) + 0.1
    args = (randn(16, 6), labels(16, classes=6), weight, reduction, 2, smoothing)
    args[1][args[1] < 0] = 2
    check_layer(aten.cross_entropy_loss.default, args, (4,), "t")


def test_cross_entropy_of_one_token() -> None:
    check_layer(aten.cross_entropy_loss.default, (randn(8), torch.tensor(5)), (4,), "v")


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cross_entropy_with_probabilities(reduction: int) -> None:
    args = (randn(8, 6), randn(8, 6).softmax(1), None, reduction, -100, 0.1)
    check_layer(aten.cross_entropy_loss.default, args, (2, 2), "tt")


def test_cross_entropy_in_strips() -> None:
    args = (randn(16, 6), labels(16, classes=6))
    check_layer(aten.cross_entropy_loss.default, args, (2, 2), "tt", outers=(1, 2))


def test_vocab_cross_entropy_survives_large_logits() -> None:
    args = (1e4 * randn(8, 6), labels(8, classes=6))
    check_layer(aten.cross_entropy_loss.default, args, (2,), "v")


@pytest.mark.parametrize("op", [aten.nll_loss.default, aten.nll_loss_forward.default])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(op: Any, reduction: int, weighted: bool) -> None:
    weight = torch.rand(6, dtype=torch.float64) + 0.1 if weighted else None
    check_layer(op, (randn(16, 6), labels(16, classes=6), weight, reduction, -100), (2, 2), "tt")


@pytest.mark.parametrize("op", [aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.kl_div])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_pointwise_loss(op: Any, reduction: int) -> None:
    args = (randn(4, 8), torch.rand(4, 8, dtype=torch.float64), reduction)
    check_layer(op.default, args, (4,), ("d1",))
    check_layer(op.default, args, (2, 2), ("d0", "d1"))


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_binary_cross_entropy(reduction: int) -> None:
    args = (randn(4, 8), torch.rand(4, 8, dtype=torch.float64), None, randn(8).exp(), reduction)
    check_layer(aten.binary_cross_entropy_with_logits.default, args, (2, 2), ("d0", "d1"))


@pytest.mark.parametrize("sizes, factors, outers", [
    ((2,), ("query",), (1,)), ((8,), ("query",), (1,)), ((2, 2), ("query", "query"), (1, 1)),
    ((2,), ("query",), (4,)), ((2, 2), ("query", "kv"), (2, 1)), ((2, 2), ("d0", "query"), (1, 1)),
    ((2, 2), ("group", "query"), (1, 1)), ((2, 4), ("group", "kv"), (1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("causal", [True, False])
def test_attention(sizes: Any, factors: Any, outers: Any, causal: bool) -> None:
    args = (randn(2, 8, 8, 6), randn(2, 4, 8, 6), randn(2, 4, 8, 10), None, 0.0, causal)
    op = aten.scaled_dot_product_attention.default
    check_layer(op, args, sizes, factors, outers, scale=0.3, enable_gqa=True)


RINGS = [
    ((2,), ("query.ring",)), ((8,), ("query.ring",)), ((2, 4), ("query", "query.ring")),
    ((2, 2), ("query.ring", "query")), ((4, 2), ("query.ring", "kv")), ((2, 2), ("d0", "query.ring")),
]  # fmt: skip


@pytest.mark.parametrize("sizes, factors", RINGS)
@pytest.mark.parametrize("hides", ["nothing", "later", "padding", "far", "all", "bias", "bias of queries"])
def test_ring_attention(sizes: Any, factors: Any, hides: str) -> None:
    """Grouped queries, heads of values of another size, and every kind of mask; one that hides all leaves zeros, and
    biases are trained.
    """
    places, keys = torch.arange(16), 8 if hides == "padding" else 16
    masks = {
        "padding": torch.arange(8) < torch.tensor([5, 2]).view(2, 1, 1, 1),
        "far": ((places.unsqueeze(1) - places) % 16 < 3).expand(1, 1, 16, 16),
        "all": (torch.rand(2, 4, 16, 16) < 0.2) & (places < 14).unsqueeze(1),
        "bias": randn(4, 16, 16).masked_fill(places > 13, torch.finfo(torch.float64).min),
        "bias of queries": randn(2, 1, 16, 1),
    }
    args = (randn(2, 4, 16, 6), randn(2, 2, keys, 6), randn(2, 2, keys, 10), masks.get(hides), 0.0, hides == "later")
    op = aten.scaled_dot_product_attention.default
    check_layer(op, args, sizes, factors, scale=0.3, enable_gqa=True)


@pytest.mark.parametrize("sizes, factors", [
    ((2,), ("query.zigzag",)), ((4,), ("query.zigzag",)), ((2, 2), ("query.zigzag", "group")),
    ((2,), ("query.zigzag_ring",)), ((3,), ("query.zigzag_ring",)), ((4,), ("query.zigzag_ring",)),
    ((8,), ("query.zigzag_ring",)), ((2, 2), ("kv", "query.zigzag_ring")), ((2, 2), ("query.zigzag_ring", "d0")),
])  # fmt: skip
def test_attention_in_zigzag_order(sizes: Any, factors: Any) -> None:
    args = (randn(2, 4, 48, 6), randn(2, 2, 48, 6), randn(2, 2, 48, 10), None, 0.0, True)
    check_layer(aten.scaled_dot_product_attention.default, args, sizes, factors, scale=0.3, enable_gqa=True)


@pytest.mark.parametrize("window, softcap, sizes, factors", [
    (3, None, (4,), ("query.ring",)), (7, 0.5, (4,), ("query.ring",)), (40, 0.5, (2, 2), ("query.ring", "kv")),
    (1, None, (2,), ("query.ring",)), (5, 0.5, (2, 2), ("query", "query")), (5, None, (4,), ("query",)),
    (None, 0.5, (4,), ("query.zigzag_ring",)), (None, 0.5, (2, 2), ("query", "query.ring")), (5, 0.5, (2,), ("d0",)),
])  # fmt: skip
def test_attention_with_windows_and_soft_caps(window: Any, softcap: Any, sizes: Any, factors: Any) -> None:
    args = (randn(2, 4, 48, 6), randn(2, 2, 48, 6), randn(2, 2, 48, 10), None, 0.0, True)
    check_layer(windowed, args, sizes, factors, scale=0.9, enable_gqa=True, window=window, softcap=softcap)


@pytest.mark.parametrize("factor", ["query", "query.ring", "kv"])
def test_attention_with_a_mask_and_a_soft_cap(factor: str) -> None:
    mask = (torch.rand(2, 1, 16, 16) < 0.4) | torch.eye(16, dtype=torch.bool)
    args = (randn(2, 4, 16, 6), randn(2, 2, 16, 6), randn(2, 2, 16, 10), mask, 0.0, False)
    check_layer(windowed, args, (2,), (factor,), scale=0.9, enable_gqa=True, window=None, softcap=0.5)


def check_rounding() -> None:
    """Assert that the error of bfloat16 on 16 ranks is near that on one: what they add up is not rounded each time."""
    whole, ranks, op = [torch.randn(1, 2, 256, 16).bfloat16() for _ in range(4)], 16, aten.scaled_dot_product_attention

    def on_one(dtype: torch.dtype) -> list[Tensor]:
        each = [t.to(dtype).requires_grad_() for t in whole[:3]]
        out = op(*each)
        return [out.detach(), *torch.autograd.grad(out, each, whole[3].to(dtype))]

    with simulated(ranks) as (mode, mesh):
        *parts, cotangent = (mode.rank_map(lambda rank, t=t: t.chunk(ranks, 2)[rank].contiguous()) for t in whole)
        parts = [part.requires_grad_() for part in parts]
        groups = (mesh.get_group(0),)
        out = attention(*parts, query_groups=groups, ring_groups=groups)
        locals_ = [out.detach(), *torch.autograd.grad(out, parts, cotangent)]
        found = [torch.cat([t._local_tensors[rank] for rank in range(ranks)], 2) for t in locals_]
    named = zip(
        ("result", "queries", "keys", "values"), found, on_one(torch.bfloat16), on_one(torch.float64), strict=True
    )
    for name, ring, one, exact in named:
        assert (ring - exact).norm() < 1.4 * (one - exact).norm(), f"rounded: {name}"


def check_ring() -> None:
    """Assert that a causal ring of four ranks is exact."""
    args = (randn(2, 4, 16, 6), randn(2, 2, 16, 6), randn(2, 2, 16, 10), None, 0.0, True)
    check_layer(aten.scaled_dot_product_attention.default, args, (4,), ("query.ring",), scale=0.3, enable_gqa=True)


def test_ring_attention_sums_narrow_numbers_in_wide_ones() -> None:
    check_rounding()


def divided(left: Any) -> Any:
    """Gradients of keys and values as a mean over the ring."""
    return lambda places, dq, dk, dv: left(places, dq, dk / places.steps, dv / places.steps)


def reused(send: Any) -> Any:
    """What a rank sent stays what it attends to."""
    return lambda held, ring, by=1: (send(held, ring, by), lambda: held)[1]


def rounded(change: Any) -> Any:
    """What is added up is as narrow as operands."""

    def changed(total: Any, *more: Any) -> None:
        change(total, *more)
        for part in (total,) if isinstance(total, Tensor) else total.parts:
            part.copy_(part.bfloat16())

    return changed


@pytest.mark.parametrize("where, name, fault, check, noticed", [
    (partial_attention.Places, "left", divided, check_ring, "gradient of key"),
    (partial_attention._Packed, "send", reused, check_ring, "result"),
    (partial_attention, "_merge", rounded, check_rounding, "rounded: result"),
    (partial_attention._Packed, "add", rounded, check_rounding, "rounded: keys"),
], ids=lambda each: each.__name__ if callable(each) else None)  # fmt: skip
def test_a_ring_with_a_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, fault: Any, check: Any, noticed: str
) -> None:
    """Those of known implementations."""
    monkeypatch.setattr(where, name, fault(getattr(where, name)))
    with pytest.raises(AssertionError, match=noticed):
        check()


def test_attention_of_fewer_queries_than_keys() -> None:
    args = (randn(2, 4, 4, 6), randn(2, 4, 8, 6), randn(2, 4, 8, 6), None, 0.0, True)
    check_layer(aten.scaled_dot_product_attention.default, args, (4,), ("query",))


@pytest.mark.parametrize("op", [
    aten.batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
])  # fmt: skip
@pytest.mark.parametrize("sizes, factors", meshes("n", "c"))
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(op: Any, sizes: Any, factors: Any, affine: bool) -> None:
    x = 3 * randn(8, 4, 5, 3) + 100 * randn(1, 4, 1, 1)
    weight, bias = (randn(4), randn(4)) if affine else (None, None)
    args = (x, weight, bias, randn(4), torch.rand(4, dtype=torch.float64), True, 0.1, 1e-5)
    check_layer(op, (*args, True) if op is aten.batch_norm.default else args, sizes, factors)


def test_batch_norm_without_running_statistics() -> None:
    args = (randn(8, 4, 5), randn(4), randn(4), True, 0.1, 1e-5)
    check_layer(aten._native_batch_norm_legit.no_stats, args, (2, 2), "nn")


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_in_eval_and_without_buffers(training: bool) -> None:
    buffers = (None, None) if training else (randn(4), torch.rand(4, dtype=torch.float64))
    args = (randn(8, 4), randn(4), randn(4), *buffers, training, 0.1, 1e-5, True)
    check_layer(aten.batch_norm.default, args, (2, 2), "nn")


@pytest.mark.parametrize("op", [aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default])
@pytest.mark.parametrize("sizes, factors", meshes("h", "d1"))
@pytest.mark.parametrize("affine", [True, False])
def test_norm_over_a_shared_hidden_dim(op: Any, sizes: Any, factors: Any, affine: bool) -> None:
    x = 3 * randn(4, 8, 8) + 100 * randn(4, 8, 1)
    weight, bias = (randn(8), randn(8)) if affine else (None, None)
    check_layer(op, (x, [8], weight, *([bias] if "layer_norm" in str(op) else []), 1e-5), sizes, factors)


@pytest.mark.parametrize("factors", [("h", "h1"), ("h1", "d0"), ("h", "h")])
def test_norm_over_several_shared_dims(factors: Any) -> None:
    check_layer(aten.layer_norm.default, (randn(4, 8, 6), [8, 6], randn(8, 6), randn(8, 6)), (2, 2), factors)
    check_layer(aten.rms_norm.default, (randn(4, 8, 6), [8, 6]), (2, 2), factors)
    check_layer(aten.layer_norm.default, (randn(4, 2, 2, 2, 4, 2), [2, 2, 2, 4, 2]), (2, 2), ("h3", "d0"))


@pytest.mark.parametrize("sizes, factors, outers", [
    ((4,), ("g",), (1,)), ((2, 2), ("g", "c"), (1, 1)), ((2, 2), ("h", "n"), (1, 1)), ((2, 2), ("c", "h1"), (1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(sizes: Any, factors: Any, outers: Any, affine: bool) -> None:
    x = 3 * randn(2, 16, 4, 6) + 100 * randn(2, 16, 1, 1)
    check_layer(aten.group_norm.default, (x, 4, *((randn(16), randn(16)) * affine)), sizes, factors, outers)


@pytest.mark.parametrize("sizes, factors", [
    ((4,), ("classes",)), ((2, 2), ("classes", "classes")), ((2, 2), ("d0", "classes")),
])  # fmt: skip
def test_softmax_over_a_shared_dim(sizes: Any, factors: Any) -> None:
    """Of numbers whose exponentials no rank could sum by itself."""
    x = 50 * randn(4, 8, 3) + 800
    for op in (aten.softmax.int, aten.log_softmax.int):
        check_layer(op, (x, 1), sizes, factors)
    for op in (aten._softmax.default, aten._log_softmax.default):
        check_layer(op, (x, 1, False), sizes, factors)


def test_norm_in_half_precision_rounds_as_its_operator_does() -> None:
    x, weight = (randn(4, 8) + 3).bfloat16(), randn(8).bfloat16()
    with simulated(1) as (mode, mesh):
        local = [mode.rank_map(lambda _, t=t: t.clone()) for t in (x, weight)]
        keyword = {"hidden_groups": (mesh.get_group(0),)}
        for op in (aten.layer_norm.default, aten.rms_norm.default):
            found = LOCAL_FORMS[str(op)].function(local[0], [8], local[1], **keyword)
            torch.testing.assert_close(found._local_tensors[0], op(x, [8], weight), rtol=0.01, atol=0)


@pytest.mark.parametrize("way", ["n.ring", "n.panels", "k.ring"])
def test_streamed_linear(way: str) -> None:
    x, weight, bias = randn(2, 8, 12), randn(16, 12), randn(16)
    check_layer(aten.linear.default, (x, weight, bias), (4,), (way,))
    check_layer(aten.linear.default, (x, weight), (2, 2), ("m0", way))
    check_layer(aten.addmm.default, (bias, x[0], weight.T.contiguous()), (4,), (way,))


@pytest.mark.parametrize("sizes, factors", meshes("g", "n"))
def test_grouped_convolution(sizes: Any, factors: Any) -> None:
    args = (randn(4, 8, 5, 5), randn(12, 2, 3, 3), randn(12), [1, 1], [1, 1], [1, 1], 4)
    check_layer(aten.conv2d.default, args, sizes, factors)


def test_grouped_transposed_convolution() -> None:
    args = (randn(4, 8, 5), randn(8, 3, 3), randn(12), [2], [1], [0], 4, [1])
    check_layer(aten.conv_transpose1d.default, args, (2, 2), "gn")


def draws(mode: LocalTensorMode, tensor: Tensor) -> list[list[float]]:
    return [tensor._local_tensors[rank].tolist() for rank in sorted(mode.ranks)]


def test_random_regions_follow_the_data() -> None:
    with simulated(2, 2) as (mode, mesh):
        state = RandomState(7)
        rows = mesh.get_group(0)
        drawn = [draws(mode, draw(aten.rand.default, RunState(state), g, [5])) for g in ((rows,), (), (rows,))]
        across_rows, same, again = drawn
        assert across_rows[0] == across_rows[1] and across_rows[2] == across_rows[3] != across_rows[0]
        assert same[0] == same[1] == same[2] == same[3]
        assert again != across_rows

        both = (rows, mesh.get_group(1))
        assert len({tuple(d) for d in draws(mode, draw(aten.rand.default, RunState(state), both, [5]))}) == 4

        repeated = RandomState(7)
        assert [
            draws(mode, draw(aten.rand.default, RunState(repeated), g, [5])) for g in ((rows,), (), (rows,))
        ] == drawn


def test_random_regions_leave_the_generator_alone() -> None:
    with simulated(2) as (mode, mesh):
        before = torch.get_rng_state()
        draw(aten.rand.default, RunState(RandomState(0)), (mesh.get_group(0),), [3])
        assert torch.equal(torch.get_rng_state(), before)
        first, second = draws(mode, torch.rand(3))
        assert first == second


def test_recomputation_draws_what_was_drawn() -> None:
    with simulated(2) as (_, mesh):
        state, group = RandomState(3), mesh.get_group(0)
        masks = []

        def block(x: Tensor) -> Tensor:
            y = draw(aten.dropout.default, RunState(state), (group,), x, 0.5, True)
            masks.append((y != 0).detach())
            return y * y

        x = torch.ones(64, dtype=torch.float64)
        with state.recorded() as seeds:
            block(x)
        later = draw(aten.rand.default, RunState(state), (group,), [3])
        with state.replayed(enumerate(seeds)):
            block(x)
        assert len(masks) == 2 and torch.equal(masks[0], masks[1])
        assert state.calls == 2 and later is not None


def test_vocab_cross_entropy_saves_the_logits_and_little_else() -> None:
    logits, target = randn(64, 128).requires_grad_(), torch.randint(0, 256, (64,))
    with simulated(2) as (mode, mesh):
        local = mode.rank_map(lambda _: logits.detach()).requires_grad_()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            cross_entropy_loss(STATE, local, target, vocab_groups=(mesh.get_group(0),))
        large = [x._local_tensors[0] for x in saved if x.numel() == local.numel()]
        assert [x.data_ptr() for x in large] == [local.detach()._local_tensors[0].data_ptr()]
        others = sum(x.numel() * x.element_size() for x in saved if x.numel() < local.numel())
        assert others <= 64 * (8 + 8 + 1 + 1) + 64 * 8  # per token: log-sum, column, two flags; and what the mean saves


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_dtypes_and_wide_sums(dtype: torch.dtype) -> None:
    logits, target = (4 * randn(512, 64)).to(dtype), labels(512, classes=64)
    whole = aten.cross_entropy_loss.default(logits.float(), target)
    with simulated(2) as (mode, mesh):
        group = (mesh.get_group(0),)
        halves = [logits.chunk(2, d) for d in (0, 1)]
        by_token, by_class = (mode.rank_map(lambda r, h=half: h[r].contiguous()).requires_grad_() for half in halves)
        targets = mode.rank_map(lambda r: target.chunk(2)[r])
        terms = cross_entropy_loss(STATE, by_token, targets, token_groups=group)
        complete = cross_entropy_loss(STATE, by_class, target, vocab_groups=group)
        assert terms.dtype == complete.dtype == dtype
        both = [terms.detach()._local_tensors[0] + terms.detach()._local_tensors[1], complete._local_tensors[1]]
        for loss in both:
            torch.testing.assert_close(loss.float(), whole, rtol=1e-2, atol=0)
        (terms + complete).backward()
        assert by_token.grad.dtype == by_class.grad.dtype == dtype
