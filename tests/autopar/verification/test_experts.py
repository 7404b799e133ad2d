"""Mixtures of experts under every way to run them, against the model: outputs, gradients, types and collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from planner.cost.cluster import ClusterSpec
from tests.autopar.models import MODELS

WIDTH, HIDDEN = 8, 8


class Mixture(nn.Module):
    """A router, experts, a shared expert, and a loss with one that balances experts.

    Args:
        choose: overrules the router: experts of each token from scores ``[t, e]``.
    """

    def __init__(self, experts: int = 4, k: int = 2, gate: str = "halves", bias: bool = False, choose: Any = None):
        super().__init__()
        made = HIDDEN if gate == "none" else 2 * HIDDEN
        self.k, self.gate, self.choose = k, gate, choose
        self.before, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, made, WIDTH)),
            nn.Parameter(torch.randn(experts, WIDTH, HIDDEN)),
        )
        self.up_bias = nn.Parameter(torch.randn(experts, made)) if bias else None
        self.down_bias = nn.Parameter(torch.randn(experts, WIDTH)) if bias else None
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.before(x)
        scores = self.router(x).softmax(-1)
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
        return F.mse_loss(found + self.shared(x), y) + scores.square().mean()


def verified(model: Mixture, pin: dict[str, Any], ranks: int, tokens: int = 16) -> autopar.Plan:
    torch.manual_seed(0)
    batch = {"x": torch.randn(tokens, WIDTH), "y": torch.randn(tokens, WIDTH)}
    plan = autopar.plan(model, ClusterSpec.local(ranks), example_kwargs=batch, pin=pin)
    found = autopar.verify(model, plan, example_kwargs=batch)
    assert found.agreement is not None and found.agreement.agrees()
    return plan


def strategy(plan: autopar.Plan) -> str:
    (found,) = (strategy for block in plan.blocks for name, strategy in block.ops.items() if name.endswith("experts"))
    return str(found)


def layers(**wanted: str) -> dict[str, Any]:
    return {"layers": {"": wanted}}


@pytest.mark.parametrize("gate, bias", [("halves", True), ("pairs", False), ("none", True)])
@pytest.mark.parametrize("wanted", ["e", "f"])
def test_experts_and_their_parts_on_an_axis(wanted: str, gate: str, bias: bool) -> None:
    plan = verified(Mixture(gate=gate, bias=bias), {"tensor": 2, "layers": {"": {"tensor": wanted}}}, 2)
    assert strategy(plan) == f"tensor:{wanted}"


def test_a_block_that_recomputes_makes_the_rows_of_its_experts_anew() -> None:
    model, batch = MODELS["qwen3-moe"].build()
    plans = [
        autopar.plan(model, ClusterSpec.local(2), example_kwargs=batch, pin={"tensor": 2, "recompute": level})
        for level in ("none", "full")
    ]
    found = autopar.verify(model, plans[1], example_kwargs=batch)
    assert found.agreement is not None and found.agreement.agrees()
    kept = [plan.predicted.memory_bytes["activations"] for plan in plans]
    assert kept[1] < 0.6 * kept[0]
