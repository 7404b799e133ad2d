"""Undo: what running a model's code changes about the model, taken back.

A model is captured by running its code on tensors without values, and sometimes twice. Code may count, cache, install
hooks or draw random numbers; afterwards the model is as it was, and a second run begins as the first did. What the
user's own functions keep in globals, closures, classes and caches is followed too (:mod:`autopar.outside`), what
installed libraries keep there is not.
"""

from __future__ import annotations

import itertools
import operator
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from autopar.outside import Outside
from autopar.walk import Walk

_MAPPINGS = frozenset({dict, OrderedDict, defaultdict})
_CONTAINERS = _MAPPINGS | {list, set, deque, tuple}
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_VALUES = operator.methodcaller("values")
_NOT_STATE = (Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class Before:
    """The state of a model and of the random generators when it was made.

    Followed are attributes of modules, the containers and objects in them, and what functions of the user's keep
    outside; tensors keep their values.

    Attributes:
        outside: what the user's functions keep outside.
    """

    def __init__(self, walk: Walk):
        self.outside = Outside(walk)
        self._own, self._others = Held([vars(walk.model)]), Held(self.outside.now())
        numpy: Any = sys.modules.get("numpy")
        self._random = random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()

    def has_new_tensors(self) -> bool:
        """Whether the model holds tensors that it did not."""
        changed = [held for held, _ in self._own.changed()]
        now = {id(value) for held in _below(changed) for value in _items(held) if isinstance(value, Tensor)}
        return bool(now) and not now <= {id(value) for _, copy in self._own.filled for value in _items(copy)}

    def restore(self) -> None:
        """Make everything as it was."""
        for held, copy in (*self._own.changed(), *self._others.changed()):
            held.clear()
            held.extend(copy) if isinstance(held, (list, deque)) else held.update(copy)
        self.outside.restore()
        python, torchs, numpys = self._random
        random.setstate(python)
        torch.set_rng_state(torchs)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)


class Held:
    """The containers among some values and below them, and what was in them.

    Attributes:
        filled: those that held something, each with a copy.
        empty: the others, which are most of them.
    """

    def __init__(self, values: Iterable[Any]):
        found = _below(values)
        self.filled = [(held, held.copy()) for held in found if held]
        self.empty = [held for held in found if not held]
        mappings = [pair for pair in self.filled if type(pair[0]) in _MAPPINGS]
        others = [pair for pair in self.filled if type(pair[0]) not in _MAPPINGS]
        self._mappings, self._others = (([held for held, _ in p], [copy for _, copy in p]) for p in (mappings, others))

    def changed(self) -> list[tuple[Any, Any]]:
        """Those that hold something else by now, with what they held."""
        is_same = _hold_the_same(*self._others) and _hold_the_same(*self._mappings)
        is_same = is_same and _hold_the_same(*(list(map(_VALUES, held)) for held in self._mappings))
        filled = [] if is_same else [(held, copy) for held, copy in self.filled if _differs(held, copy)]
        return [*filled, *((held, ()) for held in filter(None, self.empty))]


def _hold_the_same(held: Sequence[Any], copies: Sequence[Any]) -> bool:
    """Whether all of many containers hold what others do: all at once, since most of the time they do."""
    each, other = itertools.chain.from_iterable(held), itertools.chain.from_iterable(copies)
    return list(map(len, held)) == list(map(len, copies)) and all(map(operator.is_, each, other))


def _below(values: Iterable[Any]) -> list[Any]:
    """Every container that can be changed among some values and below them; attributes of objects are one."""
    found: dict[int, Any] = {}
    level = list(values)
    while level:
        kinds = list(map(type, level))
        objects = {kind for kind in set(kinds) if _keeps_attributes(kind)}
        others = itertools.compress(level, map(objects.__contains__, kinds))
        attributes = [getattr(value, "__dict__", None) for value in others]
        here = [*itertools.compress(level, map(_CONTAINERS.__contains__, kinds))]
        here += [held for held in attributes if type(held) in _CONTAINERS]
        known = len(found)
        found.update(zip(map(id, here), here, strict=True))
        fresh = itertools.islice(found.values(), known, None)
        filled = (held.values() if type(held) in _MAPPINGS else held for held in fresh if held)
        level = [*itertools.chain.from_iterable(filled)]
    return [held for held in found.values() if type(held) is not tuple]


def _keeps_attributes(kind: type) -> bool:
    """Whether the attributes of a class's objects are state."""
    return not (kind in _CONTAINERS or kind in _PLAIN or issubclass(kind, _NOT_STATE))


def _items(held: Any) -> Any:
    return held.values() if type(held) in _MAPPINGS else held


def _differs(held: Any, copy: Any) -> bool:
    """Whether a container holds other objects than its copy, or in another order."""
    if len(held) != len(copy):
        return True
    if type(held) is set:
        return bool(held != copy)
    same_keys = type(held) not in _MAPPINGS or all(map(operator.is_, held, copy))
    return not (same_keys and all(map(operator.is_, _items(held), _items(copy))))
