"""A model that tests run under many plans is captured once in each process: a capture knows nothing of plans."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autopar.capture.capture import LossFn
from autopar.driver.trace import Traced, trace

_TRACED: dict[Any, Traced] = {}


def made(model: nn.Module, *of: Hashable) -> nn.Module:
    """Say in a test's model, and so in its copies, of what it was made: what is made of the same has the same code."""
    model.made_of = of  # type: ignore[assignment]
    return model


@contextlib.contextmanager
def captured_once() -> Iterator[None]:
    """Inside, a model that was :func:`made` is captured the first time only, on inputs of the same forms."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("driver.plan", "driver.rank_agreement", "verification.verify", "verification.reference"):
            patch.setattr(f"autopar.{module}.trace", _trace)
        yield


def _trace(model: nn.Module, args: Any, kwargs: Any, loss_fn: LossFn | None, *more: Any) -> Traced:
    of = getattr(model, "made_of", None)
    if of is None:
        return trace(model, args, kwargs, loss_fn, *more)
    modes = [(module.training, len(module._forward_hooks)) for module in model.modules()]
    tensors = dict(model.named_parameters()), dict(model.named_buffers()), args, kwargs
    forms = repr((modes, pytree.tree_map_only(Tensor, _form, tensors), more))
    around = torch.get_default_dtype(), torch._C._len_torch_function_stack()  # float64's twins, and what drops nothing
    key = of, around, loss_fn, forms
    if key not in _TRACED:
        _TRACED[key] = trace(model, args, kwargs, loss_fn, *more)
    return _TRACED[key]


def _form(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
