"""Measures the peak bytes of live tensors over a stretch of code.

What is counted are storages that torch's operators return, each once however many views it has: weights,
gradients, optimizer state, activations and temporaries of this process. Not counted: what the allocator
keeps in reserve, buffers inside a collective's or an operator's own code, and Python itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.module import ParallelModule


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages; use as a context.

    Args:
        held: tensors that are alive from the start (see :func:`held_tensors`).

    Attributes:
        now, peak: bytes alive now, and at the peak so far.
    """

    def __init__(self, held: Iterable[Tensor] = ()):
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}
        for tensor in held:
            self._add(tensor)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self._add(value)
        return result

    def _add(self, tensor: Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or local.device.type == "meta":
            return
        self._known[key] = size
        weakref.finalize(storage, self._drop, key)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


def held_tensors(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Parameters, buffers, gradients, their buckets and optimizer state that are alive between two steps."""
    found: list[Tensor] = [*module.parameters(), *module.buffers()]
    if isinstance(module, ParallelModule):
        found += module.buckets.tensors
    found += [p.grad for p in module.parameters() if p.grad is not None]
    if optimizer is not None:
        found += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return found
