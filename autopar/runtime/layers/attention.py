"""Attention whose queries are sharded along the sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.operators.autocast import as_autocast
from autopar.runtime.layers.partial_attention import Places, attend
from autopar.runtime.spmd.rank_index import Groups, ranks
from planner.ops.attention import Sight


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
    window: int | None = None,
    softcap: float | None = None,
    query_groups: Groups = (),
    query_strips: tuple[int, ...] = (),
    ring_groups: Groups = (),
    zigzag_groups: Groups = (),
) -> Tensor:
    """``aten.scaled_dot_product_attention`` of some query rows with every key, or ``autopar.attention``.

    A causal mask counts rows from the start of the whole sequence: row ``i`` sees keys ``0..i``.

    Args:
        query: ``[.., h, query / ranks, d]``, ``S`` on ``query_groups``.
        key, value: ``[.., h or kv, key, d]`` and ``[.., key, e]``, ``S`` on ``ring_groups``, ``R`` on the other
            ``query_groups``.
        attn_mask: broadcasts to ``[.., h, query / ranks, key of all ranks]``.
        dropout_p, is_causal, scale, enable_gqa: as in the operator.
        window, softcap: as in ours (:mod:`autopar.operators.attention`).
        query_groups: the mesh axes that shard the query rows, in the order in which they cut them.
        query_strips: the strips that each of them cuts, see :func:`autopar.runtime.spmd.rank_index.cut`.
        ring_groups: the one of them along which keys go from rank to rank, if there is one.
        zigzag_groups: the one of them that meets queries in zigzag order, if there is one; then it is the only one.

    Returns:
        ``[.., h, query / ranks, e]``, ``S`` on ``query_groups``.
    """
    if ring_groups or (is_causal and query_groups) or window is not None or softcap is not None:
        length, (ring,) = query.shape[-2] * ranks(query_groups), ring_groups or (None,)
        places = Places.of(length, query_groups, query_strips, ring, is_zigzag=bool(zigzag_groups))
        operands = [as_autocast(t) for t in (query, key, value)]
        batch = torch.broadcast_shapes(*(t.shape[:-3] for t in operands))
        heads = [1 if t.dim() == 2 else t.shape[-3] for t in operands]
        heads = heads if enable_gqa else [max(heads)] * 3
        q, k, v = (_in_four_dims(t, batch, count) for t, count in zip(operands, heads, strict=True))
        mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        out = attend(q, k, v, mask, dropout_p, Sight(is_causal, window), scale, places, softcap)
        if max(t.dim() for t in operands) == 4:
            return out
        return out.reshape(*batch, *heads[:1] * (max(t.dim() for t in operands) > 2), *out.shape[-2:])
    return torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _in_four_dims(tensor: Tensor, batch: Sequence[int], heads: int) -> Tensor:
    """``[.., h, n, d]`` as ``[b, h, n, d]``, repeated along what others have more of."""
    size = (*batch, heads, *tensor.shape[-2:])
    if tensor.shape != size:
        tensor = tensor.expand(size)
    return tensor if len(size) == 4 else tensor.reshape(-1, *size[-3:])
