"""Meshes at run time: process groups of a plan's axes, and where a rank stands on them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from planner import layout as planner_layout
from planner.errors import PlanError
from planner.layout import Layout, Mesh


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The torch mesh of a planner mesh, over the default process group.

    Raises:
        PlanError: no process group, or one of another size.
    """
    if not dist.is_initialized():
        raise PlanError(
            f"the plan is for {mesh.size} ranks but no process group is initialised: start the program with "
            f"`torchrun --nproc-per-node {mesh.size} ...` (autopar.parallelize then initialises it), or use "
            "autopar.verify to run the plan in one process"
        )
    if dist.get_world_size() != mesh.size:
        raise PlanError(
            f"the plan is for {mesh.size} ranks but the process group has {dist.get_world_size()}: "
            f"start {mesh.size} processes, or plan again for this cluster"
        )
    return init_device_mesh(device_type, mesh.sizes, mesh_dim_names=mesh.names)


def groups_of(mesh: DeviceMesh) -> Mapping[str, ProcessGroup]:
    """Process group of every axis, by name."""
    assert mesh.mesh_dim_names is not None
    return {name: mesh.get_group(name) for name in mesh.mesh_dim_names}


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Where ``rank`` stands on each axis."""
    return tuple(rank // axis.stride % axis.size for axis in mesh.axes)


def placements(layout: Layout) -> tuple[Placement, ...]:
    """DTensor placements of a stored or leaving tensor (``S``, ``I`` or ``R`` on every axis)."""
    found: list[Placement] = []
    for local_type in layout:
        if isinstance(local_type, planner_layout.Shard):
            strided = local_type.outer > 1
            found.append(
                _StridedShard(local_type.dim, split_factor=local_type.outer) if strided else Shard(local_type.dim)
            )
        else:
            found.append(Replicate())
    return tuple(found)


def part_of(full: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """The part of ``full`` that ``rank`` holds (a copy)."""
    return full[_indices(full.shape, layout, mesh, rank)].contiguous().clone()


def put_part(full: torch.Tensor, part: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> None:
    """Write the part of ``full`` that ``rank`` holds; the inverse of :func:`part_of`."""
    full[_indices(full.shape, layout, mesh, rank)] = part


def _indices(shape: torch.Size, layout: Layout, mesh: Mesh, rank: int) -> tuple[torch.Tensor | slice, ...]:
    """Global indices of a rank's part: an index tensor for each cut dim, broadcast against each other."""
    place = coordinates(mesh, rank)
    rows = [torch.arange(size) for size in shape]
    for axis, local_type in enumerate(layout):
        if isinstance(local_type, planner_layout.Shard):
            # Earlier axes may have cut what lies outside this axis's strips.
            strips = planner_layout.local_outer(layout[: axis + 1], axis, mesh.sizes[: axis + 1])
            whole = rows[local_type.dim].unflatten(0, (strips, -1))
            piece = whole.shape[1] // mesh.axes[axis].size
            start = place[axis] * piece
            rows[local_type.dim] = whole[:, start : start + piece].flatten()
    if not shape:
        return ()
    return torch.meshgrid(*rows, indexing="ij") if math.prod(shape) else (slice(None),) * len(shape)
