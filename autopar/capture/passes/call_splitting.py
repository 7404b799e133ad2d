"""Call splitting: the traced graph becomes a :class:`Program`, a list of calls of bodies.

The marks that :mod:`autopar.capture.repeats.repeats` left in the graph say where calls of equal submodules begin and
end: these become calls of one body. Tied parameters become one leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from autopar.capture.passes.literal_copies import LITERAL
from autopar.capture.repeats.candidates import Submodule
from autopar.capture.repeats.markers import AGAIN, ENTER, LEAF, LEAVE, VALUE, NotFoldable
from autopar.capture.repeats.repeats import Repeats
from autopar.graph import module_walk
from autopar.graph.program import Body, Call, Leaf, Program
from autopar.graph.tensors import storage_of


def call_splitting(exported: ExportedProgram, model: nn.Module, repeats: Repeats) -> Program:
    """Cut the graph into calls at the marks of ``repeats``.

    Args:
        model: the user's, whose names parameters have.

    Raises:
        NotFoldable: calls that were taken for the same differ in what became of them.
    """
    leaves = _Leaves(exported, model, repeats)
    calls = _Splitter(exported.graph, leaves, repeats).calls
    (output,) = (node for node in exported.graph.nodes if node.op == "output")
    outputs: list[str | None] = []
    updates = []
    for spec, value in zip(exported.graph_signature.output_specs, output.args[0], strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            updates.append((str(spec.target), leaves.value_of[value]))
        else:
            outputs.append(leaves.value_of[value] if isinstance(spec.arg, TensorArgument) else None)
    return Program(tuple(leaves.all), tuple(calls), tuple(outputs), tuple(updates))


# --- leaves --------------------------------------------------------------------------------------------


class _Leaves:
    """The leaves of a program: what the model has, then constants, then inputs.

    Attributes:
        value_of: placeholder, or mark of a hidden tensor -> name of its leaf; grows as the graph is split.
        tensor_of: mark of a hidden tensor -> the tensor.
        constant_of: placeholder of a constant -> its value.
    """

    def __init__(self, exported: ExportedProgram, model: nn.Module, repeats: Repeats):
        self.value_of: dict[fx.Node, str] = {}
        self.tensor_of: dict[fx.Node, Tensor] = {}
        self.constant_of: dict[fx.Node, Tensor] = {}
        kinds = [(*each, "param") for each in repeats.walk.parameters]
        kinds += [(*each, "buffer") for each in repeats.walk.buffers]
        self._stored: list[Leaf] = []
        self._consts: list[Leaf] = []
        self._inputs: list[Leaf] = []
        self._by_original: dict[str, str] = {}
        self._by_tensor: dict[int, str] = {}
        taken = {node.name for node in exported.graph_module.graph.nodes if node.op == "placeholder"}
        taken -= {spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind != InputKind.USER_INPUT}
        for original, tensor, kind in kinds:
            stem = f"{kind[0]}_{original.replace('.', '_')}"
            name, numbers = stem, itertools.count(1)
            while name in taken:
                name = f"{stem}_{next(numbers)}"
            taken.add(name)
            self._stored.append(Leaf(name, kind, original, tensor))
            self._by_original[original] = self._by_tensor[id(tensor)] = name
        placeholders = {node.name: node for node in exported.graph_module.graph.nodes if node.op == "placeholder"}
        for spec in exported.graph_signature.input_specs:
            node = placeholders.get(spec.arg.name)
            if node is None or not isinstance(spec.arg, TensorArgument):
                continue
            if spec.kind == InputKind.USER_INPUT:
                self._inputs.append(Leaf(node.name, "input", node.name, node.meta["val"]))
                self.value_of[node] = node.name
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                original = str(spec.target)
                if original not in self._by_original:  # the same under another name
                    original = module_walk.canonical_names(model)[original]
                self.value_of[node] = self._by_original[original]
            elif spec.kind == InputKind.CONSTANT_TENSOR:
                value: Any = exported.constants[str(spec.target)]
                parameter = next((t for _, t, _ in kinds if _is_the_same(t, value)), None)
                if parameter is not None:  # held by other ways than its module
                    self.value_of[node] = self.of(parameter)
                else:
                    self.constant_of[node] = value
                    self.value_of[node] = self.add_constant(node)
        for node in exported.graph_module.graph.nodes:
            if node.target is LEAF:
                self.tensor_of[node] = repeats.tensors[int(str(node.args[0]))]
                self.value_of[node] = self.of(self.tensor_of[node])

    def of(self, tensor: Tensor) -> str:
        """The leaf of a parameter or buffer of the model."""
        return self._by_tensor[id(tensor)]

    def add_constant(self, node: fx.Node) -> str:
        name = f"c_{len(self._consts)}"
        self._consts.append(Leaf(name, "const", name, self.constant_of[node]))
        return name

    @property
    def all(self) -> list[Leaf]:
        return [*self._stored, *self._consts, *self._inputs]


def _is_the_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one: every element in the same place."""
    if not (a.layout == b.layout == torch.strided and a.dtype == b.dtype and a.shape == b.shape):
        return False
    return storage_of(a) == storage_of(b) and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


# --- calls ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Traced:
    """A traced call of a nominated submodule: its body, and the nodes that it was given and gives by value number."""

    number: int
    submodule: Submodule
    path: str
    body: Body
    inputs: tuple[fx.Node, ...]
    results: Mapping[int, fx.Node]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.body.nodes)

    @cached_property
    def places(self) -> Mapping[fx.Node, Sequence[int]]:
        """For each of its inputs, as which it is given."""
        found: dict[fx.Node, list[int]] = {}
        for place, node in enumerate(self.inputs):
            found.setdefault(node, []).append(place)
        return found

    @cached_property
    def number_of(self) -> Mapping[int, int]:
        """Which of the submodule's tensors one is, by identity."""
        return {id(tensor): number for number, tensor in enumerate(self.submodule.tensors)}


@dataclass(frozen=True)
class _Copy:
    """A call like a traced one: names of its inputs that are others, by place, and of its nodes."""

    first: _Traced
    submodule: Submodule
    given: Mapping[int, str]
    names: tuple[str, ...]


class _Splitter:
    """Cuts a graph at the marks; ``calls`` is what is between them, in order."""

    def __init__(self, graph: fx.Graph, leaves: _Leaves, repeats: Repeats):
        self.leaves, self.repeats = leaves, repeats
        self.value_of = leaves.value_of
        self.calls: list[Call] = []
        self.traced: dict[int, _Traced] = {}
        self.copied: dict[int, _Copy] = {}
        pending: list[fx.Node] = []
        inputs: Any = ()
        for node in graph.nodes:
            if node.target is ENTER:
                self._straight(pending)
                pending, inputs = [], node.args[1]
            elif node.target is LEAVE:
                number, values, outputs = node.args
                called = repeats.occurrences[number]
                results = dict(zip(values, outputs, strict=True))
                body = self._straight(pending)
                self.traced[number] = _Traced(number, called.submodule, called.path, body, tuple(inputs), results)
                pending = []
            elif node.target is AGAIN:
                self._straight(pending)
                pending = []
                number, places, others = node.args
                given = dict(zip(places, [self.value_of[other] for other in others], strict=True))
                self._again(number, given)
                for following in itertools.takewhile(self._follows, itertools.count(number + 1)):
                    self._again(following, {})
            elif node.target is VALUE:
                self.value_of[node] = self._result(*node.args)
            elif node.target is not LEAF:
                pending.append(node)
        self._straight(pending)

    def _straight(self, nodes: Sequence[fx.Node]) -> Body:
        body = Body(tuple(node for node in nodes if node.op == "call_function"))
        if body.nodes:
            names = tuple(node.name for node in body.nodes)
            self.value_of.update(zip(body.nodes, names, strict=True))
            self.calls.append(Call(body, tuple(self.value_of[node] for node in body.operands), names))
        return body

    def _follows(self, number: int) -> bool:
        """Whether a call like an earlier one comes right after the one before."""
        return number < len(self.repeats.occurrences) and self.repeats.occurrences[number].follows

    def _again(self, number: int, given: dict[int, str]) -> None:
        """Copy a call, whose inputs have these names, by place; all others are those of the traced call."""
        called = self.repeats.occurrences[number]
        first = self.traced[called.like]
        given.update({place: self._result(source.call, source.value) for place, source in called.copied.items()})
        names = tuple(map(f"again{number}_".__add__, first.names))
        copy = self.copied[number] = _Copy(first, called.submodule, given, names)
        operands = tuple([self._instead(operand, copy) for operand in first.body.operands])
        self.calls.append(Call(first.body, operands, names, first.path, called.path))

    def _result(self, number: int, value: int) -> str:
        """What a value of a copied call is named."""
        copy = self.copied[number]
        result = copy.first.results[value]
        at = copy.first.body.position.get(result)
        return self._instead(result, copy) if at is None else copy.names[at]

    def _instead(self, node: fx.Node, copy: _Copy) -> str:
        """What stands in a copy for a value from outside that the first call read."""
        first = copy.first
        places, tensor = first.places.get(node), self.leaves.tensor_of.get(node)
        if places is not None:
            given = {copy.given.get(place, self.value_of[node]) for place in places}
            if len(given) > 1:
                raise NotFoldable("two inputs of a block are one value in its first call, and differ in another")
            return given.pop()
        if tensor is not None:
            number = first.number_of.get(id(tensor))
            return self.leaves.of(tensor if number is None else copy.submodule.tensors[number])
        if node.meta.get(LITERAL) == first.number and node in self.leaves.constant_of:  # every call writes its own
            return self.leaves.add_constant(node)
        return self.value_of[node]
