"""Outside: what the functions of a model keep elsewhere: globals, closures, attributes of classes, caches.

Only the user's own code is followed, from the methods of the model's modules on; installed libraries are not.
"""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_MISSING = object()
_CODE = (FunctionType, MethodType, functools.partial, functools._lru_cache_wrapper)


class Outside:
    """Everything that a model's functions read by name, as it was when this was made."""

    def __init__(self, model: nn.Module):
        self._globals: list[tuple[dict[str, Any], str, object]] = []
        self._cells: list[tuple[CellType, object]] = []
        self._attributes: list[tuple[type, str, object]] = []
        self._caches: list[tuple[Any, int]] = []
        seen: set[int] = set()
        pending: list[Any] = []
        for module in model.modules():
            held = (*vars(module).values(), *module._forward_hooks.values(), *module._forward_pre_hooks.values())
            pending += (type(module), *(value for value in held if isinstance(value, _CODE)))
        while pending:
            value = pending.pop()
            if id(value) not in seen:
                seen.add(id(value))
                pending += self._look_into(value)

    def values(self) -> Iterator[Any]:
        """What was found."""
        for _, _, value in (*self._globals, *self._attributes):
            yield value
        for _, value in self._cells:
            yield value

    def restore(self) -> None:
        """Bind every name as it was; caches that were filled are emptied."""
        for names, name, value in self._globals:
            if names.get(name, _MISSING) is not value:
                _bind(names, name, value)
        for cell, value in self._cells:
            if _contents(cell) is not value:
                cell.cell_contents = value
        for owner, name, value in self._attributes:
            if vars(owner).get(name, _MISSING) is not value:
                setattr(owner, name, value)
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()

    def _look_into(self, value: Any) -> list[Any]:
        """Note what a function, class or cache reads; what is to be looked into next."""
        if isinstance(value, functools._lru_cache_wrapper):
            self._caches.append((value, value.cache_info().misses))
            return [value.__wrapped__]
        if isinstance(value, (staticmethod, classmethod, MethodType)):
            return [value.__func__]
        if isinstance(value, property):
            return [value.fget]
        if isinstance(value, functools.partial):
            return [value.func]
        if isinstance(value, type):
            owners = [owner for owner in value.__mro__ if _is_users(owner)]
            for owner in owners:
                self._attributes += [(owner, name, v) for name, v in vars(owner).items() if not _is_special(name)]
            return [v for owner in owners for v in vars(owner).values()]
        if isinstance(value, FunctionType) and not value.__code__.co_filename.startswith(_INSTALLED):
            names = {name: value.__globals__.get(name, _MISSING) for name in _names(value.__code__)}
            self._globals += [(value.__globals__, name, held) for name, held in names.items()]
            cells = [(cell, _contents(cell)) for cell in value.__closure__ or ()]
            self._cells += [(cell, held) for cell, held in cells if held is not _MISSING]
            return [*names.values(), *(held for _, held in cells)]
        return []


def _is_users(owner: type) -> bool:
    functions = [value for value in vars(owner).values() if isinstance(value, FunctionType)]
    return bool(functions) and not any(f.__code__.co_filename.startswith(_INSTALLED) for f in functions)


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function reads or writes outside, those of functions within it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _bind(names: dict[str, Any], name: str, value: object) -> None:
    if value is _MISSING:
        del names[name]
    else:
        names[name] = value
