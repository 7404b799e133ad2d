"""Convolution whose channel groups are sharded."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from autopar.runtime.spmd.rank_index import Groups, ranks


def grouped_convolution(op: OpOverload[..., Any], *args: Any, channel_groups: Groups = (), **kwargs: Any) -> Tensor:
    """``op``, a convolution with ``groups``, where each rank holds some of the groups.

    Args:
        op: the operator.
        *args: its positional arguments; ``groups`` as in the whole operator.
        channel_groups: the mesh axes that shard the groups.
        **kwargs: its keyword arguments.

    Returns:
        What ``op`` returns: ``S(1)`` on ``channel_groups``.
    """
    names = [argument.name for argument in op._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    return op(**bound | {"groups": bound["groups"] // ranks(channel_groups)})
