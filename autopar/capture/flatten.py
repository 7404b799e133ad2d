"""Flatten: from an exported program to a :class:`Program`: flat, functional, free of assertions.

Regions (``no_grad``, ``autocast(enabled=False)``) are inlined, tied parameters become one leaf, and the marks that
:mod:`autopar.capture.repeats.repeats` left in the graph become calls of one body.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument

from autopar.capture.passes.canonical_order import in_order
from autopar.capture.passes.causal_masks import simplify_masks
from autopar.capture.passes.identity_indexing import drop_lookups_of_everything
from autopar.capture.passes.strides import copy_for_products, drop_contiguous
from autopar.capture.repeats.candidates import Submodule
from autopar.capture.repeats.markers import AGAIN, ENTER, LEAF, LEAVE, VALUE, NotFoldable
from autopar.capture.repeats.repeats import Repeats
from autopar.functions.ungraded import cut_ungraded
from autopar.graph import module_walk
from autopar.graph.program import Body, Call, Leaf, Program, constants_in_order, named, without_dead_code
from autopar.graph.tensors import storage_of
from planner.base.errors import CaptureError


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer -> the first name of the same tensor (tied weights share one)."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in module_walk.tensors(model)}


def flatten(
    exported: ExportedProgram,
    model: nn.Module,
    repeats: Repeats,
    outputs: Sequence[str | None],
    updates: Sequence[tuple[str, str]],
) -> tuple[Program, dict[str, Tensor]]:
    """The program, and its constants by name of leaf.

    Args:
        model: the user's, whose names parameters have.
        outputs, updates: names of the graph's nodes that leave.

    Raises:
        CaptureError: the graph holds what has no planner form; names the module.
        NotFoldable: calls that were taken for the same differ in what became of them.
    """
    graph = exported.graph_module.graph
    _inline_regions(exported.graph_module, model)
    _drop_assertions(graph)
    drop_contiguous(graph)
    _drop_overwriting(graph)
    drop_lookups_of_everything(graph)
    literals = _drop_copies_of_literals(graph)
    cut_ungraded(graph)
    copy_for_products(graph)
    leaving = _leaving(exported)
    leaves = _Leaves(exported, model, repeats, literals)
    calls = _Splitter(graph, leaves, repeats).calls
    program = Program(
        tuple(leaves.all),
        tuple(calls),
        tuple(None if name is None else leaves.value_of[leaving[name]] for name in outputs),
        tuple((buffer, leaves.value_of[leaving[name]]) for buffer, name in updates),
    )
    program = simplify_masks(program, leaves.constants)
    program, order = constants_in_order(named(in_order(without_dead_code(program))))
    return program, {new: leaves.constants[old] for old, new in order.items()}


def _leaving(exported: ExportedProgram) -> dict[str, fx.Node]:
    """The nodes that leave, by the names that the signature has for them."""
    names = [spec.arg.name for spec in exported.graph_signature.output_specs]
    (output,) = (node for node in exported.graph_module.graph.nodes if node.op == "output")
    return {name: node for name, node in zip(names, output.args[0], strict=True) if isinstance(node, fx.Node)}


# --- leaves --------------------------------------------------------------------------------------------


class _Leaves:
    """The leaves of a program: what the model has, then constants, then inputs.

    Attributes:
        value_of: placeholder, or mark of a hidden tensor -> name of its leaf; grows as the graph is split.
        tensor_of: mark of a hidden tensor -> the tensor.
        constants: value of every constant, by name of its leaf.
        literals: placeholders of constants that were written in the code -> number of the traced call in which.
    """

    def __init__(
        self, exported: ExportedProgram, model: nn.Module, repeats: Repeats, literals: Mapping[fx.Node, int | None]
    ):
        self.value_of: dict[fx.Node, str] = {}
        self.tensor_of: dict[fx.Node, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        self.literals = literals
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
                    original = canonical_names(model)[original]
                self.value_of[node] = self._by_original[original]
            elif spec.kind == InputKind.CONSTANT_TENSOR:
                value: Any = exported.constants[str(spec.target)]
                parameter = next((t for _, t, _ in kinds if _is_the_same(t, value)), None)
                if parameter is not None:  # held by other ways than its module
                    self.value_of[node] = self.of(parameter)
                else:
                    self.value_of[node] = self.add_constant(node, value)
        for node in exported.graph_module.graph.nodes:
            if node.target is LEAF:
                self.tensor_of[node] = repeats.tensors[int(str(node.args[0]))]
                self.value_of[node] = self.of(self.tensor_of[node])

    def of(self, tensor: Tensor) -> str:
        """The leaf of a parameter or buffer of the model."""
        return self._by_tensor[id(tensor)]

    def add_constant(self, node: fx.Node, value: Tensor) -> str:
        name = f"c_{len(self._consts)}"
        self._consts.append(Leaf(name, "const", name, node.meta["val"]))
        self.constants[name] = value
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
        if self.leaves.literals.get(node) == first.number:  # every call writes its own
            return self.leaves.add_constant(node, self.leaves.constants[self.value_of[node]])
        return self.value_of[node]


# --- regions -------------------------------------------------------------------------------------------


def _inline_regions(module: fx.GraphModule, model: nn.Module) -> None:
    """Inline ``torch.no_grad()`` regions, whose nodes then carry ``meta["no_grad"]``, and ``autocast(enabled=False)``.

    Raises:
        CaptureError: a region computes in another precision; names its module.
    """
    graph = module.graph
    for node in list(graph.nodes):
        kind = getattr(node.target, "__name__", "")
        if node.op != "call_function" or kind not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            continue
        body_at = 1 if kind == "wrap_with_set_grad_enabled" else 4
        body, operands = node.args[body_at], node.args[body_at + 1 :]
        inner = getattr(module, str(body.target))
        no_grad = kind == "wrap_with_set_grad_enabled" and not node.args[0]
        if kind == "wrap_with_autocast" and node.args[2]:
            raise CaptureError(_autocast_message(node, inner, model))
        _inline_regions(inner, model)
        mapping = dict(zip((n for n in inner.graph.nodes if n.op == "placeholder"), operands, strict=True))
        results: Any = ()
        with graph.inserting_before(node):
            for inner_node in inner.graph.nodes:
                if inner_node.op == "output":
                    results = inner_node.args[0]
                elif inner_node.op != "placeholder":
                    mapping[inner_node] = graph.node_copy(inner_node, mapping.__getitem__)
                    if kind == "wrap_with_set_grad_enabled":
                        mapping[inner_node].meta["no_grad"] = no_grad
        for user in list(node.users):
            assert user.target.__name__ == "getitem", "a region is read only through its results"
            user.replace_all_uses_with(mapping[results[user.args[1]]])
            graph.erase_node(user)
        graph.erase_node(node)


def _autocast_message(node: fx.Node, inner: fx.GraphModule, model: nn.Module) -> str:
    made = next((n for n in inner.graph.nodes if n.op == "call_function"), node)
    stack = [path for path, _ in (made.meta.get("nn_module_stack") or {}).values()]
    owners = [(path, model.get_submodule(path)) for path in stack if path] or [("", model)]
    path, owner = next((o for o in reversed(owners) if "autocast" in _source(o[1])[0]), owners[-1])
    device, dtype = node.args[:2]
    return (
        f"module {path or '(root)'} ({type(owner).__name__}, {_source(owner)[1]}) runs {made.target} under "
        f"torch.autocast({device!r}, {dtype}): which operators then compute in another precision is decided while they "
        "run, and a plan cannot hold it. Convert the model (model.bfloat16()) or the tensors (x.to(torch.bfloat16)) "
        "instead; autocast(enabled=False) may stay."
    )


def _source(module: nn.Module) -> tuple[str, str]:
    """The text of a module's forward, and where it is: the line with autocast, if there is one."""
    try:
        lines, line = inspect.getsourcelines(type(module).forward)
    except (OSError, TypeError):
        return "", "source unknown"
    at = next((number for number, text in enumerate(lines, line) if "autocast" in text), line)
    return "".join(lines), f"{inspect.getsourcefile(type(module).forward)}:{at}"


def _drop_overwriting(graph: fx.Graph) -> None:
    """What is written over a whole tensor is what was written: torch has no derivative of ``aten.copy``."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.copy.default:
            continue
        source, want = node.args[1], node.meta["val"]
        for target, args, kwargs, is_needed in (
            (aten._to_copy.default, (), {"dtype": want.dtype}, source.meta["val"].dtype != want.dtype),
            (aten.expand.default, (list(want.shape),), {}, source.meta["val"].shape != want.shape),
        ):
            if is_needed:
                with graph.inserting_before(node):
                    made = graph.call_function(target, (source, *args), kwargs)
                made.meta.update(node.meta, val=target(source.meta["val"], *args, **kwargs))
                source = made
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _drop_copies_of_literals(graph: fx.Graph) -> dict[fx.Node, int | None]:
    """``torch.tensor(0.5)`` is a copy of a constant, so that it may be written to; nothing here is.

    Returns the constants that were copied, with the number of the traced call in which they were.
    """
    aten = torch.ops.aten
    found: dict[fx.Node, int | None] = {}
    call: int | None = None
    for node in list(graph.nodes):
        if node.target in (ENTER, LEAVE):
            call = int(str(node.args[0])) if node.target is ENTER else None
        literal = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(literal, fx.Node) or literal.op != "placeholder":
            continue
        if node.target in (aten.lift_fresh_copy.default, aten.detach_.default):
            node.replace_all_uses_with(literal)
            graph.erase_node(node)
            found.setdefault(literal, call)
    return found


def _drop_assertions(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and "_assert" in str(node.target) and not node.users:
            graph.erase_node(node)
