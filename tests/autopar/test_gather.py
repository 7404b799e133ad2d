"""Parameters of a block gathered in one call: what is gathered, and what is sent back, is cut as the layouts say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autopar.runtime.mesh import part_of
from autopar.runtime.parameters import _Form, gather_parameters
from autopar.simulate import fake_process_group
from planner.layout import Mesh, Shard

RANKS = 3


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_a_parameter_is_made_of_its_parts_and_its_gradient_cut_into_them(sizes: list[int], data: st.DataObject) -> None:
    dim, strips = data.draw(st.integers(0, len(sizes) - 1)), data.draw(st.integers(1, 2))
    shape = [size * RANKS * strips if at == dim else size for at, size in enumerate(sizes)]
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    mesh, layout = Mesh.of(data=RANKS), (Shard(dim, strips),)
    parts = [part_of(whole, layout, mesh, rank) for rank in range(RANKS)]
    form = _Form(parts[0].shape, str(layout[0]), RANKS)
    # Other parameters lie before and behind it, in every row.
    every = torch.cat([torch.stack([part.reshape(-1) for part in parts]), torch.zeros(RANKS, 2)], 1)
    rows = every[:, : parts[0].numel()]
    gathered = form.whole(rows)
    assert torch.equal(gathered, whole)
    assert gathered.is_contiguous() and gathered.untyped_storage().data_ptr() != every.untyped_storage().data_ptr()
    rows.zero_()
    form.fill(rows, whole)
    assert all(torch.equal(row.view(part.shape), part) for row, part in zip(rows, parts, strict=True))
    form.fill(rows, None)
    assert not rows.any() and not every.any()


class _Lost(torch.autograd.Function):
    """The sum, whose gradient reaches nobody."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> Tensor:
        return torch.stack([value.sum() for value in values]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return None, None


@pytest.mark.parametrize("reached", ["both", "one", "none"])
def test_what_does_not_reach_the_loss_has_no_gradient_and_keeps_ranks_in_step(reached: str) -> None:
    weight, bias = torch.ones(2, 3, requires_grad=True), torch.ones(2, requires_grad=True)
    with fake_process_group(2):
        axis = dist.group.WORLD
        assert axis is not None
        w, b = gather_parameters((weight, bias), axis, ("S(0)", "S(0)"))
        assert (w.shape, b.shape) == ((4, 3), (4,))
        loss = {"both": lambda: w.sum() + b.sum(), "one": b.sum, "none": lambda: _Lost.apply(w, b)}[reached]()
        loss.backward()
    assert [p.grad is not None for p in (weight, bias)] == {"both": [1, 1], "one": [0, 1], "none": [0, 0]}[reached]
