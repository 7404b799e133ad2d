"""Parts: what this rank holds of a tensor that lies on several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autopar.runtime.spmd.mesh import as_dtensor


def local(tensor: Any) -> Tensor:
    """What this rank holds of it; a plain tensor is all here."""
    found: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return found


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """A tensor of which this rank holds a part, laid out as a parameter."""
    if not isinstance(parameter, DTensor):
        return part
    return as_dtensor(part, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())


def is_cut(tensor: Tensor) -> bool:
    """Whether ranks hold different parts of it."""
    return isinstance(tensor, DTensor) and any(not placement.is_replicate() for placement in tensor.placements)


def holders_of(tensor: DTensor) -> ProcessGroup:
    """The ranks that together hold a tensor which is cut; its axes are joined where the mesh was made."""
    mesh = tensor.device_mesh
    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(cut) == 1:
        return mesh.get_group(cut[0])
    assert mesh.mesh_dim_names is not None
    names = tuple(mesh.mesh_dim_names[axis] for axis in cut)
    return mesh[names]._flatten("+".join(names)).get_group()


def evaluated(closure: Any) -> Any:
    """What the closure of a step returns, which makes gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
