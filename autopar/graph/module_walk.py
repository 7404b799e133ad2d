"""Lists a model's modules, parameters and buffers in torch's order, in a fraction of torch's time.

Models have tens of thousands of modules, and are walked over for many reasons. Torch's own walks pass each module
through a generator for every module above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor, nn


class ModuleWalk:
    """One walk over a model, for all who ask for as long as it has the same modules and tensors."""

    def __init__(self, model: nn.Module):
        self.model = model

    @cached_property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """As :func:`modules`."""
        return modules(self.model)

    @cached_property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """Every module by each of its names."""
        held = sum([len(module._modules) for _, module in self.modules if module._modules])
        return self.modules if held == len(self.modules) - 1 else modules(self.model, once=False)

    @cached_property
    def parameters(self) -> list[tuple[str, Tensor]]:
        """Every parameter by its first name."""
        return first_names(_named([(path, module._parameters) for path, module in self.modules if module._parameters]))

    @cached_property
    def buffers(self) -> list[tuple[str, Tensor]]:
        """Every buffer by its first name."""
        return first_names(_named([(path, module._buffers) for path, module in self.modules if module._buffers]))


def modules(model: nn.Module, *, once: bool = True) -> list[tuple[str, nn.Module]]:
    """Every module with its path, ``model`` first; one of several names by its first, or ``once`` for each."""
    found: list[tuple[str, nn.Module]] = [("", model)]
    seen = {id(model)}

    def visit(module: nn.Module, before: str) -> None:
        for name, child in module._modules.items():
            if child is None or (once and id(child) in seen):
                continue
            seen.add(id(child))
            path = before + name
            found.append((path, child))
            if child._modules:
                visit(child, path + ".")

    visit(model, "")
    return found


def tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter, then every buffer, by all of its names."""
    found = modules(model, once=False)
    held = [(path, module._parameters) for path, module in found]
    return _named(held) + _named([(path, module._buffers) for path, module in found])


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer -> the first name of the same tensor (tied weights share one)."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors(model)}


def _named(held: Sequence[tuple[str, Mapping[str, Tensor | None]]]) -> list[tuple[str, Tensor]]:
    return [
        (f"{path}.{name}" if path else name, tensor)
        for path, each in held
        if each
        for name, tensor in each.items()
        if tensor is not None
    ]


def first_names(named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Each tensor by its first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    for each in named:
        first.setdefault(id(each[1]), each)
    return list(first.values())
