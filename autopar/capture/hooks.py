"""Looks for hooks on a model that a plan would run once, or never."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.graph.module_walk import ModuleWalk
from planner.base.errors import InputError

_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
COLLECTING = "transformers.utils.output_capturing"
"""The module of hooks that Transformers leaves on a model once it was asked for more outputs: they give them to who
asks, and are idle in other calls."""


def check_hooks(model: nn.Module) -> list[str]:
    """Refuse hooks that wait for gradients.

    Returns:
        What to warn of: hooks in forward, of which only what they compute is captured.

    Raises:
        InputError: names the module or parameter, and the way out.
    """
    walk = ModuleWalk(model)
    for path, module in walk.modules:
        for hook in _hooks(module, _BACKWARD):
            raise InputError(
                f"{_called(hook)} is a backward hook on {path or 'the model'!r}, and would never be called, since a "
                "plan runs operators and not modules: remove it (handle.remove()), or register it on the parallel "
                "module"
            )
    for name, parameter in walk.parameters:
        for hook in _hooks(parameter, ("_backward_hooks", "_post_accumulate_grad_hooks")):
            raise InputError(
                f"{_called(hook)} is a hook on the gradient of {name!r}, and would never be called, since training "
                "is of the parallel module's own parameters: remove it (handle.remove()), and register it on "
                f"pmodel.get_parameter({name!r}), whose gradient is a DTensor"
            )
    on: dict[str, list[str]] = {}
    for path, module in walk.modules:
        for hook in _hooks(module, _FORWARD):
            is_torchs = type(hook).__module__.startswith("torch.")  # such as weight_norm's, which only computes
            if not is_torchs and getattr(hook, "__module__", None) != COLLECTING:
                on.setdefault(_called(hook), []).append(repr(path or "the model"))
    return [
        f"{name} is a forward hook on {', '.join(paths[:3])}{f' and {len(paths) - 3} more' if paths[3:] else ''}: what "
        "it returns or changes is captured, and what else it does (print, count, record) is not done in a step. "
        "Register that on the parallel module, or return from forward what it is to see"
        for name, paths in on.items()
    ]


def _hooks(owner: Any, names: tuple[str, ...]) -> list[Any]:
    found: list[Mapping[int, Any] | None] = [getattr(owner, name, None) for name in names]
    return [hook for each in found if each for hook in each.values()]


def _called(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
