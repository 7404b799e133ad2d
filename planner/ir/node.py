"""Nodes of the graph, each with the types of its results.

A node has an operator name, arguments by name (tensors as :class:`Ref`, everything else static), and the types of
its results. Leaves are nodes too, with the operators ``input``, ``param``, ``buffer`` and ``const``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

LEAVES = frozenset({"input", "param", "buffer", "const"})


@dataclass(frozen=True)
class TensorType:
    """Shape, dtype, and whether a gradient flows back through the tensor."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.numel * self.item_bytes


class Ref(NamedTuple):
    """Result number ``index`` of the node called ``node``; a tuple, since graphs are looked up by little else."""

    node: str
    index: int = 0  # type: ignore[assignment]  # not the method of tuples

    def __str__(self) -> str:
        return self.node if self.index == 0 else f"{self.node}.{self.index}"


@dataclass(frozen=True)
class Node:
    """One operator application.

    ``args`` holds every argument by schema name, defaults included; values are :class:`Ref`, static
    scalars and strings, ``None``, or (nested) tuples of these. ``path`` is the owning module's name;
    ``target`` is the original name of a parameter, buffer or input. ``shares`` names, for each result, the
    tensor operand whose memory it shares (-1: none); it is empty where nobody looked.
    """

    name: str
    op: str
    args: tuple[tuple[str, object], ...]
    results: tuple[TensorType, ...]
    path: str = ""
    target: str = ""
    shares: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> object:
        """The argument called ``name``; ``None`` when the operator has no such argument."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, object]:
        return dict(self.args)

    @cached_property
    def inputs(self) -> tuple[Ref, ...]:
        """Every tensor argument in order, repeats included."""
        return tuple(_refs(value for _, value in self.args))

    @property
    def is_leaf(self) -> bool:
        return self.op in LEAVES

    def copy(self, name: str, inputs: tuple[Ref, ...], path: str, target: str = "") -> Node:
        """The same operator once more, on ``inputs``, or a leaf like it, of another ``target``."""
        found = object.__new__(Node)
        first = self.__dict__.get("first", self)
        held = {"name": name, "op": self.op, "results": self.results, "path": path, "shares": self.shares}
        found.__dict__.update(held, target=target, first=first, inputs=inputs)
        return found

    if TYPE_CHECKING:

        @property
        def first(self) -> Node:
            """The node that this is a copy of, or itself: what does not depend on values is found for that once."""

    else:

        def __getattr__(self, name: str) -> object:
            """``first`` where this is no copy; ``args`` where it is, since few ask for them."""
            if name == "first":
                return self
            if name != "args" or "first" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            inputs = iter(self.inputs)
            args = self.__dict__["args"] = tuple((name, _with(value, inputs)) for name, value in self.first.args)
            return args


def _with(value: object, inputs: Iterator[Ref]) -> object:
    """An argument with the next of ``inputs`` in the place of each of its tensors."""
    if isinstance(value, Ref):
        return next(inputs)
    return tuple([_with(each, inputs) for each in value]) if isinstance(value, tuple) else value


def _refs(values: object) -> Iterator[Ref]:
    for value in values:  # type: ignore[attr-defined]
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, tuple):
            yield from _refs(value)


def static(value: object) -> object:
    """``value`` with every reference replaced by ``None`` and every constant by its text.

    The text tells ``1``, ``1.0`` and ``True`` apart, which Python's equality does not.
    """
    if isinstance(value, Ref):
        return None
    if isinstance(value, tuple):
        return tuple(static(item) for item in value)
    return repr(value)
