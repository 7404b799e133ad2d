"""A snapshot of a model's state, restored once its code has run: capture leaves the model as it was found.

A model is captured by running its code on tensors without values, and sometimes twice. Code may count, cache, install
hooks or draw random numbers; a second run begins as the first did. What the user's own functions share by name
(globals, closures, classes, caches) is restored too: a tensor that one run left there has no place in the next.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import sysconfig
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from autopar.graph.module_walk import ModuleWalk

_CONTAINERS = (OrderedDict, dict, list, set, deque, tuple, frozenset)
"""Built-in classes of containers, each before those that it derives from."""
_WRAPPERS = (MethodType, functools.partial, functools._lru_cache_wrapper, property, staticmethod, classmethod)
_FUNCTIONS = (FunctionType, *_WRAPPERS)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_MISSING = object()


class Snapshot:
    """The state of a model, of what its code shares by name, and of the random generators when it was made.

    A model's state is the attributes of modules and of the objects in them, and the containers there. Tensors and
    arrays keep their values; slots of objects, attributes and defaults of functions, and what installed libraries keep
    elsewhere are not followed.

    Attributes:
        shared: what the user's functions read by name.
        had_new_tensors: whether the model held tensors, when it was restored, that it does not hold now.
    """

    def __init__(self, walk: ModuleWalk):
        self.had_new_tensors = False
        self._own = _Held([vars(walk.model)])
        kinds = dict.fromkeys(type(module) for _, module in walk.modules)
        self.shared, caches = _shared([*kinds, *self._own.functions])
        self._others = _Held(name.value for name in self.shared)
        self._caches = [(cache, cache.cache_info().misses) for cache in caches]
        numpy: Any = sys.modules.get("numpy")
        self._random = random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Make everything as it was; caches that were filled are emptied."""
        own, others = self._own.changed(), self._others.changed()
        self.had_new_tensors = bool(own) and not _Held(held for _, held, _ in own).tensors <= self._own.tensors
        for base, held, contents in (*own, *others):
            _refill(base, held, contents)
        for name in self.shared:
            name.restore()
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
        python, torchs, numpys = self._random
        random.setstate(python)
        torch.set_rng_state(torchs)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)


# ---- containers and attributes -----------------------------------------------------------------------------------


class _Held:
    """The containers that are reached from some values, and what is in them; attributes of an object are in one.

    Attributes:
        tensors: those that are reached, by identity.
        functions: those that are reached.
    """

    def __init__(self, values: Iterable[Any]):
        self.tensors: set[int] = set()
        self.functions: list[Any] = []
        self._contents: list[tuple[Any, Any, list[Any]]] = []
        bases: dict[type, Any] = dict.fromkeys(_PLAIN)
        seen: set[int] = set()
        pending = list(values)
        while pending:
            value = pending.pop()
            kind = type(value)
            if kind not in bases:
                bases[kind] = next((base for base in _CONTAINERS if issubclass(kind, base)), object)
            base = bases[kind]
            if base is None or id(value) in seen:
                continue
            seen.add(id(value))
            if base is not object:
                contents = _contents(base, value)
                self._contents.append((base, value, contents))
                pending += contents
            if isinstance(value, Tensor):
                self.tensors.add(id(value))
            elif isinstance(value, _FUNCTIONS):
                self.functions.append(value)
            elif kind is not base and not isinstance(value, (type, ModuleType)):
                pending.append(getattr(value, "__dict__", None))

    def changed(self) -> list[tuple[Any, Any, list[Any]]]:
        """Containers that hold other objects by now, or in another order: built-in class, itself, what it held."""
        filled = (each for each in self._contents if each[2] or each[0].__len__(each[1]))
        return [(base, held, was) for base, held, was in filled if not _are_same(_contents(base, held), was)]


def _contents(base: Any, held: Any) -> list[Any]:
    """What is in a container of a built-in class, read as that class does it; keys before values."""
    if not base.__len__(held):
        return []
    return [*base.keys(held), *base.values(held)] if issubclass(base, dict) else list(base.__iter__(held))


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _refill(base: Any, held: Any, contents: list[Any]) -> None:
    """Let a container hold what it held."""
    base.clear(held)
    if issubclass(base, dict):
        half = len(contents) // 2
        for key, value in zip(contents[:half], contents[half:], strict=True):
            base.__setitem__(held, key, value)
    elif base is set:
        base.update(held, contents)
    else:
        base.extend(held, contents)


# ---- what functions share ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedName:
    """A global, a variable of a closure, or an attribute of a class.

    Attributes:
        words: which one.
        place: the globals, the closure's cell, or the class.
        name: what it is called there.
        value: what it stands for.
    """

    words: str
    place: Any
    name: str
    value: Any

    def restore(self) -> None:
        """Bind the name as it was."""
        if _bound(self.place, self.name) is self.value:
            return
        if isinstance(self.place, CellType):
            self.place.cell_contents = self.value
        elif isinstance(self.place, type):
            setattr(self.place, self.name, self.value)
        elif self.value is _MISSING:
            del self.place[self.name]
        else:
            self.place[self.name] = self.value


def _shared(values: Iterable[Any]) -> tuple[list[SharedName], list[Any]]:
    """The names that the user's functions and classes among some values use, and those that these stand for; caches."""
    found: list[SharedName] = []
    caches: list[Any] = []
    seen: set[int] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools._lru_cache_wrapper):
            caches.append(value)
        if isinstance(value, _WRAPPERS):
            pending += [getattr(value, name, None) for name in ("__wrapped__", "__func__", "func", "fget")]
        names = [SharedName(*each, _bound(*each[1:])) for each in _names_in(value)]
        found += names
        pending += [name.value for name in names]
    return found, caches


def _names_in(value: Any) -> Iterator[tuple[str, Any, str]]:
    """The names that a function or class of the user's uses: in words, where they are bound, and as what."""
    if isinstance(value, type):
        for owner in value.__mro__:
            if owner is not object and not is_installed(_file_of(owner)):
                for name in vars(owner):
                    yield f"attribute {name!r} of class {owner.__qualname__}", owner, name
    elif isinstance(value, FunctionType) and not is_installed(value.__code__.co_filename):
        module = value.__globals__.get("__name__")
        for name in dict.fromkeys(_names_of(value.__code__)):
            yield f"global {name!r} of module {module!r}", value.__globals__, name
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if _bound(cell, name) is not _MISSING:
                yield f"variable {name!r} around {value.__qualname__}", cell, name


def _names_of(code: CodeType) -> Iterator[str]:
    """Names of globals that code uses, and of attributes; those of functions made inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


def _bound(place: Any, name: str) -> Any:
    if isinstance(place, CellType):
        try:
            return place.cell_contents
        except ValueError:  # empty
            return _MISSING
    return (vars(place) if isinstance(place, type) else place).get(name, _MISSING)


def _file_of(owner: type) -> str | None:
    module = sys.modules.get(getattr(owner, "__module__", ""))
    return getattr(module, "__file__", None)


def is_installed(file: str | None) -> bool:
    """Whether a file is of Python itself or of an installed library."""
    return file is not None and file.startswith(_INSTALLED)
