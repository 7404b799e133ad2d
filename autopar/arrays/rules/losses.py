"""Losses: of every element for all members at once, then each member's sum or mean."""

from __future__ import annotations

import math

import torch

from autopar.arrays.rules.calls import Data, Emitted, MemberValue, OperatorCall

NONE, MEAN = 0, 1
"""Numbers of torch's reductions; 2 is the sum."""


def pointwise(call: OperatorCall) -> Emitted:
    """Losses of elements, broadcast."""
    values = {name: value for name, value in call.args.items() if isinstance(value, MemberValue)}
    rank = max(value.rank for value in values.values())
    shape = torch.broadcast_shapes(*(value.shape for value in values.values()))
    spread = {name: call.aligned(value, rank).expand(call.members, *shape) for name, value in values.items()}
    each = call.run(**spread, reduction=NONE)
    if call["reduction"] == NONE or not rank:
        return each
    dims = [*range(1, rank + 1)]
    return each.mean(dims) if call["reduction"] == MEAN else each.sum(dims)


def by_class(call: OperatorCall) -> Emitted:
    """Cross entropy and negative log likelihood.

    A mean divides by a member's own count of targets that are not ignored, or by their classes' weights.
    """
    scores, target = call.tensor("self"), call.tensor("target")
    weight: MemberValue | None = call["weight"]
    if len(call.results) != 1 or (weight is not None and weight.stacked):
        return NotImplemented
    members, shape = call.members, [1, *scores.shape] if scores.rank == 1 else [*scores.shape]
    soft = target.dtype.is_floating_point
    rows = call.front(scores).reshape(members * shape[0], *shape[1:])
    targets = call.front(target).reshape(members * shape[0], *(shape[1:] if soft else shape[2:]))
    each = call.run(self=rows, target=targets, reduction=NONE)
    if call["reduction"] == NONE:
        return each.reshape(members, *call.results[0].shape)
    total = each.reshape(members, -1).sum(1)
    if call["reduction"] != MEAN:
        return total
    if soft:
        return total / math.prod([shape[0], *shape[2:]])
    return total / _counted(call, targets.reshape(members, -1), weight, scores.dtype)


def _counted(call: OperatorCall, targets: Data, weight: MemberValue | None, dtype: torch.dtype) -> Data:
    """For each member, how much its targets that are not ignored weigh."""
    counted = targets != call["ignore_index"]
    if weight is None:
        return counted.to(dtype).sum(1)
    known = torch.where(counted, targets, torch.zeros_like(targets))
    weights = weight.data.index_select(0, known.reshape(-1)).reshape(call.members, -1)
    return (weights * counted.to(dtype)).sum(1)
