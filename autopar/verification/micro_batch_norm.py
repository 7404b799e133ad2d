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
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

TRAINING = 5
"""The place of ``training`` among the arguments of both functions."""


@contextlib.contextmanager
def normalizing_by_micro_batch(model: nn.Module, micro_batches: int) -> Iterator[None]:
    """While inside, batch norms of ``model`` take one micro-batch of their input after the other, in order."""
    if micro_batches == 1:
        yield
        return

    def count(module: nn.Module, *_: Any) -> None:
        if module.training and isinstance(module.num_batches_tracked, torch.Tensor):
            module.num_batches_tracked.add_(micro_batches - 1)

    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    hooks = [norm.register_forward_hook(count) for norm in norms]
    try:
        with _ByMicroBatch(micro_batches):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _ByMicroBatch(TorchFunctionMode):
    """Gives batch norms their input in parts."""

    def __init__(self, micro_batches: int):
        super().__init__()
        self.micro_batches = micro_batches

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        training = args[TRAINING] if len(args) > TRAINING else named.get("training", False)
        if func not in (torch.batch_norm, F.batch_norm) or not training:
            return func(*args, **named)
        whole, rest = (named.pop("input"), ()) if "input" in named else (args[0], args[1:])
        return torch.cat([func(part, *rest, **named) for part in whole.chunk(self.micro_batches)])
