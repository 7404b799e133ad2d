"""Compares objects by identity where others are compared by value."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


class Same:
    """An object, equal only to itself."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def are_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether objects are the same as as many others, one by one."""
    return all(map(operator.is_, some, others))
