"""One application of an operator in a member, as rules see it: values of all members, and what one member has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from planner.ops.sharding_rule import Rule

Data = Any
"""A tensor of the graph that is written (a proxy of fx); rules compute with it as with a tensor."""
Emitted = Any
"""What a rule returns: the stacked result, a list of them, or ``NotImplemented`` where it does not apply."""


@dataclass(frozen=True)
class MemberValue:
    """A tensor of a member.

    Attributes:
        data: that of all members: stacked along a leading dim; or, where it is the same for all, theirs.
        shape, dtype: of one member's.
        stacked: which of these it is.
    """

    data: Data
    shape: tuple[int, ...]
    dtype: torch.dtype
    stacked: bool

    @property
    def rank(self) -> int:
        """Dims of one member's."""
        return len(self.shape)


@dataclass(frozen=True)
class OperatorCall:
    """An application of an operator.

    Attributes:
        members: how many.
        operator: the operator.
        args: by name of its schema, tensors as :class:`MemberValue`.
        results: shapes and dtypes of what it gives one member.
        rule: its factors, of one member.
        tracer: of the graph that rules write.
    """

    members: int
    operator: OpOverload[..., Any]
    args: Mapping[str, Any]
    results: tuple[torch.Tensor, ...]
    rule: Rule
    tracer: fx.proxy.TracerBase

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def tensor(self, name: str) -> MemberValue:
        """An argument that is a tensor."""
        value = self.args[name]
        assert isinstance(value, MemberValue)
        return value

    def is_stacked(self, *names: str) -> bool:
        """Whether any of these arguments is stacked."""
        return any(isinstance(self.args[name], MemberValue) and self.args[name].stacked for name in names)

    def front(self, value: MemberValue) -> Data:
        """A value with a leading dim of members: a copy for each, without memory, where it is the same for all."""
        if value.stacked:
            return value.data
        return value.data.unsqueeze(0).expand(self.members, *value.shape)

    def aligned(self, value: MemberValue, rank: int) -> Data:
        """A value as it is broadcast against members' tensors of ``rank`` dims."""
        if not value.stacked or value.rank >= rank:
            return value.data
        return value.data.reshape(self.members, *[1] * (rank - value.rank), *value.shape)

    def run(self, /, **changed: Any) -> Data:
        """The operator with some arguments changed; values that are left are as they are."""
        return self.run_other(self.operator, **{**self.args, **changed})

    def run_other(self, operator: OpOverload[..., Any], /, **named: Any) -> Data:
        """Another operator, with arguments by name."""
        schema = [(each.name, each.kwarg_only) for each in operator._schema.arguments if each.name in named]
        plain = {name: mapped(named[name], lambda value: value.data) for name, _ in schema}
        args = tuple(plain[name] for name, by_name in schema if not by_name)
        kwargs = {name: plain[name] for name, by_name in schema if by_name}
        return self.tracer.create_proxy("call_function", operator, args, kwargs)

    def each(self, found: Data) -> list[Data]:
        """What an operator with several results gave."""
        return [found[place] for place in range(len(self.results))]


StackingRule = Callable[[OperatorCall], Emitted]


def mapped(argument: Any, change: Callable[[MemberValue], Any]) -> Any:
    """An argument with its values changed, in lists too."""
    if isinstance(argument, MemberValue):
        return change(argument)
    if isinstance(argument, (list, tuple)):
        return [mapped(each, change) for each in argument]
    return argument


def values_in(argument: Any) -> list[MemberValue]:
    """The values in an argument, or in a list of them."""
    if isinstance(argument, MemberValue):
        return [argument]
    return [value for each in argument for value in values_in(each)] if isinstance(argument, (list, tuple)) else []


def dim_behind(dim: int) -> int:
    """A dim of a member, where all members lie before."""
    return dim + 1 if dim >= 0 else dim
