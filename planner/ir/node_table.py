"""The nodes of a graph as columns, so that questions about all of them are array operations.

Models repeat themselves: of sixty thousand nodes a hundred differ in more than names, paths and operands. These are
held once; what is a copy of one of them becomes a :class:`Node` only when somebody asks for it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from planner.ir.node import LEAVES, Node, Ref

Ints = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Columns:
    """The nodes of a graph, in order; a node is its place among them.

    Attributes:
        firsts: those that are copies of no other.
        first: for every node which of ``firsts`` it is, or is a copy of.
        names, paths, targets: of every node.
        ends: where the operands of each node end in the columns of operands, which hold those of all nodes one after
            another; begins with 0.
        makers: for every operand the node that makes it; the number of nodes where none does.
        indices: for every operand which result of that node it is.
    """

    firsts: tuple[Node, ...]
    first: Ints
    names: tuple[str, ...]
    paths: tuple[str, ...]
    targets: tuple[str, ...]
    ends: Ints
    makers: Ints
    indices: Ints

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Columns:
        """The columns of nodes that are all there."""
        firsts = {id(node.first): node.first for node in nodes}
        number = dict(zip(firsts, itertools.count(), strict=False))
        names = tuple([node.name for node in nodes])
        position = dict(zip(names, itertools.count(), strict=False))
        refs = [ref for node in nodes for ref in node.inputs]
        return cls(
            tuple(firsts.values()),
            ints(number[id(node.first)] for node in nodes),
            names,
            tuple([node.path for node in nodes]),
            tuple([node.target for node in nodes]),
            ending(ints(len(node.inputs) for node in nodes)),
            ints(position.get(ref.node, len(nodes)) for ref in refs),
            ints(ref.index for ref in refs),
        )

    @cached_property
    def position(self) -> dict[str, int]:
        """The place of every node by its name."""
        return dict(zip(self.names, itertools.count(), strict=False))

    @cached_property
    def each_first(self) -> tuple[Node, ...]:
        """For every node the one that it is, or is a copy of."""
        return tuple(map(self.firsts.__getitem__, self.first.tolist()))

    @cached_property
    def is_leaf(self) -> NDArray[np.bool_]:
        """Which nodes are leaves."""
        return self.applying(LEAVES)

    def applying(self, ops: Collection[str]) -> NDArray[np.bool_]:
        """Which nodes are of some operators."""
        return np.array([node.op in ops for node in self.firsts], dtype=np.bool_)[self.first]

    @cached_property
    def readers(self) -> Ints:
        """For every operand the node that reads it."""
        return np.repeat(np.arange(len(self.names)), np.diff(self.ends))

    @cached_property
    def starts(self) -> Ints:
        """The first of each node's results among all *values*, which are the results of all nodes one after another.

        Ends with how many there are.
        """
        return ending(np.array([len(node.results) for node in self.firsts], dtype=np.int64)[self.first])

    @cached_property
    def read(self) -> Ints:
        """For every operand which value it is."""
        found: Ints = self.starts[self.makers] + self.indices
        return found

    def of_values(self, each: Sequence[Sequence[int]]) -> Ints:
        """A number for every value, from those of the results of each of ``firsts``."""
        sizes = np.diff(self.starts)
        own = ending(ints(map(len, each)))
        flat = ints(itertools.chain.from_iterable(each))
        found: Ints = flat[np.repeat(own[self.first] - self.starts[:-1], sizes) + np.arange(self.starts[-1])]
        return found

    def value(self, ref: Ref) -> int:
        """Which value a result is.

        Raises:
            KeyError: there is no such node, or it has no such result.
        """
        place = self.position[ref.node]
        found = int(self.starts[place]) + ref.index
        if ref.index < 0 or found >= self.starts[place + 1]:
            raise KeyError(ref)
        return found

    def refs(self, values: Ints) -> list[Ref]:
        """Values as results of nodes."""
        makers = np.searchsorted(self.starts, values, side="right") - 1
        indices = (values - self.starts[makers]).tolist()
        return [Ref(self.names[maker], index) for maker, index in zip(makers.tolist(), indices, strict=True)]


class Nodes(Sequence[Node]):
    """Nodes of a graph, of which copies are made when they are asked for.

    Args:
        columns: of the whole graph.
        places: which of its nodes these are.
        made: those nodes of the graph that there are already, by place; grows.
    """

    def __init__(self, columns: Columns, places: Sequence[int], made: dict[int, Node]):
        self.columns, self.places = columns, places
        self._made: dict[int, Node] = made

    @property
    def names(self) -> tuple[str, ...]:
        return self._part(self.columns.names)

    @property
    def paths(self) -> tuple[str, ...]:
        return self._part(self.columns.paths)

    @property
    def firsts(self) -> tuple[Node, ...]:
        """For each the node that it is, or is a copy of; it differs in its name, path, target and operands."""
        return self._part(self.columns.each_first)

    @property
    def are_all(self) -> bool:
        """Whether these are all nodes of the graph, in order."""
        return self.places == range(len(self.columns.names))

    def among(self, places: Sequence[int]) -> Nodes:
        """Others of the same graph."""
        return Nodes(self.columns, places, self._made)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> Node: ...
    @overload
    def __getitem__(self, at: slice) -> Nodes: ...
    def __getitem__(self, at: int | slice) -> Node | Nodes:
        if isinstance(at, slice):
            return self.among(self.places[at])
        place = self.places[at]
        node = self._made.get(place)
        if node is None:
            node = self._made[place] = self._make(place)
        return node

    def __iter__(self) -> Iterator[Node]:
        return map(self.__getitem__, range(len(self.places)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Nodes, tuple)) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """How many there are, and the names of some; none is made for that."""
        names = self.among(self.places[:3]).names
        if len(self) > 4:
            names += ("...",)
        if len(self) > 3:
            names += (self.columns.names[self.places[-1]],)
        return f"<{len(self):,} nodes: {', '.join(names)}>" if names else "<0 nodes>"

    def _make(self, place: int) -> Node:
        columns = self.columns
        first: Node = columns.firsts[int(columns.first[place])]
        if first.name == columns.names[place]:
            return first
        operands = slice(columns.ends[place], columns.ends[place + 1])
        makers, indices = columns.makers[operands].tolist(), columns.indices[operands].tolist()
        inputs = tuple([Ref(columns.names[maker], index) for maker, index in zip(makers, indices, strict=True)])
        return first.copy(columns.names[place], inputs, columns.paths[place], columns.targets[place])

    def _part(self, column: tuple[T, ...]) -> tuple[T, ...]:
        places = self.places
        if isinstance(places, range) and places.step == 1:
            return column[places.start : places.stop]
        return tuple(map(column.__getitem__, places))


def ints(values: Iterable[int]) -> Ints:
    """Numbers as an array."""
    return np.fromiter(values, dtype=np.int64)


def ending(sizes: Ints) -> Ints:
    """Where stretches of these sizes end, one after another; begins with 0."""
    return joined((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))


def joined(columns: Iterable[Ints]) -> Ints:
    """Columns one after another; there may be none."""
    return np.concatenate((np.zeros(0, dtype=np.int64), *columns))
