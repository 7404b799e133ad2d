"""Walk: torch's walks over a model's modules, parameters and buffers as lists, in a fraction of the time.

Models have tens of thousands of modules, and are walked over for many reasons. Torch's own walks pass each module
through a generator for every module above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn


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


def tensors(model: nn.Module, *, once: bool = True) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Every parameter, and every buffer, by its first name, or by all of them."""
    found = modules(model, once=once)
    return (
        _named([(path, module._parameters) for path, module in found if module._parameters], once),
        _named([(path, module._buffers) for path, module in found if module._buffers], once),
    )


def _named(held: Sequence[tuple[str, Mapping[str, Tensor | None]]], once: bool) -> list[tuple[str, Tensor]]:
    named = [
        (f"{path}.{name}" if path else name, tensor)
        for path, each in held
        for name, tensor in each.items()
        if tensor is not None
    ]
    return first_names(named) if once else named


def first_names(named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Each tensor by its first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    for each in named:
        first.setdefault(id(each[1]), each)
    return list(first.values())
