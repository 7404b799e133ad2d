"""All-to-alls of rows of which each rank sends as many as it has to: where they go is known only in the step.

How many go where is exchanged first. Tensors may be those of all ranks at once, where one process simulates them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import SymInt, Tensor
from torch.distributed import ProcessGroup
from torch.distributed._local_tensor import LocalIntNode, LocalTensor

Splits = Sequence[int | SymInt]
"""How many rows go to each rank of a group, or come from it."""


def exchange_counts(counts: Tensor, group: ProcessGroup) -> Tensor:
    """``counts[p * n] -> [p * n]``: what each of ``p`` ranks has for this one."""
    arrived = torch.empty_like(counts)
    dist.all_to_all_single(arrived, counts, group=group)
    return arrived


def exchange_rows(rows: Tensor, sent: Splits, received: Splits, group: ProcessGroup) -> Tensor:
    """``rows[sum(sent), h] -> [sum(received), h]``, in the order of ranks; the gradient goes the way back."""
    return _ExchangeRows.apply(rows, sent, received, group)


class RowsInFlight:
    """Rows on their way to where :func:`end_rows` waits for them, and in backward their gradients, which go the way
    back behind what autograd comes upon between the two.
    """

    def __init__(self, sent: Splits, received: Splits, group: ProcessGroup):
        self._there, self._back, self._group = (sent, received), (received, sent), group
        self._started: tuple[Tensor, Callable[[], Any]] | None = None

    def start(self, rows: Tensor, back: bool = False) -> Tensor:
        """What arrives, to be waited for."""
        sent, received = self._back if back else self._there
        self._started = _started(rows, sent, received, self._group)
        return self._started[0]

    def wait(self) -> Tensor:
        """What has arrived."""
        assert self._started is not None
        (found, finish), self._started = self._started, None
        finish()
        return found


def begin_rows(rows: Tensor, sent: Splits, received: Splits, group: ProcessGroup) -> tuple[Tensor, RowsInFlight]:
    """As :func:`exchange_rows`, for :func:`end_rows` to wait for; nothing else may read what this returns."""
    flight = RowsInFlight(sent, received, group)
    return _BeginRows.apply(rows, flight), flight


def end_rows(rows: Tensor, flight: RowsInFlight) -> Tensor:
    """The rows that :func:`begin_rows` sent, once they are there."""
    return _EndRows.apply(rows, flight)


def splits(counts: Tensor, group: ProcessGroup) -> Splits:
    """Rows for each rank of a group, of counts ``[p * n]`` in the order of ranks."""
    totals = counts.view(group.size(), -1).sum(1)
    if not isinstance(totals, LocalTensor):
        return totals.tolist()
    each = {rank: own.tolist() for rank, own in totals._local_tensors.items()}
    return [SymInt(LocalIntNode({rank: own[place] for rank, own in each.items()})) for place in range(group.size())]


class _BeginRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: RowsInFlight) -> Tensor:
        ctx.flight = flight
        return flight.start(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.flight.wait(), None


class _EndRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: RowsInFlight) -> Tensor:
        ctx.flight = flight
        flight.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.flight.start(gradient, back=True)
        return gradient, None  # of the right shape, and nobody reads it: what arrives is found in flight


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Splits, received: Splits, group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: Splits, received: Splits, group: ProcessGroup) -> Tensor:
    found, finish = _started(rows, sent, received, group)
    finish()
    return found


def _started(rows: Tensor, sent: Splits, received: Splits, group: ProcessGroup) -> tuple[Tensor, Callable[[], Any]]:
    """What arrives, and what waits for it, which holds what is sent until then."""
    there: Any = [*sent]
    here: Any = [*received]
    rows = rows.contiguous()
    if isinstance(rows, LocalTensor):  # of all ranks at once, which send other numbers each, and are there at once
        found = torch.ops._c10d_functional.all_to_all_single.default(rows, here, there, group.group_name)
        return torch.ops._c10d_functional.wait_tensor.default(found), int
    found = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(found, rows, here, there, group=group, async_op=True)

    def finish(sent: Tensor = rows) -> None:
        work.wait()

    return found, finish
