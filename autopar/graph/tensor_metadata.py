"""What code may ask of a tensor and get the same answer from its proxy."""

from __future__ import annotations

import torch
from torch import Tensor

ATOMS = frozenset(
    {int, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Kinds of values that equal none of another kind."""

PLAIN = ATOMS | {bool, float, complex, torch.Size}
"""Kinds of values that hold no tensors and do not change."""

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "requires_grad", "is_sparse", "is_quantized"),
    *("is_nested", "is_mkldnn", "is_meta", "is_cpu", "is_cuda", "is_xpu", "is_mps", "is_xla", "is_mtia"),
)
_METHODS = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "__len__"),
)

FACTS = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(Tensor, name) for name in _METHODS),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.result_type),
    ]
)
"""Functions whose answer follows from shapes, strides, dtypes, devices and ``requires_grad``. All others (``is_leaf``,
``_version``, ``data_ptr``, ``__hash__``) ask for what only the tensor itself knows."""

HISTORY = frozenset([torch.autograd.grad, *(getattr(Tensor, name).__get__ for name in ("_base", "grad"))])
"""Functions that return tensors which depend on how others came about."""
