"""Attention of some queries with some keys on one device, with the log-sum-exp of its scores.

Results over several sets of keys are merged by it (:mod:`autopar.runtime.layers.partial_attention`). torch's public
attention does not return it; this is the only file that calls the kernels below that do. Scores are never stored,
except for float64 on GPUs, where torch has no such kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten
ALIGNMENT = 8
"""GPUs' kernels take heads whose sizes are multiples of it."""
LSE_ALIGNMENT = 32
"""To so many queries the memory-efficient kernel pads the log-sum-exp."""


@dataclass(frozen=True)
class AttentionPiece:
    """One call of a kernel.

    Attributes:
        query: ``[b, h, n, d]``.
        key, value: ``[b, h or kv, m, d]`` and ``[b, h or kv, m, e]``; a head of keys serves ``h / kv`` of queries.
        mask: is added to scores; broadcasts to ``[b, h, n, m]``, and is of their dtype.
        causal: query ``i`` sees keys ``0..i``; there are as many of both.
        scale: of the products of queries and keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float

    def forward(self) -> tuple[Tensor, Tensor]:
        """``[b, h, n, e]`` and the log-sum-exp ``[b, h, n]``: 0 and ``-inf`` for a query that sees none of the keys."""
        out, lse = _forward(self._padded())
        out = out[..., : self.value.shape[-1]]
        if self.mask is None:
            return out, lse
        sees_none = (self.mask == -torch.inf).all(-1)
        return out.masked_fill(sees_none.unsqueeze(-1), 0), lse.masked_fill(sees_none, -torch.inf)

    def backward(self, gradient: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values.

        Args:
            gradient: of ``out``.
            out, lse: over all keys that the queries see, of which these may be some.
        """
        lse = lse.masked_fill(lse == -torch.inf, 0)  # nothing is seen: the mask makes every weight 0
        padded = self._padded()
        gradient, out = (pad(t, (0, padded.value.shape[-1] - t.shape[-1])) for t in (gradient, out))
        found = _backward(padded, gradient, out, lse)
        given = (self.query, self.key, self.value)
        dq, dk, dv = (g[..., : t.shape[-1]] for g, t in zip(found, given, strict=True))
        return dq, dk, dv

    def _padded(self) -> AttentionPiece:
        """With heads of one size, which kernels ask for; zeros change neither scores nor what is kept of results."""
        size = max(self.query.shape[-1], self.value.shape[-1])
        if self.query.is_cuda:
            size = -(-size // ALIGNMENT) * ALIGNMENT
        query, key, value = (
            t if t.shape[-1] == size and t.stride(-1) == 1 else pad(t, (0, size - t.shape[-1])).contiguous()
            for t in (self.query, self.key, self.value)
        )
        return AttentionPiece(query, key, value, self.mask, self.causal, self.scale)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def for_each_head(self) -> AttentionPiece:
        """With keys and values repeated for every head of queries."""
        times = self.query.shape[1] // self.key.shape[1]
        if times == 1:
            return self
        key, value = (t.repeat_interleave(times, 1) for t in (self.key, self.value))
        return AttentionPiece(self.query, key, value, self.mask, self.causal, self.scale)

    def as_grouped(self, gradient: Tensor) -> Tensor:
        """The gradient of keys or values of one for every head of queries."""
        heads = self.key.shape[1]
        return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _is_flash(piece: AttentionPiece) -> bool:
    return piece.query.dtype in (torch.float16, torch.bfloat16) and piece.mask is None and piece.query.shape[-1] <= 256


def _forward(piece: AttentionPiece) -> tuple[Tensor, Tensor]:
    causal, scale = piece.causal, piece.scale
    if not piece.query.is_cuda:
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu.default
        return kernel(*piece.operands, 0.0, causal, attn_mask=piece.mask, scale=scale)
    if _is_flash(piece):
        return _aten._scaled_dot_product_flash_attention.default(*piece.operands, 0.0, causal, scale=scale)[:2]
    piece = piece.for_each_head()
    if piece.query.dtype == torch.float64:
        scores = _scores(piece)
        lse = scores.logsumexp(-1)
        return (scores - _finite(lse).unsqueeze(-1)).exp() @ piece.value, lse
    kernel = _aten._scaled_dot_product_efficient_attention.default
    out, lse, *_ = kernel(*piece.operands, _aligned(piece.mask, piece), True, 0.0, causal, scale=scale)
    return out, lse[..., : piece.query.shape[-2]]


def _backward(piece: AttentionPiece, gradient: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    causal, scale, given = piece.causal, piece.scale, piece
    if not piece.query.is_cuda:
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return kernel(gradient, *piece.operands, out, lse, 0.0, causal, attn_mask=piece.mask, scale=scale)
    none = torch.empty(0, dtype=torch.int64, device="cpu")  # what dropout would have drawn; lengths that vary
    if _is_flash(piece):
        lengths = piece.query.shape[-2], piece.key.shape[-2]
        kernel = _aten._scaled_dot_product_flash_attention_backward.default
        return kernel(
            gradient, *piece.operands, out, lse.contiguous(), None, None, *lengths, 0.0, causal, none, none, scale=scale
        )
    piece = piece.for_each_head()
    if piece.query.dtype == torch.float64:
        weights = (_scores(piece) - lse.unsqueeze(-1)).exp()
        errors = weights * (gradient @ piece.value.mT - (gradient * out).sum(-1, keepdim=True)) * scale
        dq, dk, dv = errors @ piece.key, errors.mT @ piece.query, weights.mT @ gradient
    else:
        lse = pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=torch.inf)
        kernel = _aten._scaled_dot_product_efficient_attention_backward.default
        dq, dk, dv, _ = kernel(
            gradient, *piece.operands, _aligned(piece.mask, piece), out, lse, none, none, 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
    return dq, given.as_grouped(dk), given.as_grouped(dv)


def _scores(piece: AttentionPiece) -> Tensor:
    scores = piece.query @ piece.key.mT * piece.scale
    if piece.mask is not None:
        scores = scores + piece.mask
    if piece.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0)


def _aligned(mask: Tensor | None, piece: AttentionPiece) -> Tensor | None:
    """A mask in the form that the memory-efficient kernel takes: rows begin at multiples of the alignment."""
    if mask is None:
        return None
    keys = piece.key.shape[-2]
    wide = pad(mask.expand(*mask.shape[:-1], keys), (0, -keys % ALIGNMENT))[..., :keys]
    return wide.expand(*piece.query.shape[:-1], keys)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of booleans, which say what is seen, as one to be added to scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
