"""Declared: what a user says of a ``torch.autograd.Function`` that nothing can be found out of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function

from autopar.functions.kept import Kept
from planner.base.errors import CaptureError


@dataclass(frozen=True)
class Declared:
    """What a Function's dims mean, as ``"b s h, h -> b s h"`` says it.

    Attributes:
        text: the signature as it was given.
        operands, results: a name for every dim of every tensor; equal names are one factor.
        whole: names that must not be sharded.
        dtypes: of the results; ``None`` is that of the first operand.
        kept: what it keeps for its backward, as an example showed; ``None`` without one.
    """

    text: str
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    whole: frozenset[str]
    dtypes: tuple[torch.dtype | None, ...]
    kept: Kept | None = None

    def sizes(self, name: str, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The size of every name.

        Raises:
            CaptureError: operands of other number, rank or sizes than the signature says.
        """
        found: dict[str, int] = {}
        if [len(shape) for shape in shapes] != [len(labels) for labels in self.operands]:
            raise CaptureError(
                f"{name} was registered as {self.text!r}, and is called on tensors of shapes "
                f"{', '.join(str(tuple(shape)) for shape in shapes)}: name every dim of every tensor that it takes"
            )
        for shape, labels in zip(shapes, self.operands, strict=True):
            for size, label in zip(shape, labels, strict=True):
                if found.setdefault(label, size) != size:
                    raise CaptureError(
                        f"{name} was registered as {self.text!r}, but {label!r} is both {found[label]} and {size} "
                        "long: give dims of different sizes different names"
                    )
        return found

    def check(self, name: str, shapes: Sequence[Sequence[int]], sizes: dict[str, int]) -> None:
        """Refuse results of other shapes than the signature says."""
        wanted = [tuple(sizes[label] for label in labels) for labels in self.results]
        if [tuple(shape) for shape in shapes] != wanted:
            raise CaptureError(
                f"{name} was registered as {self.text!r}, so its results have shapes {', '.join(map(str, wanted))}, "
                f"but they have {', '.join(str(tuple(shape)) for shape in shapes)}: mend the signature"
            )

    def empty(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Results for tensors without data."""
        sizes = self.sizes(name, [t.shape for t in tensors])
        return [
            tensors[0].new_empty([sizes[label] for label in labels], dtype=dtype)
            for labels, dtype in zip(self.results, self.dtypes, strict=True)
        ]


DECLARED: dict[type[Function], Declared] = {}
"""What was registered, by Function."""
