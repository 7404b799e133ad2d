"""Dump: with ``AUTOPAR_DUMP=folder`` every program on the way is written to that folder, as text to read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from planner.base.errors import InputError

VARIABLE = "AUTOPAR_DUMP"

_PAUSED = ContextVar("paused", default=False)


@contextmanager
def paused() -> Iterator[None]:
    """Write nothing meanwhile: what is captured is not the user's model, but a copy of it to compare with."""
    token = _PAUSED.set(True)
    try:
        yield
    finally:
        _PAUSED.reset(token)


def folder() -> Path | None:
    """Where programs are to be written, if anywhere; it is there afterwards.

    Raises:
        InputError: it cannot be made.
    """
    given = os.environ.get(VARIABLE)
    if not given or _PAUSED.get():
        return None
    try:
        Path(given).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(given, error) from error
    return Path(given)


def begin() -> None:
    """Remove what passes of an earlier capture wrote, of which there may have been others.

    Raises:
        InputError: it cannot be removed.
    """
    path = folder()
    for old in path.glob("[0-9][0-9]_*.py") if path is not None else ():
        try:
            old.unlink(missing_ok=True)  # another rank may be first
        except OSError as error:
            raise _refused(str(path), error) from error


def write(name: str, text: Callable[[], str]) -> None:
    """Write a program to ``name.py`` in the folder, if there is one.

    Raises:
        InputError: it cannot be written.
    """
    path = folder()
    if path is None:
        return
    try:
        (path / f"{name}.py").write_text(text())
    except OSError as error:
        raise _refused(str(path), error) from error


def _refused(given: str, error: OSError) -> InputError:
    return InputError(
        f"{VARIABLE}={given}: programs cannot be written there ({error.strerror}): give a folder that can be written "
        "to, or unset the variable"
    )
