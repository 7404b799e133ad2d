"""Slabs of embedding tables of which each rank has some of the rows."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor

from autopar.operators.embedding_slabs import embedding_slabs
from autopar.runtime.spmd.rank_index import Groups, as_partial, first, ranks


def row_sharded_slabs(slabs: Tensor, indices: Tensor, starts: Tensor, *, row_groups: Groups = ()) -> Tensor:
    """``autopar.embedding_slabs`` where each rank holds a slice of the rows of its slabs.

    Args:
        slabs: ``[p, r / ranks, h]``, ``S(1)`` on ``row_groups``.
        indices: ``[b, p, c]``, rows of the whole slab, ``R`` on ``row_groups``.
        starts: ``[p, t]``, ``R`` on ``row_groups``.
        row_groups: the mesh axes that shard ``r``, major first.

    Returns:
        ``[b, p, t, h]``, ``P`` on ``row_groups``.
    """
    if not row_groups:
        return embedding_slabs(slabs, indices, starts)
    rows = slabs.shape[1] * ranks(row_groups)
    row = first(rows, row_groups, indices.device)
    return as_partial(_RowsHere.apply(slabs, indices, starts, row, rows), row_groups)


class _RowsHere(torch.autograd.Function):
    """``slabs[p, r, h], indices[b, p, c], starts[p, t], row[] -> y[b, p, t, h]``: sums of the rows that are here.

    Ids of other ranks, and the row that stands for nothing, are looked up with weight 0; backward skips them.
    """

    @staticmethod
    def forward(ctx: Any, slabs: Tensor, indices: Tensor, starts: Tensor, row: Tensor, rows: int) -> Tensor:
        count, here, features = slabs.shape
        samples, _, ids = indices.shape
        local = indices - row
        present = (local >= 0) & (local < here) & (indices != rows - 1)
        slab = torch.arange(count, device=indices.device).unsqueeze(1)
        flat = local.masked_fill(~present, 0) + slab * here
        places = torch.arange(samples * count, device=indices.device).view(samples, count, 1) * ids + starts
        bags = torch.ops.aten.embedding_bag.default(
            slabs.reshape(-1, features),
            flat.flatten(),
            places.flatten(),
            per_sample_weights=present.flatten().to(slabs.dtype),
        )[0]
        ctx.shape = slabs.shape
        each = torch.arange(ids, device=starts.device).expand(count, -1).contiguous()
        bag = torch.searchsorted(starts, each, right=True) - 1
        ctx.save_for_backward(flat.masked_fill(~present, -1), bag)
        return bags.view(samples, count, starts.shape[1], features)

    @staticmethod
    def spmd_typecheck(*, slabs: Tensor, indices: Tensor, starts: Tensor, row: Tensor) -> Any:
        spmd.rules.ignore(row)
        return spmd.rules.einsum("prh,bpc,pt->bpth", slabs, indices, starts, linear_in=(0,))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        flat, bag = ctx.saved_tensors
        count, here, features = ctx.shape
        samples, _, ids = flat.shape
        each = grad.gather(2, bag.view(1, count, ids, 1).expand(samples, -1, -1, features))
        rows = torch.ops.aten.embedding_dense_backward(each.flatten(0, 2), flat.flatten(), count * here, -1, False)
        return rows.view(ctx.shape), None, None, None, None
