"""In which dtype autocast has torch's operators compute, for what stands in their place."""

from __future__ import annotations

import torch
from torch import Tensor


def autocasts(tensor: Tensor) -> bool:
    """Whether autocast is on where a tensor is."""
    kind = tensor.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of products and attention with a tensor."""
    is_cast = autocasts(tensor) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(tensor.device.type) if is_cast else tensor.dtype


def as_autocast(tensor: Tensor) -> Tensor:
    """A tensor in that dtype; itself, which may be a term of a sum, where it is in it."""
    dtype = product_dtype(tensor)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
