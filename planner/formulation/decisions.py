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
from typing import NamedTuple, cast

from planner.formulation.remat.backward_slice import Again, Backward
from planner.formulation.remat.levels import NOTHING, Level, Recompute
from planner.formulation.remat.saved_accounting import Charges, Places
from planner.formulation.strategies import Cuts, Ways, Wires
from planner.ir.folding import Folded, Instance
from planner.ir.graph import Node, Ref
from planner.ops import OPS
from planner.ops.memory_traffic import Traffic, added_places, traffic
from planner.ops.sharding_rule import Rule
from planner.ops.workspace import Working, working

Role = tuple[object, ...]
Flow = tuple[Role, Role, Ref, tuple[int, ...]]
"""Source role, reader role, representative value, operand positions."""


class Together(NamedTuple):
    """Parameters that one call of a block brings: how many, and how often as large as one of them all are."""

    parameters: int
    times: float


class Skeleton:
    """The roles of a folded graph and the flows between them.

    Args:
        folded: the graph and its distinct blocks.
        rules: the factor rule of every operator.
        delivered: values that have a relay even if no member of their role has several readers.
        like: that of another folding of the same graph, with the same rules.

    Attributes:
        role_of: the role of every node.
        members: the nodes of every role in graph order; the first represents them.
        ways: what was found of ways to run operators on an axis, see :func:`planner.formulation.strategies.axis_ways`.
    """

    def __init__(
        self,
        folded: Folded,
        rules: Mapping[str, Rule],
        delivered: frozenset[Ref] = frozenset(),
        like: Skeleton | None = None,
    ):
        self.folded, self.graph, self.rules = folded, folded.graph, rules
        self.role_of, self.members = _roles(folded)
        self._delivered = delivered
        self.ways: dict[object, Ways] = {} if like is None else like.ways
        self._cuts: dict[object, Cuts] = {}
        self._backward: dict[int, Backward] = {}
        self._again: dict[tuple[int, Level], Again] = {}
        self._working: dict[str, Working] = {}
        self._last: dict[int, dict[Ref, int]] = {}
        self._traffic: dict[tuple[int, int, bool], Traffic] = {}
        self._charges = Charges(folded, self.again)
        self._charged: dict[Recompute, dict[Role, Counter[Places]]] = {}
        self._takes: dict[tuple[str, Level], tuple[Flow, ...]] = {}
        self._flows_again: dict[Recompute, Mapping[Flow, int]] = {}
        self._among: dict[frozenset[int], dict[int, set[int]]] = {}
        self._flows_among: dict[frozenset[int], Mapping[Flow, int]] = {}

    def survey(self) -> None:
        """Walk the whole graph now, not when a mesh first asks: what comes after does not grow with its depth."""
        self.flows  # noqa: B018
        self.relay_readers  # noqa: B018
        self.charged(NOTHING)

    @cached_property
    def own(self) -> frozenset[str]:
        """Leaves that one block alone reads."""
        return frozenset(
            name for role, names in self.members.items() if role[0] == "leaf" and len(role) == 3 for name in names
        )

    def representative(self, ref: Ref) -> Ref:
        """The same value of its role's first member."""
        return Ref(self.members[self.role_of[ref.node]][0], ref.index)

    def readers(self, ref: Ref) -> int:
        """How many distinct readers a value has, outputs included."""
        return self._crossing[ref] + self._within[self.role_of[ref.node], ref.index]

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
    def _within(self) -> Counter[tuple[Role, int]]:
        """How many operators of its own block read a result of an operator's role."""
        return Counter(
            (self.role_of[name], index)
            for first, *_ in self.folded.kinds
            for node in first.block.nodes
            for name, index in set(node.inputs).difference(first.block.inputs)
        )

    @cached_property
    def relays(self) -> dict[Role, Ref]:
        """Relay role -> a representative value. A role has a relay when any of its members has several readers."""
        several = [ref for ref in self._crossing if self.readers(ref) > 1]
        delivered = {(self.role_of[name], index) for name, index in (*several, *self._delivered)}
        delivered.update(value for value, count in self._within.items() if count > 1)
        found: dict[Role, Ref] = {}
        for role, names in self.members.items():
            for index in range(len(self.graph.by_name[names[0]].results)):
                if (role, index) in delivered:
                    found["relay", role, index] = Ref(names[0], index)
        return found

    @cached_property
    def relayed_leaves(self) -> tuple[Ref, ...]:
        """The leaves that have a relay."""
        relayed = {relay[1] for relay in self.relays}
        return tuple([Ref(name) for name in self.graph.leaves.names if self.role_of[name] in relayed])

    @cached_property
    def relay_readers(self) -> dict[Role, tuple[tuple[Role, int], ...]]:
        """Relay role -> the (role, operand position) of all who read any of its values."""
        found: dict[Role, dict[tuple[Role, int], None]] = {relay: {} for relay in self.relays}
        for source, head, _, positions in self.flows:
            if source in found and head[0] == "op":
                found[source].update(dict.fromkeys((head, position) for position in positions))
        return {relay: tuple(readers) for relay, readers in found.items()}

    def relay_of(self, ref: Ref) -> Role | None:
        """The relay role of a value, if it has one."""
        relay = ("relay", self.role_of[ref.node], ref.index)
        return relay if relay in self.relays else None

    @cached_property
    def together(self) -> dict[Role, Together]:
        """Role of a parameter that one operator of one block reads -> those of its block that are like it.

        They are brought in one call as far as they are stored and used alike (:meth:`Assignment.chunks`), and are
        priced as if they all were.
        """
        found: dict[Role, Together] = {}
        for first, *_ in self.folded.kinds:
            alike: dict[object, list[Ref]] = {}
            for ref in first.block.inputs:
                if self.graph.by_name[ref.node].op == "param" and self.relay_of(ref) is None:
                    tensor = self.graph.type_of(ref)
                    alike.setdefault((tensor.dtype, tensor.grad), []).append(ref)
            for refs in alike.values():
                whole = sum(self.graph.type_of(ref).size_bytes for ref in refs)
                for ref in refs:
                    size = self.graph.type_of(ref).size_bytes
                    found[self.role_of[ref.node]] = Together(len(refs), whole / size if size else 1.0)
        return found

    def runs_again(self, role: Role, recompute: Recompute) -> int:
        """How many members of an operator's role run again in backward."""
        if role[0] != "op":
            return 0
        kind, at = cast(int, role[1]), role[2]
        levels = recompute.levels(kind)
        return sum(len(numbers) for level, numbers in levels if at in self.again(kind, level).operators)

    def flows_again(self, recompute: Recompute) -> Mapping[Flow, int]:
        """How often a resharding of each flow runs again in backward."""
        if recompute not in self._flows_again:
            self._flows_again[recompute] = self._count_again(recompute)
        return self._flows_again[recompute]

    def _count_again(self, recompute: Recompute) -> Mapping[Flow, int]:
        flows: Counter[Flow] = Counter()
        for instance, numbers in self._entered:
            for level, range_ in recompute.levels(instance.kind):
                times = sum(number in range_ for number in numbers)
                for flow in self._taken(instance, level) if times else ():
                    flows[flow] += times
        for relay, ref in self.relays.items():
            role = self.role_of[ref.node]
            for level, counted in recompute.levels(cast(int, role[1])) if role[0] == "op" else ():
                if (role[2], ref.index) in self.again(cast(int, role[1]), level).values:
                    flows[role, relay, ref, (0,)] += len(counted)
        return flows

    def _taken(self, instance: Instance, level: Level) -> tuple[Flow, ...]:
        """The flows whose reshardings an instance, the first of its way to be entered, runs again at a level."""
        key = instance.block.span.names[0], level
        if key not in self._takes:
            taken = self.again(instance.kind, level).taken
            self._takes[key] = tuple(
                self._flow(ref, self.role_of[node.name], positions)
                for at, node in enumerate(instance.block.nodes)
                for ref, positions in _operands(node).items()
                if not taken[at].isdisjoint(positions)
            )
        return self._takes[key]

    def _flow(self, ref: Ref, head: Role, positions: tuple[int, ...]) -> Flow:
        return self.relay_of(ref) or self.role_of[ref.node], head, self.representative(ref), positions

    @cached_property
    def flows(self) -> dict[Flow, int]:
        """How often each flow occurs."""
        flows: Counter[Flow] = Counter()
        for instance, numbers in self._entered:
            for flow in self._read_by(instance):
                flows[flow] += len(numbers)
        for position, ref in enumerate(self.graph.leaving):
            flows[self._flow(ref, ("output", position), (0,))] += 1
        for relay, ref in self.relays.items():
            role = self.role_of[ref.node]
            flows[role, relay, ref, (0,)] = len(self.members[role])
        return flows

    def flows_among(self, instances: frozenset[int]) -> Mapping[Flow, int]:
        """How often each flow occurs in some instances: by which of them it is read, or relayed."""
        if instances not in self._flows_among:
            flows, among = Counter[Flow](), self.among(instances)
            for instance, numbers in self._entered:
                count = len(among.get(instance.kind, set()).intersection(numbers))
                for flow in self._read_by(instance) if count else ():
                    flows[flow] += count
            for relay, ref in self.relays.items():
                role = self.role_of[ref.node]
                if role[0] == "op" and role[1] in among:
                    flows[role, relay, ref, (0,)] = len(among[cast(int, role[1])])
            self._flows_among[instances] = flows
        return self._flows_among[instances]

    @cached_property
    def equal_blocks(self) -> frozenset[int]:
        """The most instances of one kind that take their operands from the same roles, of the kind with most work."""
        most = max(range(len(self.flops)), key=lambda kind: self.flops[kind] * len(self.folded.kinds[kind]))
        alike = max((numbers for instance, numbers in self._entered if instance.kind == most), key=len)
        found = {*alike}
        return frozenset(at for at, (kind, nth) in enumerate(self.numbers) if kind == most and nth in found)

    def among(self, instances: frozenset[int]) -> Mapping[int, set[int]]:
        """Which of their kind some instances are, by kind."""
        if instances not in self._among:
            found = self._among.setdefault(instances, {})
            for at in instances:
                kind, nth = self.numbers[at]
                found.setdefault(kind, set()).add(nth)
        return self._among[instances]

    def _read_by(self, instance: Instance) -> Iterator[Flow]:
        """The flows of all that an instance of a block reads."""
        for node in instance.block.nodes:
            for ref, positions in _operands(node).items():
                yield self._flow(ref, self.role_of[node.name], positions)

    @cached_property
    def reads(self) -> dict[Ref, tuple[tuple[Role, tuple[int, ...]], ...]]:
        """Representative value -> the roles that read it, and at which operands."""
        found: dict[Ref, list[tuple[Role, tuple[int, ...]]]] = {}
        for _, head, ref, positions in self.flows:
            found.setdefault(ref, []).append((head, positions))
        return {ref: tuple(heads) for ref, heads in found.items()}

    @cached_property
    def _entered(self) -> tuple[tuple[Instance, tuple[int, ...]], ...]:
        """The first instance of each block and of each way to enter it, and which of their kind all of these are."""
        found: dict[object, tuple[Instance, list[int]]] = {}
        for instance, (_, nth) in zip(self.folded.instances, self.numbers, strict=True):
            key = (instance.kind, tuple((self.role_of[ref.node], ref.index) for ref in instance.block.inputs))
            found.setdefault(key, (instance, []))[1].append(nth)
        return tuple((instance, tuple(numbers)) for instance, numbers in found.values())

    @cached_property
    def numbers(self) -> tuple[tuple[int, int], ...]:
        """The kind of every instance, and which of its kind it is."""
        count: Counter[int] = Counter()
        found = []
        for instance in self.folded.instances:
            found.append((instance.kind, count[instance.kind]))
            count[instance.kind] += 1
        return tuple(found)

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
    def flops(self) -> tuple[int, ...]:
        """Forward operations of one block of each kind."""
        found = []
        for first, *_ in self.folded.kinds:
            rows = ((node, OPS.get(node.op)) for node in first.block.nodes)
            each = (row.flops(node, self.graph.input_types(node), self.rules[node.name]) for node, row in rows if row)
            found.append(sum(each))
        return tuple(found)

    def charge(self, node: Node, recompute: Recompute) -> Places:
        """Which tensors an operator owns as saved for backward (:mod:`planner.formulation.remat.saved_accounting`)."""
        number, at = self.seat[node.name]
        return self._charges.of(recompute or NOTHING)[number].places[at]

    @cached_property
    def seat(self) -> dict[str, tuple[int, int]]:
        """Operator -> the number of its block in execution order, and its position in the block."""
        return {
            name: (number, at)
            for number, instance in enumerate(self.folded.instances)
            for at, name in enumerate(instance.block.span.names)
        }

    def again(self, kind: int, level: Level) -> Again:
        """What the instances of a kind recompute at a level other than ``none``."""
        if (kind, level) not in self._again:
            self._again[kind, level] = self.backward(kind).again(level)
        return self._again[kind, level]

    def backward(self, kind: int) -> Backward:
        """What backward of the instances of a kind needs."""
        if kind not in self._backward:
            self._backward[kind] = Backward(self.graph, self.folded.kinds[kind][0].block)
        return self._backward[kind]

    def working(self, node: Node) -> Working:
        """What an operator needs while it runs."""
        if node.name not in self._working:
            self._working[node.name] = working(self.graph, node)
        return self._working[node.name]

    def traffic(self, node: Node, on_host: bool) -> Traffic:
        """What an operator passes over, see :mod:`planner.ops.memory_traffic`; the same for all members of its role."""
        _, kind, at = cast(tuple[str, int, int], self.role_of[node.name])
        if (kind, at, on_host) not in self._traffic:
            first = self.folded.kinds[kind][0].block.nodes[at]
            last = self._read_last(kind)
            where = added_places(self.graph, first, frozenset(ref for ref in first.inputs if last.get(ref, at) > at))
            self._traffic[kind, at, on_host] = traffic(self.graph, first, where, on_host=on_host)
        return self._traffic[kind, at, on_host]

    def _read_last(self, kind: int) -> dict[Ref, int]:
        """Value -> the last operator with a gradient in a kind's first instance that reads it."""
        if kind not in self._last:
            nodes = enumerate(self.folded.kinds[kind][0].block.nodes)
            differentiated = [(at, node) for at, node in nodes if any(tensor.grad for tensor in node.results)]
            self._last[kind] = {ref: at for at, node in differentiated for ref in node.inputs}
        return self._last[kind]

    def charged(self, recompute: Recompute) -> dict[Role, Counter[Places]]:
        """Which tensors the members of an operator's role pay for, and how many members pay for just these."""
        recompute = recompute or NOTHING
        if recompute not in self._charged:
            found: dict[Role, Counter[Places]] = {}
            paid = zip(self.folded.instances, self._charges.of(recompute), strict=True)
            for (kind, each), times in Counter((instance.kind, each) for instance, each in paid).items():
                for at, places in enumerate(each.places):
                    found.setdefault(("op", kind, at), Counter())[places] += times
            self._charged[recompute] = found
        return self._charged[recompute]


def _operands(node: Node) -> dict[Ref, tuple[int, ...]]:
    """Every value that an operator reads, and the positions at which it does."""
    found: dict[Ref, tuple[int, ...]] = {}
    for position, ref in enumerate(node.inputs):
        found[ref] = (*found.get(ref, ()), position)
    return found


def _roles(folded: Folded) -> tuple[dict[str, Role], dict[Role, list[str]]]:
    """Role of every node, and the members of every role in graph order.

    A leaf that only one block reads shares its role with the leaf at the same place of the other
    instances; a leaf that several blocks read is a decision of its own.
    """
    role_of: dict[str, Role] = {}
    reading: dict[str, list[Role]] = {}
    own: dict[int, list[Role]] = {}
    for number, instance in enumerate(folded.instances):
        names = instance.block.span.names
        roles = own.setdefault(instance.kind, [("op", instance.kind, at) for at in range(len(names))])
        role_of.update(zip(names, roles, strict=True))
        for slot, ref in enumerate(instance.block.inputs):
            reading.setdefault(ref.node, []).append((number, instance.kind, slot))
    outputs = {ref.node for ref in folded.graph.outputs}
    for name in folded.graph.leaves.names:
        places = reading.get(name, [])
        if len(places) == 1 and name not in outputs:
            role_of[name] = ("leaf", *places[0][1:])
        else:
            role_of[name] = ("leaf", name)
    members: dict[Role, list[str]] = {}
    for kind, instances in enumerate(folded.kinds):
        alike = zip(*(instance.block.span.names for instance in instances), strict=True)
        members.update(zip(own[kind], map(list, alike), strict=True))
    for name in folded.graph.leaves.names:
        members.setdefault(role_of[name], []).append(name)
    position = folded.graph.position
    return role_of, dict(sorted(members.items(), key=lambda each: position[each[1][0]]))
