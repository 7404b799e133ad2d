"""State dicts: whole tensors from the parts that ranks and stages hold, and parts from whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.graph.slabs import Cut, Slabs
from autopar.runtime.host.disk import check_there
from autopar.runtime.host.pages import READ, WRITE
from autopar.runtime.spmd.mesh import as_dtensor, part_of, rows_of, whole_of
from autopar.runtime.spmd.pipeline_ranks import PipelineRanks
from planner.base.errors import DiskError, InputError
from planner.ir.layout import Layout, Mesh

UNCHANGED = (
    "Nothing was changed: if the disk comes back call it again (where other ranks wait for this one, end all), else "
    "load the last checkpoint with another offload_path"
)
"""What is so where a state dict cannot be taken from files, or put there."""


def whole_tensors(
    own: Mapping[str, Tensor], names: Iterable[str], pipeline: PipelineRanks | None, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """What all stages hold, whole, on the CPU, one tensor after the other; every rank must take all of them.

    Args:
        own: what this rank holds.
        names: of what all stages may hold, in order.
    """
    if pipeline is None:
        yield from ((name, _on_cpu(name, value)) for name, value in own.items())
        return
    forms = {name: (tuple(value.shape), value.dtype) for name, value in own.items()}
    stages: list[dict[str, Any]] = [{} for _ in range(pipeline.size)]
    dist.all_gather_object(stages, forms, group=pipeline.ranks)
    for name in names:
        home = next((number for number, held in enumerate(stages) if name in held), None)
        if home is None:
            continue
        value = _on_cpu(name, own[name]).to(device) if home == pipeline.rank else None
        if value is None:
            shape, dtype = stages[home][name]
            value = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(value, pipeline.global_rank(home), pipeline.ranks)
        yield name, value.cpu()


def part_like(
    name: str, value: Tensor, own: DTensor, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh, rank: int
) -> DTensor:
    """This rank's part of a value of a state dict, whole or a DTensor, as a parameter of it is stored.

    Raises:
        InputError: it has another shape.
        DiskError: one of them is in a file that cannot be read, or be written.
    """
    if tuple(value.shape) != tuple(own.shape):
        raise InputError(f"{name} has shape {tuple(value.shape)} in the state dict, {tuple(own.shape)} in the model")
    if isinstance(value, DTensor):
        value = _whole(name, value)
    check_there(own._local_tensor, WRITE, name, UNCHANGED)
    part = part_of(value, layout, mesh, rank).to(own.device, own.dtype)
    return as_dtensor(part, device_mesh, own.placements, own.shape, own.stride())


def slabs_like(
    slabs: Slabs, tables: Mapping[str, Tensor], own: Tensor, layout: Layout, mesh: Mesh, rank: int
) -> Tensor:
    """This rank's part of slabs, filled with tables of a state dict; where it lacks some, as they are.

    Raises:
        InputError: a table has another shape.
        DiskError: the slabs are in a file that cannot be read, or be written.
    """
    slabs.check(tables)

    def of_table(name: str) -> Cut | None:
        given = tables.get(name)
        if given is None:
            return None
        return (_whole(name, given) if isinstance(given, DTensor) else given).detach().__getitem__

    here = own._local_tensor if isinstance(own, DTensor) else own
    check_there(here, READ, slabs.name, UNCHANGED)
    check_there(here, WRITE, slabs.name, UNCHANGED)
    part = slabs.local(rows_of(slabs.shape, layout, mesh, rank), of_table, here)
    if not isinstance(own, DTensor):
        return part
    return as_dtensor(part, own.device_mesh, own.placements, own.shape, own.stride())


def on_all_stages(load: Callable[[], Any], pipeline: PipelineRanks) -> Any:
    """What ``load`` returns; what is wrong with one stage's part is an error on all ranks, or the others would wait for
    that stage.
    """
    wrong: list[Any] = [None] * pipeline.size
    mine, result = None, None
    try:
        result = load()
    except (InputError, DiskError, RuntimeError) as error:
        mine = error
    dist.all_gather_object(wrong, mine, group=pipeline.ranks)
    first = next((error for error in wrong if error is not None), None)
    if first is not None:
        raise mine or first
    return result


def _on_cpu(name: str, value: Tensor) -> Tensor:
    """A copy of a tensor, whole, on the CPU."""
    return (_whole(name, value) if isinstance(value, DTensor) else value).detach().cpu().clone()


def _whole(name: str, value: DTensor) -> Tensor:
    check_there(value._local_tensor, READ, name, UNCHANGED)
    return whole_of(value)
