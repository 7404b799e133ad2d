"""Operators that name dims or sizes of one member: the dim of members lies before these."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from autopar.arrays.rules.calls import Emitted, MemberValue, OperatorCall, StackingRule, dim_behind, mapped, values_in

aten = torch.ops.aten


def pointwise(call: OperatorCall) -> Emitted:
    """Elementwise with broadcasting: operands of fewer dims get dims of size 1 behind that of members.

    A member's number in a tensor of no dims does not widen tensors of its kind; of all members it would.
    """
    values = [value for value in call.args.values() if isinstance(value, MemberValue)]
    rank = max(value.rank for value in values)
    wide = [value.dtype for value in values if value.rank]
    widest = functools.reduce(torch.promote_types, wide) if wide else None

    def behind(value: MemberValue) -> Any:
        data = call.aligned(value, rank)
        narrows = not value.rank and widest not in (None, value.dtype) and _kind(value.dtype) == _kind(widest)
        return data.to(widest) if narrows else data

    return call.run(**{name: behind(value) for name, value in call.args.items() if isinstance(value, MemberValue)})


def _kind(dtype: torch.dtype | None) -> tuple[bool, bool, bool]:
    """What torch's promotion of dtypes ranks before sizes: truth values, whole numbers, floating and complex ones."""
    return dtype is not None and dtype.is_complex, dtype is not None and dtype.is_floating_point, dtype == torch.bool


def along(*names: str) -> StackingRule:
    """An operator on tensors of one rank, with dims in these arguments; a number has no dim that could lie behind."""

    def rule(call: OperatorCall) -> Emitted:
        values = (value for given in call.args.values() for value in values_in(given))
        return along_new(*names)(call) if all(value.rank for value in values) else NotImplemented

    return rule


def along_new(*names: str) -> StackingRule:
    """As :func:`along`, where the dims are of the result, which numbers get, too."""

    def rule(call: OperatorCall) -> Emitted:
        changed = {name: mapped(value, call.front) for name, value in call.args.items()}
        for name in names:
            dims = call[name]
            changed[name] = [*map(dim_behind, dims)] if isinstance(dims, (list, tuple)) else dim_behind(dims)
        found = call.run(**changed)
        return call.each(found) if len(call.results) > 1 else found

    return rule


def several_along(*names: str) -> StackingRule:
    """As :func:`along`, of operators that return a list, be it of one."""

    def rule(call: OperatorCall) -> Emitted:
        found = along(*names)(call)
        return found if found is NotImplemented or isinstance(found, list) else call.each(found)

    return rule


def over(dims: str, with_dims: Any) -> StackingRule:
    """A reduction along ``dims``, or, without any, over all that a member has.

    Args:
        with_dims: the operator that takes dims.
    """

    def rule(call: OperatorCall) -> Emitted:
        value, given = call.tensor("self"), call.args.get(dims)
        if not value.rank:
            value, given = replace(value, data=value.data.unsqueeze(1), shape=(1,)), None
        each = range(value.rank) if given in (None, []) else given if isinstance(given, list) else [given]
        named = {**call.args, "self": value.data, dims: [*map(dim_behind, each)]}
        found = call.run_other(with_dims, **named)
        return call.each(found) if len(call.results) > 1 else found

    return rule


def rolled(call: OperatorCall) -> Emitted:
    """Along dims; or, without any, all that a member has as one row."""
    if call["dims"]:
        return along("dims")(call)
    rows = call.tensor("self").data.reshape(call.members, -1)
    return call.run(self=rows, dims=[1]).reshape(call.members, *call.results[0].shape)


def reshaped(call: OperatorCall) -> Emitted:
    """The shape of the result is known, whatever says so; a view of one member may have to be a copy of all."""
    return call.tensor("self").data.reshape(call.members, *call.results[0].shape)


def expanded(call: OperatorCall) -> Emitted:
    """Copies along new dims and dims of size 1."""
    shape = call.results[0].shape
    return call.aligned(call.tensor("self"), len(shape)).expand(call.members, *shape)


def broadcast(call: OperatorCall) -> Emitted:
    """Several tensors, all expanded to the same shape."""
    pairs = zip(call["tensors"], call.results, strict=True)
    return [call.aligned(value, len(of.shape)).expand(call.members, *of.shape) for value, of in pairs]


def repeated(call: OperatorCall) -> Emitted:
    """Repeats may be of more dims than the tensor has."""
    return call.aligned(call.tensor("self"), len(call["repeats"])).repeat(1, *call["repeats"])


def transposed(call: OperatorCall) -> Emitted:
    """Matrices, and what has fewer dims as it is."""
    data = call.tensor("self").data
    return data.transpose(1, 2) if call.tensor("self").rank == 2 else data


def permuted(call: OperatorCall) -> Emitted:
    """Dims in another order."""
    rank = call.tensor("self").rank
    return call.tensor("self").data.permute(0, *(dim % rank + 1 for dim in call["dims"]))


def new(call: OperatorCall) -> Emitted:
    """A tensor of another size, which takes dtype and device from one of the members."""
    return call.run(size=[call.members, *call["size"]])


def drawn(call: OperatorCall) -> Emitted:
    """Random numbers, others for every member."""
    return call.run(size=[call.members, *call["size"]])


def in_front(call: OperatorCall) -> Emitted:
    """An operator on trailing dims, or on each element: of all members it is the same."""
    found = call.run(**{name: mapped(value, call.front) for name, value in call.args.items()})
    return call.each(found) if len(call.results) > 1 else found


def padded(call: OperatorCall) -> Emitted:
    """Padding with a number goes by trailing dims, whatever lies before; other modes by batches and channels."""
    return in_front(call) if call.args.get("mode", "constant") == "constant" else NotImplemented
