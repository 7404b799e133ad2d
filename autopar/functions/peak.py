"""Peak: the bytes that a Function's backward needs while it runs, beside the gradients that it is given and gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.functions.carry import Carried
from autopar.functions.joint import Operand, alone


def backward_bytes(carried: Carried, operands: Sequence[Operand]) -> int:
    """Bytes of the tensors that backward makes, at the fullest of its moments, without the gradients that it gives.

    It runs once on tensors without data, and what its code still holds counts, as long as it holds it.
    """
    with alone(), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        inputs = [torch.empty(o.shape, dtype=o.dtype, device=o.device, requires_grad=o.trained) for o in operands]
        results = [t for t in carried.apply(inputs) if t.requires_grad]
        wanted, given = [t for t in inputs if t.requires_grad], [torch.empty_like(t) for t in results]
        if not results or not wanted:
            return 0
        with _Peak([*inputs, *results, *given]) as peak:
            found = torch.autograd.grad(results, wanted, given, allow_unused=True)
    return max(0, peak.bytes - sum(t.numel() * t.element_size() for t in found if t is not None))


class _Peak(TorchDispatchMode):
    """The most bytes of tensors that were made inside and were alive at one time."""

    def __init__(self, before: Sequence[Tensor]):
        super().__init__()
        self.bytes = 0
        self._before = {t.untyped_storage()._cdata for t in before}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given | self._before:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return result
