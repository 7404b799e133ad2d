"""Operators that read or write one element of a dim at the place of a label, where that dim is sharded.

Softmax over millions of classes is written with them: a margin is subtracted from the logit of the label alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from autopar.runtime.layers.ids import check_ids
from autopar.runtime.spmd.rank_index import Groups, as_partial, cut, ranks


def _numbers(length: int, groups: Groups, like: Tensor) -> Tensor:
    """The global indices of this rank's part of a dim of ``length``."""
    return cut(torch.arange(length, device=like.device), groups, like=like)


def one_hot(labels: Tensor, num_classes: int = -1, *, class_groups: Groups = ()) -> Tensor:
    """``aten.one_hot`` of global labels ``[..]``: ``[.., num_classes / ranks]``, ``S`` on ``class_groups``."""
    if not class_groups:
        return torch.ops.aten.one_hot.default(labels, num_classes)
    check_ids(labels, num_classes, "classes")
    return (labels.unsqueeze(-1) == _numbers(num_classes, class_groups, labels)).to(torch.int64)


def gather(
    op: OpOverload[..., Any],
    self: Tensor,
    dim: int,
    index: Tensor,
    sparse_grad: bool = False,
    *,
    class_groups: Groups = (),
) -> Tensor:
    """``aten.gather`` along a dim of which each rank holds a slice: zeros for what others hold.

    Args:
        op: the operator.
        self: ``S(dim)`` on ``class_groups``.
        index: global, ``R`` on ``class_groups``.
        dim, sparse_grad: as in the operator.
        class_groups: the mesh axes that shard ``dim``, major first.

    Returns:
        ``P`` on ``class_groups``.
    """
    here = self.shape[dim]
    classes = here * ranks(class_groups)
    check_ids(index, classes, "classes")
    begin = cut(torch.arange(0, classes, here, device=index.device), class_groups, like=index)
    local = index - begin
    present = (local >= 0) & (local < here)
    found = op(self, dim, local.masked_fill(~present, 0), sparse_grad=sparse_grad)
    return as_partial(found.masked_fill(~present, 0), class_groups)


def scatter(
    op: OpOverload[..., Any],
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor | float,
    *,
    class_groups: Groups = (),
) -> Tensor:
    """``aten.scatter`` of one element along a dim of which each rank holds a slice.

    Args:
        op: the operator, the one that takes a tensor or the one that takes a number.
        self: ``S(dim)`` on ``class_groups``.
        index: global, of size 1 along ``dim``, ``R`` on ``class_groups``; ``src`` likewise, if it is a tensor.
        dim: as in the operator.
        class_groups: the mesh axes that shard ``dim``, major first.

    Returns:
        ``S(dim)`` on ``class_groups``.
    """
    classes = self.shape[dim] * ranks(class_groups)
    check_ids(index, classes, "classes")
    numbers = _numbers(classes, class_groups, index)
    shape = [1] * self.dim()
    shape[dim] = -1
    is_written = numbers.view(shape) == index
    if isinstance(src, Tensor):
        return torch.where(is_written, src, self)
    return self.masked_fill(is_written, src)  # as a number of the dtype of self
