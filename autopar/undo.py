"""Undo: what running a model's code changes about the model, taken back.

A model is captured by running its code on tensors without values, and sometimes twice. Code may count, cache, install
hooks or draw random numbers; afterwards the model is as it was, and a second run begins as the first did. What the
user's own functions keep in globals, closures, classes and caches is followed too (:mod:`autopar.outside`), what
installed libraries keep there is not.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.outside import Outside

_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, set, deque)
_NOT_STATE = (Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class Before:
    """The state of a model and of the random generators when it was made.

    Followed are attributes of modules, the containers and objects in them, and what functions of the user's keep
    outside; tensors keep their values.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        found = _containers(model)
        self._tensors = _tensors(found)
        self._outside = Outside(model)
        held_outside = [below for value in self._outside.values() for below in _below(value)]
        self._contents = [(held, held.copy()) for held in (*found, *held_outside) if not isinstance(held, tuple)]
        numpy: Any = sys.modules.get("numpy")
        self._random = random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()

    def has_new_tensors(self) -> bool:
        """Whether the model holds tensors that it did not."""
        return not _tensors(_containers(self._model)).keys() <= self._tensors.keys()

    def restore(self) -> None:
        """Make everything as it was."""
        for held, copy in self._contents:
            if not _holds_the_same(held, copy):
                held.clear()
                held.update(copy) if isinstance(held, (*_MAPPINGS, set)) else held.extend(copy)
        self._outside.restore()
        python, torchs, numpys = self._random
        random.setstate(python)
        torch.set_rng_state(torchs)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)


def _containers(model: nn.Module) -> list[Any]:
    """Every container in which the model holds something, the attributes of modules and objects among them."""
    return _below(vars(model))


def _below(container: Any) -> list[Any]:
    """A container and every one below it; none if it is something else."""
    if not _is_container(container):
        return []
    found: dict[int, Any] = {}
    pending: list[Any] = [container]
    while pending:
        held = pending.pop()
        if id(held) in found:
            continue
        found[id(held)] = held
        for value in _items(held):
            if _is_container(value):
                if value:
                    pending.append(value)
                else:
                    found.setdefault(id(value), value)
            elif hasattr(value, "__dict__") and not isinstance(value, _NOT_STATE):
                pending.append(vars(value))
    return list(found.values())


def _is_container(value: Any) -> bool:
    return type(value) in _MAPPINGS or type(value) in _SEQUENCES or type(value) is tuple


def _tensors(containers: Iterable[Any]) -> dict[int, Tensor]:
    return {id(value): value for held in containers for value in _items(held) if isinstance(value, Tensor)}


def _items(held: Any) -> Iterable[Any]:
    return held.values() if isinstance(held, _MAPPINGS) else held


def _holds_the_same(held: Any, copy: Any) -> bool:
    if len(held) != len(copy):
        return False
    if isinstance(held, set):
        return bool(held == copy)
    keys_too = isinstance(held, _MAPPINGS)
    if keys_too and any(a is not b for a, b in zip(held, copy, strict=True)):
        return False
    return all(a is b for a, b in zip(_items(held), _items(copy), strict=True))
