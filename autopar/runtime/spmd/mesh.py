"""Meshes at run time: process groups of a plan's axes, and where a rank stands on them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.graph.rows import Rows, as_slice, take
from autopar.runtime.host.timeouts import be_patient
from autopar.runtime.spmd.pipeline_ranks import PipelineRanks
from autopar.runtime.spmd.resharding import convert
from planner.base.errors import InputError, PlanError
from planner.ir import layout as planner_layout
from planner.ir.layout import PIPELINE, Layout, Mesh


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The torch mesh of a planner mesh, over the default process group; see :func:`pipeline_mesh`."""
    return pipeline_mesh(mesh, device_type, 1)[0]


def pipeline_mesh(mesh: Mesh, device_type: str, stages: int) -> tuple[DeviceMesh, PipelineRanks | None]:
    """The torch mesh of this rank's stage of a pipeline, over the default process group.

    Axes are joined in all ways too, so that DTensor reduces over several of them at once (a norm of gradients).

    Args:
        mesh: of one stage.
        stages: so many of them follow one another.

    Returns:
        The mesh, and the ranks that hold the same part of every stage; ``None`` for one stage.

    Raises:
        PlanError: no process group, or one of another size.
    """
    size = mesh.size * stages
    if not dist.is_initialized():
        raise PlanError(
            f"the plan is for {size} ranks but no process group is initialised: start the program with "
            f"`torchrun --nproc-per-node {size} ...` (autopar.parallelize then initialises it), or use "
            "autopar.verify to run the plan in one process"
        )
    if dist.get_world_size() != size:
        raise PlanError(
            f"the plan is for {size} ranks but the process group has {dist.get_world_size()}: "
            f"start {size} processes, or plan again for this cluster"
        )
    pipeline = None
    if stages == 1:
        made = init_device_mesh(device_type, mesh.sizes, mesh_dim_names=mesh.names)
    else:
        whole = init_device_mesh(device_type, (stages, *mesh.sizes), mesh_dim_names=(PIPELINE, *mesh.names))
        made = whole[mesh.names]
        be_patient([whole.get_group(PIPELINE)], torch.device(device_type))
        pipeline = PipelineRanks.over(whole.get_group(PIPELINE), torch.device(device_type))
    for count in range(2, len(mesh.names) + 1):
        for names in itertools.combinations(mesh.names, count):
            made[names]._flatten("+".join(names))
    be_patient(groups_of(made).values(), torch.device(device_type))
    return made, pipeline


def groups_of(mesh: DeviceMesh) -> Mapping[str, ProcessGroup]:
    """Process group of every axis, by name."""
    assert mesh.mesh_dim_names is not None
    return {name: mesh.get_group(name) for name in mesh.mesh_dim_names}


def coordinates(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Where ``rank`` stands on each axis."""
    return tuple(rank // axis.stride % axis.size for axis in mesh.axes)


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placed: Sequence[Placement], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """A tensor of which this rank holds ``local``, which stays where it is: on the mesh's devices, or on the host.

    Args:
        placed: how it is cut on each axis.
        shape, stride: of the whole.
    """
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placed), tensor_meta=meta), requires_grad=False)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a tensor whose rows lie behind one another."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


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


def whole_of(value: Tensor) -> Tensor:
    """The global tensor on every rank, gathered axis by axis, minor first; all ranks of the mesh must call it. A plain
    tensor is whole already.

    What is stored in strips is gathered here: torch takes strips for an order in which axes were cut, which they
    seldom are; then its own ``full_tensor`` fails (2.11), or is wrong where several axes cut strips of one dim (2.13).

    Raises:
        InputError: the tensor is in strips that are not equally long.
    """
    if not isinstance(value, DTensor):
        return value
    kept = list(value.placements)
    if not any(isinstance(placement, _StridedShard) for placement in kept):
        # Not all at once: torch warns of gathering over several axes.
        for axis in reversed(range(len(kept))):
            kept[axis] = Replicate()
            value = value.redistribute(placements=kept)
        return value.to_local()
    steps: list[tuple[int, planner_layout.Shard]] = []
    length = list(value.shape)
    for axis, placement in enumerate(kept):
        if isinstance(placement, (Shard, _StridedShard)):
            strips = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            ranks = value.device_mesh.size(axis)
            if length[placement.dim] % (strips * ranks):
                raise InputError(
                    f"a tensor of shape {tuple(value.shape)} is cut as {value.placements}: {strips} strips over "
                    f"{ranks} ranks do not divide {length[placement.dim]} evenly, and such parts are not put "
                    "together; give the whole tensor"
                )
            length[placement.dim] //= ranks
            steps.append((axis, planner_layout.Shard(placement.dim, strips)))
    part = value.to_local().detach()
    for axis, shard in reversed(steps):
        part = convert(part, value.device_mesh.get_group(axis), str(shard), "R")
    return part


@functools.lru_cache(maxsize=1024)
def rows_of(shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int) -> Rows:
    """Where the part of a tensor that ``rank`` holds lies in the whole."""
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
    return tuple(as_slice(indices) for indices in rows)


def input_part(full: torch.Tensor, layout: Layout, mesh: Mesh, rank: int, device: torch.device) -> torch.Tensor:
    """The part of an input that ``rank`` holds, contiguous on ``device``: a copy, as ``full`` may be filled again."""
    rows = rows_of(tuple(full.shape), layout, mesh, rank)
    return take(full, rows).to(device, copy=True, memory_format=torch.contiguous_format)


def part_of(full: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """The part of ``full`` that ``rank`` holds (a copy)."""
    return take(full, rows_of(tuple(full.shape), layout, mesh, rank)).clone(memory_format=torch.contiguous_format)


def put_part(full: torch.Tensor, part: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> None:
    """Write the part of ``full`` that ``rank`` holds; the inverse of :func:`part_of`."""
    rows = rows_of(tuple(full.shape), layout, mesh, rank)
    if all(isinstance(indices, slice) for indices in rows):
        take(full, rows).copy_(part)
    else:
        whole = [torch.arange(i.start, i.stop) if isinstance(i, slice) else i for i in rows]
        full[torch.meshgrid(*whole, indexing="ij")] = part
