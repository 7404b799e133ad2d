"""Collectives of layers on plain tensors, whose types the layer states itself."""

from __future__ import annotations

import torch.distributed._functional_collectives as funcol
from torch import Tensor

from autopar.runtime.spmd.rank_index import Groups


def all_reduce(tensor: Tensor, kind: str, groups: Groups) -> Tensor:
    """Sum, maximum or minimum over the ranks of all groups."""
    for group in groups:
        tensor = funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), kind, group))
    return tensor
