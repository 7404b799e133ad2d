"""Norms of whole tensors of which ranks hold parts, all of them in one reduction.

An optimizer that scales each parameter's update by norms of the whole parameter (LARS, LAMB) may so update parts: it
says ``takes_parts = True``, and asks :func:`whole_norms` for what it would take of whole tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.optim.parts import holders_of, is_cut, local


def whole_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, as a scalar on its device, in float32 at least.

    Of those that are cut over the same ranks all are summed at once; ranks that hold copies compute the same. Every
    rank that holds a part must call it, for the same tensors in the same order.

    Args:
        tensors: parameters, gradients or what was made of them: DTensors, or plain tensors that are whole.
    """
    squares = [_square(local(tensor)) for tensor in tensors]
    groups: dict[object, tuple[DTensor, list[int]]] = {}
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) and is_cut(tensor):
            cut = tuple(not placement.is_replicate() for placement in tensor.placements)
            groups.setdefault((tensor.device_mesh, cut, squares[number].dtype), (tensor, []))[1].append(number)
    for tensor, numbers in groups.values():
        at = [squares[number].device for number in numbers]
        summed = torch.stack([squares[number].to(tensor.device_mesh.device_type) for number in numbers])
        dist.all_reduce(summed, group=holders_of(tensor))
        for number, device, square in zip(numbers, at, summed.unbind(), strict=True):
            squares[number] = square.to(device)
    return [square.sqrt() for square in squares]


def _square(part: Tensor) -> Tensor:
    wide = torch.promote_types(part.dtype, torch.float32)
    return torch.linalg.vector_norm(part, dtype=wide).square()
