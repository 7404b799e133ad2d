"""Recall: calls of a submodule whose code need not run, since nothing that it could tell is other than before.

A call that does what an earlier one did is *watched* while its code runs: which attributes it reads of its modules,
which of the user's functions it runs, and whether it leaves everything as it was. A later call with equal inputs need
not run if what was read is equal in its modules, and all that can be reached from there, and from the user's functions,
is as it was. Where that cannot be told the code runs: an attribute that is neither plain nor one object for all, an
iterator, an array, a function that only a library knows. What installed libraries keep outside the model is not
followed, as in :mod:`autopar.capture.snapshot.user_code_state`.
"""

from __future__ import annotations

import dis
import enum
import inspect
import itertools
import operator
import os
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from autopar.capture.repeats.candidates import Submodule
from autopar.capture.snapshot.model_state import Held
from autopar.capture.snapshot.user_code_state import Outside, is_installed
from autopar.graph.identity import are_same
from autopar.graph.tensor_metadata import PLAIN
from autopar.graph.tensors import first_with

MOST = 2000
"""Containers that a call may reach: to compare more takes longer than to run it."""

_CONTAINERS = frozenset({dict, OrderedDict, list, set, tuple})
"""Those that keep nothing but what is in them: a deque has a length at most."""
_HERE = str(Path(__file__).parents[2]) + os.sep
_MISSING = object()
_LOOK_UP = nn.Module.__getattr__.__code__
"""Reads ``__dict__`` for the sake of one attribute."""
_EVERYTHING = frozenset({"__dict__", "__reduce__", "__reduce_ex__", "__getstate__"})
"""Attributes that hold all others; ``Module.__setattr__`` reads them too."""
_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes that hold what is compared by itself."""
_REVEALING = frozenset({id, hash, globals, inspect.getattr_static, inspect.currentframe, sys._getframe})
"""Functions that read attributes and globals unseen, or tell which module this is."""
_UNSEEN = frozenset({"__getattribute__", "__setattr__", "__delattr__", "__repr__", *(f.__name__ for f in _REVEALING)})
"""Names in code that may do so."""
_IMPORTS = dis.opmap["IMPORT_NAME"]


class _Bare:
    """Its objects keep all in their ``__dict__``."""


class Watch:
    """What one call reads and leaves behind, while inside the context.

    Args:
        inputs: tensors that the call is given.
        names: attributes that fake tensors have.
    """

    def __init__(
        self, submodule: Submodule, outside: Outside, inputs: Iterable[Tensor], leaves: list[Any], names: frozenset[str]
    ):
        self.submodule, self.modules = submodule, submodule.modules
        self.outside, self.leaves, self.names = outside, leaves, names
        self.read: set[tuple[int, str]] = set()
        self.is_seen = sys.getprofile() is None and not any(map(_has_slots, {type(m) for m in self.modules}))
        self._reach = _Reach(self.modules, outside)
        self._marks, self._random = _marks(submodule.tensors), _randomness()
        self.is_seen &= self._reach.size <= MOST and self._are_plain(inputs)
        self._codes: set[CodeType] = set()
        self._patched: list[tuple[type, Any]] = []

    def __enter__(self) -> None:
        """Put a look at every attribute into the modules' classes, and at every function into Python."""
        places = {id(module): place for place, module in enumerate(self.modules)}
        kinds = {type(module): type(module).__getattribute__ for module in self.modules}
        for kind, before in kinds.items():
            self._patched.append((kind, vars(kind).get("__getattribute__", _MISSING)))
            kind.__getattribute__ = self._looking(before, places)  # type: ignore[method-assign]
        sys.setprofile(self._entered)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        for kind, before in self._patched:
            if before is _MISSING:
                del kind.__getattribute__
            else:
                kind.__getattribute__ = before  # type: ignore[method-assign]

    def recall(self, inputs: Iterable[Tensor], foreign: Iterable[Tensor], leaves: list[Any]) -> Recall | None:
        """What later calls need to be the same, once the call is over; ``None`` if that cannot be told.

        Args:
            foreign: tensors that are neither the call's inputs nor its own.
            leaves: of its arguments, as they are now.
        """
        reach, known = self._reach, _Known(self.outside, self.names)
        if not (
            self.is_seen
            and list(map(id, leaves)) == list(map(id, self.leaves))
            and all(isinstance(leaf, Tensor) or type(leaf) in PLAIN for leaf in leaves)
            and known.all(self.outside.now())
            and known.all(foreign)
        ):
            return None
        own = [(place, name) for place, name in self.read if name not in _STRUCTURE]
        read = _Read(self.modules, own, frozenset(known.seen))
        if not (known.all(read.values) and all(map(known.has_plain, self._marks)) and self._random == _randomness()):
            return None
        others = [(other, dict(vars(other))) for other in known.others]
        recall = Recall(self.submodule, read, leaves, self._marks, others, known.seen, self.names, reach)
        return recall if recall.holds(self.submodule, inputs, leaves) else None

    def _looking(self, before: Callable[[Any, str], Any], places: dict[int, int]) -> Callable[[Any, str], Any]:
        read = self.read

        def __getattribute__(module: Any, name: str) -> Any:
            place = places.get(id(module))
            if place is not None:
                if name not in _EVERYTHING:
                    read.add((place, name))
                elif sys._getframe(1).f_code is not _LOOK_UP:
                    self.is_seen = False
            return before(module, name)

        return __getattribute__

    def _entered(self, frame: FrameType, event: str, _: object) -> None:
        """A function runs: it must be an installed one, or known."""
        code = frame.f_code
        if event == "call" and code not in self._codes:
            self._codes.add(code)
            file = code.co_filename
            if file.startswith("<"):
                file = str(frame.f_globals.get("__file__", file))
            if not is_installed(file) and not file.startswith(_HERE):
                maker = self.outside.codes.get(code, code)
                # What a function keeps that was made before the call is found where the function is.
                is_found = maker is None or (maker is not code and (maker in self._codes or not code.co_freevars))
                is_plain = _UNSEEN.isdisjoint(code.co_names) and _IMPORTS not in code.co_code[::2]
                self.is_seen &= is_found and is_plain

    def _are_plain(self, inputs: Iterable[Tensor]) -> bool:
        """Whether nobody has put an attribute on these tensors."""
        return all(vars(tensor).keys() <= self.names for tensor in inputs)


@dataclass(frozen=True)
class Recall:
    """A call that was watched, and what another must have equal.

    Attributes:
        submodule: whose call it was.
        read: what its code read of its modules.
        leaves: of its arguments.
        marks: attributes of its parameters and buffers.
        others: tensors that it could find and was not given, and the user's classes, each with its attributes.
        reached: whatever it could compare its inputs and modules to, by identity.
        names: attributes that fake tensors have.
        reach: all else that it could read.
    """

    submodule: Submodule
    read: _Read
    leaves: list[Any]
    marks: list[dict[str, Any]]
    others: list[tuple[Tensor | type, dict[str, Any]]]
    reached: set[int]
    names: frozenset[str]
    reach: _Reach

    def holds(self, submodule: Submodule, inputs: Iterable[Tensor], leaves: list[Any]) -> bool:
        """Whether a call of equal structure, whose tensors are of the same kinds, would do the same."""
        modules = submodule.modules
        return (
            submodule.is_as_nominated
            and self.read.is_equal_in(modules)
            and all(isinstance(a, Tensor) or _equal(a, b) for a, b in zip(self.leaves, leaves, strict=True))
            and all(map(_equal, self.marks, _marks(submodule.tensors)))
            and self.reached.isdisjoint(map(id, (*inputs, *submodule.tensors, *modules)))
            and all(vars(tensor).keys() <= self.names for tensor in inputs)
            and all(_equal(attributes, dict(vars(other))) for other, attributes in self.others)
            and self.reach.is_as_it_was()
        )


class _Read:
    """Attributes of modules as they were when this was made.

    Args:
        read: number of a module, and name of an attribute.
        elsewhere: what code finds elsewhere too, by identity.

    Attributes:
        values: what was found, but for empty containers, which most of what is found is.
    """

    def __init__(self, modules: Sequence[nn.Module], read: Iterable[tuple[int, str]], elsewhere: frozenset[int]):
        absent: dict[int, set[str]] = {}
        there = []
        for place, name in read:
            if name in vars(modules[place]):
                there.append((place, name))
            else:
                absent.setdefault(place, set()).add(name)
        self._without, self._absent = list(absent), list(map(frozenset, absent.values()))
        values = _found(modules, there)
        is_empty = [type(value) in _CONTAINERS and not value for value in values]
        self._empty = list(itertools.compress(there, is_empty))
        self._kinds = list(itertools.compress(map(type, values), is_empty))
        self._filled = list(itertools.compress(there, map(operator.not_, is_empty)))
        self.values = list(itertools.compress(values, map(operator.not_, is_empty)))
        self._has_filled = any(type(value) in _CONTAINERS for value in self.values)
        self._elsewhere = elsewhere
        self._ties = self._tied(list(itertools.compress(values, is_empty)), self.values)

    def is_equal_in(self, modules: Sequence[nn.Module]) -> bool:
        """Whether code that reads the same of these modules finds equal values."""
        empty, filled = _found(modules, self._empty), _found(modules, self._filled)
        return (
            all(map(frozenset.isdisjoint, self._absent, map(vars, map(modules.__getitem__, self._without))))
            and are_same(map(type, empty), self._kinds)
            and not any(empty)
            and all(map(_equal, self.values, filled))
            and self._tied(empty, filled) == self._ties
        )

    def _tied(self, empty: list[Any], filled: list[Any]) -> object:
        """Which containers are one, and which are also found elsewhere; ``None`` where each is found once."""
        held = list(map(id, [*empty, *_containers(filled)] if self._has_filled else empty))
        if len(set(held)) == len(held) and self._elsewhere.isdisjoint(held):
            return None
        return first_with(held), [(at, each) for at, each in enumerate(held) if each in self._elsewhere]


def _found(modules: Sequence[nn.Module], read: Sequence[tuple[int, str]]) -> list[object]:
    """The attributes of these names, of modules of these numbers."""
    attributes = list(map(vars, modules))
    return [attributes[place].get(name, _MISSING) for place, name in read]


def _containers(values: Iterable[Any]) -> list[Any]:
    """Containers that may change, among these and inside them, as often as they are found."""
    found, seen, pending = [], set[int](), list(values)
    while pending:
        value = pending.pop()
        if type(value) in _CONTAINERS:
            if type(value) is not tuple:
                found.append(value)
            if id(value) not in seen:
                seen.add(id(value))
                pending += _inside(value)
    return found


class _Reach:
    """All that can be reached from modules, and from the user's functions, as it was when this was made."""

    def __init__(self, modules: Iterable[nn.Module], outside: Outside):
        self._outside, self._values = outside, outside.now()
        self._caches = outside.filled()
        self._held = Held([*map(vars, modules), *self._values])

    @property
    def size(self) -> int:
        """How many containers were found."""
        return len(self._held.filled) + len(self._held.empty)

    def is_as_it_was(self) -> bool:
        now = self._outside.now()
        return are_same(self._values, now) and self._caches == self._outside.filled() and not self._held.changed()


class _Known:
    """Which values keep all that they hold where it is found: in attributes and containers.

    Attributes:
        seen: all values that were, by identity.
        others: tensors and classes among them, whose attributes are no containers' and followed nowhere else.
    """

    def __init__(self, outside: Outside, names: frozenset[str]):
        self._outside, self._names = outside, names
        self.seen: set[int] = set()
        self.others: list[Tensor | type] = []

    def all(self, values: Iterable[Any]) -> bool:
        """Whether these do, and all that they hold."""
        pending = list(values)
        while pending:
            value = pending.pop()
            if type(value) in PLAIN or id(value) in self.seen:
                continue
            self.seen.add(id(value))
            if not self._is_known(value):
                return False
            pending += _inside(value)
        return True

    def _is_known(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            self.others.append(value)
            return self.has_plain(vars(value))
        if isinstance(value, dict):
            return type(value) in _CONTAINERS and all(map(_is_plain_key, value))
        if type(value) in _CONTAINERS or type(value) is object or isinstance(value, enum.Enum):
            return True
        if isinstance(value, BuiltinFunctionType):
            return value not in _REVEALING and isinstance(value.__self__, (ModuleType, type, type(None)))
        if isinstance(value, ModuleType):
            return value.__name__ in sys.builtin_module_names or is_installed(getattr(value, "__file__", None))
        if isinstance(value, (FunctionType, type, staticmethod, classmethod, property, _lru_cache_wrapper)):
            return value is not inspect.getattr_static and self._outside.knows(value)
        return hasattr(value, "__dict__") and not _has_slots(type(value)) and self._is_known_class(type(value))

    def has_plain(self, marks: Mapping[str, Any]) -> bool:
        """Whether what somebody has put on a tensor does not change."""
        return all(type(value) in PLAIN for name, value in marks.items() if name not in self._names)

    def _is_known_class(self, kind: type) -> bool:
        """Whether all that a class keeps for its objects is simulated, or can be compared."""
        for owner in kind.__mro__:
            if not self._outside.knows(owner) and id(owner) not in self.seen:
                held = [v for name, v in vars(owner).items() if not name.startswith("__")]
                if not all(type(v) in PLAIN or hasattr(type(v), "__get__") for v in held):
                    return False
                self.seen.add(id(owner))
                self.others.append(owner)
        return True


def _is_plain_key(key: object) -> bool:
    return type(key) in PLAIN or (type(key) is tuple and all(map(_is_plain_key, key)))


def _inside(value: Any) -> Iterator[Any]:
    """What a value holds."""
    if type(value) in _CONTAINERS:
        yield from value.values() if isinstance(value, dict) else value
    elif not isinstance(value, (Tensor, enum.Enum, ModuleType, FunctionType, BuiltinFunctionType, type)):
        yield from getattr(value, "__dict__", {}).values()


def _has_slots(kind: type) -> bool:
    """Whether objects of a class keep something outside their ``__dict__``: in slots, or in C."""
    return kind.__basicsize__ > _Bare.__basicsize__ or any(
        base is not object and (not base.__flags__ & 1 << 9 or vars(base).get("__slots__")) for base in kind.__mro__
    )


def _marks(tensors: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Attributes that somebody has put on parameters and buffers."""
    return [dict(vars(tensor)) for tensor in tensors]


def _randomness() -> object:
    """The state of the random generators of Python and NumPy."""
    numpy: Any = sys.modules.get("numpy")
    kind, keys, *place = ("", b"") if numpy is None else numpy.random.get_state()
    return random.getstate(), kind, bytes(keys), place


def _equal(a: Any, b: Any) -> bool:
    """Whether code cannot tell two values apart: one object, or plain ones of the same type, maybe in containers.

    Which of the containers are one is not compared.
    """
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in PLAIN:
        return bool(a == b) and (kind not in (float, complex) or repr(a) == repr(b))
    if kind not in _CONTAINERS or len(a) != len(b):
        return False
    if not a:
        return True
    if isinstance(a, dict):
        return all(map(_equal, a, b)) and all(map(_equal, a.values(), b.values()))
    return kind is not set and all(map(_equal, a, b))
