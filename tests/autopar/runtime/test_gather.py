"""Parameters of a block gathered in one call: what is gathered, and what is sent back, is cut as the layouts say.

And when: what the next block needs is on its way before this one's gradients are.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.driver.plan import assign, plan_traced, staged
from autopar.driver.trace import Traced, trace
from autopar.runtime.pipeline.actions import StageActions
from autopar.runtime.pipeline.executor import _Run
from autopar.runtime.spmd import parameters, prefetch_gather
from autopar.runtime.spmd.mesh import part_of
from autopar.runtime.spmd.parameters import _ShardedForm, gather_parameters
from autopar.verification.reference import reference
from autopar.verification.simulator import Simulation, fake_process_group
from autopar.verification.verify import simulate, verify
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.layout import Mesh, Shard
from planner.plan.plan import Plan
from planner.solve.pipeline.schedule import Action

RANKS = 3


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_a_parameter_is_made_of_its_parts_and_its_gradient_cut_into_them(sizes: list[int], data: st.DataObject) -> None:
    dim, strips = data.draw(st.integers(0, len(sizes) - 1)), data.draw(st.integers(1, 2))
    shape = [size * RANKS * strips if at == dim else size for at, size in enumerate(sizes)]
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    mesh, layout = Mesh.of(data=RANKS), (Shard(dim, strips),)
    parts = [part_of(whole, layout, mesh, rank) for rank in range(RANKS)]
    form = _ShardedForm(parts[0].shape, str(layout[0]), RANKS)
    # Other parameters lie before and behind it, in every row.
    every = torch.cat([torch.stack([part.reshape(-1) for part in parts]), torch.zeros(RANKS, 2)], 1)
    rows = every[:, : parts[0].numel()]
    gathered = form.whole(rows)
    assert torch.equal(gathered, whole)
    assert gathered.is_contiguous() and gathered.untyped_storage().data_ptr() != every.untyped_storage().data_ptr()
    rows.zero_()
    form.fill(rows, whole)
    assert all(torch.equal(row.view(part.shape), part) for row, part in zip(rows, parts, strict=True))
    form.fill(rows, None)
    assert not rows.any() and not every.any()


class _Lost(torch.autograd.Function):
    """The sum, whose gradient reaches nobody."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        return torch.stack([value.sum() for value in values]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return None, None


@pytest.mark.parametrize("reached", ["both", "one", "none"])
def test_what_does_not_reach_the_loss_has_no_gradient_and_keeps_ranks_in_step(reached: str) -> None:
    weight, bias = torch.ones(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)
    with fake_process_group(2):
        axis = dist.group.WORLD
        assert axis is not None
        w, b = gather_parameters((weight, bias), axis, ("S(0)", "S(0)"))
        assert (w.shape, b.shape) == ((4, 3), (4,))
        loss = {"both": lambda: w.sum() + b.sum(), "one": b.sum, "none": lambda: _Lost.apply(w, b)}[reached]()
        loss.backward()
    assert [p.grad is not None for p in (weight, bias)] == {"both": [1, 1], "one": [0, 1], "none": [0, 0]}[reached]


# ---- a block ahead ---------------------------------------------------------------------------------------------------

LAYERS, WIDTH = 4, 6


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Shifted(nn.Module):
    """The gradient of its parameter needs nothing that forward made; that of what comes in does."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(x + self.shift)


class Residuals(nn.Module):
    """Layers, the first of which are frozen, others that only shift before the last two, and some that do not reach the
    loss.
    """

    def __init__(self, frozen: int = 0, beside: int = 0, shifted: int = 0, layers: int = LAYERS):
        super().__init__()
        kinds = [Residual] * (layers - 2) + [Shifted] * shifted + [Residual] * 2
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.beside = nn.ModuleList(Residual() for _ in range(beside))
        self.layers[:frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        y = x
        for layer in self.beside:
            y = layer(y)
        return x.square().mean(), y


def planned(traced: Traced, **pin: object) -> Plan:
    """A plan with all model data on devices, of two ranks or of two by two."""
    ranks = 4 if not {"replicate", "tensor", "pipeline"}.isdisjoint(pin) else 2
    return plan_traced(traced, ClusterSpec.local(ranks), Pins.parse({"offload": "none", **pin}), Training())


class Calls(list[str]):
    """What is sent, and waited for, in order: gathers and reductions by their number in order of sending.

    Attributes:
        fails: where an error is raised.
    """

    fails = ""

    def note(self, call: str) -> None:
        self.append(call)
        if call == self.fails:
            raise RuntimeError(call)


class Work:
    def __init__(self, calls: Calls, name: str, work: Any):
        self.calls, self.name, self.work = calls, name, work

    def wait(self) -> None:
        self.calls.note(f"wait {self.name}")
        self.work.wait()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()

    def watched(kind: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Work:
            name = f"{kind} {sum(each.startswith(kind) for each in found)}"
            found.note(name)
            return Work(found, name, function(*args, **kwargs))

        return call

    monkeypatch.setattr(prefetch_gather, "all_gather", watched("gather", prefetch_gather.all_gather))
    monkeypatch.setattr(parameters, "reduce_scatter", watched("reduce", prefetch_gather.reduce_scatter))
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gathers_are_a_block_ahead_and_gradients_are_reduced_beside_the_next_block(
    calls: Calls, recompute: str
) -> None:
    torch.manual_seed(0)
    model, x = Residuals(), torch.randn(4, WIDTH)
    traced = trace(model, (x,))
    plan = planned(traced, data=2, zero=3, recompute=recompute)
    with Simulation(model, traced.captured, plan.assignment) as simulation:
        (inputs,) = simulation.inputs((x,), {})[0]
        for _ in range(2):
            calls.clear()
            loss, _ = simulation.module(inputs)
            assert calls == [
                "gather 0", "gather 1", "wait gather 0", "gather 2", "wait gather 1",
                "gather 3", "wait gather 2", "wait gather 3",
            ]  # fmt: skip
            calls.clear()
            loss.backward()
            assert calls == [
                "gather 0", "gather 1", "wait gather 0", "reduce 0",
                "gather 2", "wait gather 1", "wait reduce 0", "reduce 1",
                "gather 3", "wait gather 2", "wait reduce 1", "reduce 2",
                "wait gather 3", "wait reduce 2", "reduce 3", "wait reduce 3",
            ]  # fmt: skip
        calls.clear()
        with torch.no_grad():
            simulation.module(inputs)
        assert sum(call.startswith("gather") for call in calls) == LAYERS


@pytest.mark.parametrize("recompute, pin", [
    ("full", {}), ("none", {"pipeline": 2}), ("full", {"pipeline": 2, "schedule": "zero_bubble", "virtual_stages": 1}),
], ids=str)  # fmt: skip
def test_micro_batched_gathers_are_a_block_ahead_within_an_action(
    calls: Calls, recompute: str, pin: Mapping[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward, and in backward of blocks that gather again; nothing is on its way from one action to another."""
    torch.manual_seed(0)
    model, x = Residuals(layers=2 * LAYERS), torch.randn(4, WIDTH)
    traced, acts, do = trace(model, (x,)), list[tuple[Action, int]](), _Run._act

    def act(run: _Run, actions: StageActions, action: Action) -> None:
        acts.append((action, len(calls)))
        do(run, actions, action)

    monkeypatch.setattr(_Run, "_act", act)
    plan = planned(traced, data=2, zero=3, micro_batches=2, recompute=recompute, **{"schedule": "1f1b", **pin})
    assignment, micro_batched = staged(plan, assign(traced, plan))
    with Simulation(model, traced.captured, assignment, 0, micro_batched) as simulation:
        (inputs,) = simulation.inputs((x,), {})[0]
        for _ in range(2):
            calls.clear()
            acts.clear()
            simulation.module(inputs)[0].backward()
            ends = [*(begin for _, begin in acts[1:]), len(calls)]
            found = {action: calls[begin:end] for (action, begin), end in zip(acts, ends, strict=True)}
            gathers = {action: [call for call in sent if "gather" in call] for action, sent in found.items()}
            assert all(sent == one_ahead(sent) for sent in gathers.values())
            assert all(len(sent) >= 2 * 3 for (_, kind, _), sent in gathers.items() if kind == "F")
            again = {action: len(sent) for action, sent in gathers.items() if action.kind in "BW"}
            assert all(again.values()) and max(again.values()) >= 2 * 3
        calls.clear()
        with torch.no_grad():
            simulation.module(inputs)
        assert len(calls) == 2 * sum(call.startswith("gather") for call in calls) >= 2 * 2 * LAYERS


def test_micro_batched_a_plan_that_waits_gathers_nothing_ahead(calls: Calls) -> None:
    torch.manual_seed(0)
    ref = reference(Residuals(), (torch.randn(4, WIDTH),))
    plan = planned(ref.traced, data=2, zero=3, micro_batches=2, recompute="full")
    data = plan.to_dict()
    waiting = Plan.from_dict({**data, "pipeline": {**data["pipeline"], "waits": True}})
    for each in (plan, waiting):
        assignment, micro_batched = staged(each, assign(ref.traced, each))
        calls.clear()
        assert simulate(ref, assignment, 0, micro_batched).worst[0] <= 1e-10
        gathers = [call for call in calls if "gather" in call]
        one_by_one = [name for call in gathers if not call.startswith("wait") for name in (call, f"wait {call}")]
        assert (gathers == one_by_one) == (each is waiting)


def one_ahead(gathers: list[str]) -> list[str]:
    """Just these gathers, each sent before the one before it is waited for."""
    sent = [call for call in gathers if not call.startswith("wait")]
    found = sent[:1]
    for call, following in zip_longest(sent, sent[1:]):
        found += [following] if following else []
        found.append(f"wait {call}")
    return found


@pytest.mark.parametrize("ranks, recompute", [(2, "none"), (3, "full")])
def test_a_step_of_zero_3_passes_each_chunk_three_times(
    ranks: int, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gathers and a reduce-scatter of each: 6 (P-1)/P bytes of every parameter in bfloat16, none for padding."""
    model, x = Residuals().bfloat16(), torch.randn(6, WIDTH, dtype=torch.bfloat16)
    traced, pins = trace(model, (x,)), Pins.parse({"data": ranks, "zero": 3, "recompute": recompute})
    plan = plan_traced(traced, ClusterSpec.local(ranks), pins, Training())
    passed: dict[str, list[float]] = {"gather": [], "reduce": []}

    def all_gather(every: Tensor, own: Tensor, **options: Any) -> Any:  # in a ring, to each of the others
        passed["gather"].append((ranks - 1) * own.numel() * own.element_size())
        return gather(every, own, **options)

    def reduce_scatter(own: Tensor, every: Tensor, **options: Any) -> Any:
        passed["reduce"].append((ranks - 1) / ranks * every.numel() * every.element_size())
        return reduce(own, every, **options)

    gather, reduce = prefetch_gather.all_gather, parameters.reduce_scatter
    monkeypatch.setattr(prefetch_gather, "all_gather", all_gather)
    monkeypatch.setattr(parameters, "reduce_scatter", reduce_scatter)
    with Simulation(model, traced.captured, plan.assignment) as simulation:
        (inputs,) = simulation.inputs((x,), {})[0]
        simulation.module(inputs)[0].backward()
    assert {kind: len(each) for kind, each in passed.items()} == {"gather": 2 * LAYERS, "reduce": LAYERS}
    count = sum(parameter.numel() for parameter in model.parameters())
    assert sum(passed["gather"]) + sum(passed["reduce"]) == pytest.approx(6 * (ranks - 1) / ranks * count, rel=1e-12)
    predicted = [(call.kind, number) for call, number in plan.predicted.collectives if call.bytes_in > 8]
    assert sorted(predicted) == [("all_gather", LAYERS), ("all_gather", LAYERS), ("reduce_scatter", LAYERS)]


@pytest.mark.parametrize("pin", [{}, {"micro_batches": 2}], ids=str)
def test_a_step_that_failed_leaves_nothing_to_the_next(calls: Calls, pin: Mapping[str, object]) -> None:
    torch.manual_seed(0)
    model, x = Residuals(), torch.randn(4, WIDTH)
    traced = trace(model, (x,))
    plan = planned(traced, data=2, zero=3, **pin)
    assignment, micro_batched = staged(plan, assign(traced, plan))
    with Simulation(model, traced.captured, assignment, 0, micro_batched) as simulation:
        module, (inputs,) = simulation.module, simulation.inputs((x,), {})[0]

        def gradients() -> list[Tensor]:
            """Of two forwards and backwards, added up."""
            calls.clear()
            module.zero_grad()
            for _ in range(2):
                module(inputs)[0].backward()
            grads = [p.grad.to_local() for p in module.parameters() if isinstance(p.grad, DTensor)]
            return [part.clone() for grad in grads for part in grad._local_tensors.values()]

        expected, once = gradients(), [*calls]
        for fails in ("wait gather 1", "wait gather 6", "reduce 2"):  # in forward, and twice in backward
            calls.fails = fails
            with pytest.raises(RuntimeError, match=fails):
                gradients()
            calls.fails = ""
            assert all(map(torch.equal, gradients(), expected))
            assert calls == once
    assert len(expected) == 2 * 4 * LAYERS


@pytest.mark.parametrize("recompute, pin", [("none", {"micro_batches": 2}), ("full", {})], ids=str)
def test_a_forward_that_failed_holds_no_gathered_memory(
    calls: Calls, recompute: str, pin: Mapping[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not until garbage is collected either."""
    model, x = Residuals(), torch.randn(4, WIDTH)
    traced = trace(model, (x,))
    plan = planned(traced, data=2, zero=3, recompute=recompute, **pin)
    assignment, micro_batched = staged(plan, assign(traced, plan))
    alive: weakref.WeakSet[object] = weakref.WeakSet()

    class Watched(prefetch_gather.PrefetchedGather):
        def start(self) -> None:
            alive.add(self)
            super().start()

    monkeypatch.setattr(parameters, "PrefetchedGather", Watched)
    with Simulation(model, traced.captured, assignment, 0, micro_batched) as simulation:
        (inputs,) = simulation.inputs((x,), {})[0]
        gc.collect()
        gc.disable()
        try:
            for calls.fails in ("gather 0", "wait gather 1", "gather 3"):
                calls.clear()
                with pytest.raises(RuntimeError, match=calls.fails):
                    simulation.module(inputs)
                assert not alive
            calls.fails = ""
            simulation.module(inputs)
            assert not alive
        finally:
            gc.enable()


MICRO_BATCHED: Mapping[str, object] = {"micro_batches": 2, "recompute": "full"}


@pytest.mark.parametrize("form, pin", [
    ({"frozen": 2}, {}),
    ({"frozen": LAYERS - 1}, {"recompute": "full"}),
    ({"shifted": 3, "layers": 6}, {}),
    ({"shifted": 3, "layers": 6}, {"recompute": "full"}),
    ({"beside": 2}, {"recompute": "full"}),
    ({"frozen": 2}, {**MICRO_BATCHED, "pipeline": 2, "schedule": "zero_bubble"}),
    ({"frozen": LAYERS - 1}, MICRO_BATCHED),
    ({"shifted": 3, "layers": 6}, MICRO_BATCHED),
    ({"beside": 2}, {**MICRO_BATCHED, "pipeline": 2, "schedule": "zero_bubble"}),
    ({"beside": 2}, {"replicate": 2}),
], ids=str)  # fmt: skip
def test_nothing_is_gathered_for_a_block_that_backward_does_not_reach(
    form: Mapping[str, int], pin: Mapping[str, object]
) -> None:
    """Calls are as predicted, and gradients those of the model."""
    torch.manual_seed(0)
    model, x = Residuals(**form), torch.randn(4, WIDTH)
    autopar.verify(model, planned(trace(model, (x,)), data=2, zero=3, **pin), example_args=(x,))


class Headed(Residuals):
    """With a head beside the loss, in whose block the loss is too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, y = super().forward(x)
        return loss, self.head(y)


def test_a_block_that_is_asked_for_nothing_gathers_nothing_again() -> None:
    """Backward passes the head's block and needs nothing of what the head gave up."""
    torch.manual_seed(0)
    pin = {"data": 2, "zero": 3, "recompute": "full"}
    verify(Headed(), ClusterSpec.local(2), example_args=(torch.randn(4, WIDTH),), pin=pin)
