"""Keeps CPython's garbage collector and stack growth from taking a good part of the time of planning and reports."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_ROOM = 1 << 15
"""Words of a frame for which CPython makes a piece of stack with room for a thousand frames more (256 KiB)."""


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Do not look for garbage while making objects that all live until the end: among many, it doubles the time.

    A decorator, too.
    """
    collecting = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if collecting:
            gc.enable()


def on_one_stack(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function whose loops call deeply, so that its time does not depend on how deep its caller is.

    CPython 3.11 and 3.12 take frames from pieces of 16 KiB, and give a piece back to the system as soon as it is
    empty: a loop that calls across the edge of one maps and clears pages in every round (python/cpython#142183), which
    took a third of a capture. A frame that is larger than a piece is given a piece of its own, of the next power of
    two, and what is called from there has the rest of it.
    """

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        result: _R = _with_room(function, args, kwargs)
        return result

    return called


def _with_room(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


_with_room.__code__ = _with_room.__code__.replace(co_stacksize=_ROOM)
