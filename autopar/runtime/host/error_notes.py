"""What an error's message says, and what else is known."""

from __future__ import annotations


def add_note(error: BaseException, note: str) -> None:
    """As ``error.add_note(note)``, which Python 3.10 has not: there the note is kept, but not printed."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]


def first_line(error: BaseException) -> str:
    """Of what an error says; a bare assertion says no more than its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
