"""The planner's graph: operators over typed tensors, in topological order.

A :class:`Graph` is what a captured model looks like without torch: every node has an operator name,
arguments by name (tensors as :class:`Ref`, everything else static), and the types of its results.
Leaves are nodes too, with the operators ``input``, ``param``, ``buffer`` and ``const``.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import networkx as nx

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

_NAME, _NODE, _INDEX = operator.attrgetter("name"), operator.itemgetter(0), operator.itemgetter(1)
LEAVES = frozenset({"input", "param", "buffer", "const"})


@dataclass(frozen=True)
class TensorType:
    """Shape, dtype, and whether a gradient flows back through the tensor."""

    shape: tuple[int, ...]
    dtype: str
    grad: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return self.numel * self.item_bytes


class Ref(NamedTuple):
    """Result number ``index`` of the node called ``node``; a tuple, since graphs are looked up by little else."""

    node: str
    index: int = 0  # type: ignore[assignment]  # not the method of tuples

    def __str__(self) -> str:
        return self.node if self.index == 0 else f"{self.node}.{self.index}"


@dataclass(frozen=True)
class Node:
    """One operator application.

    ``args`` holds every argument by schema name, defaults included; values are :class:`Ref`, static
    scalars and strings, ``None``, or (nested) tuples of these. ``path`` is the owning module's name;
    ``target`` is the original name of a parameter, buffer or input. ``shares`` names, for each result, the
    tensor operand whose memory it shares (-1: none); it is empty where nobody looked.
    """

    name: str
    op: str
    args: tuple[tuple[str, object], ...]
    results: tuple[TensorType, ...]
    path: str = ""
    target: str = ""
    shares: tuple[int, ...] = ()

    def __getitem__(self, name: str) -> object:
        """The argument called ``name``; ``None`` when the operator has no such argument."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, object]:
        return dict(self.args)

    @cached_property
    def inputs(self) -> tuple[Ref, ...]:
        """Every tensor argument in order, repeats included."""
        return tuple(_refs(value for _, value in self.args))

    @property
    def is_leaf(self) -> bool:
        return self.op in LEAVES

    def copy(self, name: str, inputs: tuple[Ref, ...], path: str) -> Node:
        """The same operator once more, on ``inputs``."""
        found = object.__new__(Node)
        first = self.__dict__.get("first", self)
        held = {"name": name, "op": self.op, "results": self.results, "path": path, "target": "", "shares": self.shares}
        found.__dict__.update(held, first=first, inputs=inputs)
        return found

    if TYPE_CHECKING:

        @property
        def first(self) -> Node:
            """The node that this is a copy of, or itself: what does not depend on values is found for that once."""

    else:

        def __getattr__(self, name: str) -> object:
            """``first`` where this is no copy; ``args`` where it is, since few ask for them."""
            if name == "first":
                return self
            if name != "args" or "first" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            inputs = iter(self.inputs)
            args = self.__dict__["args"] = tuple((name, _with(value, inputs)) for name, value in self.first.args)
            return args


def _with(value: object, inputs: Iterator[Ref]) -> object:
    """An argument with the next of ``inputs`` in the place of each of its tensors."""
    if isinstance(value, Ref):
        return next(inputs)
    return tuple([_with(each, inputs) for each in value]) if isinstance(value, tuple) else value


def _refs(values: object) -> Iterator[Ref]:
    for value in values:  # type: ignore[attr-defined]
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, tuple):
            yield from _refs(value)


class Reads(NamedTuple):
    """Every operand of every node, node by node: what is read, and where in the graph its maker and its reader are.

    What nothing makes is made after all.
    """

    refs: list[Ref]
    makers: list[int]
    readers: list[int]


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order, the results that leave the model, and buffer updates.

    ``updates`` pairs a buffer's target name with the value it holds after the step. ``named_loss`` is the position of
    the output that the model calls its loss, if it calls one so.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]
    updates: tuple[tuple[str, Ref], ...] = ()
    named_loss: int | None = None

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return dict(zip(map(_NAME, self.nodes), self.nodes, strict=True))

    @cached_property
    def position(self) -> dict[str, int]:
        return dict(zip(map(_NAME, self.nodes), itertools.count(), strict=False))

    def type_of(self, ref: Ref) -> TensorType:
        return self.by_name[ref.node].results[ref.index]

    def input_types(self, node: Node) -> tuple[TensorType, ...]:
        return tuple(self.type_of(ref) for ref in node.inputs)

    @cached_property
    def reads(self) -> Reads:
        inputs = [node.inputs for node in self.nodes]
        refs = list(itertools.chain.from_iterable(inputs))
        names, nowhere = map(_NODE, refs), itertools.repeat(len(inputs))
        readers = itertools.chain.from_iterable(map(itertools.repeat, itertools.count(), map(len, inputs)))
        return Reads(refs, list(map(self.position.get, names, nowhere)), list(readers))

    @cached_property
    def users(self) -> dict[Ref, tuple[tuple[Node, int], ...]]:
        """For each result, the (node, input position) pairs that read it."""
        found: dict[Ref, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for position, ref in enumerate(node.inputs):
                found.setdefault(ref, []).append((node, position))
        return {ref: tuple(uses) for ref, uses in found.items()}

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """Positions of the outputs that backward starts from.

        The loss is the differentiable scalar of that name, or else the first one; without one, every differentiable
        output may be a root.
        """
        found = [i for i, ref in enumerate(self.outputs) if self.type_of(ref).grad]
        scalars = [i for i in found if not self.type_of(self.outputs[i]).shape]
        return (self.named_loss,) if self.named_loss in scalars else tuple(scalars[:1] or found)

    @property
    def loss(self) -> int | None:
        """The position of the loss, if there is one."""
        return next((position for position in self.roots if not self.type_of(self.outputs[position]).shape), None)

    @cached_property
    def differentiated(self) -> frozenset[Ref]:
        """Values whose gradient a training step computes: those that reach a root."""
        found = {self.outputs[i] for i in self.roots}
        is_reached = bytearray(len(self.nodes))
        for ref in found:
            is_reached[self.position[ref.node]] = True
        refs, makers, readers = self.reads
        grads = [[tensor.grad for tensor in node.results] for node in self.nodes]
        has_grad = bytearray([grads[maker][index] for maker, (_, index) in zip(makers, refs, strict=True)])
        for at in range(len(refs) - 1, -1, -1):
            if has_grad[at] and is_reached[readers[at]]:
                is_reached[makers[at]] = True
        is_read = map(is_reached.__getitem__, readers)
        found.update(itertools.compress(refs, map(operator.and_, has_grad, is_read)))
        return frozenset(found)

    @cached_property
    def leaves(self) -> tuple[Node, ...]:
        return tuple([node for node in self.nodes if node.op in LEAVES])

    @cached_property
    def operators(self) -> tuple[Node, ...]:
        """The nodes that are no leaves."""
        return tuple([node for node in self.nodes if node.op not in LEAVES])

    def check(self) -> None:
        """Assert that names are unique, references resolve, and every use follows its definition."""
        nodes, position = self.nodes, self.position
        for at, node in enumerate(nodes) if len(position) < len(nodes) else ():
            assert position[node.name] == at, f"two nodes are called {node.name}"
        refs, makers, readers = self.reads
        for at in itertools.compress(itertools.count(), map(operator.ge, makers, readers)):
            raise AssertionError(f"{nodes[readers[at]].name} reads {refs[at]}, which is not defined before it")
        results = [len(node.results) for node in nodes]
        missing = map(operator.ge, map(_INDEX, refs), map(results.__getitem__, makers))
        for at in itertools.compress(itertools.count(), missing):
            raise AssertionError(f"{nodes[readers[at]].name} reads missing result {refs[at]}")
        for ref in (*self.outputs, *(ref for _, ref in self.updates)):
            assert ref.node in position, f"output {ref} is not defined"

    def digraph(self) -> nx.DiGraph[str]:
        """The graph as a networkx digraph over node names (for analysis and drawing)."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from((node.name, {"op": node.op, "path": node.path}) for node in self.nodes)
        graph.add_edges_from((ref.node, node.name) for node in self.nodes for ref in node.inputs)
        return graph
