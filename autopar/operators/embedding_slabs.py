"""The operators of embedding tables that are placed on ranks: several tables lie in each slab, and a slab is on a rank.

To give whole tables to ranks is to shard slabs, as one shards a batch: the slab is a factor of the look-up, of its ids
and of its results (:mod:`autopar.capture.in_slabs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.base.errors import InputError

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("embedding_slabs(Tensor slabs, Tensor indices, Tensor starts) -> Tensor")
_LIBRARY.define("checked_ids(Tensor ids, str[] names, int[] rows, int[] pooling) -> Tensor")


def _embedding_slabs(slabs: Tensor, indices: Tensor, starts: Tensor) -> Tensor:
    """``slabs[p, r, h], indices[b, p, c], starts[p, t] -> y[b, p, t, h]``: sums of rows, by bag.

    Args:
        slabs: the tables of slab ``p`` one below the other; its last row is looked up where there is nothing to add.
        indices: rows of the slab.
        starts: where among the ``c`` ids of a sample the bag of each of the slab's tables begins.
    """
    count, rows, features = slabs.shape
    samples, _, ids = indices.shape
    device = indices.device
    flat = indices + torch.arange(count, device=device).unsqueeze(1) * rows
    places = torch.arange(samples * count, device=device).view(samples, count, 1) * ids + starts
    padding = torch.where(indices == rows - 1, rows - 1, flat)  # one row stands for the last of every slab
    bags = torch.ops.aten.embedding_bag.padding_idx(
        slabs.reshape(-1, features), padding.flatten(), places.flatten(), False, 0, False, None, False, rows - 1
    )[0]
    return bags.view(samples, count, starts.shape[1], features)


_LIBRARY.impl("embedding_slabs", _embedding_slabs, "CompositeImplicitAutograd")
embedding_slabs = torch.ops.autopar.embedding_slabs.default
"""The operator; see :func:`_embedding_slabs`."""


def _checked_ids(ids: Tensor, names: Sequence[str], rows: Sequence[int], pooling: Sequence[int]) -> Tensor:
    """``ids[b, c] -> ids[b, c]``: what they were, if each is a row of its table.

    Args:
        names, rows, pooling: of the tables, each with how many of the columns are looked up in it.

    Raises:
        InputError: on a CPU, of an id that is beyond its table. A GPU reports it later, without names.
    """
    column_rows = [count for count, columns in zip(rows, pooling, strict=True) for _ in range(columns)]
    beyond = (ids < 0) | (ids >= torch.tensor(column_rows, device=ids.device))
    if ids.device.type != "cpu":
        torch._assert_async(~beyond.any(), "an id is beyond its embedding table")
    elif beyond.any():
        sample, column = beyond.nonzero()[0].tolist()
        last = column_rows[column] - 1
        name = [name for name, columns in zip(names, pooling, strict=True) for _ in range(columns)][column]
        raise InputError(
            f"sample {sample} looks up id {int(ids[sample, column])} in table {name!r}, which has {last + 1} "
            f"rows (0 to {last})"
        )
    return ids.clone()


_LIBRARY.impl("checked_ids", _checked_ids, "CompositeExplicitAutograd")
_LIBRARY.impl("checked_ids", lambda ids, names, rows, pooling: torch.empty_like(ids), "Meta")
checked_ids = torch.ops.autopar.checked_ids.default
"""The operator; see :func:`_checked_ids`."""
