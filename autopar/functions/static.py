"""Arguments of a Function that are no tensors, as something to compare and as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from autopar.graph.identity import Same
from autopar.graph.tensor_metadata import PLAIN


@dataclass(frozen=True)
class Hole:
    """Where a tensor goes."""

    place: int


def code(value: Any) -> object:
    """An argument as something to compare: numbers with their types, what may change by identity."""
    if type(value) is Hole:
        return value
    if type(value) in PLAIN or isinstance(value, (enum.Enum, type)):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value
    if type(value) in (tuple, list):
        return type(value), *map(code, value)
    if type(value) is dict:
        return dict, *((code(k), code(v)) for k, v in value.items())
    return Same(value)


def text(value: Any, numbers: dict[int, int]) -> str:
    """An argument as text, the same in every process; ``numbers`` counts objects without a text of their own."""
    if isinstance(value, Hole):
        return "_"
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, (enum.Enum, type)):
        return str(value)
    if type(value) in (tuple, list):
        return f"[{', '.join(text(v, numbers) for v in value)}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{text(k, numbers)}: {text(v, numbers)}' for k, v in value.items())}}}"
    return f"<{type(value).__name__} {numbers.setdefault(id(value), len(numbers))}>"
