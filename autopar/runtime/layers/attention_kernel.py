"""Attention of some queries with some keys on one device, with the log-sum-exp of its scores.

Results over several sets of keys are merged by it (:mod:`autopar.runtime.layers.partial_attention`). torch's public
attention does not return it; this is the only file that calls the kernels below that do. Scores of a piece are there
while it runs where torch has no kernel without: for float64 on GPUs, where CPUs drop some, for masks with gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from planner.ops.attention import needs_scores

_aten = torch.ops.aten
ALIGNMENT = 8
"""GPUs' kernels take heads whose sizes are multiples of it."""
Drawn = tuple[Tensor, ...]
"""What a kernel of GPUs drew weights to drop by, which its backward takes."""
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
        dropout_p: the share of weights that is dropped at random; what queries see of other keys is not weighed by it,
            so that pieces are merged as without.
        softcap: what scores are at most, before the mask: ``softcap * tanh(score / softcap)``.
        seed: of what is drawn, where that is not done by a kernel of GPUs.
        base: ``[b, h, n, 1]`` or what broadcasts to it, is taken off scores where these are there.
        trains: the mask has a gradient.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    dropout_p: float = 0.0
    softcap: float | None = None
    seed: int = 0
    base: Tensor | None = None
    trains: bool = False

    def forward(self) -> tuple[Tensor, Tensor, Drawn]:
        """``[b, h, n, e]`` and the log-sum-exp ``[b, h, n]``: 0 and ``-inf`` for a query that sees none of the keys."""
        out, lse, drawn = _forward(self._padded())
        out = out[..., : self.value.shape[-1]]
        if self.mask is None:
            return out, lse, drawn
        sees_none = (self.mask == -torch.inf).all(-1)
        return out.masked_fill(sees_none.unsqueeze(-1), 0), lse.masked_fill(sees_none, -torch.inf), drawn

    def backward(self, gradient: Tensor, out: Tensor, lse: Tensor, drawn: Drawn) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values, and of a mask that is trained.

        Args:
            gradient: of ``out``.
            out, lse: over all keys that the queries see, of which these may be some.
            drawn: in forward.
        """
        lse = lse.masked_fill(lse == -torch.inf, 0)  # nothing is seen: the mask makes every weight 0
        padded = self._padded()
        gradient, out = (pad(t, (0, padded.value.shape[-1] - t.shape[-1])) for t in (gradient, out))
        found = _backward(padded, gradient, out, lse, drawn)
        given = (self.query, self.key, self.value)
        return *(g[..., : t.shape[-1]] for g, t in zip(found, given, strict=False)), *found[3:]

    def _padded(self) -> AttentionPiece:
        """With heads of one size, which kernels ask for; zeros change neither scores nor what is kept of results."""
        size = max(self.query.shape[-1], self.value.shape[-1])
        if self.query.is_cuda:
            size = -(-size // ALIGNMENT) * ALIGNMENT
        query, key, value = (
            t if t.shape[-1] == size and t.stride(-1) == 1 else pad(t, (0, size - t.shape[-1])).contiguous()
            for t in (self.query, self.key, self.value)
        )
        return replace(self, query=query, key=key, value=value)

    @property
    def has_scores(self) -> bool:
        """Whether no kernel does without scores."""
        dtype = str(self.query.dtype).removeprefix("torch.")
        return needs_scores(dtype, not self.query.is_cuda, self.dropout_p, self.softcap, self.trains)

    def in_wide(self) -> AttentionPiece:
        """With operands in float32 at the least."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        mask = None if self.mask is None else self.mask.to(wide)
        return replace(self, query=self.query.to(wide), key=self.key.to(wide), value=self.value.to(wide), mask=mask)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def for_each_head(self) -> AttentionPiece:
        """With keys and values repeated for every head of queries."""
        times = self.query.shape[1] // self.key.shape[1]
        if times == 1:
            return self
        key, value = (t.repeat_interleave(times, 1) for t in (self.key, self.value))
        return replace(self, key=key, value=value)

    def as_grouped(self, gradient: Tensor) -> Tensor:
        """The gradient of keys or values of one for every head of queries."""
        heads = self.key.shape[1]
        return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _is_flash(piece: AttentionPiece) -> bool:
    return piece.query.dtype in (torch.float16, torch.bfloat16) and piece.mask is None and piece.query.shape[-1] <= 256


def _forward(piece: AttentionPiece) -> tuple[Tensor, Tensor, Drawn]:
    causal, scale = piece.causal, piece.scale
    if piece.has_scores:
        return (*_with_scores(piece), ())
    if not piece.query.is_cuda:
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu.default
        return (*kernel(*piece.operands, 0.0, causal, attn_mask=piece.mask, scale=scale), ())
    if _is_flash(piece):
        kernel = _aten._scaled_dot_product_flash_attention.default
        out, lse, *_, state, unused, _ = kernel(*piece.operands, piece.dropout_p, causal, scale=scale)
        return out, lse, (state, unused)
    piece = piece.for_each_head()
    kernel = _aten._scaled_dot_product_efficient_attention.default
    mask = _aligned(piece.mask, piece)
    out, lse, *drawn = kernel(*piece.operands, mask, True, piece.dropout_p, causal, scale=scale)
    return out, lse[..., : piece.query.shape[-2]], tuple(drawn)


def _backward(piece: AttentionPiece, gradient: Tensor, out: Tensor, lse: Tensor, drawn: Drawn) -> tuple[Tensor, ...]:
    causal, scale, given = piece.causal, piece.scale, piece
    if piece.has_scores:
        return _gradients_by_scores(piece, gradient, out, lse)
    if not piece.query.is_cuda:
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return kernel(gradient, *piece.operands, out, lse, 0.0, causal, attn_mask=piece.mask, scale=scale)
    if _is_flash(piece):
        lengths = piece.query.shape[-2], piece.key.shape[-2]
        kernel = _aten._scaled_dot_product_flash_attention_backward.default
        return kernel(
            gradient, *piece.operands, out, lse.contiguous(), None, None, *lengths, piece.dropout_p, causal, *drawn,
            scale=scale,
        )  # fmt: skip
    piece = piece.for_each_head()
    lse = pad(lse, (0, -lse.shape[-1] % LSE_ALIGNMENT), value=torch.inf)
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # so it is read in half precision, whatever its strides say
    kernel = _aten._scaled_dot_product_efficient_attention_backward.default
    dq, dk, dv, _ = kernel(
        gradient, *piece.operands, _aligned(piece.mask, piece), out, lse, *drawn, piece.dropout_p,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return dq, given.as_grouped(dk), given.as_grouped(dv)


def _with_scores(piece: AttentionPiece) -> tuple[Tensor, Tensor]:
    """Where no kernel does without them: two of their size at most are there at once."""
    each = piece.in_wide().for_each_head()
    weights = _scores(each)[0]
    lse = weights.logsumexp(-1)
    weights.sub_(_finite(lse).unsqueeze(-1)).exp_()
    if each.dropout_p:
        weights.mul_(_kept(each, weights))
    return (weights @ each.value).to(piece.query.dtype), lse


def _gradients_by_scores(piece: AttentionPiece, gradient: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    """Likewise, three at most, one more with a soft cap, and with a mask that is trained."""
    each = piece.in_wide().for_each_head()
    gradient, out = gradient.to(each.query.dtype), out.to(each.query.dtype)
    weights, slope = _scores(each)
    weights.sub_(lse.unsqueeze(-1)).exp_()
    errors = gradient @ each.value.mT
    left = weights
    if each.dropout_p:
        left = _kept(each, weights)
        errors.mul_(left)
        left.mul_(weights)
    dv = left.mT @ gradient
    errors.sub_((gradient * out).sum(-1, keepdim=True)).mul_(weights)
    of_mask: tuple[Tensor, ...] = ()
    if piece.trains and piece.mask is not None:
        of_mask, errors = (errors.sum_to_size(piece.mask.shape),), errors.clone()
    errors.mul_(each.scale)
    if slope is not None:
        errors.mul_(slope)
    return errors @ each.key, piece.as_grouped(errors.mT @ each.query), piece.as_grouped(dv), *of_mask


def _scores(piece: AttentionPiece) -> tuple[Tensor, Tensor | None]:
    """And by what their gradient is multiplied for that of products of queries and keys; ``None``: 1."""
    scores, slope = (piece.query * piece.scale) @ piece.key.mT, None
    if piece.softcap is not None:
        capped = scores.div_(piece.softcap).tanh_()
        scores, slope = capped * piece.softcap, capped.square_().neg_().add_(1)
    if piece.mask is not None:
        scores += piece.mask
    if piece.base is not None:
        scores -= piece.base
    if piece.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    return scores, slope


def _kept(piece: AttentionPiece, weights: Tensor) -> Tensor:
    """By what weights are multiplied: 0 where one is dropped. Drawn again it is the same."""
    generator = None if weights.is_meta else torch.Generator(weights.device).manual_seed(piece.seed)
    keeps = 1 - piece.dropout_p
    return torch.empty_like(weights).bernoulli_(keeps, generator=generator).mul_(1 / keeps if keeps else 0.0)


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
