"""Reach: what a Function's code can get at without being given it, where what it does cannot be watched.

A backward that decides on values runs on shapes only as far as that. What it may read after is what its code names and
what else than tensors it is given hold: if a model's parameter or buffer is there, the Function is refused.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from autopar.capture.model_state import is_installed
from autopar.functions.carry import Carried
from autopar.functions.outside import belongings, storage_of
from planner.base.errors import CaptureError

_READS = ("LOAD_GLOBAL", "LOAD_NAME")


def refuse_reach(carried: Carried) -> None:
    """Refuse a Function of which not all can be watched, if it can get at a model's parameters or buffers.

    Raises:
        CaptureError: it can.
    """
    models = belongings()
    for where, start in (("it is given", carried.args), ("its code names", carried.cls)):
        for tensor in _tensors(start):
            if storage_of(tensor) in models or isinstance(tensor, nn.Parameter):
                what, _ = models.get(storage_of(tensor), ("parameter", None))
                raise CaptureError(
                    f"{carried.name} decides on the values of tensors, or runs on tensors with data only, so that what "
                    f"it reads cannot be watched, and {where} something that holds a {what} of shape "
                    f"{tuple(tensor.shape)}: a plan would go on with the original's values. Pass to apply() the "
                    "tensors that it reads, and nothing that holds others"
                )


def _tensors(start: object) -> Iterator[Tensor]:
    """Every tensor that can be reached."""
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            yield from (*value.parameters(), *value.buffers())
        else:
            waiting += _held(value)


def _held(value: Any) -> list[Any]:
    """What a value leads to; installed code leads nowhere."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, CellType):
        return [] if value == CellType() else [value.cell_contents]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        if is_installed(value.__code__.co_filename):
            return []
        names = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        return [*names, *(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
    if isinstance(value, type):
        return [each for owner in value.__mro__ if _is_users(owner) for each in vars(owner).values()]
    if isinstance(value, ModuleType) or not _is_users(type(value)):
        return []
    return [*vars(value).values(), type(value)] if hasattr(value, "__dict__") else [type(value)]


def _is_users(owner: type) -> bool:
    functions = [value for value in vars(owner).values() if isinstance(value, FunctionType)]
    module = owner.__module__.partition(".")[0]
    return module not in ("builtins", "torch") and not any(is_installed(f.__code__.co_filename) for f in functions)


def _names(code: CodeType) -> Iterator[str]:
    """Globals that a function reads, those of functions within it too."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in _READS)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
