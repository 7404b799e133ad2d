"""Runs a model on the global batch with batch norms that normalise micro-batch by micro-batch.

That is what a plan with the pin ``batch_norm`` computes; all else, such as of how many tokens a loss is the mean, is of
the global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

ARGUMENTS: dict[Callable[..., Any], tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: (
        "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled",
    ),
}  # fmt: skip


@contextlib.contextmanager
def normalizing_by_micro_batch(model: nn.Module, micro_batches: int) -> Iterator[None]:
    """While inside, batch norms of ``model`` take one micro-batch of their input after the other; running statistics
    are as after calls of the whole model on one after the other.
    """
    if micro_batches == 1:
        yield
        return

    def count(module: nn.Module, *_: Any) -> None:
        if module.training and isinstance(module.num_batches_tracked, Tensor):
            module.num_batches_tracked.add_(micro_batches - 1)

    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    hooks = [norm.register_forward_hook(count) for norm in norms]
    mode = _ByMicroBatch(micro_batches)
    try:
        with mode:
            yield
        mode.update()
    finally:
        for hook in hooks:
            hook.remove()


class _ByMicroBatch(TorchFunctionMode):
    """Gives batch norms their input in parts, and keeps these for the running statistics."""

    def __init__(self, micro_batches: int):
        super().__init__()
        self.micro_batches = micro_batches
        self.calls: list[tuple[tuple[Tensor, ...], Tensor, Tensor, float]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(zip(ARGUMENTS.get(func, ()), args, strict=False)) | (kwargs or {})
        if func not in ARGUMENTS or not given.get("training"):
            return func(*args, **(kwargs or {}))
        parts, mean, var = given["input"].chunk(self.micro_batches), given["running_mean"], given["running_var"]
        if mean is not None:
            detached = tuple(part.detach() for part in parts)
            self.calls.append((detached, mean, var, given.get("momentum", 0.1)))
        given |= {"running_mean": None, "running_var": None}
        return torch.cat([func(**{**given, "input": part}) for part in parts])

    def update(self) -> None:
        """Bring running statistics up to date, micro-batch by micro-batch."""
        for number in range(self.micro_batches):
            for parts, mean, var, momentum in self.calls:
                F.batch_norm(parts[number], mean, var, training=True, momentum=momentum)
