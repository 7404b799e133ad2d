"""The operator of an embedding bag: rows of a table looked up and pooled, bag by bag, with one result.

``aten.embedding_bag`` returns three tensors more, whose shapes depend on the kernel. A capture puts this one in its
place (:mod:`autopar.capture.passes.embedding_bags`).
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "embedding_bag(Tensor weight, Tensor indices, Tensor? starts, Tensor? per_sample_weights, int mode, "
    "int padding_idx, bool scale_grad_by_freq) -> Tensor"
)


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    starts: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """``weight[v, h], indices -> y[b, h]``.

    Args:
        weight: the table.
        indices: ids ``[b, l]``, a bag in each row; or ``[n]``, the bags one behind the other.
        starts: ``[b]``, where in these each bag begins; ``None`` where bags are rows.
        per_sample_weights: like ``indices``, by which rows are multiplied before they are added up.
        mode: sum, mean or max, numbered as torch does.
        padding_idx: the id that bags do without; -1 for none.
        scale_grad_by_freq: as in ``torch.nn.EmbeddingBag``.
    """
    if starts is None:
        bags, size = indices.shape
        starts = torch.arange(bags, device=indices.device) * size
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    padding = None if padding_idx == -1 else padding_idx  # to torch's operator -1 is the last row
    return torch.ops.aten.embedding_bag.padding_idx(
        weight, indices.reshape(-1), starts, scale_grad_by_freq, mode, False, per_sample_weights, False, padding
    )[0]


_LIBRARY.impl("embedding_bag", _embedding_bag, "CompositeImplicitAutograd")
embedding_bag = torch.ops.autopar.embedding_bag.default
"""The operator; see :func:`_embedding_bag`."""
