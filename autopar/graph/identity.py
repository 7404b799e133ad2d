"""Compares objects by identity where others are compared by value."""

from __future__ import annotations


class Same:
    """An object, equal only to itself."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
