"""Region inlining: what a region computes has no gradient, and lies in the graph like all else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.capture import capture
from autopar.capture.lowering import lower
from autopar.capture.passes.region_inlining import region_inlining
from planner.base.errors import CaptureError

X = torch.randn(4, 8)


class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        with torch.no_grad():
            scale = self.weight * 2
        return (x * scale * self.weight).sum()


def test_gradients_stop_at_no_grad_regions():
    graph = lower(capture(NoGrad(), (X,)))
    scaled = next(node for node in graph.nodes if node.op == "aten.mul.Tensor")
    assert not scaled.results[0].grad
    assert graph.type_of(graph.outputs[0]).grad


class Nested(nn.Module):
    """A region in another, and one in the precision that the model has."""

    def forward(self, x):
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                z = y + x
        with torch.autocast("cpu", enabled=False):
            return z - y


def test_no_region_is_left():
    program = torch.export.export(Nested(), (X,), strict=False)
    expected = Nested()(X)
    module = region_inlining(program, Nested()).graph_module
    assert not list(module.children()) and {node.op for node in module.graph.nodes} <= {
        "placeholder",
        "call_function",
        "output",
    }
    off = {str(node.target): node.meta.get("no_grad") for node in module.graph.nodes if node.op == "call_function"}
    assert off["aten.mul.Tensor"] and not off["aten.add.Tensor"] and not off["aten.sub.Tensor"]
    module.recompile()
    assert torch.equal(module(X)[0], expected)


class Halved(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x.T


def test_another_precision_is_refused():
    with pytest.raises(CaptureError, match=r"module \(root\) \(Halved, .*test_region_inlining.py:\d+\) runs aten"):
        capture(Halved(), (X,))
