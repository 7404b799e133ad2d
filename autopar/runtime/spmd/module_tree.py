"""Module tree: parameters and buffers under the dotted names that they have in the original model."""

from __future__ import annotations

from torch import Tensor, nn


class ParameterHolder(nn.Module):
    """Holds parameters and buffers where the original model's submodule held them."""


def register(root: nn.Module, name: str, tensor: Tensor, saved: bool) -> None:
    """Put a parameter or buffer where the original model has it.

    Args:
        saved: whether a buffer is part of the state dict.
    """
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, ParameterHolder())
        child = module._modules[part]
        assert child is not None
        module = child
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor, persistent=saved)


def lookup(root: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of a name."""
    *path, last = name.split(".")
    module = root
    for part in path:
        child = module._modules[part]
        assert child is not None
        module = child
    tensor = module._parameters.get(last)
    found = tensor if tensor is not None else module._buffers[last]
    assert found is not None
    return found
