"""Skeleton: what a folded graph's problem is made of on every mesh, found once.

Every distinct position of the folded graph is one decision, a *role*: each operator of each distinct block, the
storage of each leaf, the layout in which a value with several readers is delivered (its *relay*), each output. Which
roles there are, which values flow between them and how often follows from the graph alone. After one pass over the
graph everything here is found from one instance of each block and of each way to enter it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property

from planner.fold import Folded, Instance
from planner.graph import Ref
from planner.ops import OPS
from planner.rules import Rule
from planner.strategy import Cuts, Wires

Role = tuple[object, ...]
Flow = tuple[Role, Role, Ref, tuple[int, ...]]
"""Source role, reader role, representative value, operand positions."""


class Skeleton:
    """The roles of a folded graph and the flows between them.

    Args:
        folded: the graph and its distinct blocks.
        rules: the factor rule of every operator.
        delivered: values that have a relay even if no member of their role has several readers.

    Attributes:
        role_of: the role of every node.
        members: the nodes of every role in graph order; the first represents them.
    """

    def __init__(self, folded: Folded, rules: Mapping[str, Rule], delivered: frozenset[Ref] = frozenset()):
        self.folded, self.graph, self.rules = folded, folded.graph, rules
        self.role_of, self.members = _roles(folded)
        self._delivered = delivered
        self._cuts: dict[object, Cuts] = {}

    def survey(self) -> None:
        """Walk the whole graph now, not when a mesh first asks: what comes after does not grow with its depth."""
        self.flows  # noqa: B018
        self.relay_readers  # noqa: B018
        self.charged  # noqa: B018

    @cached_property
    def own(self) -> frozenset[str]:
        """Leaves that one block alone reads."""
        return frozenset(
            name for role, names in self.members.items() if role[0] == "leaf" and len(role) == 3 for name in names
        )

    @cached_property
    def leaving(self) -> tuple[Ref, ...]:
        """Everything that leaves the model: outputs, then new values of buffers."""
        return (*self.graph.outputs, *(ref for _, ref in self.graph.updates))

    def representative(self, ref: Ref) -> Ref:
        """The same value of its role's first member."""
        return Ref(self.members[self.role_of[ref.node]][0], ref.index)

    @cached_property
    def readers(self) -> dict[Ref, int]:
        """How many distinct readers a value has, outputs included."""
        count = {ref: len({node.name for node, _ in users}) for ref, users in self.graph.users.items()}
        for ref in self.leaving:
            count[ref] = count.get(ref, 0) + 1
        return count

    @cached_property
    def relays(self) -> dict[Role, Ref]:
        """Relay role -> a representative value. A role has a relay when any of its members has several readers."""
        found: dict[Role, Ref] = {}
        for role, names in self.members.items():
            for index in range(len(self.graph.by_name[names[0]].results)):
                values = [Ref(name, index) for name in names]
                if any(self.readers.get(ref, 0) > 1 or ref in self._delivered for ref in values):
                    found["relay", role, index] = Ref(names[0], index)
        return found

    @cached_property
    def relay_readers(self) -> dict[Role, tuple[tuple[Role, int], ...]]:
        """Relay role -> the (role, operand position) of all who read any of its values."""
        return {
            relay: tuple(
                {
                    (self.role_of[node.name], position): None
                    for name in self.members[self.role_of[ref.node]]
                    for node, position in self.graph.users.get(Ref(name, ref.index), ())
                }
            )
            for relay, ref in self.relays.items()
        }

    def relay_of(self, ref: Ref) -> Role | None:
        """The relay role of a value, if it has one."""
        relay = ("relay", self.role_of[ref.node], ref.index)
        return relay if relay in self.relays else None

    @cached_property
    def flows(self) -> dict[Flow, int]:
        """How often each flow occurs."""
        flows: dict[Flow, int] = {}

        def add(head: Role, ref: Ref, positions: tuple[int, ...], times: int) -> None:
            key = (self.relay_of(ref) or self.role_of[ref.node], head, self.representative(ref), positions)
            flows[key] = flows.get(key, 0) + times

        for instance, times in self._entered:
            for node in instance.block.nodes:
                by_ref: dict[Ref, list[int]] = {}
                for position, ref in enumerate(node.inputs):
                    by_ref.setdefault(ref, []).append(position)
                for ref, positions in by_ref.items():
                    add(self.role_of[node.name], ref, tuple(positions), times)
        for position, ref in enumerate(self.leaving):
            add(("output", position), ref, (0,), 1)
        for relay, ref in self.relays.items():
            role = self.role_of[ref.node]
            flows[role, relay, ref, (0,)] = len(self.members[role])
        return flows

    @cached_property
    def _entered(self) -> tuple[tuple[Instance, int], ...]:
        """The first instance of each block and of each way to enter it, and how often it occurs."""
        found: dict[object, tuple[Instance, int]] = {}
        for instance in self.folded.instances:
            key = (instance.kind, tuple((self.role_of[ref.node], ref.index) for ref in instance.block.inputs))
            first, times = found.get(key, (instance, 0))
            found[key] = first, times + 1
        return tuple(found.values())

    def cuts(self, sizes: tuple[int, ...]) -> Cuts:
        """Where values may be cut into strips on a mesh of these sizes, by representative value."""
        born = self._wires.born(sizes)
        if born not in self._cuts:
            self._cuts[born] = self._wires.cuts(born)
        return self._cuts[born]

    @cached_property
    def _wires(self) -> Wires:
        return Wires(self._uses())

    def _uses(self) -> Iterator[tuple[Rule, tuple[Ref, ...], tuple[Ref, ...]]]:
        """Rule, operands and results of every operator, as representative values."""
        for instance, _ in self._entered:
            for node in instance.block.nodes:
                results = (self.representative(Ref(node.name, i)) for i in range(len(node.results)))
                yield self.rules[node.name], tuple(map(self.representative, node.inputs)), tuple(results)

    @cached_property
    def charges(self) -> dict[str, tuple[int, ...]]:
        """Which tensors (operands, then results) each operator pays for as saved: the first reader of a value that
        needs it in backward pays, views of one tensor count once, parameters are paid as parameters.
        """
        root: dict[Ref, Ref] = {}
        paid: set[Ref] = set()
        charges: dict[str, tuple[int, ...]] = {}
        for node in self.graph.nodes:
            row = OPS.get(node.op)
            results = [Ref(node.name, i) for i in range(len(node.results))]
            if row is not None and row.view and node.inputs:
                root.update({ref: root.get(node.inputs[0], node.inputs[0]) for ref in results})
                continue
            if not any(t.grad for t in node.results):
                continue
            tensors = (*node.inputs, *results)
            saved = None if row is None else row.saved(node, self.graph.input_types(node))
            places = range(len(tensors)) if saved is None else _places(saved, len(node.inputs), len(tensors))
            for place in places:
                ref = root.get(tensors[place], tensors[place])
                if ref not in paid and self.graph.by_name[ref.node].op != "param":
                    paid.add(ref)
                    charges[node.name] = (*charges.get(node.name, ()), place)
        return charges

    @cached_property
    def charged(self) -> dict[Role, dict[tuple[int, ...], int]]:
        """Which tensors the members of a role pay for, and how many members pay for just these."""
        return {role: Counter(self.charges.get(name, ()) for name in names) for role, names in self.members.items()}


def _places(saved: tuple[str, ...], operands: int, tensors: int) -> list[int]:
    """Places of saved tensors among operands, then results; one of the operator's own counts like its first."""
    named = ["in0" if word in ("own", "mask") else word for word in saved if word not in ("rows", "scores")]
    places = [int(word[2:]) if word.startswith("in") else operands + int(word[3:]) for word in named]
    return [place for place in places if place < tensors]


def _roles(folded: Folded) -> tuple[dict[str, Role], dict[Role, list[str]]]:
    """Role of every node, and the members of every role in graph order.

    A leaf that only one block reads shares its role with the leaf at the same place of the other
    instances; a leaf that several blocks read is a decision of its own.
    """
    role_of: dict[str, Role] = {}
    reading: dict[str, list[Role]] = {}
    for number, instance in enumerate(folded.instances):
        for position, node in enumerate(instance.block.nodes):
            role_of[node.name] = ("op", instance.kind, position)
        for slot, ref in enumerate(instance.block.inputs):
            reading.setdefault(ref.node, []).append((number, instance.kind, slot))
    outputs = {ref.node for ref in folded.graph.outputs}
    for node in folded.graph.leaves:
        places = reading.get(node.name, [])
        if len(places) == 1 and node.name not in outputs:
            role_of[node.name] = ("leaf", *places[0][1:])
        else:
            role_of[node.name] = ("leaf", node.name)
    members: dict[Role, list[str]] = {}
    for node in folded.graph.nodes:
        members.setdefault(role_of[node.name], []).append(node.name)
    return role_of, members
