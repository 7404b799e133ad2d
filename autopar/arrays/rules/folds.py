"""Operators on batches or channels that take no further dim: members are folded into one of theirs, and unfolded."""

from __future__ import annotations

from autopar.arrays.rules.calls import Data, Emitted, MemberValue, OperatorCall, StackingRule
from planner.ops.sharding_rule import MECHANICAL


def channels_folded(call: OperatorCall, value: MemberValue, spatial: int) -> Data:
    """``[members, batch, channels, ..] -> [batch, members channels, ..]``: no copy of what a convolution made.

    Args:
        spatial: dims behind the channels; there may be no batch.
    """
    data, (channels, *last) = call.front(value), value.shape[len(value.shape) - spatial - 1 :]
    if value.rank == spatial + 1:
        return data.reshape(call.members * channels, *last)
    return data.transpose(0, 1).reshape(value.shape[0], call.members * channels, *last)


def channels_unfolded(call: OperatorCall, data: Data, spatial: int, place: int = 0) -> Data:
    """Undo :func:`channels_folded` for a result."""
    shape = call.results[place].shape
    channels = shape[len(shape) - spatial - 1]
    last = shape[len(shape) - spatial :]
    if len(shape) == spatial + 1:
        return data.reshape(call.members, channels, *last)
    return data.reshape(shape[0], call.members, channels, *last).transpose(0, 1)


def by_channel(spatial: int) -> StackingRule:
    """An operator on each channel by itself, over the last ``spatial`` dims."""

    def rule(call: OperatorCall) -> Emitted:
        name, value = next((name, value) for name, value in call.args.items() if isinstance(value, MemberValue))
        if value.rank not in (spatial + 1, spatial + 2):
            return NotImplemented
        found = call.run(**{name: channels_folded(call, value, spatial)})
        results = call.each(found) if len(call.results) > 1 else [found]
        each = [channels_unfolded(call, result, spatial, place) for place, result in enumerate(results)]
        return each if len(each) > 1 else each[0]

    return rule


def by_batch(call: OperatorCall) -> Emitted:
    """Any operator whose factors say that dim 0 is a batch: nothing that it computes reads two of its indices.

    Then so are members times dim 0. Operands that lack the batch must be the same for all members.
    """
    rule = call.rule
    if not rule.results or not rule.results[0] or len(rule.results[0][0]) != 1:
        return NotImplemented
    (batch,) = rule.results[0][0]
    if batch in rule.whole or rule.ways_of(batch) != (MECHANICAL,):
        return NotImplemented
    values = {name: value for name, value in call.args.items() if isinstance(value, MemberValue)}
    if len(values) != len(rule.operands) or any(dims[:1] != ((batch,),) for dims in rule.results):
        return NotImplemented
    changed = {}
    for (name, value), dims in zip(values.items(), rule.operands, strict=True):
        if dims[:1] == ((batch,),):
            changed[name] = call.front(value).reshape(call.members * value.shape[0], *value.shape[1:])
        elif value.stacked:
            return NotImplemented
    found = call.run(**changed)
    results = call.each(found) if len(call.results) > 1 else [found]
    each = [data.reshape(call.members, *of.shape) for data, of in zip(results, call.results, strict=True)]
    return each if len(each) > 1 else each[0]
