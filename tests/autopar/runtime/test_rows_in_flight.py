"""Rows in flight: what is computed between their beginning and their end comes between both, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.measure.local_processes import LocalProcesses
from autopar.runtime.spmd import row_exchange
from autopar.runtime.spmd.row_exchange import RowsInFlight, begin_rows, end_rows, exchange_rows

ROWS = ([1, 3], [2, 0])
"""How many each rank sends to each."""


class _Told(torch.autograd.Function):
    """Identity that tells of itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        events.append("beside")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.events.append("beside")
        return gradient, None


def exchange(in_flight: bool) -> tuple[list[str], Tensor, Tensor]:
    """Rows of this rank sent while something else is computed of the same values."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    sent, received = ROWS[rank], [each[rank] for each in ROWS]
    x = (torch.arange(sum(sent) * 2.0).view(-1, 2) + 10 * rank).requires_grad_()
    events: list[str] = []
    rows = 3 * x
    with pytest.MonkeyPatch.context() as patch:
        started, wait = row_exchange._started, RowsInFlight.wait
        patch.setattr(row_exchange, "_started", lambda *args: (events.append("start"), started(*args))[1])
        patch.setattr(RowsInFlight, "wait", lambda self: (events.append("wait"), wait(self))[1])
        sending = (
            begin_rows(rows, sent, received, group) if in_flight else (exchange_rows(rows, sent, received, group),)
        )
        beside = _Told.apply(rows, events)
        arrived = end_rows(*sending) if in_flight else sending[0]
        (beside.sum() + (arrived.square() * (rank + 1)).sum()).backward()
    assert x.grad is not None
    return events, arrived.detach(), x.grad


def both() -> tuple[list[str], bool]:
    events, *found = exchange(True)
    _, *wanted = exchange(False)
    return events, all(map(torch.equal, found, wanted))


def test_what_is_beside_comes_between(pool: LocalProcesses) -> None:
    for events, is_equal in pool.run(both, ranks=2):
        assert is_equal
        assert events == ["start", "beside", "wait"] * 2
