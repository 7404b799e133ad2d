"""Which part of a dim a rank holds, as tensors: no rank number is asked for, so that types can be checked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import spmd_types as spmd
import torch
from spmd_types import I, P, R, S, V
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.runtime.spmd.micro_batch import MicroBatches

Groups = tuple[ProcessGroup, ...]
"""Mesh axes."""
GroupsOrMicroBatches = tuple[ProcessGroup | MicroBatches, ...]
"""Mesh axes, the one of micro-batches perhaps among them."""


def ranks(groups: GroupsOrMicroBatches) -> int:
    """How many ranks, or micro-batches, share a dim that is sharded over ``groups``."""
    return math.prod(group.size() for group in groups)


def cut(index: Tensor, groups: GroupsOrMicroBatches, strips: Sequence[int] = (), like: Tensor | None = None) -> Tensor:
    """This rank's part of ``index[n]``, equal on every rank before.

    Args:
        index: one-dimensional.
        groups: the mesh axes that shard the dim, in the order in which they cut it.
        strips: for each group, into how many strips it finds its dim divided, each of which it cuts
            (``planner.ir.layout.local_outer``); one each when left out.
        like: under the type checker, the typed tensor that the part is going to meet.

    Returns:
        ``[n / ranks]``.
    """
    with spmd.no_typecheck():
        for group, count in zip(groups, strips or (1,) * len(groups), strict=True):
            if isinstance(group, MicroBatches):
                index = index.view(count, group.count, -1)[:, group.now].flatten()
            else:
                index = spmd.shard(index.view(count, -1), group, src=R, dst=S(1)).flatten()
    if like is not None and spmd.is_type_checking():
        varying = {spmd.normalize_axis(group) for group in among_ranks(groups)}
        held = spmd.get_local_type(like).items()
        spmd.assert_type(index, {axis: V if axis in varying else I if t is I else R for axis, t in held})
    return index


def first(length: int, groups: Groups, device: torch.device) -> Tensor:
    """The global index ``[]`` at which this rank's contiguous slice of a dim of size ``length`` starts; untyped."""
    with spmd.no_typecheck():
        return cut(torch.arange(0, length, length // ranks(groups), device=device), groups).squeeze(0)


def coordinate(groups: GroupsOrMicroBatches) -> int:
    """This rank's number among the ranks of ``groups``, the first group being the major one."""
    with torch.device("cpu"):
        return cut(torch.arange(ranks(groups)), groups).item()  # type: ignore[return-value]


def among_ranks(groups: GroupsOrMicroBatches) -> Groups:
    """The axes that are no micro-batches."""
    return tuple(group for group in groups if not isinstance(group, MicroBatches))


def as_partial(tensor: Tensor, groups: GroupsOrMicroBatches) -> Tensor:
    """Say that the ranks of ``groups`` hold terms of a sum."""
    if spmd.is_type_checking():
        for group in among_ranks(groups):
            tensor = spmd.reinterpret(tensor, group, src=V, dst=P)
    return tensor


def as_invariant(tensor: Tensor, groups: Groups) -> Tensor:
    """Say that ``tensor``, equal on the ranks of ``groups`` and without a gradient, is invariant."""
    if spmd.is_type_checking():
        for group in groups:
            tensor = spmd.runtime.reinterpret_no_grad(tensor, group, dst=I)
    return tensor
