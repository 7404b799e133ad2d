"""What the dims of a ``torch.autograd.Function`` mean, as a user says, or as is known of a library's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import Function

from autopar.functions.observe import ObservedFunction
from planner.base.errors import CaptureError, InputError

ANY = "..."
"""In a signature: any dims, each of which is a name of its own."""

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Declared:
    """What a Function's dims mean, as ``"b s h, h -> b s h"`` says it.

    Attributes:
        text: the signature as it was given.
        operands, results: a name for every dim of every tensor; equal names are one factor.
        whole: names that must not be sharded.
        dtypes: of the results; ``None`` is that of the first operand.
        linear_backward: whether backward may be given terms of a sum.
        observed: what an example showed of it; ``None`` without one.
    """

    text: str
    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    whole: frozenset[str] = frozenset()
    dtypes: tuple[torch.dtype | None, ...] = (None,)
    linear_backward: bool = False
    observed: ObservedFunction | None = None

    def expanded(self, shapes: Sequence[Sequence[int]]) -> Declared:
        """With a name for each of the dims that ``...`` stands for in operands of such shapes."""
        pairs = zip(shapes, self.operands, strict=False)
        count = max((len(shape) - len(labels) + 1 for shape, labels in pairs if ANY in labels), default=0)
        names = tuple(f"{ANY}{place}" for place in range(count))

        def filled(labels: Labels) -> Labels:
            return tuple(each for label in labels for each in (names if label == ANY else (label,)))

        operands, results = (tuple(map(filled, tensors)) for tensors in (self.operands, self.results))
        return replace(self, operands=operands, results=results, whole=frozenset(filled(tuple(self.whole))))

    def sizes(self, name: str, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The size of every name of what is expanded.

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

    def check(self, name: str, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> None:
        """Refuse operands and results of other shapes than the signature says.

        Raises:
            CaptureError: they are.
        """
        each = self.expanded(operands)
        sizes = each.sizes(name, operands)
        wanted = [tuple(sizes[label] for label in labels) for labels in each.results]
        if [tuple(shape) for shape in results] != wanted:
            raise CaptureError(
                f"{name} was registered as {self.text!r}, so its results have shapes {', '.join(map(str, wanted))}, "
                f"but they have {', '.join(str(tuple(shape)) for shape in results)}: mend the signature"
            )

    def dims(self, shapes: Sequence[Sequence[int]]) -> tuple[Labels, ...]:
        """For every operand of such shapes, then result, the names along which it may be sharded; ``""`` for others."""
        each = self.expanded(shapes)
        return tuple(
            tuple("" if label in each.whole else label for label in labels)
            for labels in (*each.operands, *each.results)
        )

    def empty(self, name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Results for tensors without data."""
        shapes = [t.shape for t in tensors]
        each = self.expanded(shapes)
        sizes = each.sizes(name, shapes)
        return [
            tensors[0].new_empty([sizes[label] for label in labels], dtype=dtype)
            for labels, dtype in zip(each.results, self.dtypes, strict=True)
        ]


def read(
    name: str,
    signature: str,
    whole: Collection[str] = (),
    dtypes: Sequence[torch.dtype | None] | None = None,
    linear_backward: bool = False,
) -> Declared:
    """A signature as it is written.

    Raises:
        InputError: it cannot be read.
    """
    sides = signature.split("->")
    if len(sides) != 2:
        raise InputError(f"{name}: {signature!r} is no signature: write 'b s h, h -> b s h', with one arrow")
    operands, results = (tuple(tuple(tensor.split()) for tensor in side.split(",")) for side in sides)
    known = {label for labels in operands for label in labels}
    for labels in (*operands, *results):
        if len({*labels}) != len(labels):
            raise InputError(f"{name}: {signature!r} names two dims of one tensor alike: give each a name of its own")
    unknown = sorted({label for labels in results for label in labels} - known)
    if unknown:
        raise InputError(
            f"{name}: in {signature!r} no operand has the dims {', '.join(map(repr, unknown))} of a result, so their "
            "sizes are unknown: names of results must be names of operands"
        )
    names = {*whole.split()} if isinstance(whole, str) else {*whole}
    if names - known:
        raise InputError(f"{name}: whole={sorted(names - known)} are no names of {signature!r}")
    if dtypes is not None and len(dtypes) != len(results):
        raise InputError(f"{name}: {len(dtypes)} dtypes for the {len(results)} results of {signature!r}")
    given = tuple(dtypes or [None] * len(results))
    return Declared(signature, operands, results, frozenset(names), given, linear_backward)


DECLARED: dict[type[Function], Declared] = {}
"""What was registered, by Function."""

_TRANSFORMERS = {
    "bloom.modeling_bloom.GeLUFunction": "... -> ...",
    "recurrent_gemma.modeling_recurrent_gemma.SqrtBoundDerivative": "... -> ...",
    "ibert.quant_modules.floor_ste": "... -> ...",
    "ibert.quant_modules.round_ste": "... -> ...",
}

SHIPPED = {
    f"transformers.models.{name}": read(name, signature, linear_backward=True)
    for name, signature in _TRANSFORMERS.items()
}
"""What is known of Functions of libraries, by their full names."""


def declared_of(function: type[Function]) -> Declared | None:
    """What was registered of a Function, or else is known of it."""
    return DECLARED.get(function) or SHIPPED.get(f"{function.__module__}.{function.__qualname__}")
