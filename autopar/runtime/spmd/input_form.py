"""The form of a call's inputs, which decides the program that runs it.

``shard`` knows the global shapes; ``forward`` is given parts, and finds on each the global shape that ``shard`` left
there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from autopar.runtime.spmd.interface import Interface
from planner.base.errors import InputError
from planner.base.formatting import shape_text

_MARK = "_autopar_global_shape"
STATIC = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class TensorForm:
    """Global shape and dtype of an input."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Static:
    """An input that is no tensor; 1, 1.0 and True differ."""

    kind: type
    value: Any


@dataclass(frozen=True)
class InputForm:
    """The form of a call: every input by name, as :func:`flat_call` has them, and the mode."""

    inputs: tuple[tuple[str, TensorForm | Static], ...]
    training: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors, by name."""
        return {name: each.shape for name, each in self.inputs if isinstance(each, TensorForm)}

    def __str__(self) -> str:
        """``input_ids 3x128 int64, use_cache False``."""
        return ", ".join(
            f"{name} {shape_text(each.shape)} {str(each.dtype).removeprefix('torch.')}"
            if isinstance(each, TensorForm)
            else f"{name} {each.value!r}"
            for name, each in self.inputs
        )


@dataclass(frozen=True)
class FlatCall:
    """A call's inputs one after another, keyword inputs in the order of their names."""

    names: tuple[str, ...]
    spec: pytree.TreeSpec
    values: tuple[Any, ...]

    def with_values(self, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Other values in the same places: (args, kwargs)."""
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        return args, kwargs

    def form(self, shapes: Mapping[str, tuple[int, ...]], training: bool) -> InputForm:
        """That of the call; ``shapes``: global ones, by name."""
        forms = (
            TensorForm(shapes[name], value.dtype) if isinstance(value, Tensor) else Static(type(value), value)
            for name, value in zip(self.names, self.values, strict=True)
        )
        return InputForm(tuple(zip(self.names, forms, strict=True)), training)


def flat_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatCall:
    """Flatten a call; names are ``input_ids``, ``batch.x``, or ``0`` of the first positional input."""
    in_order = {name: kwargs[name] for name in sorted(kwargs)}
    values = (*args, *in_order.values())
    if all(isinstance(value, Tensor) for value in values):  # nothing is nested: the form was worked out once
        return FlatCall(*_names_and_spec(len(args), tuple(in_order)), values)
    found, spec = pytree.tree_flatten_with_path((args, in_order))
    return FlatCall(_names(found), spec, tuple(value for _, value in found))


@functools.cache
def _names_and_spec(count: int, keywords: tuple[str, ...]) -> tuple[tuple[str, ...], pytree.TreeSpec]:
    """Those of a call with so many tensors by position, and others by these names."""
    found, spec = pytree.tree_flatten_with_path(((0,) * count, dict.fromkeys(keywords, 0)))
    return _names(found), spec


def _names(found: Iterable[tuple[pytree.KeyPath, Any]]) -> tuple[str, ...]:
    return tuple(".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path[1:]) for path, _ in found)


def named_inputs(in_spec: pytree.TreeSpec, values: Sequence[Any]) -> dict[str, Any]:
    """Values that are aligned with flattened inputs (args, kwargs), by the names that :func:`flat_call` gives these."""
    args, kwargs = pytree.tree_unflatten([_Leaf(value) for value in values], in_spec)
    call = flat_call(args, kwargs)
    return {name: leaf.value for name, leaf in zip(call.names, call.values, strict=True)}


@dataclass(frozen=True)
class _Leaf:
    """No container for pytree, whatever the value is."""

    value: Any


def captured_form(interface: Interface) -> InputForm:
    """That of the call that a program was captured for."""
    leaves = {leaf.name: TensorForm(leaf.shape, leaf.dtype) for leaf in interface.leaves if leaf.kind == "input"}
    forms = [
        Static(type(static), static) if name is None else leaves[name]
        for name, static in zip(interface.input_names, interface.static_inputs, strict=True)
    ]
    return InputForm(tuple(named_inputs(interface.in_spec, forms).items()), interface.captured_training)


def mark(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Leave the global shape on a part."""
    setattr(part, _MARK, tuple(shape))
    return part


def marked(part: Tensor) -> tuple[int, ...] | None:
    """The global shape of a part, where ``shard`` made it."""
    return getattr(part, _MARK, None)


def check_values(call: FlatCall, planned: Mapping[str, TensorForm | Static]) -> None:
    """Refuse values that no program takes.

    Raises:
        InputError: one is neither a tensor nor a plain value, or a plain value where a tensor was planned.
    """
    for name, value in zip(call.names, call.values, strict=True):
        if isinstance(value, Tensor):
            each = planned.get(name)
            if isinstance(each, TensorForm) and value.dtype != each.dtype:
                raise InputError(
                    f"input {name!r} has dtype {value.dtype}, but was planned as {each.dtype}: convert it "
                    f"(.to({each.dtype})), or plan again with example inputs of this dtype"
                )
            continue
        parent = next((each for each in planned if name.startswith(f"{each}.")), None)
        wanted = planned.get(name if parent is None else parent)
        is_tensors = isinstance(wanted, TensorForm) and value is not None
        if parent is not None and isinstance(wanted, TensorForm):
            many = sum(each.startswith(f"{parent}.") for each in call.names)
            raise InputError(
                f"input {parent!r} nests {many} values that are no tensors, but the model was planned with one tensor "
                "in its place: give torch.as_tensor(...) of it"
            )
        if is_tensors or not isinstance(value, STATIC):
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise InputError(f"input {name!r} is of type {kind}: give a torch.Tensor, e.g. torch.as_tensor(value)")
