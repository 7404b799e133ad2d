"""Outside: what the functions of a model keep elsewhere: globals, closures, attributes of classes, caches.

Only the user's own code is simulated, from the methods of the model's modules on; installed libraries are not.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from autopar.graph.module_walk import Walk

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_MISSING = object()
_NAMING = {
    dis.opmap[name]: int(name == "LOAD_GLOBAL" and sys.version_info >= (3, 11))
    for name in ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    if name in dis.opmap
}
"""Instructions that name a global: by how many bits their argument is shifted."""
_EXTENDED = dis.opmap["EXTENDED_ARG"]
_CODE = (FunctionType, MethodType, functools.partial, functools._lru_cache_wrapper)


class Outside:
    """Everything that a model's functions read by name, as it was when this was made.

    Args:
        held: objects that the model has in its attributes, and in containers there; functions among them are its own.

    Attributes:
        codes: of the functions that were found (``None``), and of those made inside them: the code that makes them.
    """

    def __init__(self, walk: Walk, held: Sequence[Any]):
        self._globals: list[tuple[dict[str, Any], str, object]] = []
        self._cells: list[tuple[CellType, object]] = []
        self._attributes: list[tuple[type, str, object]] = []
        self._caches: list[tuple[Any, int]] = []
        self._functions: dict[int, FunctionType] = {}
        self._owners: dict[int, type] = {}
        self.codes: dict[CodeType, CodeType | None] = {}
        seen: set[int] = set()
        pending: list[Any] = [*dict.fromkeys(type(module) for _, module in walk.modules)]
        kinds = {kind for kind in set(map(type, held)) if issubclass(kind, _CODE)}
        pending += [value for value in held if type(value) in kinds]
        while pending:
            value = pending.pop()
            if id(value) not in seen:
                seen.add(id(value))
                pending += self._look_into(value)

    def now(self) -> list[Any]:
        """What is in all these places by now."""
        return [
            *(names.get(name, _MISSING) for names, name, _ in self._globals),
            *(_contents(cell) for cell, _ in self._cells),
            *(vars(owner).get(name, _MISSING) for owner, name, _ in self._attributes),
            *(held for f in self._functions.values() for held in (f.__defaults__, f.__kwdefaults__, f.__dict__)),
        ]

    def places(self) -> Iterator[tuple[str, Any]]:
        """Each of these places in words, and what was there."""
        for names, name, value in self._globals:
            yield f"global {name!r} of module {names.get('__name__')!r}", value
        for function in self._functions.values():
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                yield f"variable {name!r} around {function.__qualname__}", _contents(cell)
        for owner, name, value in self._attributes:
            yield f"attribute {name!r} of class {owner.__qualname__}", value

    def filled(self) -> list[int]:
        """How much caches and classes hold by now."""
        found = [number for cache, _ in self._caches for number in cache.cache_info()[1::2]]
        return found + [len(vars(owner)) for owner in self._owners.values()]

    def knows(self, value: Any) -> bool:
        """Whether all that a function, class or cache reads by name is installed, or among what was found."""
        if isinstance(value, (staticmethod, classmethod)):
            return self.knows(value.__func__)
        if isinstance(value, property):
            return all(f is None or self.knows(f) for f in (value.fget, value.fset, value.fdel))
        if isinstance(value, functools._lru_cache_wrapper):
            return any(cache is value for cache, _ in self._caches) or is_installed(
                value.__wrapped__.__code__.co_filename
            )
        if isinstance(value, FunctionType):
            return id(value) in self._functions or is_installed(value.__code__.co_filename)
        return isinstance(value, type) and all(id(o) in self._owners or _is_installed(o) for o in value.__mro__)

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
            self._owners.update({id(owner): owner for owner in owners})
            for owner in owners:
                self._attributes += [(owner, name, v) for name, v in vars(owner).items() if not _is_special(name)]
            return [v for owner in owners for v in vars(owner).values()]
        if isinstance(value, FunctionType) and not is_installed(value.__code__.co_filename):
            self._functions[id(value)] = value
            for code, maker in _made_in(value.__code__):
                self.codes.setdefault(code, maker)
            self.codes[value.__code__] = None
            names = {name: value.__globals__.get(name, _MISSING) for name in globals_of(value.__code__)}
            self._globals += [(value.__globals__, name, held) for name, held in names.items()]
            cells = [(cell, _contents(cell)) for cell in value.__closure__ or ()]
            self._cells += [(cell, held) for cell, held in cells if held is not _MISSING]
            return [*names.values(), *(held for _, held in cells)]
        return []


def is_installed(file: str | None) -> bool:
    """Whether a file is of Python itself or of an installed library."""
    return file is not None and file.startswith(_INSTALLED)


def _is_users(owner: type) -> bool:
    functions = [value for value in vars(owner).values() if isinstance(value, FunctionType)]
    return bool(functions) and not any(is_installed(f.__code__.co_filename) for f in functions)


def _is_installed(owner: type) -> bool:
    """Whether a class is Python's own, or of an installed library."""
    return owner.__module__ == "builtins" or is_installed(getattr(sys.modules.get(owner.__module__), "__file__", None))


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _made_in(code: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The code of every function made inside one, with the code that makes it."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant, code
            yield from _made_in(constant)


def globals_of(code: CodeType) -> Iterator[str]:
    """Names that a function reads or writes outside, those of functions within it too.

    As :func:`dis.get_instructions` tells them from attributes, in a tenth of the time.
    """
    for each in (code, *(inner for inner, _ in _made_in(code))):
        names, above = each.co_names, 0
        for op, low in zip(each.co_code[::2], each.co_code[1::2], strict=True):
            number = above | low
            above = number << 8 if op == _EXTENDED else 0
            if op in _NAMING:
                yield names[number >> _NAMING[op]]


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
