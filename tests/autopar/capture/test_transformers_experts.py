"""Experts of Transformers are captured as one operator, whatever their configuration says, and left as they were."""

from __future__ import annotations

import inspect
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import autopar
from autopar.capture.capture import capture
from autopar.capture.transformers_experts import expert_of
from autopar.operators.expert import Expert
from planner.cost.cluster import ClusterSpec
from planner.ops import OPS
from tests.autopar.models import MODELS

EXPERTS = "autopar.experts.default"
LAYERS = {"mixtral": 2, "qwen2-moe": 2, "qwen3-moe": 2, "deepseek-v3": 1, "gpt-oss": 2}


def operators(model: nn.Module, batch: dict[str, Tensor]) -> Counter[str]:
    return Counter(
        str(node.target) for node in capture(model, example_kwargs=batch).graph.nodes if node.op == "call_function"
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_every_layer_is_one_operator(name: str, implementation: str) -> None:
    model, batch = MODELS[name].build()
    model.config._experts_implementation = implementation
    table = dict(ALL_EXPERTS_FUNCTIONS)
    found = operators(model, batch)
    assert found[EXPERTS] == LAYERS[name]
    assert not [op for op in found if op not in OPS and "getitem" not in op]
    assert model.config._experts_implementation == implementation and dict(ALL_EXPERTS_FUNCTIONS) == table


def test_batched_products_and_the_sizes_of_bfloat16() -> None:
    model, batch = MODELS["qwen3-moe"].build()
    model.config._experts_implementation = "batched_mm"
    assert operators(model.bfloat16(), batch)[EXPERTS] == 2


def module_with(between: Any, is_concatenated: bool = True, has_gate: bool = True, **numbers: Any) -> Any:
    return SimpleNamespace(
        has_gate=has_gate, has_post_expert_norm=False, is_transposed=False, is_concatenated=is_concatenated,
        _is_expert_parallel=False, _apply_gate=between, act_fn=between, **numbers,
    )  # fmt: skip


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return gate, up


GATES = [
    (lambda x: torch.nn.functional.gelu(split(x)[0], approximate="tanh") * split(x)[1], {}, Expert("gelu_tanh")),
    (
        lambda x: torch.nn.functional.silu(split(x)[0].clamp(max=2.0)) * split(x)[1].clamp(-2.0, 2.0),
        {"swiglu_limit": 2.0},
        Expert("silu", limit=2.0),
    ),
    (
        lambda x: (
            (split(x)[1].clamp(-7, 7) + 1) * split(x)[0].clamp(max=7) * torch.sigmoid(1.7 * split(x)[0].clamp(max=7))
        ),
        {"limit": 7.0, "alpha": 1.7},
        Expert("swish", alpha=1.7, limit=7.0, offset=1.0),
    ),
    (lambda x: torch.cos(split(x)[0]) * split(x)[1], {}, None),
    (lambda x: torch.nn.functional.silu(split(x)[0].clamp(max=30)) * split(x)[1], {"limit": 30.0}, None),
    (lambda x: torch.nn.functional.silu(split(x)[0]) * split(x)[1].clamp(-30, 30), {"limit": 30.0}, None),
    (lambda x: torch.nn.functional.silu(split(x)[0]) * split(x)[1].clamp(-5e4, 5e4), {}, None),
    (lambda x: torch.nn.functional.silu(split(x)[0]).clamp(max=7) * split(x)[1].clamp(-7, 7), {"limit": 7.0}, None),
    (lambda x: torch.nn.functional.silu(split(x)[0]) * split(x)[1], {"limit": 30.0, "alpha": 1.0}, Expert()),
]


@pytest.mark.parametrize("between, numbers, expected", GATES)
def test_what_lies_between_the_products_is_recognised_by_its_numbers(
    between: Any, numbers: dict[str, float], expected: Expert | None
) -> None:
    assert expert_of(module_with(between, **numbers)) == expected


@pytest.mark.parametrize("limit", [0.01, 1, 20.0, 25.0, 50.0, 3e3, 1e9])
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "relu", "relu2"])
def test_a_clamp_is_recognised_wherever_it_is(name: str, limit: float) -> None:
    """Beside other numbers that the module holds."""
    clamped = Expert(name, limit=float(limit))
    assert expert_of(module_with(clamped.between, swiglu_limit=limit, other_limit=2 * limit, hidden=2880)) == clamped
    plain = Expert(name)
    assert expert_of(module_with(plain.between, swiglu_limit=limit)) == plain


def test_what_two_forms_compute_alike_is_not_guessed() -> None:
    """A sigmoid is 1 above 40, in any precision."""
    assert expert_of(module_with(torch.sigmoid, has_gate=False, limit=50.0)) is None
    assert expert_of(module_with(torch.sigmoid, has_gate=False)) == Expert("sigmoid", "none")


def test_experts_without_gates() -> None:
    assert expert_of(module_with(lambda x: torch.relu(x).square(), has_gate=False)) == Expert("relu2", "none")


@use_experts_implementation
class Strange(nn.Module):
    """Experts with an activation that the operator does not know."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 8))
        self.act_fn = torch.cos

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("the configuration says batched_mm")


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Strange(SimpleNamespace(_experts_implementation="batched_mm"))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = x[:, :4].softmax(-1).topk(2)
        return self.experts(x, chosen, weights).square().mean()  # type: ignore[no-any-return]


def test_unknown_experts_run_as_configured() -> None:
    batch = {"x": torch.randn(8, 8)}
    found = operators(Around(), batch)
    assert EXPERTS not in found and found["aten.bmm.default"] == 2
    assert autopar.verify(Around(), ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2}).agreement is not None


def test_the_table_has_the_form_that_is_relied_on() -> None:
    """Their wrapper asks the table by the name in the configuration, ``eager`` included, and wraps the class's own."""
    assert inspect.unwrap(Strange.forward) is not Strange.forward
    assert "get_interface" in inspect.getsource(use_experts_implementation)
