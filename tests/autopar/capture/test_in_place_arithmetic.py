"""In-place arithmetic: what is done in place to a value of its own becomes a new value, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.passes.functionalization import mutates
from autopar.capture.passes.in_place_arithmetic import in_place_arithmetic

X = torch.randn(4, 8)


class Normalized(nn.Module):
    """As routers of Transformers do: weights that were chosen are divided by their sum."""

    def forward(self, x):
        weights, indices = x.exp().topk(2)
        before = weights * 3
        weights /= weights.sum(-1, keepdim=True)
        weights *= 2
        return before, weights + 1, indices


class Viewed(nn.Module):
    def forward(self, x):
        y = x * 2
        part = y[0]
        y += 1
        return part, y


class Input(nn.Module):
    def forward(self, x):
        x += 1
        return x * 2


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1).mul_(2)
        return x * self.count


class Narrower(nn.Module):
    def forward(self, x):
        y = x.to(torch.bfloat16)
        y.mul_(x)
        return y


def exported(model):
    return torch.export.export(model, (X.clone(),), strict=False)


def test_chosen_weights_are_divided_by_their_sum_as_new_values():
    program = in_place_arithmetic(exported(Normalized()))
    assert not mutates(program)
    program.graph_module.graph.lint()
    for found, wanted in zip(program.module()(X), Normalized()(X), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("model", [Viewed(), Input(), Counts(), Narrower()])
def test_what_others_see_or_a_new_value_would_not_be_stays_in_place(model):
    assert mutates(in_place_arithmetic(exported(model)))
