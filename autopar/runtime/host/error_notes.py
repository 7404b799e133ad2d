"""Adds what else is known to an error's message."""

from __future__ import annotations


def add_note(error: BaseException, note: str) -> None:
    """As ``error.add_note(note)``, which Python 3.10 has not: there the note is kept, but not printed."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]
