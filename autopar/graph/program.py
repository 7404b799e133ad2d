"""A captured model as a list of calls of block bodies, so that what repeats is held once.

A :class:`Body` is a stretch of operators, a :class:`Call` one occurrence of it with values, names and a module
path of its own. :func:`expand` writes all calls out as one fx graph; lowering works on the calls themselves.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
from collections.abc import Iterator, Mapping, Set
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
        value: something with its shape, dtype and ``requires_grad``.
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

    @cached_property
    def stems(self) -> tuple[str, ...]:
        """What the name of each node begins with."""
        return tuple(_stem(node.target) for node in self.nodes)


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


@dataclass(frozen=True)
class Program:
    """Leaves, calls in execution order, and the names of the values that leave; ``None`` for a static output."""

    leaves: tuple[Leaf, ...]
    calls: tuple[Call, ...]
    outputs: tuple[str | None, ...]
    updates: tuple[tuple[str, str], ...]


def module_path(node: fx.Node) -> str:
    """The module whose forward made a node."""
    stack = node.meta.get("nn_module_stack") or {}
    return next(reversed(stack.values()))[0] if stack else ""


def without_dead_code(program: Program) -> Program:
    """Leave out every operator that nothing reads, in each call for itself; leaves stay."""
    live = {name for name in program.outputs if name is not None} | {name for _, name in program.updates}
    trimmed: dict[tuple[Body, frozenset[int]], tuple[Body, tuple[int, ...]]] = {}
    calls = []
    for call in reversed(program.calls):
        read = frozenset(at for at, name in enumerate(call.names) if name in live)
        if (call.body, read) not in trimmed:
            trimmed[call.body, read] = _trim(call.body, read)
        body, kept = trimmed[call.body, read]
        values = dict(zip(call.body.operands, call.operands, strict=True))
        operands = tuple(values[node] for node in body.operands)
        live.update(operands)
        calls.append(replace(call, body=body, operands=operands, names=tuple(call.names[at] for at in kept)))
    return replace(program, calls=tuple(reversed(calls)))


def _trim(body: Body, read: frozenset[int]) -> tuple[Body, tuple[int, ...]]:
    needed = {body.nodes[at] for at in read}
    for node in reversed(body.nodes):
        if node in needed or node.is_impure():
            needed.add(node)
            needed.update(node.all_input_nodes)
    kept = tuple(at for at, node in enumerate(body.nodes) if node in needed)
    if len(kept) == len(body.nodes):
        return body, kept
    return Body(tuple(body.nodes[at] for at in kept)), kept


def named(program: Program) -> Program:
    """Number the nodes by kind in execution order, so that names do not say how the model was captured."""
    taken = frozenset([leaf.name for leaf in program.leaves])
    numbered: dict[str, Iterator[str]] = {}
    of_body: dict[Body, list[Iterator[str]]] = {}
    for body in dict.fromkeys([call.body for call in program.calls]):
        of_body[body] = [numbered.setdefault(stem, _numbered(stem, taken)) for stem in body.stems]
    renamed: dict[str, str] = {}
    calls = []
    for call in program.calls:
        names = tuple(map(next, of_body[call.body]))
        operands = tuple([renamed.get(name, name) for name in call.operands])
        renamed.update(zip(call.names, names, strict=True))
        calls.append(replace(call, operands=operands, names=names))
    outputs = tuple(None if name is None else renamed.get(name, name) for name in program.outputs)
    updates = tuple((buffer, renamed.get(name, name)) for buffer, name in program.updates)
    return Program(program.leaves, tuple(calls), outputs, updates)


def _numbered(stem: str, taken: Set[str]) -> Iterator[str]:
    """A name, then the same with numbers, but for those that are taken or mean something to Python."""
    if stem not in taken and not (keyword.iskeyword(stem) or hasattr(builtins, stem)):
        yield stem
    for number in itertools.count(1):
        name = f"{stem}_{number}"
        if name not in taken:
            yield name


def _stem(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return _snake(re.sub(r"__\d+$", "", target.overloadpacket.__name__))  # Functions are numbered
    return _snake(getattr(target, "__name__", "node"))


def _snake(name: str) -> str:
    """A Python identifier that does not end in a number of its own."""
    return re.sub(r"_(\d+)$", r"\1", re.sub(r"\W", "_", name)).lower() or "node"


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
    leaving = [name for name in program.outputs if name is not None] + [name for _, name in program.updates]
    graph.output(tuple(made[name] for name in leaving))
    return graph


def _stack(node: fx.Node, call: Call) -> Mapping[str, tuple[str, Any]]:
    stack = node.meta.get("nn_module_stack") or {}
    return {key: (call.module_path(path), kind) for key, (path, kind) in stack.items()}


def constants_in_order(program: Program) -> tuple[Program, dict[str, str]]:
    """Number constants in order of first use, leaving out those without one; old names -> new names."""
    kinds = {leaf.name: leaf.kind for leaf in program.leaves}
    used = [name for call in program.calls for name in call.operands]
    used += [name for name in (*program.outputs, *(name for _, name in program.updates)) if name is not None]
    found = dict.fromkeys(name for name in used if kinds.get(name) == "const")
    taken = {name for name, kind in kinds.items() if kind != "const"}.union(*(call.names for call in program.calls))
    fresh = (name for name in (f"c_{number}" for number in itertools.count()) if name not in taken)
    order = dict(zip(found, fresh, strict=False))
    by_name = {leaf.name: leaf for leaf in program.leaves}
    consts = [by_name[old]._replace(name=new, target=new) for old, new in order.items()]
    stored = [leaf for leaf in program.leaves if leaf.kind in ("param", "buffer")]
    inputs = [leaf for leaf in program.leaves if leaf.kind == "input"]
    renamed = Program(
        (*stored, *consts, *inputs),
        tuple([call if order.keys().isdisjoint(call.operands) else _reading(call, order) for call in program.calls]),
        tuple(None if name is None else order.get(name, name) for name in program.outputs),
        tuple((buffer, order.get(name, name)) for buffer, name in program.updates),
    )
    return renamed, order


def _reading(call: Call, instead: Mapping[str, str]) -> Call:
    """The call with others in place of some of its operands."""
    return replace(call, operands=tuple(instead.get(name, name) for name in call.operands))
