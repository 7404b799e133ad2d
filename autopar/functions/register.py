"""Register: what the dims of a ``torch.autograd.Function`` mean, as a user says; an example shows whether it holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from autopar.functions.declared import DECLARED, Declared
from autopar.functions.keeping import observed
from autopar.functions.kept import Kept
from planner.base.errors import CaptureError, InputError


def register(
    function: type[Function],
    signature: str,
    *,
    whole: Collection[str] = (),
    dtypes: Sequence[torch.dtype | None] | None = None,
    example: Sequence[Any] | None = None,
) -> None:
    """Say what the dims of a ``torch.autograd.Function`` mean, where nothing can be found out of it.

    Args:
        function: the Function; a later call replaces what was said of it.
        signature: a name for every dim of every tensor that it takes and returns: ``"b s h, h -> b s h"``. Equal names
            are one factor, along which it may be sharded: each rank applies it to its slices, and that gives slices of
            results that have the name, and terms of a sum for those that lack it. Backward likewise: slices of
            gradients of what has the name, terms for what lacks it. It returns these tensors and nothing else.
        whole: names along which it may not be sharded: what it normalizes over, what it is a window of.
        dtypes: of the results; ``None``, or left out, is that of the first operand.
        example: arguments of ``function.apply``. If they are given, the signature is checked: forward and backward of
            the whole are compared with those of slices, name by name; and what it keeps for backward is seen, which is
            all that floats otherwise.

    Raises:
        InputError: no Function, a signature that cannot be read, or one that does not hold for the example.
    """
    if not (isinstance(function, type) and issubclass(function, Function)):
        raise InputError(f"autopar.register takes a class derived from torch.autograd.Function, not {function!r}")
    declared = _read(function.__qualname__, signature, whole, dtypes)
    if example is not None:
        check(function, declared, example)
        declared = replace(declared, kept=_kept(function, example))
    DECLARED[function] = declared


def _read(name: str, signature: str, whole: Collection[str], dtypes: Sequence[torch.dtype | None] | None) -> Declared:
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
    return Declared(signature, operands, results, frozenset(names), tuple(dtypes or [None] * len(results)))


# ---- does it hold? ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """Results, and gradients of operands, of one step; ``None`` where there is none."""

    results: list[Tensor | None]
    gradients: list[Tensor | None]


def check(function: type[Function], declared: Declared, example: Sequence[Any]) -> None:
    """Compare a Function's whole with its slices along every factor.

    Raises:
        InputError: names the factor, and what differs by how much.
    """
    name = function.__qualname__
    tensors = [arg for arg in example if isinstance(arg, Tensor)]
    try:
        sizes = declared.sizes(name, [t.shape for t in tensors])
        whole = _step(function, example, [t.detach() for t in tensors], None)
        declared.check(name, [t.shape for t in whole.results if t is not None], sizes)
    except CaptureError as error:
        raise InputError(str(error)) from error
    given = [torch.randn_like(t) if t is not None and t.is_floating_point() else None for t in whole.results]
    whole = _step(function, example, [t.detach() for t in tensors], given)
    for label, size in sizes.items():
        parts = next((ranks for ranks in range(2, size + 1) if size % ranks == 0), 1)
        if label in declared.whole or parts == 1:
            continue
        steps = []
        for part in range(parts):
            cut = [
                _part(t.detach(), labels, label, part, parts)
                for t, labels in zip(tensors, declared.operands, strict=True)
            ]
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
                if want is not None:
                    _compare(declared, name, label, f"{what} {place}", [each[place] for each in found], want, labels)


def _step(
    function: type[Function], example: Sequence[Any], tensors: list[Tensor], given: list[Tensor | None] | None
) -> _Step:
    """One step; without gradients ``given``, forward alone."""
    operands = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
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


def _kept(function: type[Function], example: Sequence[Any]) -> Kept:
    """What it keeps of an example."""
    tensors = [arg for arg in example if isinstance(arg, Tensor)]
    apply = partial(_applied, function, example)
    return observed(apply, [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors])


def _part(tensor: Tensor, labels: Sequence[str], label: str, part: int, parts: int) -> Tensor:
    return tensor.chunk(parts, labels.index(label))[part].contiguous() if label in labels else tensor


def _compare(
    declared: Declared,
    name: str,
    label: str,
    what: str,
    found: list[Tensor | None],
    want: Tensor,
    labels: Sequence[str],
) -> None:
    parts = [torch.zeros_like(want) if t is None else t for t in found]
    got = torch.cat(parts, labels.index(label)) if label in labels else torch.stack(parts).sum(0)
    if not want.is_floating_point():
        error, allowed = float((got != want).any()), 0.0
    else:
        largest = float(want.abs().max()) or 1.0
        error, allowed = float((got - want).abs().max()) / largest, 100 * torch.finfo(want.dtype).eps
    if not error <= allowed:
        raise InputError(
            f"{name} is not {declared.text!r}: {what} of slices along {label!r}, put together, differs from the "
            f"whole's by {error:.2g}, relative ({allowed:.2g} is allowed). Add {label!r} to whole=, or mend the "
            "signature"
        )
