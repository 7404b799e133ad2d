"""Predicted memory against torch's ``MemTracker`` on the emitted program of one rank."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.driver.plan import plan_traced
from autopar.driver.trace import Traced, trace
from autopar.emit.build import build
from autopar.runtime.spmd.interface import LeafSpec
from autopar.runtime.spmd.mesh import device_mesh
from autopar.verification.memory_meter import LiveBytes, held_tensors
from autopar.verification.simulator import fake_process_group
from benchmarks import memory_micro_batched
from benchmarks.context import HEAD, HEADS, Layer
from benchmarks.memory import backward, observed_peak
from benchmarks.million import LossInParts
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Node, TensorType
from planner.ir.layout import local_shape
from planner.ops.saved_tensors import beside, is_own, own_bytes, saved_tensors
from planner.ops.table import WHOLE
from planner.plan.plan import Plan
from tests.autopar.allocated import changes_during, most_bytes
from tests.autopar.models import MODELS, Model, llama, text

TOLERANCE = 0.05  # of models so small that a few numbers per row show; the issue of the benchmark is the mean


CASES = [
    *itertools.product(
        ["functional-gpt", "llama", "vit"],
        [(2, {"data": 2}), (2, {"data": 2, "zero": 3}), (4, {"data": 2, "tensor": 2})],
    ),
    ("t5", (4, {"data": 2, "tensor": 2, "zero": 3})),  # the whole model is one block that gathers again
    ("llama", (4, {"context": 4, "context_kind": "ring"})),
    ("t5", (4, {"context": 4, "context_kind": "ring"})),  # a bias that is trained, and dropout
    ("llama", (4, {"context": 4, "context_kind": "zigzag"})),
    ("llama", (4, {"context": 4, "context_kind": "zigzag_gather"})),
    ("gpt2", (4, {"context": 4, "context_kind": "zigzag"})),  # likewise
    ("gpt2", (2, {"tensor": 2, "recompute": "selective"})),  # attention with dropout
    ("shared-layers", (2, {"data": 2, "recompute": "full"})),  # gradients that several blocks add to
]


@functools.cache
def of_zoo(name: str) -> tuple[nn.Module, Traced]:
    """A model, and what is captured of it once for all plans."""
    model, batch = MODELS[name].build()
    return model, trace(model, None, batch)


def planned(traced: Traced, ranks: int, pin: Mapping[str, Any], training: Training | None = None) -> Plan:
    """A plan that keeps all model data on devices: no other is searched."""
    pins = Pins.parse({"offload": "none", **pin})
    return plan_traced(traced, ClusterSpec.local(ranks), pins, training or Training())


@pytest.mark.parametrize("name, case", CASES, ids=str)
def test_the_predicted_peak_is_the_observed_one(name: str, case: tuple[int, Mapping[str, object]]) -> None:
    ranks, pin = case
    model, traced = of_zoo(name)
    plan = planned(traced, ranks, pin)
    observed = observed_peak(model, traced, plan.assignment)
    assert plan.predicted.peak_bytes == pytest.approx(observed, rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["ring", "zigzag"])
def test_attention_in_a_ring_needs_no_more_on_more_ranks(kind: str) -> None:
    """With as many tokens on each rank, on 2, 4 and 8, the peak is the same to a byte, but for what is given."""
    found = set()
    for ranks in (2, 4, 8):
        model, x = Layer(causal=True), torch.randn(1, 256 * ranks, HEADS * HEAD)
        traced = trace(model, (x,), None)
        pin = {"context": ranks, "context_kind": kind, "zero": 0, "pipeline": 1, "micro_batches": 1}
        plan = planned(traced, ranks, pin)
        observed = observed_peak(model, traced, plan.assignment)
        assert plan.predicted.peak_bytes == pytest.approx(observed, rel=0.08)
        found.add((plan.predicted.peak_bytes - 4 * x.numel(), observed - 4 * x.numel()))
    assert len(found) == 1


def test_what_a_loss_in_parts_keeps_is_made_anew() -> None:
    """Of eight parts that recompute, the logarithms of one's probabilities are there at a time."""
    tokens, vocab, parts = 64, 4096, 8
    model = LossInParts(llama(vocab_size=vocab), parts)
    ids = torch.randint(0, vocab, (1, tokens))
    traced = trace(model, None, {"input_ids": ids, "labels": ids})
    observed = {}
    for level in ("full", "none"):
        pin = {"context": 2, "recompute": level, "pipeline": 1, "micro_batches": 1, "zero": 0}
        plan = planned(traced, 2, pin)
        observed[level] = observed_peak(model, traced, plan.assignment)
        assert plan.predicted.peak_bytes == pytest.approx(observed[level], rel=0.01)
    kept = tokens // 2 // parts * vocab * 4
    assert observed["full"] < observed["none"] - (parts - 2) * kept


class Layers(nn.Module):
    """Many parameters and few activations."""

    def __init__(self, layers: int = 16, width: int = 64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def most_bytes_of_backward(model: nn.Module, traced: Traced, assignment: Assignment) -> int:
    """As :func:`observed_peak`, without hooks on parameters, for whose gradients these would wait."""
    mesh = assignment.space.mesh

    def part(leaf: LeafSpec) -> Tensor:
        return torch.zeros(local_shape(leaf.shape, leaf.layout, mesh.sizes) or (), dtype=leaf.dtype)

    with fake_process_group(mesh.size):
        pmodel = build(model, traced.captured, assignment, device_mesh(mesh, "cpu"), 0, part)
        optimizer = pmodel.optimizer(torch.optim.AdamW)
        leaves = {leaf.name: part(leaf) for leaf in pmodel.interface.leaves if leaf.kind == "input"}
        backward(pmodel, leaves)
        optimizer.step()
        optimizer.zero_grad()
        with LiveBytes([*held_tensors(pmodel, optimizer), *leaves.values()]) as live:
            backward(pmodel, leaves)
    return live.peak


@pytest.mark.parametrize(
    "ranks, pin", [(1, {}), (2, {"data": 2, "zero": 0}), (2, {"data": 2, "zero": 3}), (4, {"data": 2, "tensor": 2})]
)
def test_gradients_that_backward_uses_are_there_for_a_block_or_two(ranks: int, pin: dict[str, Any]) -> None:
    model, batch = Layers(), {"x": torch.randn(4, 64)}
    traced, found = trace(model, None, batch), {}
    for update in ("after", "backward"):
        plan = planned(traced, ranks, {**pin, "recompute": "none", "update": update})
        observed = most_bytes_of_backward(model, traced, plan.assignment)
        assert plan.predicted.peak_bytes == pytest.approx(observed, rel=0.002)
        found[update] = observed
    weights = 16 * 64 * 65 * 4 // ranks ** (pin.get("zero") != 0)
    assert found["after"] - found["backward"] > weights * 0.6


class Dropping(nn.Module):
    """Attention that drops some, which no flash kernel of a CPU does."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1, is_causal=True)


class Biased(nn.Module):
    """Attention whose mask is trained, which no flash kernel of a CPU does, and perhaps drops some."""

    def __init__(self, length: int, dtype: torch.dtype, rate: float = 0.0):
        super().__init__()
        self.bias, self.rate = nn.Parameter(torch.randn(2, 4, length, length, dtype=dtype)), rate

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias, dropout_p=self.rate)


def attention_of(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Node, tuple[TensorType, ...]]:
    """The attention of a model, and the types of its operands, all of which have gradients."""
    graph = trace(model, None, {name: value.detach() for name, value in batch.items()}).graph
    node = next(each for each in graph.nodes if "attention" in each.op)
    return node, tuple(replace(tensor, grad=True) for tensor in graph.input_types(node))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["drops", "biased", "both"])
def test_attention_that_keeps_scores_keeps_what_is_counted(kind: str, dtype: torch.dtype) -> None:
    model = Dropping() if kind == "drops" else Biased(16, dtype, 0.1 if kind == "both" else 0.0)
    batch = {name: torch.randn(2, 4, 16, 8, dtype=dtype, requires_grad=True) for name in ("query", "key", "value")}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**batch)
    node, types = attention_of(model, batch)
    found = saved_tensors(node, types, True, WHOLE)
    sizes = [*(tensor.size_bytes for tensor in types), node.results[0].size_bytes]
    counted = sum(own_bytes(saved, node, types, sizes, True, WHOLE) for saved in found if is_own(saved))
    assert counted + sum(sizes[saved.place] for saved in found if saved.kind == "in") == sum(kept.values())
    assert not [saved for saved in found if saved.kind == "out"]


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("length", [4, 64])
def test_attention_that_keeps_scores_needs_what_is_counted(length: int, rate: float) -> None:
    model = Biased(length, torch.float64, rate)
    heads = [torch.randn(2, length, 4, 8, dtype=torch.float64).transpose(1, 2).requires_grad_() for _ in range(3)]
    batch = dict(zip(("query", "key", "value"), heads, strict=True))
    node, types = attention_of(model, batch)
    sizes = [*(tensor.size_bytes for tensor in types), node.results[0].size_bytes]
    needs = beside(node, types, sizes, True, WHOLE)
    found = [saved for saved in saved_tensors(node, types, True, WHOLE) if is_own(saved)]
    kept = sum(own_bytes(saved, node, types, sizes, True, WHOLE) for saved in found)
    results: list[Tensor] = []
    forward = changes_during(lambda: results.append(model(**batch)))
    assert most_bytes(forward) == pytest.approx(kept + sizes[-1] + needs.forward, rel=0.01)

    def both() -> None:
        torch.autograd.grad((model(**batch) * 2).sum(), (*heads, model.bias))

    seen = max([*itertools.accumulate(change.bytes for change in changes_during(both))][len(forward) :])
    kept += sum(sizes[:3]) if rate else 0  # where operands stand for their copies
    counted = kept + sizes[-1] + needs.backward + sum(sizes[:-1])  # gradients of the result and of operands
    assert seen == pytest.approx(counted, rel=0.01) if needs.backward else seen <= counted


@pytest.mark.parametrize("name, pin", [("llama", {"data": 2, "zero": 3}), ("gpt2", {"tensor": 2})])
def test_the_predicted_peak_is_the_observed_one_with_masters(name: str, pin: Mapping[str, object]) -> None:
    model, batch = MODELS[name].build()
    model.bfloat16()
    traced = trace(model, None, batch)
    plan = planned(traced, 2, pin, Training(optimizer_bytes_per_element=12))
    observed = observed_peak(model, traced, plan.assignment, torch.float32)
    assert plan.predicted.peak_bytes == pytest.approx(observed, rel=TOLERANCE)


@pytest.mark.parametrize(
    "made, most",
    [
        (MODELS["gpt2"], 0.9),  # while one of its two layers computes, the other one's parameters are on their way
        (MODELS["shared-layers"], 0.75),  # gradients that all three layers add to count from the first on
        (Model("llama of 8 layers", lambda: llama(num_hidden_layers=8), text), 0.65),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_predicted_peak_of_parameters_gathered_in_each_micro_batch_is_the_observed_one(
    made: Model, most: float
) -> None:
    """Whether blocks keep what they gather or make all of it again. A micro-batch here is a single sample, of which
    views copy less than of several.
    """
    model, batch = made.build()
    traced = trace(model, None, batch)
    observed: dict[object, int] = {}
    for zero, level in ((2, "none"), (3, "none"), (3, "full")):
        plan = planned(traced, 2, {"data": 2, "micro_batches": 4, "zero": zero, "recompute": level})
        observed[zero, level] = memory_micro_batched.observed_peak(model, traced, plan)
        if zero == 3:
            assert plan.predicted.peak_bytes == pytest.approx(observed[zero, level], rel=0.025)
    assert observed[3, "full"] < observed[3, "none"] < observed[2, "none"]
    assert observed[3, "full"] < most * observed[2, "none"]


PIPELINES: list[dict[str, Any]] = [
    {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b", "recompute": "none"},
    {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b", "recompute": "full"},
    {"pipeline": 2, "micro_batches": 8, "schedule": "gpipe", "recompute": "full"},
    {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b", "tensor": 2},
    {"pipeline": 2, "micro_batches": 4, "schedule": "zero_bubble", "virtual_stages": 1, "recompute": "none"},
    {"pipeline": 2, "micro_batches": 4, "schedule": "zero_bubble", "virtual_stages": 1, "recompute": "full"},
]


@pytest.mark.parametrize(
    "name, pins",
    [("gpt2", PIPELINES), ("llama", PIPELINES[::2]), ("vit", PIPELINES[::2]), ("encoder", PIPELINES[1::2])],
)
def test_no_rank_of_a_pipeline_takes_more_than_predicted(name: str, pins: list[dict[str, Any]]) -> None:
    """Outputs, messages on both sides, and what operators keep of their own included.

    Of gpipe gradients count while all micro-batches are in flight, though they come after that.
    """
    model, traced = of_zoo(name)
    for pin in pins:
        plan = planned(traced, 2 * pin.get("tensor", 1), pin)
        observed = max(memory_micro_batched.observed_peak(model, traced, plan, rank) for rank in range(2))
        assert 0.98 <= plan.predicted.peak_bytes / observed <= (1.15 if pin["schedule"] == "1f1b" else 1.25), pin


class Narrow(nn.Module):
    """Statistics of norms are as large as what else a layer saves: recomputing makes them again, and they stay."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class TiedEnds(nn.Module):
    """An embedding that is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2048, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(F.linear(x, self.embed.weight), labels)


def test_what_norms_keep_stays_where_blocks_recompute() -> None:
    model, batch = Narrow(), {"x": torch.randn(4096, 8)}
    traced = trace(model, None, batch)
    plan = planned(traced, 2, {"data": 2, "micro_batches": 4, "zero": 0, "recompute": "full"})
    observed = memory_micro_batched.observed_peak(model, traced, plan)
    assert plan.predicted.peak_bytes == pytest.approx(observed, rel=0.01)


@pytest.mark.parametrize("layers", [2, 3])
def test_a_tied_embedding_that_is_stored_whole_waits_for_its_second_gradient(layers: int) -> None:
    """Whether the other parameters are gathered once a step or in each micro-batch."""
    model = TiedEnds()
    batch = {"ids": torch.randint(0, 2048, (32,)), "labels": torch.randint(0, 2048, (32,))}
    traced = trace(model, None, batch)
    plan = planned(traced, 2, {"data": 2, "micro_batches": 4, "zero": {"embed*": 0, "layers.*": layers}})
    observed = memory_micro_batched.observed_peak(model, traced, plan)
    assert plan.predicted.peak_bytes == pytest.approx(observed, rel=0.01)


@pytest.mark.parametrize("name, error", [("mlp", 0.002), ("llama", 0.001)])
def test_gradients_that_are_summed_once_a_step_are_there_twice_then(name: str, error: float) -> None:
    """With more micro-batches less is saved, until a step is fullest at its end."""
    model, traced = of_zoo(name)
    plan = planned(traced, 2, {"data": 2, "micro_batches": 4, "zero": 0, "recompute": "none"})
    assert plan.predicted.fullest_at == "reducing gradients"
    assert plan.predicted.peak_bytes == pytest.approx(
        memory_micro_batched.observed_peak(model, traced, plan), rel=error
    )


@pytest.mark.parametrize(
    "name, pin",
    [
        ("llama", {"data": 2, "zero": 2}),  # gradients as they are stored come at the end
        ("bert", {"data": 2, "zero": 2}),
        ("functional-gpt", {"pipeline": 2, "schedule": "gpipe"}),  # gradients come with the first backward
        ("bert", {"pipeline": 2, "schedule": "zero_bubble"}),  # of the first stage nothing waits
        ("vit", {"pipeline": 2, "schedule": "zero_bubble"}),  # all ranks are given the images
    ],
)
def test_gradients_count_from_when_they_are_there(name: str, pin: dict[str, Any]) -> None:
    model, traced = of_zoo(name)
    plan = planned(traced, 2, {**pin, "micro_batches": 4, "recompute": "none"}, Training(discards=()))
    observed = max(
        memory_micro_batched.observed_peak(model, traced, plan, rank) for rank in range(pin.get("pipeline", 1))
    )
    assert plan.predicted.peak_bytes == pytest.approx(observed, rel=0.01)
