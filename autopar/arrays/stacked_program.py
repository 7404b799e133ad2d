"""Writes the program of all members from that of one: its operators one by one, by the table of rules."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.arrays.rules.calls import Data, MemberValue, OperatorCall, mapped, values_in
from autopar.arrays.rules.folds import by_batch
from autopar.arrays.rules.table import STACKING
from autopar.capture.capture import Captured
from autopar.capture.lowering import lower
from autopar.graph.aten import values_of
from planner.base.errors import CaptureError
from planner.formulation.strategies import rules_of


@dataclass(frozen=True)
class StackedProgram:
    """The program of all members.

    Attributes:
        run: leaves -> outputs, then new values of buffers.
        leaves: (kind, name in the member) of each argument; constants are bound.
        outputs: how many of its results are outputs.
        one_by_one: the operators that it runs once for each member, and how often they stand in a member.
    """

    run: fx.GraphModule
    leaves: tuple[tuple[str, str], ...]
    outputs: int
    one_by_one: Mapping[str, int]


def stacked_program(captured: Captured, members: int, stacked: frozenset[str]) -> StackedProgram:
    """Write it.

    Args:
        captured: a member.
        stacked: the leaves that are not the same for all members.

    Raises:
        CaptureError: a buffer that is held once for all members would become another one for each.
    """
    writer = _StackedWriter(captured, members, stacked)
    for node in captured.graph.nodes:
        if node.op == "call_function":
            writer.write(node)
    return writer.done()


class _StackedWriter:
    """The graph that is written, and what has become of the member's nodes."""

    def __init__(self, captured: Captured, members: int, stacked: frozenset[str]):
        self._captured, self._members = captured, members
        self._rules = rules_of(lower(captured))
        self._graph = fx.Graph()
        self._tracer = fx.proxy.GraphAppendingTracer(self._graph)
        self._made: dict[str, Any] = {}
        self._one_by_one: dict[str, int] = {}
        for leaf, node in zip(captured.program.leaves, captured.graph.find_nodes(op="placeholder"), strict=True):
            place = self._graph.get_attr if leaf.kind == "const" else self._graph.placeholder
            data = fx.Proxy(place(leaf.name), self._tracer)
            self._made[leaf.name] = self._made[node.name] = MemberValue(
                data, tuple(leaf.value.shape), leaf.value.dtype, leaf.name in stacked
            )

    def write(self, node: fx.Node) -> None:
        """Write what computes a node of the member for all members."""
        if node.target is operator.getitem:
            source, place = node.args
            self._made[node.name] = self._made[source.name][place]  # type: ignore[union-attr,index]
            return
        operator_of = node.target
        assert isinstance(operator_of, torch._ops.OpOverload), f"{node.target} is no operator"
        results = tuple(values_of(node, node.meta["val"]))
        args = {}
        for place, argument in enumerate(operator_of._schema.arguments):
            given = (
                node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            )
            args[argument.name] = _with_values(given, self._made)
        call = OperatorCall(self._members, operator_of, args, results, self._rules[node.name], self._tracer)
        draws = torch.Tag.nondeterministic_seeded in operator_of.tags
        if not draws and not any(value.stacked for given in args.values() for value in values_in(given)):
            self._keep(node, _once(call), results, stacked=False)
            return
        for rule in (STACKING.get(str(operator_of)), by_batch):
            found = NotImplemented if rule is None else rule(call)
            if found is not NotImplemented:
                self._keep(node, found, results, stacked=True)
                return
        self._one_by_one[str(operator_of)] = self._one_by_one.get(str(operator_of), 0) + 1
        self._keep(node, _one_by_one(call), results, stacked=True)

    def _keep(self, node: fx.Node, found: Any, results: tuple[torch.Tensor, ...], *, stacked: bool) -> None:
        if isinstance(node.meta["val"], (list, tuple)):
            pairs = enumerate(results)
            self._made[node.name] = [MemberValue(found[at], tuple(of.shape), of.dtype, stacked) for at, of in pairs]
        else:
            (of,) = results
            self._made[node.name] = MemberValue(found, tuple(of.shape), of.dtype, stacked)

    def _front(self, value: MemberValue) -> Data:
        if value.stacked:
            return value.data
        return value.data.unsqueeze(0).expand(self._members, *value.shape)

    def done(self) -> StackedProgram:
        """The program."""
        captured = self._captured
        outputs = [self._front(self._made[name]) for name in captured.outputs if name is not None]
        buffers = {leaf.target: self._made[leaf.name] for leaf in captured.program.leaves if leaf.kind == "buffer"}
        updates = []
        for buffer, name in captured.updates:
            new = self._made[name]
            if new.stacked and not buffers[buffer].stacked:
                raise CaptureError(
                    f"buffer {buffer} is the same in all members and is held once, and the forward gives it another "
                    "value in each: give members that differ in it, or register it with persistent=True and a "
                    "floating dtype, so that each member has its own"
                )
            updates.append(self._front(new) if buffers[buffer].stacked else new.data)
        self._graph.output(tuple(value.node for value in (*outputs, *updates)))
        self._graph.eliminate_dead_code()
        module = fx.GraphModule(dict(captured.constants), self._graph)
        leaves = tuple((leaf.kind, leaf.target) for leaf in captured.program.leaves if leaf.kind != "const")
        return StackedProgram(module, leaves, len(outputs), self._one_by_one)


def _with_values(argument: Any, made: Mapping[str, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return made[argument.name]
    if isinstance(argument, (list, tuple)):
        return [_with_values(each, made) for each in argument]
    return argument


def _once(call: OperatorCall) -> Any:
    """The operator on what is the same for all members. Copies that only order memory left the member's program when it
    was captured, so that a view may have to be one.
    """
    if call.operator is torch.ops.aten.view.default:
        return call.tensor("self").data.reshape(call.results[0].shape)
    return call.run()


def _one_by_one(call: OperatorCall) -> Any:
    """The operator once for each member, and what these give stacked."""
    runs = []
    for member in range(call.members):

        def own(value: MemberValue, member: int = member) -> Any:
            return value.data.select(0, member) if value.stacked else value.data

        runs.append(call.run(**{name: mapped(given, own) for name, given in call.args.items()}))
    if len(call.results) == 1 and not isinstance(call.operator._schema.returns[0].type, torch.ListType):
        return torch.stack(runs)
    return [torch.stack([run[place] for run in runs]) for place in range(len(call.results))]
