"""Overwrite removal: what is written over a part of a tensor has a gradient."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.capture import capture
from autopar.verification.verify import verify
from planner.cost.cluster import ClusterSpec


class Overwriting(nn.Module):
    """Writes into parts of a tensor: equal in shape, repeated, and of another dtype."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        y = torch.zeros(4, 8, dtype=x.dtype)
        y[0] = x[1]
        y[1:3] = x[2]
        y[3] = x[3].to(torch.float64)
        return (y * x).sum()


def test_what_is_written_over_a_part_has_a_gradient():
    model, x = Overwriting(), torch.randn(4, 8)
    assert "aten.copy.default" not in {str(node.target) for node in capture(model, (x,)).graph.nodes}
    verify(model, ClusterSpec.local(2), example_args=(x,), pin={"tensor": 2})
