"""The planner's graph: operators over typed tensors, in topological order.

A :class:`Graph` is what a captured model looks like without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.ir.node import ITEM_BYTES, LEAVES, Node, Ref, TensorType, static
from planner.ir.node_table import Columns, Nodes

if TYPE_CHECKING:
    import networkx as nx

LOSS = "loss"
"""The output of this name is what a step goes backward from, where several might be."""

__all__ = ["ITEM_BYTES", "LEAVES", "LOSS", "Graph", "Node", "Ref", "TensorType", "Values", "static"]


class Values(Set[Ref]):
    """Some of the results of a graph's nodes.

    Args:
        chosen: for every value of the columns whether it is one of them.
    """

    def __init__(self, columns: Columns, chosen: NDArray[np.bool_]):
        self._columns, self._chosen = columns, chosen
        self._bytes = chosen.tobytes()

    @classmethod
    def _from_iterable(cls, refs: Iterable[Ref]) -> frozenset[Ref]:  # type: ignore[override]
        """What ``&``, ``|`` and ``-`` make."""
        return frozenset(refs)

    def __contains__(self, ref: object) -> bool:
        try:
            return isinstance(ref, Ref) and self._bytes[self._columns.value(ref)] > 0
        except KeyError:
            return False

    def __iter__(self) -> Iterator[Ref]:
        return iter(self._columns.refs(np.flatnonzero(self._chosen)))

    def __len__(self) -> int:
        return int(np.count_nonzero(self._chosen))


class _ByName(dict[str, Node]):
    """Nodes by name, each made when it is first asked for; holds those, but is as long as if it held all."""

    def __init__(self, nodes: Sequence[Node], position: dict[str, int]):
        super().__init__()
        self._nodes, self._position = nodes, position

    def __missing__(self, name: str) -> Node:
        node = self[name] = self._nodes[self._position[name]]
        return node

    def __iter__(self) -> Iterator[str]:
        return iter(self._position)

    def __len__(self) -> int:
        return len(self._position)

    def __contains__(self, name: object) -> bool:
        return name in self._position

    get, keys, values, items = Mapping.get, Mapping.keys, Mapping.values, Mapping.items  # type: ignore[assignment]


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order, the results that leave the model, and buffer updates.

    ``updates`` pairs a buffer's target name with the value it holds after the step. ``output_names`` is what the model
    calls its outputs: keys, attributes or numbers, of nested ones from the outside in (``hidden_states.0``).
    """

    nodes: Sequence[Node]
    outputs: tuple[Ref, ...]
    updates: tuple[tuple[str, Ref], ...] = ()
    output_names: tuple[str, ...] = ()

    @cached_property
    def columns(self) -> Columns:
        """The nodes, fact by fact."""
        return self.all.columns

    @cached_property
    def all(self) -> Nodes:
        """The nodes, of which parts can be taken."""
        if isinstance(self.nodes, Nodes) and self.nodes.are_all:
            return self.nodes
        return Nodes(Columns.of(self.nodes), range(len(self.nodes)), dict(enumerate(self.nodes)))

    @property
    def leaving(self) -> tuple[Ref, ...]:
        """Everything that leaves the model: outputs, then new values of buffers."""
        return (*self.outputs, *(ref for _, ref in self.updates))

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return _ByName(self.nodes, self.position)

    @property
    def position(self) -> dict[str, int]:
        return self.columns.position

    def type_of(self, ref: Ref) -> TensorType:
        return self.by_name[ref.node].results[ref.index]

    def input_types(self, node: Node) -> tuple[TensorType, ...]:
        return tuple(self.type_of(ref) for ref in node.inputs)

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
        named = self.output_names.index(LOSS) if LOSS in self.output_names else None
        return (named,) if named in scalars else tuple(scalars[:1] or found)

    @property
    def loss(self) -> int | None:
        """The position of the loss, if there is one."""
        return next((position for position in self.roots if not self.type_of(self.outputs[position]).shape), None)

    @cached_property
    def differentiated(self) -> Values:
        """Values whose gradient a training step computes: those that reach a root."""
        columns = self.columns
        has_grad = columns.of_values([[tensor.grad for tensor in node.results] for node in columns.firsts])
        flows = has_grad[columns.read] > 0
        is_reached = bytearray(len(self.nodes))
        for root in self.roots:
            is_reached[self.position[self.outputs[root].node]] = True
        makers, readers = columns.makers[flows][::-1].tolist(), columns.readers[flows][::-1].tolist()
        for maker, reader in zip(makers, readers, strict=True):
            if is_reached[reader]:
                is_reached[maker] = True
        found = np.zeros(len(has_grad), dtype=np.bool_)
        found[columns.read[flows & np.frombuffer(is_reached, dtype=np.bool_)[columns.readers]]] = True
        found[[columns.value(self.outputs[root]) for root in self.roots]] = True
        return Values(columns, found)

    def follows_from_parameters(self, ref: Ref) -> bool:
        """Whether a parameter reaches a value, whether it is trained or not."""
        return self._reached_by_parameters[self.position[ref.node]] > 0

    @cached_property
    def _reached_by_parameters(self) -> bytearray:
        columns, found = self.columns, bytearray(len(self.nodes))
        for place in np.flatnonzero(columns.applying(("param",))).tolist():
            found[place] = True
        for maker, reader in zip(columns.makers.tolist(), columns.readers.tolist(), strict=True):
            if found[maker]:
                found[reader] = True
        return found

    @cached_property
    def leaves(self) -> Nodes:
        return self.applying(*LEAVES)

    @cached_property
    def operators(self) -> Nodes:
        """The nodes that are no leaves."""
        places = np.flatnonzero(~self.columns.is_leaf).tolist()
        is_a_stretch = bool(places) and places[-1] - places[0] + 1 == len(places)
        return self.all.among(range(places[0], places[-1] + 1) if is_a_stretch else places)

    def applying(self, *ops: str) -> Nodes:
        """The nodes of some operators."""
        return self.all.among(np.flatnonzero(self.columns.applying(ops)).tolist())

    def check(self) -> None:
        """Assert that names are unique, references resolve, and every use follows its definition."""
        columns, position = self.columns, self.position
        names, size = columns.names, len(columns.names)
        for at, name in enumerate(names) if len(position) < size else ():
            assert position[name] == at, f"two nodes are called {name}"
        late = columns.makers >= columns.readers
        results = np.append(np.diff(columns.starts), 0)
        missing = (columns.indices < 0) | (columns.indices >= results[columns.makers])
        for place in np.flatnonzero(late | missing).tolist():
            at = int(columns.readers[place])
            reader = self.nodes[at]
            ref = reader.inputs[place - int(columns.ends[at])]
            what = f"{ref}, which is not defined before it" if late[place] else f"missing result {ref}"
            raise AssertionError(f"{reader.name} reads {what}")
        for ref in self.leaving:
            assert ref.node in position, f"output {ref} is not defined"
            assert 0 <= ref.index < results[position[ref.node]], f"output {ref} is a missing result"

    def digraph(self) -> nx.DiGraph[str]:
        """The graph as a networkx digraph over node names, for analysis and drawing."""
        import networkx

        graph: nx.DiGraph[str] = networkx.DiGraph()
        graph.add_nodes_from((node.name, {"op": node.op, "path": node.path}) for node in self.nodes)
        graph.add_edges_from((ref.node, node.name) for node in self.nodes for ref in node.inputs)
        return graph
