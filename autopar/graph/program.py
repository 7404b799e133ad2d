"""A captured model as a list of calls of block bodies, so that what repeats is held once.

A :class:`Body` is a stretch of operators, a :class:`Call` one occurrence of it with values, names and a module
path of its own. :func:`expand` writes all calls out as one fx graph; lowering works on the calls themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx


class Leaf(NamedTuple):
    """An input, parameter, buffer or constant.

    Attributes:
        name: unique in the program.
        kind: ``input``, ``param``, ``buffer`` or ``const``.
        target: original name.
        value: something with its shape, dtype and ``requires_grad``; of a constant, itself.
    """

    name: str
    kind: str
    target: str
    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class Body:
    """Operators in execution order.

    Attributes:
        nodes: fx nodes, which serve as templates: target, arguments, ``meta``.
    """

    nodes: tuple[fx.Node, ...]

    @cached_property
    def operands(self) -> tuple[fx.Node, ...]:
        """Nodes outside that are read, in order of first use."""
        own = set(self.nodes)
        return tuple(dict.fromkeys(a for node in self.nodes for a in node.all_input_nodes if a not in own))

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        return {node: at for at, node in enumerate(self.nodes)}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The modules whose forwards made the nodes, each once."""
        return tuple(dict.fromkeys(map(module_path, self.nodes)))

    def rewritten(self, rewrite: Callable[[fx.Node, Mapping[fx.Node, fx.Node]], None]) -> RewrittenBody:
        """A copy, some nodes of which read or do something else.

        Args:
            rewrite: is given each node and the copies so far, and may change its own.
        """
        graph = fx.Graph()
        copies = {operand: graph.placeholder(operand.name) for operand in self.operands}
        sources = {copy: operand for operand, copy in copies.items()}
        for operand, copy in copies.items():
            copy.meta = operand.meta
        for node in self.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            rewrite(node, copies)
        body = Body(tuple(copies[node] for node in self.nodes))
        return RewrittenBody(body, tuple(sources[operand] for operand in body.operands))


class RewrittenBody(NamedTuple):
    """A body that stands for another one, and the operands of that which it reads."""

    body: Body
    sources: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class Call:
    """One occurrence of a body.

    Attributes:
        operands: names of the values that it reads, aligned with ``body.operands``.
        names: names of its nodes, aligned with ``body.nodes``.
        traced, path: the module path under which the body was traced, and the one that stands in its place here.
    """

    body: Body
    operands: tuple[str, ...]
    names: tuple[str, ...]
    traced: str = ""
    path: str = ""

    def module_path(self, path: str) -> str:
        """Where a node of the body that was traced in module ``path`` lies in this call."""
        inside = path == self.traced or path.startswith(f"{self.traced}.")
        return self.path + path[len(self.traced) :] if inside else path

    @property
    def values(self) -> dict[fx.Node, str]:
        """What every node that the body reads or makes is called here."""
        return dict(zip((*self.body.operands, *self.body.nodes), (*self.operands, *self.names), strict=True))

    def running(self, rewritten: RewrittenBody) -> Call:
        """The same call with the body that stands for its own."""
        values = self.values
        return replace(self, body=rewritten.body, operands=tuple([values[each] for each in rewritten.sources]))

    def of(self, body: Body) -> Call:
        """The same call of some of its body's nodes, maybe in another order."""
        if body is self.body:
            return self
        values = self.values
        operands, names = ([values[node] for node in nodes] for nodes in (body.operands, body.nodes))
        return replace(self, body=body, operands=tuple(operands), names=tuple(names))


@dataclass(frozen=True)
class Program:
    """Leaves, and calls in execution order.

    Attributes:
        outputs: names of the values that the model returns, ``None`` for a static output.
        updates: for each buffer that the model writes to, the name of its new value.
    """

    leaves: tuple[Leaf, ...]
    calls: tuple[Call, ...]
    outputs: tuple[str | None, ...]
    updates: tuple[tuple[str, str], ...]

    @property
    def leaving(self) -> tuple[str, ...]:
        """Names of all values that leave."""
        return (*(name for name in self.outputs if name is not None), *(name for _, name in self.updates))

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors that the model's code holds, by name of leaf."""
        return {leaf.name: leaf.value for leaf in self.leaves if leaf.kind == "const"}


def module_path(node: fx.Node) -> str:
    """The module whose forward made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    return next(reversed(stack.values()))[0] if stack else ""


def renamed(program: Program, names: Mapping[str, str]) -> Program:
    """The program with other names for some of its values."""

    def new(name: str) -> str:
        return names.get(name, name)

    leaves = [leaf._replace(name=names[leaf.name]) if leaf.name in names else leaf for leaf in program.leaves]
    calls = [
        call
        if names.keys().isdisjoint(call.operands) and names.keys().isdisjoint(call.names)
        else replace(call, operands=tuple(map(new, call.operands)), names=tuple(map(new, call.names)))
        for call in program.calls
    ]
    outputs = tuple(None if name is None else new(name) for name in program.outputs)
    updates = tuple((buffer, new(name)) for buffer, name in program.updates)
    return Program(tuple(leaves), tuple(calls), outputs, updates)


def expand(program: Program) -> fx.Graph:
    """Every call written out: one flat graph, whose nodes have the program's names."""
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for leaf in program.leaves:
        made[leaf.name] = graph.placeholder(leaf.name)
        made[leaf.name].meta["val"] = leaf.value
    for call in program.calls:
        at: dict[fx.Node, fx.Node] = {
            node: made[name] for node, name in zip(call.body.operands, call.operands, strict=True)
        }
        for node, name in zip(call.body.nodes, call.names, strict=True):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), at.__getitem__)
            copy = graph.create_node("call_function", node.target, args, kwargs, name)
            assert copy.name == name, f"fx does not allow the name {name}"
            copy.meta = {**node.meta, "nn_module_stack": _stack(node, call)}
            at[node] = made[name] = copy
    graph.output(tuple(made[name] for name in program.leaving))
    return graph


def _stack(node: fx.Node, call: Call) -> Mapping[str, tuple[str, Any]]:
    stack = node.meta.get("nn_module_stack") or {}
    return {key: (call.module_path(path), kind) for key, (path, kind) in stack.items()}
