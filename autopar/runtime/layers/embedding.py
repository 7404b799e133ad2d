"""Embedding with a sharded vocabulary."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch
from spmd_types import P, V
from torch import Tensor

from autopar.runtime.layers.ids import check_ids, rows_of_table
from autopar.runtime.spmd.rank_index import Groups, first, ranks


def vocab_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    vocab_groups: Groups = (),
    path: str = "",
) -> Tensor:
    """``aten.embedding`` where each rank holds a slice of the rows and adds zeros for the ids of others.

    Args:
        weight: ``[v / ranks, h]``, ``S(0)`` on ``vocab_groups``.
        indices: ``[..]``, global ids, ``R`` on ``vocab_groups``.
        padding_idx: global id of the row that gets no gradient; negative for none.
        scale_grad_by_freq, sparse: as in the operator; ``False`` where the vocabulary is sharded.
        vocab_groups: the mesh axes that shard the rows, major first.
        path: of the module, for errors.

    Returns:
        ``[.., h]``, ``P`` on ``vocab_groups``.

    Raises:
        InputError: on a CPU, of an id that is beyond the table.
    """
    if not vocab_groups:
        try:
            return torch.ops.aten.embedding.default(weight, indices, padding_idx, scale_grad_by_freq, sparse)
        except IndexError as error:
            failed = error
        check_ids(indices, weight.shape[0], rows_of_table(path))
        raise failed
    assert not scale_grad_by_freq and not sparse, "counts of ids and sparse gradients keep the vocabulary whole"
    rows = weight.shape[0] * ranks(vocab_groups)
    check_ids(indices, rows, rows_of_table(path))
    start = first(rows, vocab_groups, indices.device)
    return _VocabEmbedding.apply(weight, indices, start, padding_idx, vocab_groups)


class _VocabEmbedding(torch.autograd.Function):
    """``weight[v, h], ids[..], start[] -> y[.., h]``; saves one integer per id.

    Ids without a gradient (other ranks' and the padding) become -1, which the backward kernel skips.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, start: Tensor, padding_idx: int, groups: Groups) -> Tensor:
        rows = weight.shape[0]
        local = ids - start
        absent = (local < 0) | (local >= rows)
        skipped = absent | (ids == padding_idx) if padding_idx >= 0 else absent
        ctx.rows = rows
        ctx.save_for_backward(local.masked_fill(skipped, -1))
        found = torch.nn.functional.embedding(local.masked_fill(absent, 0), weight)
        return found.masked_fill_(absent.unsqueeze(-1), 0)

    @staticmethod
    def spmd_typecheck(*, weight: Tensor, ids: Tensor, start: Tensor, groups: Groups) -> Any:
        spmd.rules.ignore(start)
        y = spmd.rules.einsum("vh,...->...h", weight, ids, linear_in=(0,))
        for group in groups:
            y = spmd.rules.reinterpret(y, group, src=V, dst=P)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        rows = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.rows, -1, False)
        return rows, None, None, None, None
