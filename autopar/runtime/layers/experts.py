"""A mixture of experts of which each rank has some."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.operators.expert import Expert
from autopar.operators.experts import for_each_rank, routed
from autopar.runtime.spmd.rank_index import Groups, as_partial, first, ranks
from autopar.runtime.spmd.run_state import RunState


def experts(
    state: RunState,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *arguments: Any,
    expert_groups: Groups = (),
) -> Tensor:
    """``autopar.experts`` of this rank's experts.

    Args:
        state: that it is a region of: what it keeps of its rows is made anew where it runs again.
        x, indices, weights: ``[t, h]``, ``[t, k]``, ``[t, k]``; ``R`` on ``expert_groups``.
        up, down, up_bias, down_bias: ``S`` on ``expert_groups`` along their experts.
        *arguments: as in the operator.
        expert_groups: the mesh axes that shard experts, major first.

    Returns:
        ``[t, h]``, ``P`` on ``expert_groups``.
    """
    tensors = (x, indices, weights, up, down, up_bias, down_bias)
    with state.random.region(draws=False):
        if x.is_meta or not expert_groups:
            found = torch.ops.autopar.experts.default(*tensors, *arguments)
        else:
            form, start = Expert(*arguments), first(len(up) * ranks(expert_groups), expert_groups, x.device)
            found = for_each_rank(partial(routed, form=form, is_part=True), *tensors, start)
    return as_partial(found, expert_groups)
