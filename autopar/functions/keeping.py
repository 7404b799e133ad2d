"""Keeping: what a Function's forward leaves for its backward, seen while both run.

Tensors without data are enough; what decides on their values is seen as far as it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.functions.carry import Carried
from autopar.functions.joint import Operand, alone
from autopar.functions.kept import Kept
from autopar.functions.outside import Watching
from autopar.graph.tensors import storage_of
from planner.base.errors import CaptureError


def kept(carried: Carried, operands: Sequence[Operand]) -> Kept:
    """What it keeps of tensors without data.

    Raises:
        CaptureError: it reads parameters or buffers that it finds by itself.
        Exception: whatever its forward raises, if that does not run on them.
    """
    with alone(), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        inputs = [torch.empty(o.shape, dtype=o.dtype, device=o.device, requires_grad=o.trained) for o in operands]
        with Watching(carried.name, inputs):
            return observed(carried.apply, inputs, (Exception,))  # whatever code without values to decide on raises


def observed(
    apply: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    stops: tuple[type[Exception], ...] = (),
) -> Kept:
    """What is kept while ``apply`` and its backward run once on ``inputs``, some of which want gradients.

    Args:
        stops: what backward may raise, where it is seen as far as it gets; it is taken to ask for what was saved then.
    """
    packed: list[Tensor] = []
    asked: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        return tensor

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, unpack):
        results = apply(inputs)
    roots, wanted = [t for t in results if t.requires_grad], [t for t in inputs if t.requires_grad]
    if not roots or not wanted:
        return Kept()
    words = {storage_of(t): f"out{place}" for place, t in enumerate(results)}
    words |= {storage_of(t): f"in{place}" for place, t in enumerate(inputs)}
    held = [t for t in pytree.tree_leaves(vars(roots[0].grad_fn)) if isinstance(t, Tensor)]
    given, is_over = [torch.ones_like(t) for t in roots], False
    with _Peak([*inputs, *results, *given, *packed, *held]) as peak:
        try:
            found = torch.autograd.grad(roots, wanted, given, allow_unused=True)
            is_over = True
        except CaptureError:
            raise
        except stops:
            found = ()
    gives = sum(t.numel() * t.element_size() for t in found if t is not None)
    saved = packed if asked or not is_over else []
    saves = dict.fromkeys(words[storage_of(t)] for t in saved if storage_of(t) in words)
    every = {storage_of(t): t for t in (*packed, *held)}
    holds = [words[storage] for storage in every if storage in words and words[storage] not in saves]
    others = [_like(t, [*inputs, *results]) for storage, t in every.items() if storage not in words]
    first = max(1, *(t.numel() * t.element_size() for t in (inputs[0], results[0])))
    return Kept(tuple(saves), tuple(holds), tuple(others), max(0, peak.bytes - gives) / first, is_over)


def _like(tensor: Tensor, measures: Sequence[Tensor]) -> tuple[int, float]:
    """The measure next in size, and the tensor's bytes for each element of that."""
    place = min(range(len(measures)), key=lambda at: abs(measures[at].numel() - tensor.numel()))
    return place, tensor.numel() * tensor.element_size() / (measures[place].numel() or 1)


class _Peak(TorchDispatchMode):
    """The most bytes of tensors that were made inside and were alive at one time."""

    def __init__(self, before: Sequence[Tensor]):
        super().__init__()
        self.bytes = 0
        self._before = set(map(storage_of, before))
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_of(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given | self._before:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return result
