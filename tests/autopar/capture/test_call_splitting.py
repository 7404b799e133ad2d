"""Call splitting: tied weights are one leaf, and equal submodules calls of one body."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.capture import capture
from autopar.capture.lowering import lower
from planner.ir.graph import Ref
from tests.autopar.capture.test_capture import Tied

X = torch.randn(4, 8)


def test_tied_weights_are_one_leaf():
    captured = capture(Tied(), None, {"ids": torch.zeros(4, 6, dtype=torch.long)})
    graph = lower(captured)
    params = [leaf for leaf in graph.leaves if leaf.op == "param"]
    assert [leaf.target for leaf in params] == ["embed.weight"]
    assert len(graph.users[Ref(params[0].name)]) == 2


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_equal_submodules_are_calls_of_one_body():
    *_, first, second, third, _ = capture(Layers(), (X,), fold=True).program.calls
    assert (first.path, second.path, third.path) == ("", "layers.2", "layers.3")
    assert first.body is second.body is third.body
    assert second.operands == (*first.names[-1:], "p_layers_2_0_weight", "p_layers_2_0_bias")
    assert len(capture(Layers(), (X,)).program.calls) == 1
