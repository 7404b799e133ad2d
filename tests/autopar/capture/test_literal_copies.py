"""Literal copies: what is written in the code is a constant, not copied."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture.passes.literal_copies import LITERAL, literal_copies

X = torch.randn(4, 8)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor(0.5) + torch.tensor([1.0])


def test_literals_are_constants() -> None:
    program = literal_copies(torch.export.export(Halves(), (X,), strict=False))
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert operators == {"aten.mul.Tensor", "aten.add.Tensor"}
    literals = [node for node in program.graph.nodes if LITERAL in node.meta]
    assert len(literals) == 2 and all(node.op == "placeholder" and node.meta[LITERAL] is None for node in literals)
