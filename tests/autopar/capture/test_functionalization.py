"""Functionalization: what is written in place leaves as a new value."""

from __future__ import annotations

import torch
from torch import nn

from autopar.capture.capture import capture
from autopar.capture.passes.functionalization import functionalization, mutates

X = torch.randn(4, 8)


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(x).sum()


def test_running_statistics_become_updates():
    captured = capture(Running().train(), (X,))
    assert [name for name, _ in captured.updates] == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert captured.training
    assert not capture(Running().eval(), (X,)).updates


def test_what_writes_nothing_stays():
    program = torch.export.export(nn.Linear(8, 8), (X,), strict=False)
    assert functionalization(program) is program
    program = functionalization(torch.export.export(Running().train(), (X,), strict=False))
    assert not mutates(program)
