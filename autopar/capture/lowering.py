"""Lowers a captured program to the planner's graph; the only place where the two meet.

Node names are kept, so that the rewrite finds each planner node's operator again. A body is lowered once for each
way in which gradients reach it, whatever the number of its calls.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.capture.capture import Captured
from autopar.functions.carry import Carried, carried_by
from autopar.functions.describe import describe, operands_of
from autopar.graph.aten import (
    DROPOUT,
    EACH_ITS_OWN,
    arguments,
    drops_nothing,
    is_differentiable,
    shares_of,
    storages_of,
    tensor_type,
    values_of,
)
from autopar.graph.program import Body, Leaf, Program, module_path
from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.ir.node_table import Columns, Ints, Nodes, ending, ints
from planner.ops.function import PREFIX


def lower(captured: Captured) -> Graph:
    """The planner's graph of a captured model.

    Raises:
        CaptureError: an operator returns something that is not a tensor, or a size is symbolic.
    """
    lowering = _Lowering(captured.program)
    graph = Graph(
        lowering.nodes(),
        tuple(lowering.ref(name) for name in captured.outputs if name is not None),
        tuple((buffer, lowering.ref(name)) for buffer, name in captured.updates),
        tuple(n for n, node in zip(captured.output_names, captured.outputs, strict=True) if node is not None),
    )
    graph.check()
    return graph


class _Lowering:
    """A program's leaves and calls; the columns of all calls of one template are found at once."""

    def __init__(self, program: Program):
        self._picked: dict[str, Ref] = {}
        self._calls: dict[_Template, list[_Called]] = {}
        self._names = [leaf.name for leaf in program.leaves]
        self._paths = [""] * len(program.leaves)
        self._targets = [leaf.target for leaf in program.leaves]
        self._firsts, self._first = _like_others(program.leaves)
        trains = [node.results[0].grad for node in self._firsts]
        has_grad = {name: trains[first] for name, first in zip(self._names, self._first, strict=True)}
        templates: dict[tuple[Body, tuple[bool, ...]], _Template] = {}
        functions = _Functions()
        for call in program.calls:
            key = call.body, tuple([has_grad[name] for name in call.operands])
            if key not in templates:
                templates[key] = _lower_body(*key, functions)
            template = templates[key]
            has_grad.update(zip(call.names, template.grads, strict=True))
            called = _Called(len(self._names), list(map(self.ref, call.operands)))
            self._calls.setdefault(template, []).append(called)
            self._names += [call.names[at] for at in template.kept] if template.picks else call.names
            inside = {path: call.module_path(path) for path in call.body.paths}
            self._paths += [inside[each.path] for each in template.operators]
            for at, value in template.picks:
                source = self.ref((*call.operands, *call.names)[value.place])
                self._picked[call.names[at]] = Ref(source.node, value.index)

    def ref(self, name: str) -> Ref:
        """What a name of the program is in the graph."""
        return self._picked.get(name) or Ref(name)

    def nodes(self) -> Nodes:
        """All nodes; those of the first call of every template are there, the others are copies of them."""
        names, paths = self._names, self._paths
        position = dict(zip(names, itertools.count(), strict=False))
        firsts, (first, counts) = self._firsts.copy(), np.zeros((2, len(names)), dtype=np.int64)
        first[: len(self._first)] = self._first
        for template, calls in self._calls.items():
            own = np.arange(len(template.operators))
            places = ints(call.begin for call in calls)[:, None] + own
            first[places] = len(firsts) + own
            counts[places] = [len(each.inputs) for each in template.operators]
            firsts += template.written(calls[0], names, paths)
        ends = ending(counts)
        makers, indices = np.zeros((2, ends[-1]), dtype=np.int64)
        for template, calls in self._calls.items():
            begins = ints(call.begin for call in calls)
            shape = len(calls), template.operands
            given = ints(position[ref.node] for call in calls for ref in call.operands).reshape(shape)
            picked = ints(ref.index for call in calls for ref in call.operands).reshape(shape)
            made = begins[:, None] + np.arange(len(template.operators))
            slots, results = template.slots
            where = ends[begins][:, None] + np.arange(len(slots))
            makers[where] = np.hstack((given, made))[:, slots]
            indices[where] = np.where(results > 0, results, np.hstack((picked, 0 * made))[:, slots])
        targets = (*self._targets, *itertools.repeat("", len(names) - len(self._targets)))
        columns = Columns(tuple(firsts), first, tuple(names), tuple(paths), targets, ends, makers, indices)
        return Nodes(columns, range(len(names)), {})


def _like_others(leaves: Sequence[Leaf]) -> tuple[list[Node], list[int]]:
    """The first of all leaves that differ but for name and target, as nodes, and for each leaf which it is like."""
    number: dict[object, int] = {}
    firsts: list[Node] = []
    like = []
    for leaf in leaves:
        value, trains = leaf.value, leaf.kind == "param" and leaf.value.requires_grad
        key = leaf.kind, value.shape, value.dtype, trains
        if key not in number:
            number[key] = len(firsts)
            results = (tensor_type(leaf.name, value, trains),)
            firsts.append(Node(leaf.name, leaf.kind, (), results, target=leaf.target))
        like.append(number[key])
    return firsts, like


# --- bodies --------------------------------------------------------------------------------------------


class _Called(NamedTuple):
    """A call of a template: the place of its first operator among all nodes, and what it is given."""

    begin: int
    operands: list[Ref]


@dataclass(frozen=True, eq=False)
class _Template:
    """A lowered body.

    Attributes:
        operands: how many values a call is given.
        operators: the planner's nodes, in order.
        kept: which of the body's nodes these are.
        picks: the others, which are other names for values.
        grads: of every node of the body, whether a gradient flows through its (first) result.
    """

    operands: int
    operators: tuple[_Operator, ...]
    kept: tuple[int, ...]
    picks: tuple[tuple[int, _Value], ...]
    grads: tuple[bool, ...]

    @cached_property
    def slots(self) -> tuple[Ints, Ints]:
        """Every operand of the operators: which of the call's operands, then of its operators, and which result.

        A result above 0 of a call's operand stands for that of the operand's maker.
        """
        place = {self.operands + at: self.operands + number for number, at in enumerate(self.kept)}
        inputs = [value for each in self.operators for value in each.inputs]
        return ints(place.get(value.place, value.place) for value in inputs), ints(value.index for value in inputs)

    def written(self, call: _Called, names: Sequence[str], paths: Sequence[str]) -> Iterator[Node]:
        """The nodes of a call."""
        values = [*call.operands, *(Ref(name) for name in names[call.begin : call.begin + len(self.operators)])]
        reads = zip(*self.slots, strict=True)
        for at, each in enumerate(self.operators, call.begin):
            pairs = itertools.islice(reads, len(each.inputs))
            inputs = iter([Ref(values[slot].node, int(index) or values[slot].index) for slot, index in pairs])
            args = tuple([(key, _filled(value, inputs)) for key, value in each.args])
            yield Node(names[at], each.op, args, each.results, paths[at], shares=each.shares)


@dataclass(frozen=True)
class _Value:
    """A tensor inside a template: result ``index`` of what is at ``place`` among its operands, then its steps."""

    place: int
    index: int


@dataclass(frozen=True)
class _Operator:
    """A planner node but for its name and its operands, for which its arguments hold :class:`_Value`.

    ``inputs`` are all of these in order.
    """

    op: str
    args: tuple[tuple[str, object], ...]
    inputs: tuple[_Value, ...]
    results: tuple[TensorType, ...]
    path: str
    shares: tuple[int, ...]


def _lower_body(body: Body, grads: Sequence[bool], functions: _Functions) -> _Template:
    values = {node: _Value(at, 0) for at, node in enumerate(body.operands)}
    has_grad: dict[_Value, bool] = dict(zip(values.values(), grads, strict=True))
    storages = {value: storages_of(node)[0] for node, value in values.items()}
    operators: dict[int, _Operator] = {}
    picks: list[tuple[int, _Value]] = []
    for place, node in enumerate(body.nodes, len(body.operands)):
        if node.target is operator.getitem:
            source = values[node.args[0]]  # type: ignore[index]
            index = node.args[1]
            assert isinstance(index, int)
            values[node] = _Value(source.place, index)
            has_grad.setdefault(values[node], has_grad.get(source, False))
            storages.setdefault(values[node], storages_of(node)[0])
            picks.append((place - len(body.operands), values[node]))
            continue
        args = arguments(node, values)
        inputs = tuple(ref for _, value in args for ref in _inputs(value))
        grad = any(has_grad[ref] for ref in inputs) and not node.meta.get("no_grad", False)
        op = str(node.target)
        results = tuple(
            tensor_type(
                node.name,
                value,
                grad and is_differentiable(op, value) and (op not in EACH_ITS_OWN or has_grad[inputs[i]]),
            )
            for i, value in enumerate(values_of(node, node.meta["val"]))
        )
        carried = carried_by(node.target)
        if carried is not None:
            op = functions.name(carried)
            found = describe(carried, operands_of(node, [grad and has_grad[ref] for ref in inputs]), results)
            args = (*args, ("static", functions.static(carried)), *found.arguments)
            results = tuple(replace(t, grad=t.grad and i not in found.untrained) for i, t in enumerate(results))
        own = [storages[inputs[0]]] if op == DROPOUT and drops_nothing(dict(args)) else storages_of(node)
        shares = shares_of([storages[ref] for ref in inputs], own)
        operators[place - len(body.operands)] = _Operator(op, args, inputs, results, module_path(node), shares)
        storages.update({_Value(place, i): storage for i, storage in enumerate(own)})
        values[node] = _Value(place, 0)
        has_grad.update({_Value(place, i): t.grad for i, t in enumerate(results)})
    grads = tuple(has_grad[values[node]] for node in body.nodes)
    return _Template(len(body.operands), tuple(operators.values()), tuple(operators), tuple(picks), grads)


class _Functions:
    """Names of ``torch.autograd.Function``s, which are unique in a program and the same in every process."""

    def __init__(self) -> None:
        self._names: dict[type, str] = {}
        self._objects: dict[int, int] = {}

    def name(self, carried: Carried) -> str:
        """The operator that applies a Function, as the planner calls it; Functions of one name are numbered."""
        if carried.cls not in self._names:
            stem = PREFIX + carried.title
            same = sum(each == stem or each.startswith(f"{stem}#") for each in self._names.values())
            self._names[carried.cls] = f"{stem}#{same + 1}" if same else stem
        return self._names[carried.cls]

    def static(self, carried: Carried) -> str:
        """Its arguments that are no tensors."""
        return carried.static(self._objects)


def _filled(value: object, inputs: Iterator[Ref]) -> object:
    """An argument with its values in place."""
    if isinstance(value, _Value):
        return next(inputs)
    return tuple([_filled(each, inputs) for each in value]) if type(value) is tuple else value


def _inputs(value: object) -> list[_Value]:
    if isinstance(value, _Value):
        return [value]
    return [v for item in value for v in _inputs(item)] if isinstance(value, tuple) else []
