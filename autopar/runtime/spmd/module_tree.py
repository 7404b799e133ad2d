"""Module tree: parameters and buffers under the dotted names that they have in the original model."""

from __future__ import annotations

from torch import Tensor, nn

from autopar.runtime.spmd.original import ParameterHolder


def register(root: nn.Module, original: nn.Module, name: str, tensor: Tensor, saved: bool) -> None:
    """Put a parameter or buffer where the original model has it, whatever attributes the root has of that name.

    Args:
        saved: whether a buffer is part of the state dict.
    """
    *path, last = name.split(".")
    module = root
    for part in path:
        original = original.get_submodule(part)
        if part not in module._modules:
            module._modules[part] = ParameterHolder(original)
        child = module._modules[part]
        assert child is not None
        module = child
    if isinstance(tensor, nn.Parameter):
        module._parameters[last] = tensor
        return
    module._buffers[last] = tensor
    if not saved:
        module._non_persistent_buffers_set.add(last)


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
