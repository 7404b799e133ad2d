"""Lookups: which indices are views, and that nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from autopar.capture.passes.identity_indexing import INDEX, identity_indexing

B, L = 4, 6

Picks = Callable[[Tensor], Tensor]


class Looks(nn.Module):
    def __init__(self, picks: Picks):
        super().__init__()
        self.picks = picks

    def forward(self, x: Tensor) -> Tensor:
        return self.picks(x) * 2


VIEWS: dict[str, Picks] = {
    "mask": lambda x: x[torch.arange(B)[:, None, None, None], torch.arange(L)[None, None, None, :] + 0],
    "outer": lambda x: x[torch.arange(B)[:, None], torch.arange(L)],
    "rest": lambda x: x[torch.arange(B)],
    "deeper": lambda x: x.unsqueeze(-1)[torch.arange(B)[:, None, None]],
}
OTHERS: dict[str, Picks] = {
    "swapped": lambda x: x[torch.arange(B)[None, :], torch.arange(L)[:, None]],
    "diagonal": lambda x: x[torch.arange(B), torch.arange(B)],
    "backwards": lambda x: x[torch.arange(B - 1, -1, -1)],
    "some": lambda x: x[torch.arange(B - 1)],
    "repeated": lambda x: x[torch.arange(B)[:, None].expand(B, 3)],
    "of the input": lambda x: x[x[:, 0].long() * 0],
    "last dim": lambda x: x[:, torch.arange(L)],
}


def exported(picks: Picks) -> tuple[nn.Module, ExportedProgram, Tensor]:
    model, x = Looks(picks), torch.randn(B, L, dtype=torch.float64)
    return model, torch.export.export(model, (x,), strict=False), x


def lookups(program: ExportedProgram) -> int:
    return sum(node.target is INDEX for node in program.graph.nodes)


@pytest.mark.parametrize("name", VIEWS)
def test_a_lookup_of_everything_is_a_view(name: str) -> None:
    model, program, x = exported(VIEWS[name])
    assert lookups(program) == 1
    module = identity_indexing(program).graph_module
    assert not lookups(program)
    module.recompile()
    (result,) = module(x)
    assert torch.equal(result, model(x))
    shapes = [node.meta["val"].shape for node in module.graph.nodes if node.op == "call_function"]
    assert shapes[-1] == result.shape


@pytest.mark.parametrize("name", OTHERS)
def test_other_lookups_stay(name: str) -> None:
    _, program, _ = exported(OTHERS[name])
    assert lookups(identity_indexing(program)) == 1
