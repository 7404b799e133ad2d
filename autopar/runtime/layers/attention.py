"""Attention whose query rows are sharded."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.spmd.rank_index import Groups, cut, ranks


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    query_groups: Groups = (),
    query_strips: tuple[int, ...] = (),
) -> Tensor:
    """``aten.scaled_dot_product_attention`` of some query rows with every key.

    A causal mask counts rows from the start of the whole sequence: row ``i`` sees keys ``0..i``.

    Args:
        query: ``[.., h, query / ranks, d]``, ``S`` on ``query_groups``.
        key, value: ``[.., h or kv, key, d]`` and ``[.., key, e]``, ``R`` on ``query_groups``.
        attn_mask: broadcasts to ``[.., h, query / ranks, key]``.
        dropout_p, is_causal, scale, enable_gqa: as in the operator.
        query_groups: the mesh axes that shard the query rows, in the order in which they cut them.
        query_strips: the strips that each of them cuts, see :func:`autopar.runtime.spmd.rank_index.cut`.

    Returns:
        ``[.., h, query / ranks, e]``, ``S`` on ``query_groups``.
    """
    if is_causal and query_groups:
        assert attn_mask is None, "attention takes a mask or is_causal, not both"
        length = query.shape[-2] * ranks(query_groups)
        rows = cut(torch.arange(length, device=query.device), query_groups, query_strips, like=query)
        columns = cut(torch.arange(key.shape[-2], device=query.device), (), like=query)
        attn_mask = rows.unsqueeze(-1) >= columns
        is_causal = False
    return torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
