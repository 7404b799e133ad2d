"""Interface: from what the model's caller passes and expects to a program's flat leaves and results, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.runtime.spmd.mesh import contiguous_strides, input_part, placements
from autopar.runtime.spmd.not_kept import NotKept
from planner.base.errors import InputError
from planner.ir.layout import I, Layout, Mesh, R, local_shape


@dataclass(frozen=True)
class LeafSpec:
    """A leaf of the program: ``kind``, original ``name``, global shape, dtype, stored layout, whether it is trained."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    trainable: bool = False


@dataclass(frozen=True)
class OutputSpec:
    """A tensor that leaves the program: name, global shape, layout, and whether steps with backward keep it, too."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    is_kept: bool = True


@dataclass(frozen=True)
class Interface:
    """How a program's flat inputs and outputs map onto the model's nested ones.

    ``input_names`` aligns with the flattened (args, kwargs): a leaf's placeholder name, or ``None`` for a
    static value. ``outputs`` aligns with the flattened result: a position in the program's results, or
    ``None``, then the value in ``static_outputs``.
    """

    leaves: tuple[LeafSpec, ...]
    input_names: tuple[str | None, ...]
    in_spec: pytree.TreeSpec
    outputs: tuple[OutputSpec | None, ...]
    static_outputs: tuple[Any, ...]
    out_spec: pytree.TreeSpec
    updates: tuple[str, ...]
    captured_training: bool
    static_inputs: tuple[Any, ...] = ()

    def check_way(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse inputs by position where they were planned by name, or the other way round.

        Raises:
            InputError: says how to call.
        """
        expected, count = self.in_spec.child(1).context, self.in_spec.child(0).num_children
        if args and expected and not count:
            raise InputError(_by_name(len(args), expected))
        if kwargs and count and not expected:
            raise InputError(_by_position(list(kwargs), count))

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """A call's inputs in the order of :attr:`input_names`.

        Raises:
            InputError: they are not nested, named or valued as planned.
        """
        self.check_way(args, kwargs)
        expected = self.in_spec.child(1).context
        missing = [name for name in expected if name not in kwargs]
        extra = [name for name in kwargs if name not in expected]
        if missing or extra:
            raise InputError(
                f"the model was planned with inputs {list(expected)}; "
                + (f"missing: {missing}" if missing else f"unknown: {extra}")
                + ". Plan again with example inputs of this form"
            )
        flat = [*args, *(kwargs[name] for name in expected)]
        if not all(isinstance(value, Tensor) for value in flat) or len(flat) != len(self.input_names):
            flat, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in expected}))
            if len(flat) != len(self.input_names):
                raise InputError(_nested_otherwise(expected, spec, self.in_spec))
        for name, value, planned in zip(self.input_names, flat, self.static_inputs, strict=True):
            if name is None and value != planned:
                raise InputError(
                    f"an input is {value!r}, but the model was planned with {planned!r} in its place, and a plan holds "
                    "for one value of every input that is not a tensor: plan again for this one"
                )
        return flat

    def shard(self, batch: Any, mesh: Mesh, rank: int, device: torch.device) -> Any:
        """One rank's part of a global batch: the same nesting, tensors cut as the plan stores the inputs."""

        def part(leaf: LeafSpec, value: Any) -> Tensor:
            _check_input(leaf, value, leaf.shape, "the global batch")
            return input_part(value, leaf.layout, mesh, rank, device)

        return self.each_input(batch, part)

    def each_input(self, batch: Any, make: Callable[[LeafSpec, Any], Tensor]) -> Any:
        """A batch of the same nesting, with what ``make`` returns in place of every tensor.

        Args:
            batch: keyword inputs (a mapping), or positional ones.

        Raises:
            InputError: inputs are not nested, named or valued as planned.
        """
        args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
        specs = {leaf.name: leaf for leaf in self.input_leaves}
        made = [
            value if name is None else make(specs[name], value)
            for name, value in zip(self.input_names, self.flatten(args, kwargs), strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(made, self.in_spec)
        return kwargs if isinstance(batch, Mapping) else args

    @property
    def input_leaves(self) -> list[LeafSpec]:
        """The leaves that a caller gives."""
        return [leaf for leaf in self.leaves if leaf.kind == "input"]

    def inputs(self, flat: Sequence[Any], mesh: Mesh) -> dict[str, Tensor]:
        """This rank's part of the inputs, from :meth:`flatten`, by the names of their leaves.

        Raises:
            InputError: they are not as planned, or one requires a gradient.
        """
        values = {name: value for name, value in zip(self.input_names, flat, strict=True) if name}
        for leaf in self.input_leaves:
            value, expected = values[leaf.name], local_shape(leaf.shape, leaf.layout, mesh.sizes)
            assert expected is not None
            _check_input(leaf, value, expected, "this rank's part")
            if value.requires_grad and torch.is_grad_enabled():
                raise InputError(
                    f"input {leaf.name!r} requires a gradient, which a plan does not sum over ranks: detach it, or "
                    "make it a parameter of the model"
                )
        return values

    def returned(self, results: Sequence[Tensor | None], device_mesh: DeviceMesh) -> Any:
        """What the model returns: scalars as they are, other results as DTensors of global shape; in a step with
        backward without those that are not kept.
        """
        given = iter(results)
        flat = [
            static if spec is None else _whole(next(given), spec, device_mesh)
            for spec, static in zip(self.outputs, self.static_outputs, strict=True)
        ]
        return pytree.tree_unflatten(flat, self.out_spec)


def _whole(value: Tensor | None, spec: OutputSpec, device_mesh: DeviceMesh) -> Tensor | NotKept | None:
    if not spec.is_kept and torch.is_grad_enabled():
        return NotKept(spec.name)
    if value is None or not spec.shape or all(t in (I, R) for t in spec.layout):
        return value
    return DTensor.from_local(
        value,
        device_mesh,
        placements(spec.layout),
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=contiguous_strides(spec.shape),
    )


def _by_name(given: int, expected: Sequence[str]) -> str:
    """What to say where inputs are given by position to a model that was planned with them by name."""
    batch = ", ".join(f"{name!r}: ..." for name in expected)
    return (
        f"inputs are given by position ({given}), but the model was planned with inputs by name, {list(expected)}: "
        f"call pmodel(**pmodel.shard({{{batch}}}))"
    )


def _by_position(given: Sequence[str], expected: int) -> str:
    """The other way round."""
    return (
        f"inputs are given by name, {list(given)}, but the model was planned with inputs by position ({expected}): "
        f"call pmodel(*pmodel.shard(({('..., ' * expected).rstrip()})))"
    )


def _nested_otherwise(names: Sequence[str], got: pytree.TreeSpec, planned: pytree.TreeSpec) -> str:
    """Which input holds more or fewer values than the plan knows."""
    counts = [spec.child(0).num_children for spec in (got, planned)]
    if counts[0] != counts[1]:
        return f"{counts[0]} positional inputs are given, but the model was planned with {counts[1]}"
    called = [*(f"positional input {number}" for number in range(counts[0])), *(f"input {name!r}" for name in names)]
    each = [[*spec.child(0).children(), *spec.child(1).children()] for spec in (got, planned)]
    what, have, want = next(found for found in zip(called, *each, strict=True) if not _as_many(*found[1:]))
    return (
        f"{what} nests {have.num_leaves} values ({_kind(have)}), but the model was planned with {want.num_leaves} in "
        f"its place ({_kind(want)}): give tensors as in the example inputs (torch.as_tensor(...) of nested lists), or "
        "plan again with inputs of this form"
    )


def _as_many(one: pytree.TreeSpec, other: pytree.TreeSpec) -> bool:
    return one.num_leaves == other.num_leaves


def _kind(spec: pytree.TreeSpec) -> str:
    return "one value" if spec.is_leaf() else f"a {spec.type.__name__}"


def _check_input(leaf: LeafSpec, value: Any, expected: tuple[int, ...], what: str) -> None:
    if not isinstance(value, Tensor):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise InputError(f"input {leaf.name!r} is of type {kind}: give a torch.Tensor, e.g. torch.as_tensor(value)")
    if tuple(value.shape) != expected:
        raise InputError(
            f"input {leaf.name!r} has shape {tuple(value.shape)}, but {what} was planned as {expected}: pass "
            "pmodel.shard(batch) of a global batch of the planned size (drop or pad the last batch), or plan again for "
            "this size"
        )
    if value.dtype != leaf.dtype:
        raise InputError(
            f"input {leaf.name!r} has dtype {value.dtype}, but was planned as {leaf.dtype}: convert it "
            f"(.to({leaf.dtype})), or plan again with example inputs of this dtype"
        )
