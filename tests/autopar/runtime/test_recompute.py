"""Recomputation: gradients to the last bit, less memory, and errors where a value changed in between."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed._local_tensor import LocalTensor

import autopar
from autopar import ClusterSpec, Plan
from autopar.driver.plan import assign, plan_traced
from autopar.driver.trace import Traced, trace
from autopar.runtime.autograd.recompute import recompute
from autopar.verification.memory_meter import LiveBytes
from autopar.verification.simulator import Simulation, fake_process_group
from autopar.verification.typecheck import check_program, emit
from autopar.verification.verify import RTOL, simulate
from benchmarks.memory import observed_peak
from planner.base.errors import PlanError, VerificationError
from planner.formulation.constraints.pins import Pins
from planner.formulation.remat.levels import NOTHING, Amount, Recompute
from planner.formulation.training import Training
from planner.ops.aliasing import shares
from tests.autopar.captured_once import made
from tests.autopar.matrix import Recipe, decide, original
from tests.autopar.models import MODELS

pytestmark = pytest.mark.usefixtures("capturing_once")

DATA, TENSOR, CONTEXT, MIXED = (
    {"data": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"context": 2, "context_kind": "gather"},
    {"data": 2, "tensor": 2, "zero": 3},
)
CASES: list[tuple[str, dict[str, Any], Any]] = [
    ("gpt2", MIXED, "selective"),
    ("gpt2", TENSOR, "resharded"),
    ("functional-gpt", {"data": 2, "context": 2, "context_kind": "gather", "zero": 3}, "resharded"),
    ("llama", TENSOR, "selective"),
    ("gpt2", TENSOR, {"keep": ["*.attn*"]}),
    ("llama", MIXED, {"keep": ["*.self_attn", "*.mlp.up_proj", "*.mlp"]}),
    ("shared-layers", {"tensor": 2}, "full"),  # batch second, so that what is saved is a transposed view
]


@functools.cache
def traced(name: str) -> tuple[nn.Module, dict[str, Any], Traced]:
    model, batch = MODELS[name].build()
    return made(model, name), batch, trace(model, None, batch)


def plan_of(name: str, pin: dict[str, Any]) -> Plan:
    ranks = math.prod(pin.get(axis, 1) for axis in ("data", "tensor", "context"))
    return plan_traced(traced(name)[2], ClusterSpec.local(ranks), Pins.parse(pin), Training())


@pytest.mark.parametrize("name, pin, level", CASES, ids=str)
def test_computes_the_same_with_the_predicted_collectives(name: str, pin: dict[str, Any], level: Any) -> None:
    plan = plan_of(name, {**pin, "recompute": level})
    model, batch, _ = traced(name)
    assert plan.predicted.time_s["recompute"] > 0
    autopar.verify(model, plan, example_kwargs=batch)
    assert plan.certificate.holds


@pytest.mark.parametrize("name, sizes", [("gpt2", {"outer": 2, "inner": 2}), ("llama", {"all": 4})], ids=str)
def test_whatever_the_layouts_are_what_is_gathered_again_is_predicted(name: str, sizes: dict[str, int]) -> None:
    """In layouts that no recipe means, with reshardings one after another, forth and back."""
    assignment = decide(original(name), Recipe("random 0", sizes, seed=0))
    kinds = enumerate(assignment.space.folded.kinds)
    amounts = [Amount.of({"resharded": len(each)} if len(each) > 1 else {}) for _, each in kinds]
    assert any(
        assignment.comes_to(kind, "resharded") == "resharded" for kind, each in enumerate(amounts) if each.levels
    )
    found = simulate(original(name), replace(assignment, recompute=Recompute(tuple(amounts))))
    assert not found.miscounted and found.worst[0] <= RTOL


@pytest.mark.parametrize(
    "name, pin, level",
    [
        ("llama", DATA, "selective"),
        ("llama", MIXED, "full"),
        ("llama", TENSOR, {"keep": ["*.self_attn", "*.mlp"]}),
        ("gpt2", TENSOR, "resharded"),
        ("functional-gpt", CONTEXT, "resharded"),
    ],
    ids=str,
)
def test_holds_less_and_as_much_as_predicted(name: str, pin: dict[str, Any], level: Any) -> None:
    model, _, captured = traced(name)
    whole, less = (plan_of(name, {**pin, "recompute": each}) for each in ("none", level))
    seen = [observed_peak(model, captured, plan.assignment) for plan in (whole, less)]
    assert seen[1] < seen[0]
    assert less.predicted.peak_bytes == pytest.approx(seen[1], rel=0.08)


def test_a_plan_may_recompute_some_of_its_blocks(tmp_path: Any) -> None:
    model, batch, captured = traced("gpt2")
    data = json.loads(json.dumps(plan_of("gpt2", {"data": 2}).to_dict()))
    layer = next(block for block in data["blocks"] if block["count"] == 2)
    layer["recompute"] = {"full": 1, "selective": 1}
    edited = Plan.from_dict(data)
    autopar.verify(model, edited, example_kwargs=batch)
    priced = autopar.evaluate(model, edited, example_kwargs=batch)
    assert "recomputed in backward: 1 in full, 1 selectively" in str(priced)
    assert "recomputed in backward" in priced.to_html()
    priced.save(tmp_path / "plan.json")
    assert assign(captured, Plan.load(tmp_path / "plan.json")).recompute == priced.assignment.recompute  # type: ignore[union-attr]


def test_a_plan_may_say_which_results_its_blocks_keep(tmp_path: Any) -> None:
    """In backward nothing runs again that is kept, or that only what is kept needs."""
    model, batch, captured = traced("gpt2")
    data = json.loads(json.dumps(plan_of("gpt2", {"data": 2}).to_dict()))
    layer = next(block for block in data["blocks"] if block["count"] == 2)
    layer["recompute"] = {"lean": 1, "selective": 1}
    layer["keeps"] = {"lean": ["attn.c_attn: addmm", "attn: scaled_dot_product_attention"]}
    edited = Plan.from_dict(data)
    autopar.verify(model, edited, example_kwargs=batch)
    priced = autopar.evaluate(model, edited, example_kwargs=batch)
    words = "part 1 keeps attn.c_attn (addmm), attn (scaled_dot_product_attention)"
    assert "recomputed in backward: 1 but for part 1, 1 selectively" in str(priced)
    assert words in str(priced) and words in priced.to_html()
    priced.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == priced and assign(captured, again).recompute == priced.assignment.recompute  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "keeps, says",
    [
        ({"lean": ["attn.c_atn: addmm"]}, "which the block does not have; did you mean 'attn.c_attn: addmm'?"),
        ({"lean": ["attn: transpose.int"]}, "whose result lies in the memory of its operand"),
        ({"full": ["attn.c_attn: addmm"], "lean": []}, "give the level another name"),
        ({}, "'lean' keeps"),
        ({"lean": "attn.c_attn: addmm"}, "'keeps', 'lean' is 'attn.c_attn: addmm', and takes a list"),
    ],
    ids=str,
)
def test_wrong_results_to_keep_are_refused(keeps: dict[str, Any], says: str) -> None:
    model, batch, _ = traced("gpt2")
    data = json.loads(json.dumps(plan_of("gpt2", {"data": 2}).to_dict()))
    next(block for block in data["blocks"] if block["count"] == 2).update(recompute={"lean": 2}, keeps=keeps)
    with pytest.raises(PlanError, match=re.escape(says)):
        autopar.evaluate(model, Plan.from_dict(data), example_kwargs=batch)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"full": 3}, "block 'transformer.h.*' has 2 instances, of which 3 recompute"),
        ({"some": 1}, "it takes 'gathered', 'resharded', 'selective', 'full', each with a whole number"),
        ({"full": -1}, "block 'transformer.h.*', 'recompute', has -1, and sizes, counts and seconds are not below 0"),
    ],
)
def test_wrong_amounts_in_a_plan_are_refused(wrong: dict[str, int], says: str) -> None:
    model, batch, _ = traced("gpt2")
    data = json.loads(json.dumps(plan_of("gpt2", {"data": 2}).to_dict()))
    next(block for block in data["blocks"] if block["count"] == 2)["recompute"] = wrong
    with pytest.raises(PlanError, match=re.escape(says)):
        autopar.evaluate(model, Plan.from_dict(data), example_kwargs=batch)


def test_tight_memory_makes_the_search_recompute() -> None:
    free = plan_of("llama", {"data": 2, "zero": 0, "recompute": "none"})
    room = int(free.predicted.peak_bytes / 0.9) - 20_000
    cluster = ClusterSpec.local(2, memory_bytes=room)
    plan = plan_traced(traced("llama")[2], cluster, Pins.parse({"data": 2, "zero": 0}), Training())
    assert plan.assignment is not None and plan.assignment.recompute
    assert plan.predicted.peak_bytes <= cluster.device.usable_bytes < free.predicted.peak_bytes


# ---- random numbers --------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Blocks that drop values and attention's scores; ``widely``, also inside attention, with noise, and by alpha."""

    def __init__(self, hidden: int = 16, layers: int = 3, widely: bool = True):
        super().__init__()
        self.widely = widely
        self.up = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            q, k, v = up(F.dropout(x, 0.1)).chunk(3, dim=-1)
            mixed = F.dropout(F.softmax(q @ k.transpose(1, 2), dim=-1), 0.2) @ v
            if self.widely:
                fused = F.scaled_dot_product_attention(*(each.unsqueeze(1) for each in (q, k, v)), dropout_p=0.3)
                mixed = F.alpha_dropout(mixed + fused.squeeze(1), 0.1, training=True)
                mixed = torch.rand_like(mixed) * mixed
            x = x + F.dropout(down(mixed), 0.1)
        return x.square().mean()


def test_what_was_dropped_is_dropped_again() -> None:
    """Loss and gradients are those without recomputation, to the last bit, and so are those of the next step."""
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(8, 6, 16)
    captured = trace(model, (x,))
    pins = Pins.parse({**MIXED, "recompute": "full"})
    assignment = plan_traced(captured, ClusterSpec.local(4, cores=2), pins, Training()).assignment
    assert assignment is not None and assignment.recompute
    amounts = assignment.recompute.amounts
    selective = Recompute(tuple(Amount.of({"selective": each.count("full")}, leads=each.leads) for each in amounts))
    nodes = max(assignment.space.folded.kinds, key=len)[0].block.nodes
    some = tuple(at for at, node in enumerate(nodes) if not shares(node) and at % 3)
    partly = Recompute(tuple(Amount.of({some: each.count("full")}, leads=each.leads) for each in amounts))
    found = {}
    levels = (("none", NOTHING), ("selective", selective), ("partly", partly), ("full", assignment.recompute))
    for level, amounts_ in levels:
        recomputing = replace(assignment, recompute=amounts_)
        with Simulation(model, captured.captured, recomputing, seed=1) as simulation:
            inputs = simulation.inputs((x,), {})[0]
            module, steps = simulation.module, []
            for _ in range(2):
                loss = module(*inputs)
                loss.backward()
                grads = [p.grad.to_local() for p in module.parameters() if p.grad is not None]
                steps.append([parts_of(value) for value in (loss, *grads)])
            found[level] = steps
    assert len(found["none"][0]) == 13
    assert not same(found["none"][0], found["none"][1])
    assert all(same(a, b) for level, _ in levels for a, b in zip(found[level], found["none"], strict=True))


def parts_of(value: Tensor) -> list[Tensor]:
    """A copy of every rank's part."""
    assert isinstance(value, LocalTensor)
    return [part.detach().clone() for part in value._local_tensors.values()]


def same(some: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    pairs = [pair for a, b in zip(some, others, strict=True) for pair in zip(a, b, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def test_what_is_dropped_is_not_held_until_backward() -> None:
    """Masks are let go, and predicted to be: peaks as observed."""
    torch.manual_seed(0)
    model, x = Dropping(hidden=32, layers=6, widely=False), torch.randn(16, 32, 32)
    captured = trace(model, (x,))
    peaks = []
    for level in ("none", "selective", "full"):
        pins = Pins.parse({"data": 2, "recompute": level})
        plan = plan_traced(captured, ClusterSpec.local(2, cores=2), pins, Training())
        peaks.append(observed_peak(model, captured, plan.assignment))
        assert plan.predicted.peak_bytes == pytest.approx(peaks[-1], rel=0.03), level
    assert peaks[2] < peaks[1] < peaks[0]


def test_a_model_that_stopped_training_in_between_recomputes_as_it_ran() -> None:
    model, x = Dropping(), torch.randn(8, 6, 16)
    captured = trace(model, (x,))
    pins = Pins.parse({"data": 2, "recompute": "full"})
    plan = plan_traced(captured, ClusterSpec.local(2, cores=2), pins, Training())
    found = []
    for trains in (True, False):
        with Simulation(model, captured.captured, plan.assignment, seed=1) as simulation:
            loss = simulation.module(*simulation.inputs((x,), {})[0])
            simulation.module.train(trains)
            loss.backward()
            assert simulation.module.training == trains
            grads = [p.grad.to_local() for p in simulation.module.parameters() if p.grad is not None]
            found.append([parts_of(grad) for grad in grads])
    assert same(*found)


def test_wrong_programs_are_caught_by_their_types() -> None:
    """A resharding left out of what is run again gives a part where the whole was."""
    _, _, captured = traced("llama")
    plan = plan_of("llama", {"tensor": 2, "sequence_parallel": True, "recompute": "full"})
    with fake_process_group(2):
        program, groups = emit(captured.captured, plan.assignment)
        again = next(m for name, m in program.module.named_children() if name.endswith("_again"))
        assert isinstance(again, fx.GraphModule)
        node = next(n for n in again.graph.nodes if n.name.endswith("_r") and n.op == "call_function")
        node.replace_all_uses_with(node.args[0])
        again.graph.erase_node(node)
        again.recompile()
        with pytest.raises(VerificationError):
            check_program(program, captured.captured, plan.assignment, groups)


# ---- the runtime by itself -------------------------------------------------------------------------------------------


def program_of(function: Callable[..., Any]) -> fx.GraphModule:
    return fx.symbolic_trace(function)


def block(x: Tensor, weight: Tensor) -> Any:
    hidden = torch.tanh(x)
    product = hidden @ weight
    return (product * product).sum(), (hidden, product), (x, weight)


def again(x: Tensor, weight: Tensor) -> Any:
    hidden = torch.tanh(x)
    return hidden, hidden @ weight


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(64, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)


def test_gradients_are_the_same_bits_also_twice() -> None:
    x, weight = inputs()
    expected = torch.autograd.grad(block(x, weight)[0], (x, weight))
    loss = recompute(program_of(block), program_of(again), x, weight)
    for _ in range(2):
        found = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_values_are_let_go_until_backward() -> None:
    x, weight = inputs()
    with LiveBytes((x, weight)) as kept:
        loss = block(x, weight)[0]
        before = kept.now
    del loss
    with LiveBytes((x, weight)) as less:
        loss = recompute(program_of(block), program_of(again), x, weight)
        after = less.now
        loss.backward()
    assert before - after >= 2 * 64 * 32 * 4
    assert less.now <= before


class Probe(torch.autograd.Function):
    """Passes a value on; ``seen`` is called when its gradient comes back."""

    seen: Callable[[], object] = print

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Probe.seen()
        return grad


@fx.wrap
def probed(value: Tensor) -> Tensor:
    return Probe.apply(value)  # type: ignore[no-any-return, no-untyped-call]


def test_what_is_kept_goes_as_backward_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a block's backward, what only later operators needed is no longer there."""

    def run(x: Tensor, weight: Tensor) -> Any:
        hidden = torch.tanh(x)
        product = probed(hidden) @ weight
        return (product * product).sum(), (hidden,), (x, weight)

    def only_hidden(x: Tensor, weight: Tensor) -> Any:
        return (torch.tanh(x),)

    held: list[int] = []
    for recomputes in (False, True):
        x, weight = inputs()
        with LiveBytes((x, weight)) as live:
            monkeypatch.setattr(Probe, "seen", staticmethod(lambda live=live: held.append(live.now)))
            loss = recompute(program_of(run), program_of(only_hidden), x, weight) if recomputes else run(x, weight)[0]
            loss.backward()
    assert held[1] <= held[0]


def test_without_gradients_the_program_just_runs() -> None:
    x, weight = inputs()
    with torch.no_grad():
        assert torch.equal(recompute(program_of(block), program_of(again), x, weight), block(x, weight)[0])


def test_autocast_of_forward_holds_when_values_are_made_again() -> None:
    x, weight = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.autograd.grad(block(x, weight)[0], (x, weight))
        loss = recompute(program_of(block), program_of(again), x, weight)
    found = torch.autograd.grad(loss, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_value_that_lies_otherwise_in_memory_is_an_error() -> None:
    x, weight = inputs()

    def transposed(x: Tensor, weight: Tensor) -> Any:
        hidden = torch.tanh(x)
        return hidden.t().contiguous().t(), hidden @ weight

    loss = recompute(program_of(block), program_of(transposed), x, weight)
    with pytest.raises(RuntimeError, match=r"recomputed with size, strides and offset .*\(1, 64\).* in forward"):
        loss.backward()


def test_a_value_changed_in_between_is_an_error() -> None:
    x, weight = inputs()
    loss = recompute(program_of(block), program_of(again), x, weight)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        loss.backward()
