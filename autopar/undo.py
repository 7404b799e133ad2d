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
from torch import Tensor, nn

from autopar.outside import Outside

_MAPPINGS = frozenset({dict, OrderedDict, defaultdict})
_CONTAINERS = _MAPPINGS | {list, set, deque, tuple}
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_NOT_STATE = (Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class Before:
    """The state of a model and of the random generators when it was made.

    Followed are attributes of modules, the containers and objects in them, and what functions of the user's keep
    outside; tensors keep their values.

    Attributes:
        outside: what the user's functions keep outside.
    """

    def __init__(self, model: nn.Module):
        self.outside = Outside(model)
        self._own, self._others = Held([vars(model)]), Held(self.outside.now())
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

    def changed(self) -> list[tuple[Any, Any]]:
        """Those that hold something else by now, with what they held."""
        filled = [] if _are_same(self.filled) else [(held, copy) for held, copy in self.filled if _differs(held, copy)]
        return [*filled, *((held, ()) for held in filter(None, self.empty))]


def _below(values: Iterable[Any]) -> list[Any]:
    """Every container that can be changed among some values and below them; attributes of objects are one."""
    found: dict[int, Any] = {}
    level = list(values)
    while level:
        each = list(dict(zip(map(id, level), level, strict=True)).values())
        others = [value for value in each if type(value) not in _CONTAINERS and type(value) not in _PLAIN]
        attributes = [getattr(value, "__dict__", None) for value in others if not isinstance(value, _NOT_STATE)]
        fresh = [held for held in (*each, *attributes) if type(held) in _CONTAINERS and id(held) not in found]
        found.update(zip(map(id, fresh), fresh, strict=True))
        level = [*itertools.chain.from_iterable(map(_items, filter(None, fresh)))]
    return [held for held in found.values() if type(held) is not tuple]


def _items(held: Any) -> Any:
    return held.values() if _is_mapping(held) else held


def _differs(held: Any, copy: Any) -> bool:
    """Whether a container holds other objects than its copy, or in another order."""
    if len(held) != len(copy):
        return True
    if type(held) is set:
        return bool(held != copy)
    same_keys = not _is_mapping(held) or all(map(operator.is_, held, copy))
    return not (same_keys and all(map(operator.is_, _items(held), _items(copy))))


def _are_same(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether no container of many differs from its copy: all at once, since most of the time none does."""
    held, copies = [held for held, _ in pairs], [copy for _, copy in pairs]
    return (
        list(map(len, held)) == list(map(len, copies))
        and _hold_the_same(map(_items, held), map(_items, copies))
        and _hold_the_same(filter(_is_mapping, held), filter(_is_mapping, copies))
    )


def _hold_the_same(held: Iterable[Any], copies: Iterable[Any]) -> bool:
    chained = itertools.chain.from_iterable
    return all(map(operator.is_, chained(held), chained(copies)))


def _is_mapping(held: Any) -> bool:
    return type(held) in _MAPPINGS
