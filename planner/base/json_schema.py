"""Reads JSON into annotated types; what is missing, unknown or of another type is named by its place.

Dataclasses and typed dictionaries come from objects, tuples from lists, the rest as it is. Nothing is converted: a
document that was read is written as it was.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from planner.base.units import nearest

Readers = Mapping[Any, Callable[[Any], Any]]
WORDS = {
    int: "a whole number",
    float: "a finite number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
    types.NoneType: "null",
}
MOST = 2**63
"""Whole numbers are below, in size: bytes and counts."""
SHOWN = 60
"""So many characters of a wrong value are shown."""


class Misread(ValueError):
    """A value is not what its place takes.

    ``place`` leads there from the outermost value; ``what`` is wrong with it.
    """

    def __init__(self, what: str, place: tuple[str | int, ...] = ()) -> None:
        super().__init__(what, place)
        self.what, self.place = what, place

    def within(self, step: str | int) -> Misread:
        """The same seen from one value further out."""
        return Misread(self.what, (step, *self.place))

    def __str__(self) -> str:
        return f"{', '.join(map(repr, self.place)) or 'it'} {self.what}"


def read(kind: Any, value: Any, readers: Readers | None = None) -> Any:
    """A JSON value as a value of a type.

    Args:
        kind: an annotation: a dataclass, a typed dictionary, a tuple, a mapping, a union, literals, or a plain type.
        readers: what reads types whose JSON is another than by the rules.

    Raises:
        Misread: names the place.
    """
    readers = readers or {}
    if kind in readers:
        return readers[kind](value)
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _read_any(args, value, readers)
    if origin is Literal:
        if value not in args or type(value) not in map(type, args):
            raise Misread(f"is {_shown(value)}, and takes {' or '.join(map(repr, args))}")
        return value
    if origin is tuple:
        return _read_tuple(args, value, readers)
    if origin is not None and issubclass(origin, Mapping):
        _check(dict, value)
        return {_key(key): _read_at(key, args[1], each, readers) for key, each in value.items()}
    if is_typeddict(kind):
        return read_fields(value, get_type_hints(kind), kind.__required_keys__, readers)
    if is_dataclass(kind):
        kinds, required = fields_of(kind)  # type: ignore[arg-type]
        return kind(**read_fields(value, kinds, required, readers))  # type: ignore[operator]
    _check(kind, value)
    return value


def read_fields(
    value: Any, kinds: Mapping[str, Any], required: frozenset[str], readers: Readers | None = None
) -> dict[str, Any]:
    """The fields of a JSON object by the types that they take; raises as :func:`read`."""
    _check(dict, value)
    for name in value:
        if name not in kinds:
            raise Misread(f"has {name!r}, which there is not: remove it; {nearest(str(name), kinds)}")
    for name in kinds:
        if name in required and name not in value:
            raise Misread("is missing", (name,))
    return {name: _read_at(name, kinds[name], each, readers or {}) for name, each in value.items()}


@cache
def fields_of(kind: type[Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """The types of a dataclass's fields, and which have no default."""
    required = (each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING)
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}, frozenset(required)


def _read_at(step: str | int, kind: Any, value: Any, readers: Readers) -> Any:
    try:
        return read(kind, value, readers)
    except Misread as error:
        raise error.within(step) from None


def _read_tuple(args: tuple[Any, ...], value: Any, readers: Readers) -> tuple[Any, ...]:
    _check(list, value)
    if args[-1] is Ellipsis:
        return tuple(_read_at(number, args[0], each, readers) for number, each in enumerate(value))
    if len(value) != len(args):
        raise Misread(f"is a list of {len(value)}, and takes {len(args)} values")
    return tuple(_read_at(n, kind, each, readers) for n, (kind, each) in enumerate(zip(args, value, strict=True)))


def _read_any(kinds: tuple[Any, ...], value: Any, readers: Readers) -> Any:
    """By the last of several types that takes it, None before others; where none does, refused as by the first, for
    that is what it should have been.
    """
    for kind in reversed(kinds):
        try:
            return read(kind, value, readers)
        except Misread as error:
            last = error
    raise last


def _check(kind: Any, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        fits = is_number and -sys.float_info.max <= value <= sys.float_info.max
    elif kind is int:
        fits = is_number and isinstance(value, int) and abs(value) < MOST
    else:
        fits = isinstance(value, (list, tuple) if kind is list else kind)
    if not fits:
        raise Misread(f"is {_shown(value)}, and takes {WORDS[kind]}")


def _key(key: Any) -> Any:
    _check(str, key)
    return key


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
