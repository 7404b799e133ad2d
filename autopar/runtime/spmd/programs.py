"""The programs of a parallel module, by the form of the inputs that they run: the planned one, and further ones.

A program is static. What inputs of another form need is another program over the same parameters, which a
:class:`Maker` makes when they first come, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.runtime.spmd.input_form import (
    FlatCall,
    InputForm,
    captured_form,
    check_values,
    flat_call,
    mark,
    marked,
    named_inputs,
)
from autopar.runtime.spmd.interface import Interface, LeafSpec
from autopar.runtime.spmd.mesh import input_part
from planner.base.errors import InputError
from planner.formulation.constraints.stored_layouts import PlannedInputs, Shape
from planner.ir.layout import Layout, Mesh, local_shape


@dataclass(frozen=True)
class Emitted:
    """A program, how it maps onto the model, and the constants that it reads, by name of leaf."""

    program: Callable[..., tuple[Any, ...]]
    interface: Interface
    constants: Mapping[str, Tensor]


class Maker(Protocol):
    """Makes further programs; every rank calls it alike."""

    @property
    def inputs(self) -> PlannedInputs:
        """How the planned program's inputs are cut, by the names that the plan gives them."""

    def check(self) -> None:
        """Raise :class:`planner.base.errors.PlanError` if the plan has no further programs."""

    def check_alike(self, inputs: str, training: bool) -> None:
        """Raise :class:`planner.base.errors.PlanError` on all ranks if these words differ between them; a collective.

        Args:
            inputs: the form that the rank needs a program for.
            training: the module's mode.
        """

    def __call__(
        self,
        module: Any,
        call: FlatCall,
        form: InputForm,
        mesh: Mesh,
        layouts: Mapping[str, Layout],
        earlier: Collection[InputForm],
    ) -> Emitted:
        """The program for a form that all ranks have.

        Args:
            module: the parallel module.
            call: a call of that form, whose values are not looked at.
            mesh: with the program's micro-batches.
            layouts: of the inputs, by name.
            earlier: forms that have a program.
        """


class Programs:
    """Finds the program of a call, or has it made.

    Args:
        planned: the first program.
        maker: ``None``: there is no other one.
    """

    def __init__(self, planned: Emitted, maker: Maker | None):
        self.planned, self.maker = planned, maker
        interface, self.form = planned.interface, captured_form(planned.interface)
        self._leaf_of: dict[str, str | None] = named_inputs(interface.in_spec, interface.input_names)
        self._forms = dict(self.form.inputs)
        leaves = {leaf.name: leaf for leaf in interface.leaves if leaf.kind == "input"}
        self._leaves = {name: leaves[leaf] for name, leaf in self._leaf_of.items() if leaf is not None}
        self._made: dict[InputForm, Emitted] = {self.form: planned}

    @property
    def all(self) -> tuple[Emitted, ...]:
        """Those that there are, the planned one first."""
        return tuple(self._made.values())

    def of_parts(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh) -> Emitted:
        """The program that runs these parts of a global batch."""
        if self.maker is None:
            return self.planned
        call = self.call_of(args, kwargs)
        parts = {n: v for n, v in zip(call.names, call.values, strict=True) if isinstance(v, Tensor)}
        shapes = {name: marked(part) for name, part in parts.items()}
        if None in shapes.values():
            planned = self._planned_shapes(parts, shapes, mesh)
            shapes = planned or {name: shape or self._inferred(name, parts[name]) for name, shape in shapes.items()}
        form = call.form({name: shape for name, shape in shapes.items() if shape is not None}, module.training)
        return self._found(form) or self._make(module, call, form)

    def call_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatCall:
        """A call that some program may run.

        Raises:
            InputError: it is by position, and the plan by name, or it holds what no program takes.
        """
        self.planned.interface.check_way(args, kwargs)
        call = flat_call(args, kwargs)
        check_values(call, self._forms)
        return call

    def shard(self, batch: FlatCall, mesh: Mesh, rank: int, device: torch.device) -> list[Any]:
        """This rank's parts of a global batch, in its order."""
        tensors = {n: v for n, v in zip(batch.names, batch.values, strict=True) if isinstance(v, Tensor)}
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        layouts = self._layouts(shapes)[1]
        return [
            mark(input_part(value, layouts[name], mesh, rank, device), shapes[name]) if name in tensors else value
            for name, value in zip(batch.names, batch.values, strict=True)
        ]

    def inputs_of(self, size: int | None) -> list[LeafSpec]:
        """The inputs with a global batch of so many samples, as ``shard`` would cut them; ``None``: as planned.

        They are as planned as well where it cannot be said which of them run along the batch.
        """
        planned = list(self._leaves.values())
        sizes = {leaf.shape[0] for leaf in planned if leaf.shape}
        if not isinstance(size, int) or size < 1 or size in sizes or len(sizes) != 1 or self.maker is None:
            return planned
        shapes = {name: (size, *leaf.shape[1:]) if leaf.shape else () for name, leaf in self._leaves.items()}
        layouts = self._layouts(shapes)[1]
        return [replace(leaf, shape=shapes[name], layout=layouts[name]) for name, leaf in self._leaves.items()]

    def _found(self, form: InputForm) -> Emitted | None:
        """What was captured in train mode evaluates, too."""
        found = self._made.get(form)
        return self._made.get(replace(form, training=True)) if found is None and not form.training else found

    def _make(self, module: Any, call: FlatCall, form: InputForm) -> Emitted:
        assert self.maker is not None
        self.maker.check()
        self.maker.check_alike(str(form), form.training)
        mesh, layouts = self._layouts(form.shapes)
        made = self.maker(module, call, form, mesh, layouts, self._made)
        self._made[form] = made
        return made

    def _layouts(self, shapes: Mapping[str, Shape]) -> tuple[Mesh, dict[str, Layout]]:
        """See :meth:`PlannedInputs.cut`; here inputs go by the names of the call."""
        assert self.maker is not None
        if shapes == self.form.shapes:
            return self.maker.inputs.mesh, {name: leaf.layout for name, leaf in self._leaves.items()}
        mesh, found = self.maker.inputs.cut({self._leaf_of.get(name) or name: shape for name, shape in shapes.items()})
        return mesh, {name: found[self._leaf_of.get(name) or name] for name in shapes}

    def _planned_shapes(
        self, parts: Mapping[str, Tensor], shapes: Mapping[str, Shape | None], mesh: Mesh
    ) -> dict[str, Shape | None] | None:
        """The planned global shapes, if parts without a mark are parts of these."""
        found: dict[str, Shape | None] = {}
        for name, part in parts.items():
            leaf = self._leaves.get(name)
            if leaf is None:
                return None
            local = local_shape(leaf.shape, leaf.layout, mesh.sizes)
            if (shapes[name] or leaf.shape) != leaf.shape or tuple(part.shape) != local:
                return None
            found[name] = leaf.shape
        return found

    def _inferred(self, name: str, part: Tensor) -> Shape:
        """The global shape of a part that ``shard`` did not make, cut as planned."""
        assert self.maker is not None
        ranks, shape = self.maker.inputs.ranks(self._leaf_of.get(name) or name), tuple(part.shape)
        if not shape or ranks == 1:
            return shape
        if name in self._leaves and shape == self._leaves[name].shape:
            raise InputError(
                f"input {name!r} has shape {shape}, which is that of the planned global batch, and each of {ranks} "
                "ranks takes a part of it: pass pmodel.shard(batch)"
            )
        if shape[0] % ranks:
            raise InputError(
                f"input {name!r} has shape {shape} on this rank, which may be its part of {shape[0] * ranks} rows over "
                f"{ranks} ranks, or a batch of {shape[0]} that they do not divide and hold whole: pass what "
                "pmodel.shard(batch) returned for the global batch, as it is"
            )
        return (shape[0] * ranks, *shape[1:])
