"""Undo: what running a model's code changes about the model, taken back.

A model is captured by running its code on tensors without values, and sometimes twice. Code may count, cache, install
hooks or draw random numbers; afterwards the model is as it was, and a second run begins as the first did. What the
user's own functions keep in globals, closures, classes and caches is simulated too
(:mod:`autopar.capture.snapshot.user_code_state`), what installed libraries keep there is not.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from autopar.capture.snapshot.object_state import Hidden, hidden
from autopar.capture.snapshot.user_code_state import Outside
from autopar.graph.identity import are_same
from autopar.graph.module_walk import Walk

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
        had_new_tensors: whether the model held tensors, when it was restored, that it does not hold now.
    """

    def __init__(self, walk: Walk):
        self.had_new_tensors = False
        self._own = Held([vars(walk.model)])
        self.outside = Outside(walk, self._own.objects)
        self._others = Held(self.outside.now())
        numpy: Any = sys.modules.get("numpy")
        self._random = random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Make everything as it was."""
        own, others = self._own.changed(), self._others.changed()
        values = [held.value if isinstance(held, Hidden) else held for held, _ in own]
        self.had_new_tensors = bool(own) and not _tensors(Held(values)) <= _tensors(self._own)
        for held, items in (*own, *others):
            if isinstance(held, Hidden):
                held.restore()
            else:
                held.clear()
                held.extend(items) if isinstance(held, (list, deque)) else held.update(items)
        self.outside.restore()
        python, torchs, numpys = self._random
        random.setstate(python)
        torch.set_rng_state(torchs)
        if numpys is not None:
            sys.modules["numpy"].random.set_state(numpys)


class Held:
    """The containers among some values and below them, and what was in them; attributes of objects are in one.

    Attributes:
        filled: those that held something, each once.
        empty: the others, which are most of them.
        objects: what was in those that are filled, but for containers and what is plain.
        hidden: what some of these keep apart from their attributes.
    """

    def __init__(self, values: Iterable[Any]):
        self.empty: list[Any] = []
        self.objects: list[Any] = []
        self.hidden: list[Hidden] = []
        self._seen: set[int] = set()
        self._contents: list[Any] = []
        found: dict[int, Any] = {}
        contents, attributes = list(values), list[Any]()
        while contents or attributes:
            known, objects = len(found), []
            for value in itertools.chain(contents, attributes):
                kind = type(value)
                if kind in _CONTAINERS:
                    if value:
                        found[id(value)] = value
                    else:
                        self.empty.append(value)
                elif kind not in _PLAIN:
                    objects.append(value)
            contents = list(_contents(_views(itertools.islice(found.values(), known, None))))
            kinds = {kind for kind in set(map(type, objects)) if not issubclass(kind, _NOT_STATE)}
            attributes = _attributes(objects, kinds) + self._note_hidden(objects, kinds)
            self.objects += objects
            self._contents += contents
        self.filled = list(found.values())
        self._views, self._mappings = _views(self.filled), [held for held in self.filled if type(held) in _MAPPINGS]
        self._sizes, self._keys = list(map(len, self.filled)), list(_contents(self._mappings))

    def _note_hidden(self, objects: Sequence[Any], kinds: set[type]) -> list[Any]:
        """Note what objects keep apart from their attributes, each once; all that is in there."""
        found = hidden(objects, kinds)
        if found:
            found = list({id(each.value): each for each in found if id(each.value) not in self._seen}.values())
            self._seen.update([id(each.value) for each in found])
            self.hidden += found
        return [value for each in found for value in each.inside]

    def changed(self) -> list[tuple[Any, list[Any]]]:
        """Those that hold something else by now, with what they held: keys with values, where they are mappings."""
        found: list[tuple[Any, list[Any]]] = [(held, []) for held in filter(None, self.empty)]
        found += [(held, held.inside) for held in self.hidden if held.is_changed()]
        if (
            list(map(len, self.filled)) == self._sizes
            and are_same(self._contents, _contents(self._views))
            and are_same(self._keys, _contents(self._mappings))
        ):
            return found
        keys, contents = iter(self._keys), iter(self._contents)
        for held, size in zip(self.filled, self._sizes, strict=True):
            items = list(itertools.islice(contents, size))
            names = list(itertools.islice(keys, size if type(held) in _MAPPINGS else 0))
            if _differs(held, names, items):
                found.append((held, list(zip(names, items, strict=True)) if names else items))
        return found


def _attributes(objects: Sequence[Any], kinds: set[type]) -> list[Any]:
    """What holds the attributes of those objects for which they are state, whose classes are ``kinds``."""
    found = [getattr(value, "__dict__", None) for value in objects if type(value) in kinds]
    return [held for held in found if type(held) in _CONTAINERS]


def _views(filled: Iterable[Any]) -> list[Any]:
    """What is in each container, as it is whenever one looks."""
    return [held.values() if type(held) in _MAPPINGS else held for held in filled]


def _contents(held: Iterable[Any]) -> Iterator[Any]:
    """What is in containers, one after another; of mappings their keys."""
    return itertools.chain.from_iterable(held)


def _differs(held: Any, names: list[Any], items: list[Any]) -> bool:
    """Whether a container holds other objects than these, or in another order."""
    if len(held) != len(items):
        return True
    if type(held) is set:
        return bool(held != set(items))
    if type(held) in _MAPPINGS:
        return not (are_same(names, held) and are_same(items, held.values()))
    return not are_same(items, held)


def _tensors(held: Held) -> set[int]:
    """The tensors in some containers."""
    return {id(value) for value in held.objects if isinstance(value, Tensor)}
