"""Late experts: what a layer computes beside its experts comes between what these need and them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.capture import capture
from autopar.capture.passes.late_experts import EXPERTS
from autopar.graph.program import module_path

WIDTH = 4


class Layer(nn.Module):
    """A router, experts and a shared expert with a gate, in a module of their own, in some order.

    Args:
        order: of ``shared``, ``route``, ``experts`` and ``gate``.
    """

    def __init__(self, order: str):
        super().__init__()
        self.order = order.split()
        self.router, self.shared, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made: dict[str, Tensor] = {}

        def experts() -> Tensor:
            weights, indices = made["route"].topk(2)
            return autopar.experts(x, indices, weights, self.up, self.down).view(2, -1, WIDTH)

        steps: dict[str, Callable[[], Tensor]] = {
            "shared": lambda: self.shared(x),
            "route": lambda: self.router(x),
            "experts": experts,
            "gate": lambda: self.gate(x).sigmoid(),
        }
        for step in self.order:
            made[step] = steps[step]()
        return x + made["experts"].view(-1, WIDTH) + made["shared"] * made["gate"]


class Model(nn.Module):
    def __init__(self, order: str):
        super().__init__()
        self.before, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer(order) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("order", [
    "route experts shared gate", "shared route gate experts", "gate shared route experts", "shared route experts gate",
])  # fmt: skip
@pytest.mark.parametrize("fold", [False, True])
def test_what_is_shared_comes_between_routing_and_experts(order: str, fold: bool) -> None:
    graph = capture(Model(order), example_kwargs={"x": torch.randn(8, WIDTH)}, fold=fold).graph
    steps = {"router": "route", "shared": "shared", "gate": "gate", "": "experts"}
    for number in range(2):
        layer = f"layers.{number}"
        found = [
            steps[module_path(node).removeprefix(layer).lstrip(".")]
            for node in graph.nodes
            if module_path(node).startswith(layer) and str(node.target) in ("aten.linear.default", EXPERTS)
        ]
        beside = [step for step in order.split() if step in ("shared", "gate")]
        assert found == ["route", *beside, "experts"]
