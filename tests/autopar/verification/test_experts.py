"""Mixtures of experts under every way to run them, against the model: outputs, gradients, types and collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.verification.reference import Reference, reference
from autopar.verification.typecheck import typecheck
from autopar.verification.verify import decide_on, simulate
from planner.analysis.memory import usage
from planner.analysis.prediction import conversions
from planner.base.errors import InputError, PinError
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.ir.layout import Mesh
from tests.autopar.captured_once import made
from tests.autopar.models import MODELS, Batch

pytestmark = pytest.mark.usefixtures("capturing_once")

WIDTH, HIDDEN = 8, 8


def of_zoo(name: str) -> tuple[nn.Module, Batch]:
    """A model that is captured once."""
    model, batch = MODELS[name].build()
    return made(model, name), batch


class Mixture(nn.Module):
    """A router, experts, a shared expert, and a loss with one that balances experts over a batch (Fedus et al. 2021),
    and one that keeps what the router makes small (Zoph et al. 2022).

    Args:
        choose: overrules the router: experts of each token from scores ``[t, e]``.
    """

    def __init__(
        self,
        experts: int = 4,
        k: int = 2,
        gate: str = "halves",
        bias: bool = False,
        choose: Callable[[Tensor], Tensor] | None = None,
        width: int = WIDTH,
        hidden: int = HIDDEN,
    ):
        super().__init__()
        made = hidden if gate == "none" else 2 * hidden
        self.k, self.gate, self.choose, self.balances = k, gate, choose, 0.1
        self.before, self.router = nn.Linear(width, width), nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, made, width))
        self.down = nn.Parameter(torch.randn(experts, width, hidden))
        self.up_bias = nn.Parameter(torch.randn(experts, made)) if bias else None
        self.down_bias = nn.Parameter(torch.randn(experts, width)) if bias else None
        self.shared = nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.before(x)
        logits = self.router(x)
        scores = logits.softmax(-1)
        weights, indices = scores.topk(self.k)
        if self.choose is not None:
            indices = self.choose(indices)
            weights = scores.gather(1, indices)
        found = autopar.experts(
            x,
            indices,
            weights,
            self.up,
            self.down,
            self.up_bias,
            self.down_bias,
            gate=self.gate,  # type: ignore[arg-type]
        )
        loss = F.mse_loss(found + self.shared(x), y) + 0.01 * logits.logsumexp(-1).square().mean()
        if not self.balances:
            return loss
        chosen = F.one_hot(indices, scores.shape[-1]).to(scores.dtype).mean((0, 1))
        return loss + self.balances * scores.shape[-1] * (chosen * scores.mean(0)).sum()


def decided(
    model: Mixture, wanted: str, sizes: tuple[int, ...], tokens: int, **pins: int
) -> tuple[Reference, Assignment]:
    """One step of the model, and a plan of it whose experts run so on axes of these sizes."""
    torch.manual_seed(1)
    ref = reference(model, None, {"x": torch.randn(tokens, WIDTH), "y": torch.randn(tokens, WIDTH)})
    names = ("outer", "inner")[-len(sizes) :] if not pins else (*pins,)
    on_axes = dict(zip(names, wanted.split(), strict=True))
    mesh = Mesh.of(**dict(zip(names, sizes, strict=True)))
    assignment = decide_on(
        ref.traced, mesh, ClusterSpec.local(mesh.size), Pins.parse({**pins, "layers": {"": on_axes}})
    )
    (node,) = (node for node in assignment.space.graph.operators if node.op == "autopar.experts.default")
    assert assignment.choice(node).label == " ".join(f"{name}:{way}" for name, way in on_axes.items())
    return ref, assignment


def run(model: Mixture, wanted: str, sizes: tuple[int, ...] = (2,), tokens: int = 16) -> None:
    """Assert that the model computes the same with its experts run so on axes of these sizes.

    Args:
        wanted: the strategy of the experts on every axis; all else is searched.
    """
    ref, assignment = decided(model, wanted, sizes, tokens)
    typecheck(ref.traced.captured, assignment)
    agreement = simulate(ref, assignment)
    assert agreement.agrees(), agreement
    assert not agreement.miscounted, agreement.miscounted


@pytest.mark.parametrize("gate, bias", [("halves", True), ("pairs", False), ("none", True)])
@pytest.mark.parametrize("wanted", ["e", "f", "t.dispatch"])
def test_one_axis(wanted: str, gate: str, bias: bool) -> None:
    run(Mixture(gate=gate, bias=bias), wanted)


@pytest.mark.parametrize("wanted", [
    "t.dispatch e", "e t.dispatch", "t.dispatch f", "f t.dispatch", "t.dispatch t.dispatch", "t t.dispatch",
    "t.dispatch t", "t e", "e e", "e f",
])  # fmt: skip
def test_two_axes(wanted: str) -> None:
    run(Mixture(experts=8, k=3, bias=True), wanted, (2, 2))


def all_to(expert: int) -> Callable[[Tensor], Tensor]:
    return lambda indices: torch.full_like(indices, expert)


@pytest.mark.parametrize("wanted, sizes", [("t.dispatch", (4,)), ("t.dispatch t.dispatch", (2, 2)), ("e", (4,))])
@pytest.mark.parametrize("choose", [all_to(0), all_to(7), lambda i: i % 3 + 2], ids=["first", "last", "three"])
def test_ranks_that_receive_nothing(wanted: str, sizes: tuple[int, ...], choose: Callable[[Tensor], Tensor]) -> None:
    """All tokens go to one expert, or to three of eight."""
    run(Mixture(experts=8, k=1, choose=choose), wanted, sizes)


class Chosen(nn.Module):
    """Experts that the batch chooses for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 2 * HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(4, WIDTH, HIDDEN))

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        return autopar.experts(x, indices, torch.ones_like(indices, dtype=x.dtype), self.up, self.down).square().mean()


@pytest.mark.parametrize("wanted", ["invariant", "t", "f", "e", "t.dispatch"])
def test_an_expert_that_does_not_exist_is_refused_however_they_run(wanted: str) -> None:
    batch = {"x": torch.randn(16, WIDTH), "indices": torch.arange(32).view(16, 2) % 4}
    ref = reference(Chosen(), None, batch)
    pins = Pins.parse({"layers": {"": {"all": wanted}}})
    assignment = decide_on(ref.traced, Mesh.of(all=2), ClusterSpec.local(2), pins)
    assert simulate(ref, assignment).agrees()
    for expert in (9, 4, -1):
        wrong = batch["indices"].clone()
        wrong[5, 1] = expert
        with pytest.raises(InputError, match=f"goes to expert {expert}; there are 4, numbered from 0"):
            simulate(replace(ref, kwargs={**ref.kwargs, "indices": wrong}), assignment)


def test_more_choices_than_ranks() -> None:
    run(Mixture(experts=8, k=7), "t.dispatch")


@pytest.mark.parametrize("frozen", [
    ("before",), ("up", "down"), ("up_bias", "down_bias"), ("router",), ("before", "router"),
    ("before", "up", "down", "up_bias", "down_bias"), ("before", "router", "up", "up_bias", "down_bias"),
    ("router", "up", "down", "up_bias", "down_bias"),
], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("wanted", ["t.dispatch", "t.dispatch e"])
def test_parts_without_gradients(wanted: str, frozen: tuple[str, ...]) -> None:
    """Gradients go the way back only as far as there is something to train; where ``before`` is frozen tokens have
    none.
    """
    model = Mixture(bias=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.split(".")[0] not in frozen)
    run(model, wanted, (2,) * len(wanted.split()))


@pytest.mark.parametrize("wanted", ["e", "t.dispatch"])
def test_experts_that_are_the_first_layer(wanted: str) -> None:
    model = Mixture()
    model.before = nn.Identity()  # type: ignore[assignment]
    run(model, wanted)


@pytest.mark.parametrize("ranks", [2, 4])
def test_volumes(ranks: int) -> None:
    """Elements that a rank sends a layer and step, beside numbers of rows and of experts.

    Derived by hand: with ``T`` tokens a rank, each goes to ``k`` experts and back, and so do gradients, of which
    ``1 / P`` stay: ``4 k T h (P - 1) / P``. Gathered tokens come from, and sums of results go to, the others, and so
    do gradients: ``4 (P - 1) T h``. Experts that are stored sharded are gathered forward and backward, and their
    gradients are reduced: ``9 E h f (P - 1) / P`` for three matrices of ``E`` experts each.
    """
    experts, k, tokens = 8, 3, 16
    sends = {"all_gather": ranks - 1, "reduce_scatter": (ranks - 1) / ranks, "all_to_all": (ranks - 1) / ranks}

    def sent(wanted: str) -> tuple[float, float]:
        """Bytes that a rank sends inside of experts, and to reshard what they read and make but their parameters."""
        _, assignment = decided(Mixture(experts, k, choose=None), wanted, (ranks,), tokens * ranks, data=ranks)
        space, graph = assignment.space, assignment.space.graph
        (node,) = (node for node in graph.operators if node.op == "autopar.experts.default")
        inside = list(space.inner_calls(space.rules[node.name], assignment.choice(node), True))
        beside = [
            call
            for each, times in conversions(assignment)
            if node.name in (each.reader, each.ref.node) and graph.by_name[each.ref.node].op != "param"
            for step in space.table(each.ref).route(each.source, each.target)
            for call in step.collectives(graph.type_of(each.ref), space.mesh)
            for _ in range(times)
        ]
        return (
            sum(sends[call.kind] * size for _, call, size, _ in inside),
            sum(sends[call.kind] * call.bytes_in for call in beside),
        )

    item = index = 8
    dispatched = 4 * k * tokens * WIDTH * (ranks - 1) / ranks * item + experts * index * (ranks - 1) / ranks
    assert sent("t.dispatch") == (dispatched, 0)
    chosen = k * tokens * (ranks - 1) * (2 * item + index)  # weights and their gradients, and indices
    assert sent("e") == (0, 4 * (ranks - 1) * tokens * WIDTH * item + chosen)
    model = Mixture(experts, k)
    plan = autopar.plan(
        model,
        ClusterSpec.local(ranks),
        example_kwargs={"x": torch.randn(64, WIDTH), "y": torch.randn(64, WIDTH)},
        pin={
            "data": ranks,
            "zero": {"up": 3, "down": 3, "*": 0},
            "layers": {"": {"data": "t"}},
            "pipeline": 1,
            "micro_batches": 1,
        },
    )
    weights = 4 * 3 * experts * WIDTH * HIDDEN
    calls = dict(plan.predicted.collectives)
    gathered = sum(n * c.bytes_in * (ranks - 1) for c, n in calls.items() if c.kind == "all_gather")
    reduced = sum(n * c.bytes_in * (ranks - 1) / ranks for c, n in calls.items() if c.kind == "reduce_scatter")
    assert gathered + reduced == 3 * weights * (ranks - 1) / ranks


@pytest.mark.parametrize("wanted, times", [("t.dispatch", 2.0), ("e", 2.0), ("t", 1.0), ("f", 1.0)])
def test_the_busiest_rank_decides(wanted: str, times: float) -> None:
    """Seconds and bytes are those of the rank that most tokens go to, where the cluster says how many more they are;
    what comes back of dispatched ones is for its own tokens.
    """
    ref = reference(Mixture(8, 2), None, {name: torch.randn(4096, WIDTH) for name in ("x", "y")})
    found = []
    for imbalance in (1.0, 2.0):
        cluster = ClusterSpec.local(2).model_copy(update={"expert_imbalance": imbalance})
        plan = decide_on(ref.traced, Mesh.of(all=2), cluster, Pins.parse({"layers": {"": {"all": wanted}}}))
        (node,) = (node for node in plan.space.graph.operators if node.op == "autopar.experts.default")
        space, choice = plan.space, plan.choice(node)
        work = space.work(node, choice)
        kept = sum(held.bytes for held in usage(plan).alive if "experts keeps" in held.name)
        found.append((space.load(node, choice), work.inner_forward_s, kept))
    (even, even_s, even_bytes), (uneven, uneven_s, uneven_bytes) = found
    assert even == 1 and uneven == times and uneven_s == times * even_s
    even_ones = 4096 * WIDTH * 8 if wanted == "t.dispatch" else 0
    assert uneven_bytes - even_ones == times * (even_bytes - even_ones) > 0


def test_what_a_shared_expert_takes_hides_dispatch() -> None:
    """One of the two all-to-alls forward, and of the two backward, each by what products beside it take at least."""
    ref = reference(Mixture(8, 2), None, {name: torch.randn(4096, WIDTH) for name in ("x", "y")})
    found = []
    for overlap in (0.0, 0.5):
        cluster = ClusterSpec.local(2).model_copy(update={"overlap": overlap})
        plan = decide_on(ref.traced, Mesh.of(all=2), cluster, Pins.parse({"layers": {"": {"all": "t.dispatch"}}}))
        (node,) = (node for node in plan.space.graph.operators if node.op == "autopar.experts.default")
        found.append(plan.space.work(node, plan.choice(node)))
    flops = 2 * 4096 // 2 * WIDTH * WIDTH  # of the shared expert on one of two ranks; twice that for gradients
    forward_s, backward_s = (
        CostModel(cluster).compute_s(times * flops, 0.0, "float64", launches=times) for times in (1, 2)
    )
    assert found[0].inner_forward_s - found[1].inner_forward_s == pytest.approx(0.5 * forward_s)
    assert found[0].inner_backward_s - found[1].inner_backward_s == pytest.approx(0.5 * backward_s)


def test_a_block_that_recomputes_makes_the_rows_of_its_experts_anew() -> None:
    (model, batch), pin = of_zoo("qwen3-moe"), {"tensor": 2, "pipeline": 1, "micro_batches": 1}
    plans = [
        autopar.plan(model, ClusterSpec.local(2), example_kwargs=batch, pin={**pin, "recompute": level})
        for level in ("none", "full")
    ]
    found = autopar.verify(model, plans[1], example_kwargs=batch)
    assert found.agreement is not None and found.agreement.agrees()
    kept = [plan.predicted.memory_bytes["activations"] for plan in plans]
    assert kept[1] < 0.6 * kept[0]


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_grouped_products_of_transformers_are_verified_in_float64(name: str) -> None:
    """As a configuration has it that says nothing of experts; their product of groups takes no float64."""
    model, batch = MODELS[name].build()
    model.config._experts_implementation = "grouped_mm"
    plan = autopar.plan(model, ClusterSpec.local(2), example_kwargs=batch, pin={"expert": 2})
    assert "Shards experts over all 2 processes (expert parallel)" in " ".join(str(plan).split())
    found = autopar.verify(model, plan, example_kwargs=batch)
    assert found.verdict == "verified" and found.tolerance is not None and found.tolerance.dtypes == "float64"
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("free, tokens, expected", [
    (True, 27_000, "t.dispatch"), (True, 28_000, "t"), (False, 14_000, "t.dispatch"), (False, 20_000, "t"),
])  # fmt: skip
def test_experts_are_gathered_where_there_are_many_tokens(free: bool, tokens: int, expected: str) -> None:
    """Above ``2.25 E f / k`` tokens a rank, 27,648 for a layer of Qwen3-30B-A3B, gathering experts moves less. Where
    memory is not ``free``, and gradients are reduced beside computing, it is fewer: dispatched rows are sorted anew.
    """
    cluster = ClusterSpec.preset("dgx-h100", nodes=1)
    if free:
        described = {**cluster.to_dict(), "overlap": 0.0}
        described["device"]["memory_bandwidth_bytes_per_s"] = 1e18
        for level in described["levels"]:
            level["latency_s"] = 1e-9
            level.pop("in_switch_bytes_per_s", None)
        cluster = ClusterSpec.from_dict(described)
    with torch.device("meta"):
        model = Mixture(128, 8, width=2048, hidden=768).bfloat16()
        batch = {name: torch.empty(8 * tokens, 2048, dtype=torch.bfloat16) for name in ("x", "y")}
    pin = {"data": 8, "zero": 3, "pipeline": 1, "micro_batches": 1}
    plan = autopar.plan(model, cluster, example_kwargs=batch, pin=pin)
    (strategy,) = (way for block in plan.blocks for name, way in block.ops.items() if name.endswith("experts"))
    assert strategy == f"data:{expected}"


def test_a_loss_that_balances_over_the_batch_has_no_micro_batches() -> None:
    """The mean of the micro-batches' losses is another loss, and the sum of their gradients another gradient."""
    model, batch = Mixture().double(), {name: torch.randn(64, WIDTH).double() for name in ("x", "y")}
    with pytest.raises(PinError, match=r"mixes samples, .* balances experts, a product .* or pin 'micro_batches' 1"):
        autopar.plan(model, ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2, "micro_batches": 2})

    def gradient_of_balance(x: Tensor, y: Tensor) -> Tensor:
        """For the router: of the loss with it, less that without."""
        found = []
        for model.balances in (1.0, 0.0):
            found += torch.autograd.grad(model(x, y), [model.router.weight])
        return found[0] - found[1]

    whole = gradient_of_balance(**batch)
    parts = map(gradient_of_balance, *(value.chunk(4) for value in batch.values()))
    assert (torch.stack([*parts]).mean(0) - whole).norm() > 0.01 * whole.norm()


def test_a_loss_that_keeps_what_a_router_makes_small_has_micro_batches() -> None:
    """Without one that balances experts: it is a mean."""
    model, batch = Mixture(), {name: torch.randn(16, WIDTH) for name in ("x", "y")}
    model.balances = 0.0
    pin = {"expert": 2, "pipeline": 1, "micro_batches": 2}
    found = autopar.verify(model, ClusterSpec.local(2), example_kwargs=batch, pin=pin)
    assert found.agreement is not None and found.agreement.agrees() and found.simulated.micro_batches == 2


@pytest.mark.parametrize("name, pin, strategy", [
    ("gpt-oss", {"expert": 2, "expert_tensor": 2}, "expert:t.dispatch expert_tensor:f"),
    ("mixtral", {"tensor": 2, "expert": 2, "expert_tensor": 1}, "expert:t.dispatch tensor:e"),
    ("qwen2-moe", {"tensor": 2, "expert": 2, "expert_tensor": 2}, "expert:t.dispatch tensor:f"),
], ids=str)  # fmt: skip
def test_pinned_ranks_share_each_expert_or_have_whole_ones(name: str, pin: dict[str, int], strategy: str) -> None:
    model, batch = of_zoo(name)
    plan = autopar.plan(model, ClusterSpec.local(4), example_kwargs=batch, pin=pin)
    assert {way for block in plan.blocks for name, way in block.ops.items() if name.endswith("experts")} == {strategy}
    found = autopar.verify(model, plan, example_kwargs=batch)
    assert found.agreement is not None and found.agreement.agrees() and plan.pin == pin


@pytest.mark.parametrize("pin, told", [
    ({"data": 2, "layers": {"*.experts": {"data": "e"}}},
     "Shards experts over all 2 processes (expert parallel), copies the model over all 2 processes (data parallel)"),
    ({"expert_tensor": 2},
     "Shards each expert over all 2 processes (expert tensor parallel), copies the model over all 2 processes (data "),
    ({"tensor": 2, "layers": {"*.experts": {"tensor": "t.dispatch/8"}}, "sequence_parallel": True},
     "Shards experts over all 2 processes (expert parallel), splits weights over all 2 processes (tensor parallel, "),
], ids=str)  # fmt: skip
def test_an_axis_of_experts_is_called_for_what_it_does_else(pin: dict[str, Any], told: str) -> None:
    """Experts have most of the work."""
    model, batch = of_zoo("mixtral")
    assert told in " ".join(str(autopar.plan(model, ClusterSpec.local(2), example_kwargs=batch, pin=pin)).split())


@pytest.mark.parametrize("way", ["t.dispach", "e.dispatch", "e/2", "dispatch", "k", "t.dispatch/3"])
def test_ways_that_experts_do_not_have(way: str) -> None:
    """None of them runs on the whole of the experts instead."""
    known = rf"no strategy '{way}'; .* t \(16\), .*t.dispatch \(4\), .*or pin 'invariant'"
    with pytest.raises(PinError, match=known) as refused:
        decided(Mixture(), way, (2,), 16)
    assert "e (4)" in str(refused.value) and "f (8)" in str(refused.value)


@pytest.mark.parametrize("way, ranks, size", [("t.dispatch", 8, 4), ("t.dispatch/2", 8, 4), ("t.dispatch/16", 4, 2)])
def test_dispatch_on_ranks_that_do_not_divide_tokens_or_experts(way: str, ranks: int, size: int) -> None:
    with pytest.raises(PinError, match=f"{way} has size {size}, which {ranks} ranks do not divide"):
        decided(Mixture(experts=4), way, (ranks,), 32)


@pytest.mark.parametrize("model, pin, message", [
    ("mixtral", {"expert": 8}, "pin 'expert' is 8 but the expert dim has length 4, which it does not divide"),
    ("llama", {"expert": 8}, "pin 'expert' shards experts, and the model has none that are known as such: write them"),
    ("llama", {"tensor": 8, "expert_tensor": 8}, "pin 'expert_tensor' shards each expert, and the model has none that"),
    ("mixtral", {"tensor": 2, "expert": 4, "expert_tensor": 1},
     "'expert_tensor' is 1 beside pin 'tensor' 2 and pin 'expert' 4, so that 8 ranks .* the expert dim has length 4"),
    ("mixtral", {"tensor": 8, "expert_tensor": 2}, "is 2 beside pin 'tensor' 8, .* all together .8., or have whole"),
])  # fmt: skip
def test_experts_that_do_not_divide_or_are_not_there(model: str, pin: dict[str, int], message: str) -> None:
    module, batch = of_zoo(model)
    with pytest.raises(PinError, match=message):
        autopar.plan(module, ClusterSpec.local(8), example_kwargs=batch, pin=pin)
