"""Plans of real models: read back, edited, priced again, and refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import ClusterSpec, Plan
from autopar.driver.plan import assign
from autopar.driver.trace import trace
from planner.base.errors import InputError, PinError, PlanError
from planner.plan.document.document import BlockPlan


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 3, width: int = 64):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.layers = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.stem(x)).square().mean()


def cluster(devices: int = 4) -> ClusterSpec:
    return ClusterSpec.local(devices, memory_bytes="1 GiB", cores=2)


def example(batch: int = 32, width: int = 64) -> dict[str, Any]:
    return {"x": torch.zeros(batch, width)}


@cache
def planned() -> Plan:
    return autopar.plan(Model(), cluster(), example_kwargs=example(), pin={"tensor": 4})


def reread(plan: Plan) -> dict[str, Any]:
    return json.loads(json.dumps(plan.to_dict()))  # type: ignore[no-any-return]


def test_one_sequence_on_one_device_has_a_plan() -> None:
    plan = autopar.plan(Model(), cluster(1), example_kwargs=example(batch=1), pin={"data": 1})
    assert plan.search.status == "optimal"


def test_a_plan_with_compiled_blocks_is_priced_with_them_and_again_from_its_file() -> None:
    pin = {"tensor": 4, "compile": True}
    plan = autopar.plan(Model(), cluster(), example_kwargs=example(), pin=pin)
    assert plan.predicted.time_s["compute"] < planned().predicted.time_s["compute"]
    priced = autopar.evaluate(Model(), Plan.from_dict(reread(plan)), example_kwargs=example())
    assert priced.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s)


def test_a_plan_is_applied_from_its_file(tmp_path: Path) -> None:
    planned().save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == planned()
    assert planned().assignment is not None
    assert assign(trace(Model(), None, example()), loaded).chosen == planned().assignment.chosen


def test_an_edited_entry_is_applied_and_computes_the_same() -> None:
    data = reread(planned())
    data["pin"] = {}
    layer = next(block for block in data["blocks"] if block["count"] == 3)
    assert layer["ops"]["up: linear"] == "tensor:n"
    layer["ops"]["up: linear"] = "tensor:k"
    edited = Plan.from_dict(data)
    torch.manual_seed(0)
    report = autopar.verify(Model(), edited, example_kwargs={"x": torch.randn(32, 64)})
    assert "verified" in str(report)
    priced = autopar.evaluate(Model(), edited, example_kwargs=example())
    assert priced.search.status == "edited"
    assert priced.predicted.step_time_s > planned().predicted.step_time_s
    assert next(block for block in priced.blocks if block.count == 3).ops["up: linear"] == "tensor:k"


def test_an_entry_changed_in_python_is_applied() -> None:
    def edited(block: BlockPlan) -> BlockPlan:
        return replace(block, ops={**block.ops, "up: linear": "tensor:k"}) if block.count == 3 else block

    plan, traced = planned(), trace(Model(), None, example())
    changed = replace(plan, pin={}, blocks=tuple(map(edited, plan.blocks)))
    assert changed.assignment is None and plan.assignment is not None
    found = assign(traced, changed)
    assert changed.blocks != plan.blocks and found.chosen != plan.assignment.chosen
    assert found.chosen == assign(traced, Plan.from_dict(reread(changed))).chosen
    with pytest.raises(PlanError, match=r"read from a file, or changed, .* give it one with autopar\.evaluate"):
        changed.at(batch=8)


def test_a_pin_changed_in_python_must_be_respected() -> None:
    plan = autopar.plan(Model(), cluster(), example_kwargs=example(), pin={"data": 4, "zero": 0})
    assert autopar.evaluate(Model(), plan, example_kwargs=example()).search.status == "optimal"
    with pytest.raises(PlanError, match=r'impossible there under its pin \{"data": 4, "zero": 3\}'):
        autopar.evaluate(Model(), replace(plan, pin={"data": 4, "zero": 3}), example_kwargs=example())


def test_an_impossible_entry_is_refused_with_what_is_possible() -> None:
    data = reread(planned())
    data["pin"] = {}
    next(block for block in data["blocks"] if block["count"] == 3)["ops"]["up: linear"] = "tensor:heads"
    with pytest.raises(
        PlanError, match=r"'tensor:heads' for block 'layers\.\*', ops, 'up: linear'.*possible.*'tensor:n'"
    ):
        autopar.evaluate(Model(), Plan.from_dict(data), example_kwargs=example())


@pytest.mark.parametrize(
    "model, batch, message",
    [
        (
            Model(layers=2),
            example(),
            r"parameters: plan \d+, model \d+; block: plan 3 x layers\.\*, model 2 x layers\.\*",
        ),
        (Model(), example(batch=16), "input x: plan 32x64, model 16x64"),
        (nn.Sequential(nn.Linear(64, 64)), {"input": torch.zeros(32, 64)}, "class: plan Model, model Sequential"),
    ],
    ids=["fewer layers", "smaller batch", "another class"],
)
def test_a_plan_of_another_model_says_what_differs(model: nn.Module, batch: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        autopar.evaluate(model, Plan.from_dict(reread(planned())), example_kwargs=batch)


def test_a_plan_of_other_dtypes_says_which() -> None:
    """A parameter of the stem is the first, with three blocks of six, its bias and the input besides."""
    other, batch = Model().double(), {"x": torch.zeros(32, 64, dtype=torch.float64)}
    told = (
        r"\(parameter stem\.weight: plan float32, model float64, and 20 more in another dtype\): plan again for these"
    )
    for plan in (planned(), Plan.from_dict(reread(planned()))):
        with pytest.raises(PlanError, match=told) as refused:
            autopar.evaluate(other, plan, example_kwargs=batch)
        assert "other shapes" not in str(refused.value) and "sorted" not in str(refused.value)


def test_a_plan_for_another_number_of_devices_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan is for 4 devices, the cluster has 8"):
        autopar.parallelize(Model(), cluster(8), plan=planned(), example_kwargs=example())


def test_a_batch_that_does_not_divide_is_named() -> None:
    with pytest.raises(PinError, match="pin 'data' is 4 but input 'x' has a batch of 30"):
        autopar.plan(Model(), cluster(), example_kwargs=example(batch=30), pin={"data": 4})


def test_without_inputs_the_error_says_what_to_pass() -> None:
    with pytest.raises(InputError, match="example"):
        autopar.plan(Model(), cluster())
