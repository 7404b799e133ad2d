"""Layouts that are no longer to be decided: in which model data are stored already, and inputs are given.

A further program of a planned model (:mod:`planner.plan.further`) runs on the tensors of the first one, so of these
there is nothing to choose but how operators read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from planner.base.errors import PlanError
from planner.base.formatting import shape_text
from planner.formulation.assignment import Assignment
from planner.formulation.node_options import AllowLeaf
from planner.ir.folding import Folded, relabel
from planner.ir.graph import Graph, Node, Ref
from planner.ir.layout import I, Layout, Mesh, R, Shard, format_layout, local_shape, over_micro_batches

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PlannedTensor:
    """A parameter or buffer as it is stored: its layout over the axes of one stage, and its whole shape and dtype."""

    layout: Layout
    shape: Shape
    dtype: str


@dataclass(frozen=True)
class StoredLayouts:
    """The parameters and buffers that are stored, and the layouts of inputs over the axes of one stage, by name."""

    tensors: Mapping[str, PlannedTensor]
    inputs: Mapping[str, Layout]

    def allow_leaf(self, mesh: Mesh) -> AllowLeaf:
        """Keeps of the layouts of a leaf on ``mesh``, micro-batches included, the one that it has."""

        def allow(node: Node, layout: Layout) -> bool:
            wanted = self._of(node)
            return wanted is None or _are_alike(over_micro_batches(layout, mesh), wanted)

        return allow

    def apart(self, folded: Folded) -> Folded:
        """The same with equal blocks apart whose parameters and buffers are stored differently."""
        by_name = folded.graph.by_name
        leaves = ([by_name[ref.node] for ref in each.block.inputs] for each in folded.instances)
        return relabel(folded, [tuple(self._of(leaf) for leaf in each if leaf.is_leaf) for each in leaves])

    def unknown(self, graph: Graph) -> list[str]:
        """The parameters and buffers of a graph that are stored nowhere."""
        names = (leaf.target or leaf.name for leaf in graph.applying("param", "buffer"))
        return [name for name in names if name not in self.tensors]

    def changed(self, graph: Graph) -> list[str]:
        """The parameters and buffers of a graph that are stored in another shape or dtype, in words."""
        found = []
        for leaf in graph.applying("param", "buffer"):
            tensor, stored = leaf.results[0], self.tensors.get(leaf.target or leaf.name)
            if stored is not None and (tensor.shape, tensor.dtype) != (stored.shape, stored.dtype):
                found.append(
                    f"the model's {leaf.target or leaf.name} is now {tensor.dtype} {shape_text(tensor.shape)}, and "
                    f"ranks hold it as it was planned, {stored.dtype} {shape_text(stored.shape)}"
                )
        return found

    def check(self, assignment: Assignment) -> None:
        """Refuse decisions that would have a tensor lie otherwise than it does.

        Raises:
            PlanError: names the tensor, and both layouts.
        """
        space = assignment.space
        for leaf in space.graph.leaves:
            wanted = self._of(leaf)
            found = over_micro_batches(assignment.produced(Ref(leaf.name)), space.mesh)
            if wanted is not None and not _are_alike(found, wanted):
                raise PlanError(
                    f"{leaf.target or leaf.name} is stored as {format_layout(wanted)}, in which the model does not use "
                    f"it for these inputs (only as {format_layout(found)}): plan with them as example inputs"
                )

    def _of(self, leaf: Node) -> Layout | None:
        name = leaf.target or leaf.name
        if leaf.op == "input":
            return self.inputs.get(name)
        stored = self.tensors.get(name) if leaf.op in ("param", "buffer") else None
        return None if stored is None else stored.layout


def tensors_of(assignment: Assignment) -> dict[str, PlannedTensor]:
    """How an assignment stores every parameter and buffer, by name."""
    found, mesh = {}, assignment.space.mesh
    for leaf in assignment.space.graph.applying("param", "buffer"):
        layout = over_micro_batches(assignment.produced(Ref(leaf.name)), mesh)
        found[leaf.target or leaf.name] = PlannedTensor(layout, leaf.results[0].shape, leaf.results[0].dtype)
    return found


def _are_alike(one: Layout, other: Layout) -> bool:
    """Whether ranks hold the same parts; whole is whole, whatever its gradient is."""
    return tuple(R if t == I else t for t in one) == tuple(R if t == I else t for t in other)


@dataclass(frozen=True)
class PlannedInputs:
    """How a plan cuts its inputs, and from that how inputs of any shapes are cut.

    An input is cut over the axes over which the planned input of its name is, as far as they divide it, and whole on
    the others. One of a new name is cut as the batch is, if its dim 0 is the batch's.

    Attributes:
        mesh: the plan's, with its micro-batches.
        layouts: of every planned input, by name; one local type per axis of ``mesh``.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout]

    def cut(self, shapes: Mapping[str, Shape]) -> tuple[Mesh, dict[str, Layout]]:
        """The mesh with as many micro-batches as the batch is cut into, at most as many as planned, and the layout of
        every input over its axes for ranks.

        Args:
            shapes: of the inputs of one call, by name.
        """
        along = {name: shape for name, shape in shapes.items() if shape and self._runs_along(name)}
        sizes = [shape[0] for shape in (along or shapes).values() if shape and shape[0] > 1]
        mesh = self.mesh.micro_batched(self._micro_batches(math.gcd(*sizes) or 1))
        batch = next((shape[0] for name, shape in shapes.items() if self._is_cut(name) and shape), None)
        found = {}
        for name, shape in shapes.items():
            like = (
                name if name in self.layouts else self._batch if batch is not None and shape[:1] == (batch,) else None
            )
            found[name] = over_micro_batches(self._layout(shape, like, mesh), mesh)
        return mesh, found

    def ranks(self, name: str) -> int:
        """Over how many ranks the planned input of a name, or the batch, is cut."""
        like = name if name in self.layouts else self._batch
        cut = self._ranks_of(like) if like is not None else ()
        return math.prod(size for is_cut, size in zip(cut, self._rank_sizes, strict=False) if is_cut)

    @property
    def _rank_sizes(self) -> tuple[int, ...]:
        return self.mesh.micro_batched(1).sizes

    def _ranks_of(self, name: str) -> tuple[bool, ...]:
        """Whether the planned input is cut on each axis for ranks."""
        layout = self.layouts[name]
        return tuple(isinstance(t, Shard) for t in layout[len(layout) - len(self._rank_sizes) :])

    def _runs_along(self, name: str) -> bool:
        """Whether the planned input runs along the batch: it is cut over ranks or into micro-batches."""
        return name in self.layouts and any(isinstance(t, Shard) for t in self.layouts[name])

    def _is_cut(self, name: str) -> bool:
        return name in self.layouts and any(self._ranks_of(name))

    @property
    def _batch(self) -> str | None:
        """The planned input that is cut over most ranks."""
        cut = [name for name in self.layouts if self._is_cut(name)]
        return max(cut, key=lambda name: sum(self._ranks_of(name)), default=None)

    def _micro_batches(self, batch: int) -> int:
        """The most micro-batches that the ranks can share, or that there can be where they cannot share the batch."""
        ranks = self.ranks("") if self._batch is not None else 1
        counts = [n for n in range(self.mesh.micro_batches, 0, -1) if batch % n == 0]
        return next((n for n in counts if batch // n % ranks == 0), counts[0])

    def _layout(self, shape: Shape, like: str | None, mesh: Mesh) -> Layout:
        """Over all axes of a mesh; ``like``: the planned input that it is like, if it is."""
        found: Layout = ()
        cut = self._ranks_of(like) if like is not None else (False,) * len(self._rank_sizes)
        if mesh.micro_batches > 1:
            cut = (True, *cut)  # whatever can be is cut into micro-batches
        for is_cut, at in zip(cut, range(len(mesh.axes)), strict=True):
            longer = (*found, Shard(0))
            fits = is_cut and shape[:1] > (1,) and local_shape(shape, longer, mesh.sizes[: at + 1]) is not None
            found = longer if fits else (*found, R)
        return found
