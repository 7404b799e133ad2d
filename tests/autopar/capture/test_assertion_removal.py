"""Assertion removal: no assertion is left, and what it asked about is dead code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture.passes.assertion_removal import assertion_removal

X = torch.randn(4, 8)


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.shape[0] == 4, "four rows")
        return x.to(torch.float64) + 1


def test_no_assertion_is_left() -> None:
    program = torch.export.export(Asserts(), (X,), strict=False)
    assert any("_assert" in str(node.target) for node in program.graph.nodes)
    assert not any("_assert" in str(node.target) for node in assertion_removal(program).graph.nodes)
