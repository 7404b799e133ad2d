"""Variables: every distinct position of a folded graph that is one decision.

Those are each operator of each distinct block, the storage of each leaf, the layout in which the several readers of a
value find it (its *reshard point*), and each output. Instances of a block share their variables, so that their number
does not grow with depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from planner.ir.folding import Folded
from planner.ir.graph import Ref

Variable = tuple[object, ...]


class Variables:
    """The variables of a folded graph, in a fixed order: operators and leaves, reshard points, outputs.

    Args:
        folded: the graph and its distinct blocks.
        shared: values that have a reshard point even if no member of their variable has several readers.

    Attributes:
        variable_of: the variable of every node.
        members: the nodes of every variable in graph order; the first represents them.
    """

    def __init__(self, folded: Folded, shared: frozenset[Ref] = frozenset()):
        self.folded, self.graph = folded, folded.graph
        self.variable_of, self.members = _variables(folded)
        self._shared = shared

    def __iter__(self) -> Iterator[Variable]:
        return iter(self.order)

    @cached_property
    def order(self) -> tuple[Variable, ...]:
        """All of them: choices of the solver's problem are in this order."""
        outputs: tuple[Variable, ...] = tuple(("output", position) for position in range(len(self.graph.leaving)))
        return (*self.members, *self.reshard_points, *outputs)

    @cached_property
    def own(self) -> frozenset[str]:
        """Leaves that one block alone reads."""
        return frozenset(
            name
            for variable, names in self.members.items()
            if variable[0] == "leaf" and len(variable) == 3
            for name in names
        )

    def representative(self, ref: Ref) -> Ref:
        """The same value of its variable's first member."""
        return Ref(self.members[self.variable_of[ref.node]][0], ref.index)

    def readers(self, ref: Ref) -> int:
        """How many distinct readers a value has, outputs included."""
        return self._crossing[ref] + self._within[self.variable_of[ref.node], ref.index]

    @cached_property
    def _crossing(self) -> Counter[Ref]:
        """How many operators of other blocks, and outputs, read a value; all operators where it is a leaf."""
        found = Counter(self.graph.leaving)
        for instances in self.folded.kinds:
            reading = Counter(ref for node in instances[0].block.nodes for ref in dict.fromkeys(node.inputs))
            times = [reading[ref] for ref in instances[0].block.inputs]
            for instance in instances:
                for ref, count in zip(instance.block.inputs, times, strict=True):
                    found[ref] += count
        return found

    @cached_property
    def _within(self) -> Counter[tuple[Variable, int]]:
        """How many operators of its own block read a result of an operator's variable."""
        return Counter(
            (self.variable_of[name], index)
            for first, *_ in self.folded.kinds
            for node in first.block.nodes
            for name, index in set(node.inputs).difference(first.block.inputs)
        )

    @cached_property
    def reshard_points(self) -> dict[Variable, Ref]:
        """Reshard point -> a representative value. A variable has one when any of its members has several readers."""
        several = [ref for ref in self._crossing if self.readers(ref) > 1]
        shared = {(self.variable_of[name], index) for name, index in (*several, *self._shared)}
        shared.update(value for value, count in self._within.items() if count > 1)
        found: dict[Variable, Ref] = {}
        for variable, names in self.members.items():
            for index in range(len(self.graph.by_name[names[0]].results)):
                if (variable, index) in shared:
                    found["reshard_point", variable, index] = Ref(names[0], index)
        return found

    @cached_property
    def resharded_leaves(self) -> tuple[Ref, ...]:
        """The leaves that have a reshard point."""
        resharded = {point[1] for point in self.reshard_points}
        return tuple([Ref(name) for name in self.graph.leaves.names if self.variable_of[name] in resharded])

    def reshard_point_of(self, ref: Ref) -> Variable | None:
        """The reshard point of a value, if it has one."""
        point = ("reshard_point", self.variable_of[ref.node], ref.index)
        return point if point in self.reshard_points else None


def _variables(folded: Folded) -> tuple[dict[str, Variable], dict[Variable, list[str]]]:
    """Variable of every node, and the members of every variable in graph order.

    A leaf that only one block reads shares its variable with the leaf at the same place of the other
    instances; a leaf that several blocks read is a decision of its own.
    """
    variable_of: dict[str, Variable] = {}
    reading: dict[str, list[Variable]] = {}
    own: dict[int, list[Variable]] = {}
    for number, instance in enumerate(folded.instances):
        names = instance.block.span.names
        variables = own.setdefault(instance.kind, [("op", instance.kind, at) for at in range(len(names))])
        variable_of.update(zip(names, variables, strict=True))
        for slot, ref in enumerate(instance.block.inputs):
            reading.setdefault(ref.node, []).append((number, instance.kind, slot))
    outputs = {ref.node for ref in folded.graph.outputs}
    for name in folded.graph.leaves.names:
        places = reading.get(name, [])
        if len(places) == 1 and name not in outputs:
            variable_of[name] = ("leaf", *places[0][1:])
        else:
            variable_of[name] = ("leaf", name)
    members: dict[Variable, list[str]] = {}
    for kind, instances in enumerate(folded.kinds):
        alike = zip(*(instance.block.span.names for instance in instances), strict=True)
        members.update(zip(own[kind], map(list, alike), strict=True))
    for name in folded.graph.leaves.names:
        members.setdefault(variable_of[name], []).append(name)
    position = folded.graph.position
    return variable_of, dict(sorted(members.items(), key=lambda each: position[each[1][0]]))
