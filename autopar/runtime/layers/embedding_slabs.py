"""Slabs of embedding tables of which each rank has some of the rows."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch
from spmd_types import V
from torch import Tensor

from autopar.operators.embedding_slabs import embedding_slabs
from autopar.runtime.layers.embedding_bag import VocabBagSums
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
    count, here, features = slabs.shape
    samples, _, ids = indices.shape
    row = first(here * ranks(row_groups), row_groups, indices.device)
    with spmd.no_typecheck():
        local = indices - row
        present = (local >= 0) & (local < here) & (indices != here * ranks(row_groups) - 1)
        slab = torch.arange(count, device=indices.device).unsqueeze(1)
        flat = (local + slab * here).masked_fill(~present, -1).flatten()
        places = torch.arange(samples * count, device=indices.device).view(samples, count, 1) * ids + starts
        places = places.flatten()
    if spmd.is_type_checking():
        types: dict[Any, Any] = dict(spmd.get_local_type(indices))
        spmd.assert_type(flat, types | {spmd.normalize_axis(group): V for group in row_groups})
        spmd.assert_type(places, dict(spmd.get_local_type(starts)))
    bags = VocabBagSums.apply(slabs.reshape(-1, features), flat, places, None, torch.zeros_like(row), -1, row_groups)
    return as_partial(bags.view(samples, count, starts.shape[1], features), row_groups)
