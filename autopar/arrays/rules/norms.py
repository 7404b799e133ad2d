"""Normalisations: statistics are of each member; weights are applied behind where a kernel takes one for all."""

from __future__ import annotations

from autopar.arrays.rules.calls import Emitted, MemberValue, OperatorCall
from autopar.arrays.rules.folds import channels_folded, channels_unfolded


def trailing(call: OperatorCall) -> Emitted:
    """Layer norm and RMS norm of trailing dims."""
    x, weight, bias = call.tensor("input"), call["weight"], call.args.get("bias")
    if not call.is_stacked("weight", *(["bias"] if "bias" in call.args else [])):
        return call.run()
    without = {name: None for name in ("weight", "bias") if name in call.args}
    normed = call.run(input=x.data, **without)
    rank = x.rank
    if not x.stacked:
        normed = normed.unsqueeze(0)
    if weight is not None:
        normed = normed * call.aligned(weight, rank)
    return normed if bias is None else normed + call.aligned(bias, rank)


def per_channel(call: OperatorCall) -> Emitted:
    """Batch, group and instance norm: channels of all members side by side, whose statistics are apart anyway."""
    x = call.tensor("input")
    spatial = x.rank - 2
    changed = {
        name: call.front(value).reshape(-1) for name, value in call.args.items() if isinstance(value, MemberValue)
    }
    changed["input"] = channels_folded(call, x, spatial)
    if "num_groups" in call.args:
        changed["num_groups"] = call["num_groups"] * call.members
    found = call.run(**changed)
    if len(call.results) == 1 or "instance_norm" in str(call.operator):
        return channels_unfolded(call, found, spatial)
    first, *statistics = call.each(found)
    apart = [data.reshape(call.members, *of.shape) for data, of in zip(statistics, call.results[1:], strict=True)]
    return [channels_unfolded(call, first, spatial), *apart]
