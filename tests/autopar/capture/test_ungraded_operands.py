"""Ungraded operands: an operand that backward gives nothing to is detached."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.capture import capture
from autopar.capture.lowering import lower

X = torch.randn(4, 8)


class Scales(torch.autograd.Function):
    """Multiplies by a tensor that has no gradient of its own."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        (scale,) = ctx.saved_tensors
        return grad * scale, None


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return Scales.apply(self.inner(x), self.scale * 2).sum()


def test_an_operand_without_gradient_is_detached():
    graph = lower(capture(Scaled(), (X,)))
    (function,) = (node for node in graph.nodes if node.op == "function.Scales")
    assert [graph.by_name[ref.node].op for ref in function.inputs] == ["aten.linear.default", "aten.detach.default"]
    assert not graph.type_of(function.inputs[1]).grad
