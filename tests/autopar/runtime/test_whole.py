"""Tensors gathered from their parts, on simulated ranks: in strips on any axes, where torch itself cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.runtime.spmd.mesh import as_dtensor, coordinates, device_mesh, part_of, placements, whole_of
from autopar.verification.simulator import fake_process_group
from planner.base.errors import InputError
from planner.ir import layout as planner_layout
from planner.ir.layout import I, Layout, Mesh

MESH = Mesh.of(data=2, tensor=3)
WHOLE = torch.arange(24 * 12.0).reshape(24, 12)


def strips(dim: int, count: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=count)


def cut(rank: int, placed: tuple[Placement, ...]) -> Tensor:
    """A rank's part as torch defines placements: each axis cuts what earlier ones left."""
    left = WHOLE
    for axis, placement in enumerate(placed):
        if isinstance(placement, (Shard, _StridedShard)):
            apart = left.unflatten(placement.dim, (getattr(placement, "split_factor", 1), -1))
            parts = apart.chunk(MESH.sizes[axis], placement.dim + 1)
            left = parts[coordinates(MESH, rank)[axis]].flatten(placement.dim, placement.dim + 1)
    return left.contiguous()


@pytest.mark.parametrize(
    "placed",
    [
        (Shard(0), Replicate()),
        (Shard(1), Shard(0)),
        (Replicate(), strips(0, 4)),
        (strips(1, 3), Shard(0)),
        (strips(0, 2), strips(1, 4)),
        # No plan stores these, torch may.
        (strips(0, 3), Shard(0)),
        (Shard(0), strips(0, 2)),
        (strips(0, 2), strips(0, 2)),
    ],
    ids=str,
)
def test_parts_are_gathered(placed: tuple[Placement, ...]) -> None:
    with fake_process_group(MESH.size), LocalTensorMode(MESH.size) as mode:
        parts = mode.rank_map(lambda rank: cut(rank, placed))
        found: Any = whole_of(as_dtensor(parts, device_mesh(MESH, "cpu"), placed, WHOLE.shape, WHOLE.stride()))
        assert all(torch.equal(each, WHOLE) for each in found._local_tensors.values())


@pytest.mark.parametrize("layout", [(I, planner_layout.Shard(0, 4)), (planner_layout.Shard(0), I)], ids=str)
def test_torch_gathers_what_plans_store(layout: Layout) -> None:
    with fake_process_group(MESH.size), LocalTensorMode(MESH.size) as mode:
        parts = mode.rank_map(lambda rank: part_of(WHOLE, layout, MESH, rank))
        value = as_dtensor(parts, device_mesh(MESH, "cpu"), placements(layout), WHOLE.shape, WHOLE.stride())
        try:
            found: Any = value.full_tensor()
        except ValueError:
            if layout[1] == I:
                raise
            pytest.skip("this torch gathers no strips")
        assert all(torch.equal(each, WHOLE) for each in found._local_tensors.values())


def test_uneven_strips_are_not_gathered() -> None:
    with fake_process_group(2):
        mesh = device_mesh(Mesh.of(tensor=2), "cpu")
        value = as_dtensor(torch.zeros(4, 3), mesh, [strips(0, 2)], (7, 3), (3, 1))
        with pytest.raises(InputError, match=r"shape \(7, 3\).* 2 strips over 2 ranks do not divide 7 evenly"):
            whole_of(value)
