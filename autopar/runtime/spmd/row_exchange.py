"""All-to-alls of rows of which each rank sends as many as it has to: where they go is known only in the step.

How many go where is exchanged first. Tensors may be those of all ranks at once, where one process simulates them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from torch import SymInt, Tensor
from torch.distributed import ProcessGroup
from torch.distributed._local_tensor import LocalIntNode, LocalTensor

from autopar.runtime.spmd.rank_index import cut

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


def splits(counts: Tensor, group: ProcessGroup) -> Splits:
    """Rows for each rank of a group, of counts ``[p * n]`` in the order of ranks."""
    totals = counts.view(group.size(), -1).sum(1)
    if not isinstance(totals, LocalTensor):
        return totals.tolist()
    each = {rank: own.tolist() for rank, own in totals._local_tensors.items()}
    return [SymInt(LocalIntNode({rank: own[place] for rank, own in each.items()})) for place in range(group.size())]


def shift(tensor: Tensor, ring: ProcessGroup) -> Tensor:
    """``tensor[n]`` of the rank before in a ring, which sends it while this one sends its own to the next.

    Returns:
        What arrives, to be waited for (:func:`wait`); ``tensor`` must stay as it is until then.
    """
    return _sent(tensor, ring, lambda here: ((here + 1) % ring.size(), (here - 1) % ring.size()))


def mirror(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """``tensor[n]`` of the rank that is as far from the last as this one is from the first, which has this one's; as
    :func:`shift`.
    """
    return _sent(tensor, group, lambda here: (group.size() - 1 - here,) * 2)


def _sent(tensor: Tensor, group: ProcessGroup, ends: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """One message: ``ends`` gives of this rank where it goes, and whence one comes."""
    with torch.device("cpu"), spmd.no_typecheck():
        ranks = torch.arange(group.size())
        sent, received = (len(tensor) * (ranks == end) for end in ends(cut(ranks, (group,))))
    there: Any = [*splits(sent, group)]
    back: Any = [*splits(received, group)]
    return torch.ops._c10d_functional.all_to_all_single.default(tensor, back, there, group.group_name)


def wait(tensor: Tensor) -> Tensor:
    """What a collective gives, once it is there."""
    return torch.ops._c10d_functional.wait_tensor.default(tensor)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Splits, received: Splits, group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: Splits, received: Splits, group: ProcessGroup) -> Tensor:
    there: Any = [*sent]
    here: Any = [*received]
    rows = rows.contiguous()
    if isinstance(rows, LocalTensor):  # of all ranks at once, which send other numbers each
        return wait(torch.ops._c10d_functional.all_to_all_single.default(rows, here, there, group.group_name))
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows, here, there, group=group)
    return found
