"""Operators whose behaviour depends on the run: they draw random numbers, or differ between train and eval.

Each of them is one region of the run's random numbers, whether it draws or not.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from autopar.runtime.layers.attention import attention
from autopar.runtime.spmd.rank_index import GroupsOrMicroBatches
from autopar.runtime.spmd.run_state import RunState


def draw(op: OpOverload[..., Any], state: RunState, varying: GroupsOrMicroBatches, *args: Any, **kwargs: Any) -> Any:
    """``op``, drawing alike on ranks that hold the same data and differently over ``varying``."""
    with state.random.drawing(varying):
        return op(*args, **kwargs)


def draw_attention(
    state: RunState,
    varying: GroupsOrMicroBatches,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    **kwargs: Any,
) -> Tensor:
    """Attention with dropout, which draws only while training.

    The arguments are those of :func:`autopar.runtime.layers.attention.attention`.
    """
    with state.random.drawing(varying):
        return attention(query, key, value, attn_mask, dropout_p if state.training else 0.0, is_causal, **kwargs)
