"""Attention: members are samples of one larger batch."""

from __future__ import annotations

import math

from autopar.arrays.rules.calls import Data, Emitted, MemberValue, OperatorCall


def attention(call: OperatorCall) -> Emitted:
    """Members times the first of what lies before sequences and features; a mask that is the same for all may stay."""
    heads = {name: call.tensor(name) for name in ("query", "key", "value")}
    rank = max(value.rank for value in heads.values())
    if any(value.rank != rank for value in heads.values()):
        return NotImplemented
    batch = max(value.shape[:-2][:1] for value in heads.values())
    changed = {name: _folded(call, value, rank, batch) for name, value in heads.items()}
    mask = call["attn_mask"]
    if mask is not None:
        stays = not mask.stacked and (mask.rank < rank or mask.shape[:1] == (1,))
        changed["attn_mask"] = mask.data if stays else _folded(call, mask, rank, batch)
    return call.run(**changed).reshape(call.members, *call.results[0].shape)


def _folded(call: OperatorCall, value: MemberValue, rank: int, batch: tuple[int, ...]) -> Data:
    shape = (*[1] * (rank - value.rank), *value.shape)
    spread = call.front(value).reshape(call.members, *shape).expand(call.members, *batch, *shape[len(batch) :])
    return spread.reshape(call.members * math.prod(batch), *shape[len(batch) :])
