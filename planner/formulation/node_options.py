"""Node options: how each operator may run, each leaf be stored and each output leave, on one mesh and under filters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property

from planner.formulation.choices import Choices, Options, choices_of
from planner.formulation.decisions import DecisionGraph
from planner.formulation.strategies import Allow, Cuts, Strips, axis_ways, leaf_layouts, shards_of
from planner.formulation.variables import Variable
from planner.ir.graph import Node, Ref
from planner.ir.layout import I, Layout, LocalType, Mesh, R, Shard, local_shape

AllowLeaf = Callable[[Node, Layout], bool]


class NodeOptions:
    """What the variables of single nodes may be: choices of operators, layouts of leaves and of outputs.

    Args:
        decision_graph: the variables.
        mesh: the mesh to lay them on.
        allow, allow_leaf: keep a strategy of an operator on an axis; keep a storage layout of a leaf.
        alike: choices that were found for the same mesh, see :class:`planner.formulation.local_costs.Known`.
    """

    def __init__(
        self,
        decision_graph: DecisionGraph,
        mesh: Mesh,
        allow: Allow | None,
        allow_leaf: AllowLeaf | None,
        alike: dict[object, Choices],
    ):
        self.graph, self.rules, self.mesh = decision_graph.graph, decision_graph.rules, mesh
        self._decision_graph = decision_graph
        self.variables, self._ways = decision_graph.variables, decision_graph.blocks.ways
        self.allow, self.allow_leaf, self._alike = allow, allow_leaf, alike
        self._choices_of: dict[Variable, Choices] = {}

    def of_nodes(self, variable: Variable) -> Options:
        """The choices of the nodes of a variable."""
        node = self.graph.by_name[self.variables.members[variable][0]]
        if not node.is_leaf:
            return self.choices(variable)
        layouts = self.leaf_layouts_of(node)
        return [each for each in layouts if self.allow_leaf is None or self.allow_leaf(node, each)] or layouts[:1]

    def of_output(self, position: int) -> list[Layout]:
        """How output number ``position`` may leave the model."""
        ref, keeps_state = self.graph.leaving[position], position >= len(self.graph.outputs)
        tensor = self.graph.type_of(ref)
        whole: LocalType = I if tensor.grad else R
        types = [whole] if keeps_state or not tensor.shape else [whole, *shards_of(tensor, {})]
        return [
            layout
            for layout in itertools.product(types, repeat=len(self.mesh.axes))
            if local_shape(tensor.shape, layout, self.mesh.sizes) is not None
        ]

    @cached_property
    def _cuts(self) -> Cuts:
        return self._decision_graph.cuts(self.mesh.sizes)

    def strips(self, ref: Ref) -> Strips:
        """Where a value may be cut on this mesh."""
        return self._cuts.get(self.variables.representative(ref), {})

    def choices(self, variable: Variable) -> Choices:
        """How the operators of a variable may run."""
        if variable not in self._choices_of:
            node = self.graph.by_name[self.variables.members[variable][0]]
            rule = self.rules[node.name]
            strips = tuple(map(self.strips, (*node.inputs, *(Ref(node.name, i) for i in range(len(node.results))))))
            ways = axis_ways(self.graph, node, rule, self.mesh, strips, self.allow, self._ways)
            # Operators that share a rule are equal but for what they read; pins may tell them apart.
            key = id(rule), tuple(tuple(id(strategy) for strategy, _ in each) for each in ways)
            if key not in self._alike:
                self._alike[key] = choices_of(self.graph, node, self.mesh, ways)
            self._choices_of[variable] = self._alike[key]
        return self._choices_of[variable]

    def of_producer(self, ref: Ref) -> Options:
        """The choices of the node that makes a value."""
        variable = self.variables.variable_of[ref.node]
        node = self.graph.by_name[ref.node]
        return self.leaf_layouts_of(node) if node.is_leaf else self.choices(variable)

    def leaf_layouts_of(self, node: Node) -> list[Layout]:
        """How a leaf may be stored; only the batch is cut into micro-batches."""
        layouts = leaf_layouts(node, self.mesh, self.strips(Ref(node.name)))
        if self.mesh.micro_batches == 1:
            return layouts
        cut = [layout for layout in layouts if isinstance(layout[0], Shard)]
        return cut if node.op == "input" and cut else [each for each in layouts if not isinstance(each[0], Shard)]
