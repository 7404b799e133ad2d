"""Signature check: what a plan cannot carry is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.capture import capture
from planner.base.errors import CaptureError

X = torch.randn(4, 8)


class WritesInput(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x * 2


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.5)
        return (x * self.weight).sum()


def test_writing_into_an_input_is_refused():
    with pytest.raises(CaptureError, match="clone the input"):
        capture(WritesInput(), (X,))


def test_writing_to_a_parameter_is_refused():
    with pytest.raises(CaptureError, match="writes into 'weight' in place"):
        capture(Steps(), (X,))
