"""The operator of attention with a sliding window, or with a soft cap on scores, which torch's does not have.

A capture puts it in the place of what a model does (:mod:`autopar.capture.passes.causal_masks`,
:mod:`autopar.capture.transformers_attention`). What stands here says what it computes; a plan runs it piece by piece,
without masks or scores of the whole (:func:`autopar.runtime.layers.attention`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, int? window=None, float? softcap=None) "
    "-> Tensor"
)


def _attention(
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
) -> Tensor:
    """``q[.., h, n, d], k[.., h, m, d], v[.., h, m, e] -> y[.., h, n, e]``, as ``scaled_dot_product_attention``.

    Args:
        window: queries see so many keys, their own included; with ``is_causal``.
        softcap: scores are ``softcap * tanh(score / softcap)``, before a mask is added.
    """
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    if is_causal:
        rows, columns = (torch.arange(size, device=query.device) for size in scores.shape[-2:])
        back = rows.unsqueeze(-1) - columns
        scores = scores.masked_fill((back < 0) | (back >= (len(columns) if window is None else window)), -torch.inf)
    weights = torch.dropout(scores.softmax(-1), dropout_p, dropout_p > 0)
    return weights.to(value.dtype) @ value


_LIBRARY.impl("attention", _attention, "CompositeImplicitAutograd")
attention = torch.ops.autopar.attention.default
"""The operator; see :func:`_attention`."""
