"""Hidden: what objects keep apart from their attributes: in slots, as containers of classes of their own, as bytes.

Few models have any. They are read and written as the built-in class does it, whatever their own class does instead.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from types import MemberDescriptorType
from typing import Any

from autopar.graph.identity import are_same

_MAPPINGS = (OrderedDict, dict)
_BASES = (*_MAPPINGS, list, set, deque, bytearray, tuple, frozenset)
_EMPTY = object()


class Hidden:
    """What one object keeps so, as it was when this was made.

    Args:
        base: the built-in class of containers that it is of, if any.
        slots: those of its class.

    Attributes:
        value: the object.
        inside: all that it held.
    """

    def __init__(self, value: Any, base: Any, slots: Sequence[MemberDescriptorType]):
        self.value, self._base, self._slots = value, base, slots
        self._was, self._in_slots = self._now()
        contents = self._was if self._base is not bytearray else ()
        self.inside = [*contents, *(held for held in self._in_slots if held is not _EMPTY)]

    def is_changed(self) -> bool:
        """Whether it holds other objects by now, or in another order."""
        now, in_slots = self._now()
        if not are_same(in_slots, self._in_slots):
            return True
        if self._base in (set, frozenset):
            return set(now) != set(self._was)
        if self._base is bytearray:
            return now != self._was
        return len(now) != len(self._was) or not are_same(now, self._was)

    def restore(self) -> None:
        """Let it hold what it held."""
        for slot, held, now in zip(self._slots, self._in_slots, self._now()[1], strict=True):
            if held is not _EMPTY:
                slot.__set__(self.value, held)
            elif now is not _EMPTY:
                slot.__delete__(self.value)
        if self._base in _MAPPINGS:
            half = len(self._was) // 2
            self._base.clear(self.value)
            for key, held in zip(self._was[:half], self._was[half:], strict=True):
                self._base.__setitem__(self.value, key, held)
        elif self._base is set:
            set.clear(self.value)
            set.update(self.value, self._was)
        elif self._base in (list, deque, bytearray):
            self._base.clear(self.value)
            self._base.extend(self.value, self._was)

    def _now(self) -> tuple[Sequence[Any], list[Any]]:
        """What it holds as a container, keys before values; and in its slots."""
        contents: Sequence[Any] = []
        if self._base in _MAPPINGS:
            contents = [*self._base.keys(self.value), *self._base.values(self.value)]
        elif self._base is bytearray:
            contents = bytes(self.value)
        elif self._base is not None:
            contents = list(self._base.__iter__(self.value))
        return contents, [_in_slot(self.value, slot) for slot in self._slots]


def hidden(objects: Iterable[Any], kinds: Iterable[type]) -> list[Hidden]:
    """Those of some objects, whose classes are among ``kinds``, that keep something so."""
    ways = {kind: (_base(kind), _slots(kind)) for kind in kinds}
    ways = {kind: way for kind, way in ways.items() if way[0] is not None or way[1]}
    return [Hidden(value, *ways[type(value)]) for value in objects if type(value) in ways] if ways else []


def _base(kind: type) -> type | None:
    return next((base for base in _BASES if issubclass(kind, base)), None)


def _slots(kind: type) -> list[MemberDescriptorType]:
    """Of classes written in Python: what others have in C is theirs."""
    owners = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [value for owner in owners for value in owner.values() if isinstance(value, MemberDescriptorType)]


def _in_slot(value: Any, slot: MemberDescriptorType) -> Any:
    try:
        return slot.__get__(value, type(value))
    except AttributeError:  # empty
        return _EMPTY
