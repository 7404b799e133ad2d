"""Lower: from a captured program to the planner's graph, the only place where the two meet.

Node names are kept, so that the rewrite finds each planner node's operator again. A body is lowered once for each
way in which gradients reach it, whatever the number of its calls.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.capture import Captured
from autopar.functions.carry import Carried, carried_by
from autopar.functions.describe import describe
from autopar.functions.joint import operands_of
from autopar.operators import (
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
from autopar.program import Body, Call, module_path
from planner.graph import Graph, Node, Ref, TensorType
from planner.ops.function import PREFIX

_FIRST_RESULT = functools.partial(tuple.__new__, Ref)
"""Makes the same as ``Ref(*each)``, in half the time."""


def lower(captured: Captured) -> Graph:
    """The planner's graph of a captured model.

    Raises:
        CaptureError: an operator returns something that is not a tensor, or a size is symbolic.
    """
    program = captured.program
    made: dict[str, Node] = {}
    refs: dict[str, Ref] = {}
    templates: dict[tuple[Body, tuple[bool, ...]], _Template] = {}
    for leaf in program.leaves:
        tensor = tensor_type(leaf.name, leaf.value, leaf.kind == "param" and leaf.value.requires_grad)
        made[leaf.name] = Node(leaf.name, leaf.kind, (), (tensor,), target=leaf.target)
        refs[leaf.name] = Ref(leaf.name)
    functions = _Functions()
    for call in program.calls:
        operands = [refs[name] for name in call.operands]
        key = (call.body, tuple([made[name].results[index].grad for name, index in operands]))
        if key not in templates:
            templates[key] = _lower_body(call.body, key[1], functions)
        _instantiate(templates[key], call, operands, made, refs)
    graph = Graph(
        tuple(made.values()),
        tuple(refs[name] for name in captured.outputs if name is not None),
        tuple((buffer, refs[name]) for buffer, name in captured.updates),
        captured.named_loss,
    )
    graph.check()
    return graph


# --- bodies --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Template:
    """A lowered body.

    Attributes:
        steps: for every fx node, either an operator as a planner node, or the result of one that it picks.
        paths: the modules of the operators, each once.
        nodes: of the operators in the first call, by step; grows as that is made.
    """

    steps: tuple[_Operator | _Pick, ...]
    paths: tuple[str, ...]
    nodes: dict[int, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class _Value:
    """A tensor inside a template: result ``index`` of what is at ``place`` among its operands, then its steps."""

    place: int
    index: int


@dataclass(frozen=True)
class _Operator:
    """A planner node but for its name and its operands, for which its arguments hold :class:`_Value`.

    ``inputs`` are all of these in order: place and index.
    """

    op: str
    args: tuple[tuple[str, object], ...]
    inputs: tuple[tuple[int, int], ...]
    results: tuple[TensorType, ...]
    path: str
    shares: tuple[int, ...]


@dataclass(frozen=True)
class _Pick:
    """``operator.getitem``: another name for a value."""

    value: _Value


def _lower_body(body: Body, grads: Sequence[bool], functions: _Functions) -> _Template:
    values = {node: _Value(at, 0) for at, node in enumerate(body.operands)}
    has_grad: dict[_Value, bool] = dict(zip(values.values(), grads, strict=True))
    storages = {value: storages_of(node)[0] for node, value in values.items()}
    steps: list[_Operator | _Pick] = []
    for place, node in enumerate(body.nodes, len(body.operands)):
        if node.target is operator.getitem:
            source = values[node.args[0]]  # type: ignore[index]
            index = node.args[1]
            assert isinstance(index, int)
            values[node] = _Value(source.place, index)
            has_grad.setdefault(values[node], has_grad.get(source, False))
            storages.setdefault(values[node], storages_of(node)[0])
            steps.append(_Pick(values[node]))
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
        reads = tuple((value.place, value.index) for value in inputs)
        steps.append(_Operator(op, args, reads, results, module_path(node), shares))
        storages.update({_Value(place, i): storage for i, storage in enumerate(own)})
        values[node] = _Value(place, 0)
        has_grad.update({_Value(place, i): t.grad for i, t in enumerate(results)})
    return _Template(tuple(steps), body.paths)


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


def _instantiate(
    template: _Template, call: Call, operands: Sequence[Ref], made: dict[str, Node], refs: dict[str, Ref]
) -> None:
    """Add one call's nodes, and what they are called."""
    own = list(map(_FIRST_RESULT, zip(call.names, itertools.repeat(0))))
    values = [*operands, *own]
    refs.update(zip(call.names, own, strict=True))
    paths = {path: call.module_path(path) for path in template.paths}
    for number, (name, step) in enumerate(zip(call.names, template.steps, strict=True)):
        if isinstance(step, _Pick):
            ref = values[step.value.place]
            refs[name] = ref if step.value.index == 0 else Ref(ref.node, step.value.index)
            continue
        inputs = tuple(
            [values[place] if index == 0 else Ref(values[place].node, index) for place, index in step.inputs]
        )
        first = template.nodes.get(number)
        if first is not None:
            made[name] = first.copy(name, inputs, paths[step.path])
            continue
        remaining = iter(inputs)
        args = tuple([(key, _filled(value, remaining)) for key, value in step.args])
        node = Node(name, step.op, args, step.results, paths[step.path], shares=step.shares)
        made[name] = template.nodes[number] = node


def _filled(value: object, inputs: Iterator[Ref]) -> object:
    """An argument with its values in place."""
    if isinstance(value, _Value):
        return next(inputs)
    return tuple([_filled(each, inputs) for each in value]) if type(value) is tuple else value


def _inputs(value: object) -> list[_Value]:
    if isinstance(value, _Value):
        return [value]
    return [v for item in value for v in _inputs(item)] if isinstance(value, tuple) else []
