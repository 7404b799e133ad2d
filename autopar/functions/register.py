"""Lets a user say what the dims of a ``torch.autograd.Function`` mean, and checks it on an example."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from autopar.functions.declared import DECLARED, Declared, read
from autopar.functions.observe import ObservedFunction, observe
from planner.base.errors import CaptureError, InputError


def register(
    function: type[Function],
    signature: str,
    *,
    whole: Collection[str] = (),
    dtypes: Sequence[torch.dtype | None] | None = None,
    linear_backward: bool = False,
    example: Sequence[Any] | None = None,
) -> None:
    """Say what the dims of a ``torch.autograd.Function`` mean, along which it is sharded; undeclared it runs whole.

    Args:
        function: the Function; a later call replaces what was said of it.
        signature: a name for every dim of every tensor that it takes and returns: ``"b s h, h -> b s h"``. Equal names
            are one factor, along which it may be sharded: each rank applies it to its slices, and that gives slices of
            results that have the name, and terms of a sum for those that lack it. Backward likewise: slices of
            gradients of what has the name, terms for what lacks it. It returns these tensors and nothing else. ``...``
            stands for any dims, the same in every tensor that has it: ``"... -> ..."`` is element by element.
        whole: names along which it may not be sharded: what it normalizes over, what it is a window of.
        dtypes: of the results; ``None``, or left out, is that of the first operand.
        linear_backward: whether its backward is linear in the gradients that it is given, as every derivative is, and
            one that clips or rounds them is not. It may be given terms of a sum then; it gets complete gradients
            otherwise, wherever it is not sharded.
        example: arguments of ``function.apply``. If they are given, all of this is checked: forward and backward of
            the whole are compared with those of slices, name by name. Of a kernel that runs on tensors with data only
            it shows what it keeps for backward, which is all that floats otherwise.

    Raises:
        InputError: no Function, a signature that cannot be read, or one that does not hold for the example.
    """
    if not (isinstance(function, type) and issubclass(function, Function)):
        raise InputError(f"autopar.register takes a class derived from torch.autograd.Function, not {function!r}")
    declared = read(function.__qualname__, signature, whole, dtypes, linear_backward)
    if example is not None:
        check(function, declared, example)
        declared = replace(declared, observed=_observed(function, example))
    DECLARED[function] = declared


# ---- does it hold? ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """Results, and gradients of operands, of one step; ``None`` where there is none."""

    results: list[Tensor]
    gradients: list[Tensor | None]


def check(function: type[Function], declared: Declared, example: Sequence[Any]) -> None:
    """Compare a Function's whole with its slices along every name, and its backward with that of terms of gradients.

    Raises:
        InputError: names what was sliced, and what differs by how much.
    """
    name = function.__qualname__
    tensors = [arg for arg in example if isinstance(arg, Tensor)]
    try:
        shapes = [t.shape for t in tensors]
        expanded = declared.expanded(shapes)
        sizes = expanded.sizes(name, shapes)
        results = _step(function, example, tensors, None).results
        declared.check(name, shapes, [t.shape for t in results])
    except CaptureError as error:
        raise InputError(str(error)) from error
    declared = expanded
    given = [torch.randn_like(t) if t.is_floating_point() else None for t in results]
    whole = _step(function, example, tensors, given)
    if declared.linear_backward:
        first = [None if t is None else torch.randn_like(t) for t in given]
        rest = [None if t is None or g is None else t - g for t, g in zip(given, first, strict=True)]
        terms = [_step(function, example, tensors, each).gradients for each in (first, rest)]
        for place, want in enumerate(whole.gradients):
            difference = _difference([each[place] for each in terms], want, None)
            if difference:
                raise InputError(
                    f"the backward of {name} is not linear in the gradients that it is given: that of operand {place} "
                    f"differs, from terms of a sum, {difference}. Leave out linear_backward=True"
                )
    for label, size in sizes.items():
        parts = next((ranks for ranks in range(2, size + 1) if size % ranks == 0), 1)
        if label in declared.whole or parts == 1:
            continue
        steps = []
        for part in range(parts):
            pairs = zip(tensors, declared.operands, strict=True)
            cut = [_part(t, labels, label, part, parts) for t, labels in pairs]
            gradients = [
                None if t is None else _part(t, labels, label, part, parts)
                for t, labels in zip(given, declared.results, strict=True)
            ]
            steps.append(_step(function, example, cut, gradients))
        for what, found, wanted, labels_of in (
            ("result", [s.results for s in steps], whole.results, declared.results),
            ("the gradient of operand", [s.gradients for s in steps], whole.gradients, declared.operands),
        ):
            for place, (want, labels) in enumerate(zip(wanted, labels_of, strict=True)):
                dim = labels.index(label) if label in labels else None
                difference = _difference([each[place] for each in found], want, dim)
                if difference:
                    raise InputError(
                        f"{name} is not {declared.text!r}: {what} {place} of slices along {label!r}, put together, "
                        f"differs from the whole's {difference}. Add {label!r} to whole=, or mend the signature"
                    )


def _step(
    function: type[Function], example: Sequence[Any], tensors: list[Tensor], given: list[Tensor | None] | None
) -> _Step:
    """One step; without gradients ``given``, forward alone."""
    operands = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    results = _applied(function, example, operands)
    pairs = [(t, g) for t, g in zip(results, given or [], strict=False) if t.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    return _Step([t.detach() for t in results], [t.grad for t in operands])


def _applied(function: type[Function], example: Sequence[Any], operands: Sequence[Tensor]) -> list[Tensor]:
    """Results for other tensors than those of the example."""
    rest = iter(operands)
    returned = function.apply(*[next(rest) if isinstance(arg, Tensor) else arg for arg in example])
    return [t for t in (returned if isinstance(returned, tuple) else (returned,)) if isinstance(t, Tensor)]


def _observed(function: type[Function], example: Sequence[Any]) -> ObservedFunction:
    """What it does with an example."""
    tensors = [arg.detach().clone() for arg in example if isinstance(arg, Tensor)]
    inputs = [t.requires_grad_(t.is_floating_point()) for t in tensors]
    return observe(lambda operands: _applied(function, example, operands), inputs)


def _part(tensor: Tensor, labels: Sequence[str], label: str, part: int, parts: int) -> Tensor:
    return tensor.chunk(parts, labels.index(label))[part].contiguous() if label in labels else tensor


def _difference(parts: Sequence[Tensor | None], want: Tensor | None, dim: int | None) -> str:
    """By how much slices along a dim, or terms of a sum, differ from the whole; ``""`` if they do not."""
    found = [t for t in parts if t is not None]
    if want is None or len(found) < len(parts):
        return "" if want is None and not found else "in that one has a gradient, and the other has none"
    got = torch.stack(found).sum(0) if dim is None else torch.cat(found, dim)
    if not want.is_floating_point():
        error, allowed = float((got != want).any()), 0.0
    else:
        largest = float(want.abs().max()) or 1.0
        error, allowed = float((got - want).abs().max()) / largest, 100 * torch.finfo(want.dtype).eps
    return "" if error <= allowed else f"by {error:.2g}, relative ({allowed:.2g} is allowed)"
