"""Micro-batched steps: micro-batches and pipelines, all stages in one process, against the original on the global
batch.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import autopar
from autopar.driver.plan import assign, plan_traced, staged
from autopar.driver.trace import trace
from autopar.emit.block_program import ProgramBuilder
from autopar.emit.build import MicroBatched
from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.pipeline.used_parameters import UsedParameters
from autopar.verification.float64 import exact
from autopar.verification.reference import Reference, reference
from autopar.verification.simulator import Simulation
from autopar.verification.typecheck import typecheck
from autopar.verification.verify import observed_step, simulate
from planner.base.errors import InputError, VerificationError
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from tests.autopar import workers

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("gpt2", {"micro_batches": 2, "pipeline": 2, "data": 2, "tensor": 2, "zero": 3}, 8),
    ("llama", {"micro_batches": 2, "tensor": 2, "sequence_parallel": True}, 2),
    ("llama", {"micro_batches": 4, "pipeline": 4, "data": 2, "recompute": "full"}, 8),
    ("llama", {"micro_batches": 1, "pipeline": 2, "tensor": 2}, 4),
    (
        "llama",
        {"micro_batches": 4, "pipeline": 2, "data": 2, "zero": 3, "schedule": "zero_bubble", "recompute": "full"},
        4,
    ),
    ("llama", {"micro_batches": 4, "pipeline": 2, "tensor": 2, "schedule": "dualpipev", "recompute": "full"}, 4),
    ("gpt2", {"micro_batches": 4, "pipeline": 2, "tensor": 2, "schedule": "zbv"}, 4),
]


def name_of(value: object) -> str:
    return "+".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@functools.cache
def original(name: str) -> Reference:
    return reference(workers.model_of(name), None, workers.batch_of(name), workers.loss_fn)


@pytest.mark.parametrize("name, pin, ranks", CASES, ids=name_of)
def test_a_step_is_the_original_s(name: str, pin: dict[str, Any], ranks: int) -> None:
    ref, assignment, micro_batched = micro_batched_of(name, pin, ranks)
    with exact(), Simulation(ref.model, ref.traced.captured, assignment, 0, micro_batched) as simulation:
        found = observed_step(ref, assignment, simulation)
    assert found.worst[0] <= 1e-10, found.worst
    assert len(found.gradients) == len(ref.gradients)
    assert not found.miscounted
    assert typecheck(ref.traced.captured, assignment, micro_batched).operators > 0


def micro_batched_of(name: str, pin: dict[str, Any], ranks: int) -> tuple[Reference, Assignment, MicroBatched]:
    ref = original(name)
    plan = plan_traced(ref.traced, workers.cluster_of(ranks), Pins.parse(pin), Training())
    assignment, micro_batched = staged(plan, assign(ref.traced, plan))
    assert micro_batched is not None
    return ref, assignment, micro_batched


def test_a_gradient_that_nobody_sums_is_caught_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    ref, assignment, micro_batched = micro_batched_of(
        "gpt2", {"micro_batches": 2, "pipeline": 2, "data": 2, "zero": 0}, 4
    )
    monkeypatch.setattr(ProgramBuilder, "made_replicated", lambda self, refs, values, *_: values)
    with pytest.raises(VerificationError, match=r"use it: on axis 'data' it has type .*I, the plan says .*R"):
        typecheck(ref.traced.captured, assignment, micro_batched)


def test_tokens_are_counted_over_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch ignores another number of tokens: with the mean of their means the loss is another."""
    ref, assignment, micro_batched = micro_batched_of("llama", {"micro_batches": 4, "data": 2}, 2)
    assert len({int((rows != -100).sum()) for rows in ref.kwargs["target"].chunk(4)}) > 1
    counted = torch.tensor(4)
    monkeypatch.setattr(UsedParameters, "_counted", lambda self, stage: (counted,))
    assert simulate(ref, assignment, 0, micro_batched).worst[0] > 1e-3


def test_a_step_needs_a_loss() -> None:
    model, kwargs = workers.model_of("gpt2"), {"input_ids": workers.batch_of("gpt2")["input_ids"]}
    with pytest.raises(InputError, match=r"must return its loss .* loss_fn: .* forward only, call model\.eval\(\)"):
        autopar.plan(model, workers.cluster_of(2), example_kwargs=kwargs, pin={"micro_batches": 2})
    plan = autopar.plan(model, workers.cluster_of(2), example_kwargs=kwargs)
    assert (
        plan.pipeline is None and "pipelines and micro-batches, since the model returns no loss" in plan.search.left_out
    )
    ref = reference(model.eval(), None, kwargs)
    plan = plan_traced(ref.traced, workers.cluster_of(2), Pins.parse({"micro_batches": 2}), Training())
    assignment, micro_batched = staged(plan, assign(ref.traced, plan))
    with exact(), Simulation(ref.model, ref.traced.captured, assignment, 0, micro_batched) as simulation:
        args, inputs = simulation.inputs((), ref.kwargs)
        with pytest.raises(InputError, match="must return its loss"):
            simulation.module(*args, **inputs)
        with torch.no_grad():
            logits = simulation.module(*args, **inputs).logits
        spec = next(spec for spec in simulation.module.interface.outputs if spec is not None)
        whole = simulation.whole(logits, spec.layout, spec.shape)
    assert torch.allclose(whole, ref.outputs[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind, said", [("F", "forward"), ("B", "backward")])
def test_an_error_in_a_stage_says_where(kind: str, said: str) -> None:
    """An operator of the second stage fails on the second micro-batch."""
    ref, assignment, micro_batched = micro_batched_of(
        "gpt2", {"micro_batches": 2, "pipeline": 2, "schedule": "gpipe"}, 2
    )
    with exact(), Simulation(ref.model, ref.traced.captured, assignment, 0, micro_batched) as simulation:
        step = simulation.module.program
        assert isinstance(step, PipelineStep)
        stage, calls = step.spec.stages[1], itertools.count()

        def fail(*_: Any) -> None:
            raise ValueError("out of order")

        def run(*values: Any) -> Any:
            results = stage.program(*values)
            if next(calls) == 1:
                results[0].register_hook(fail) if kind == "B" else fail()
            return results

        step.spec.stages[1] = replace(stage, program=cast(Any, run))
        args, kwargs = simulation.inputs(ref.args, ref.kwargs)
        with pytest.raises(ValueError, match="out of order") as caught:
            simulation.module(*args, **kwargs)
    assert caught.value.__notes__ == [f"on rank 0, in action 1{kind}1: {said} of micro-batch 1 in stage 1"]


def test_a_loss_is_handed_over_once_and_scaled() -> None:
    ref, assignment, micro_batched = micro_batched_of("llama", {"micro_batches": 2, "pipeline": 2}, 2)
    with exact(), Simulation(ref.model, ref.traced.captured, assignment, 0, micro_batched) as simulation:
        args, kwargs = simulation.inputs(ref.args, ref.kwargs)
        loss = simulation.module(*args, **kwargs)
        (loss * 4).backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=r"once a step"):
            loss.backward()
        own = dict(simulation.module.named_parameters())
        layouts = {leaf.name: leaf.layout for leaf in simulation.module.interface.leaves}
        for name, gradient in ref.gradients.items():
            mine = own[name].grad
            assert mine is not None
            got = simulation.whole(mine, layouts[name], tuple(gradient.shape))
            assert torch.allclose(got, 4 * gradient, rtol=1e-9, atol=1e-12), name


def test_a_scale_keeps_small_gradients_of_half_precision() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    batch, scale = {"input": torch.randn(8, 16)}, 2.0**16
    traced = trace(model, None, batch, lambda out, kwargs: out.float().pow(2).mean() * 1e-7)
    plan = plan_traced(traced, workers.cluster_of(1), Pins.parse({"micro_batches": 2}), Training())
    assignment, micro_batched = staged(plan, assign(traced, plan))
    (model(**batch).pow(2).mean() * 1e-7).backward()
    expected, found = model[0].weight.grad, []
    with Simulation(model, traced.captured, assignment, 0, micro_batched) as simulation:
        args, kwargs = simulation.inputs((), batch)
        for _ in range(2):
            simulation.module.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = simulation.module(*args, **kwargs)
            (loss * scale).backward()
            grad = simulation.module.get_parameter("0.weight").grad
            assert grad is not None and expected is not None
            layout = next(leaf.layout for leaf in simulation.module.interface.leaves if leaf.name == "0.weight")
            found.append(simulation.whole(grad, layout, (32, 16)) / scale)
    assert not found[0].any()  # before a scale is known they vanish
    assert torch.allclose(found[1], expected, rtol=0.02, atol=0.01 * expected.abs().max().item())


def test_verify_runs_all_stages() -> None:
    model, batch = workers.model_of("llama"), workers.batch_of("llama")
    pin = {"micro_batches": 2, "pipeline": 2, "tensor": 2}
    found = autopar.verify(model, workers.cluster_of(4), example_kwargs=batch, loss_fn=workers.loss_fn, pin=pin)
    assert found.verdict == "verified"
    assert found.agreement is not None and found.agreement.worst[0] < 1e-10
