"""Rebound plans of real models compute what the model computes, to the last gradient."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan
from planner.base.errors import InputError, PlanError
from tests.autopar.driver.test_plans import Model, cluster
from tests.autopar.models import VOCAB, labels, tokens


@cache
def planned(**pin: Any) -> Plan:
    return autopar.plan(Model(4), cluster(), example_kwargs=batch(32, 64), pin=pin)


def batch(rows: int, width: int) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"x": torch.randn(rows, width)}


def check(found: Plan, model: nn.Module, inputs: dict[str, Any], tmp_path: Path) -> None:
    """What a plan's file computes and is priced at, for the model with weights that matter."""
    found.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert autopar.evaluate(model, loaded, example_kwargs=inputs) == found
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    autopar.verify(model, loaded, example_kwargs=inputs)


ZERO_3 = {"data": 2, "tensor": 2, "zero": 3, "recompute": "full"}
STAGED = {"pipeline": 2, "micro_batches": 4, "data": 2, "zero": 1, "recompute": "full"}


@pytest.mark.parametrize(
    ("pin", "layers", "width", "rows", "devices"),
    [
        ({"data": 2, "tensor": 2}, 8, 64, 32, 4),
        ({"tensor": 4}, 4, 66, 48, 4),
        (ZERO_3, 8, 96, 32, 8),
        (STAGED, 8, 64, 64, 4),
        (STAGED, 5, 66, 36, 12),
    ],
    ids=["deeper", "undivided width and other batch", "ZeRO 3 on more devices", "deeper pipeline", "all at once"],
)
def test_a_rebound_plan_is_exact(
    pin: dict[str, Any], layers: int, width: int, rows: int, devices: int, tmp_path: Path
) -> None:
    model, inputs = Model(layers, width), batch(rows, width)
    found = planned(**pin).rebind(model, cluster(devices), example_kwargs=inputs)
    check(found, model, inputs, tmp_path)


def gpt2(layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_head=4, n_embd=width, vocab_size=VOCAB, **off))


def test_strips_of_the_sequence_follow_batch_and_length(tmp_path: Path) -> None:
    """Rows of all samples together are cut along the sequence in strips, one of each: how many is no decision."""
    inputs = {"input_ids": tokens(8, 8), "labels": labels(8, 8)}
    plan = autopar.plan(gpt2(2, 32), cluster(), example_kwargs=inputs, pin={"data": 2, "context": 2})
    assert any("context:m/8" in label for block in plan.blocks for label in block.ops.values())
    other = {"input_ids": tokens(12, 16), "labels": labels(12, 16)}
    model = gpt2(4, 48)
    found = plan.rebind(model, example_kwargs=other)
    assert not found.changes
    assert any("context:m/12" in label for block in found.blocks for label in block.ops.values())
    check(found, model, other, tmp_path)


def test_a_plan_moves_to_another_cluster_with_its_own_model() -> None:
    found = planned(data=2, tensor=2).rebind(cluster=cluster(8))
    assert found.sizes == {"data": 4, "tensor": 2}
    assert [change.what for change in found.changes] == ["mesh axis 'data'"]


def test_what_cannot_be_captured_or_told_is_refused(tmp_path: Path) -> None:
    plan = planned(tensor=4)
    with pytest.raises(InputError, match="give model, too"):
        plan.rebind(cluster=cluster(8), example_kwargs=batch(32, 64))
    with pytest.raises(InputError, match=r"time_limit_s is -1; give the seconds"):
        plan.rebind(time_limit_s=-1)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="or give model"):
        Plan.load(tmp_path / "plan.json").rebind(cluster=cluster(8))
    with pytest.raises(PlanError, match=r"The plan is of Model and has .* the model has .* plan for it with autopar"):
        plan.rebind(nn.Sequential(nn.Conv1d(4, 4, 3), nn.Tanh()), example_args=(torch.randn(8, 4, 16),))


def test_outputs_that_a_step_does_not_keep_are_carried() -> None:
    inputs = {"input_ids": tokens(8, 8), "labels": labels(8, 8)}
    plan = autopar.plan(gpt2(2, 32), cluster(2), example_kwargs=inputs, pin={"micro_batches": 2, "data": 2})
    assert plan.discards == ("logits",)
    assert plan.rebind(gpt2(4, 32), example_kwargs=inputs).discards == ("logits",)
