"""Decision graph: the variables of a folded graph's problem and the edges between them, the same on every mesh.

Which variables there are (:mod:`planner.formulation.variables`), which values flow between them and how often follows
from the graph alone. After one pass over the graph everything here is found from one instance of each block and of each
way to enter it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from typing import NamedTuple, cast

from planner.formulation.block_facts import BlockFacts
from planner.formulation.remat.levels import NOTHING, Level, Recompute
from planner.formulation.strategies import Cuts, Dataflow
from planner.formulation.variables import Variable, Variables
from planner.ir.folding import Folded, Instance
from planner.ir.graph import Node, Ref
from planner.ops.sharding_rule import Rule

Flow = tuple[Variable, Variable, Ref, tuple[int, ...]]
"""Source variable, reader variable, representative value, operand positions."""


class Together(NamedTuple):
    """Parameters that one call of a block gathers: how many, and how often as large as one of them all are."""

    parameters: int
    times: float


class AsMade(NamedTuple):
    """Flows of values that are kept as they were made where that is smaller than what their resharding makes.

    Attributes:
        again: how many of them run again in backward then.
        held: how many results of them are held, by operand position, in the smaller form.
        leading: those of which one is there in the larger form, too, while the first of its kind runs its backward.
    """

    again: Mapping[Flow, int]
    held: Mapping[tuple[Flow, int], int]
    leading: Set[tuple[Flow, int]]


class DecisionGraph:
    """The variables of a folded graph and the flows between them, and how often each occurs in which part of a step.

    Args:
        folded: the graph and its distinct blocks.
        rules: the factor rule of every operator.
        shared: values that have a reshard point even if no member of their variable has several readers.
        like: that of another folding of the same graph, with the same rules.

    Attributes:
        variables: what is decided.
        blocks: what is known of the operators in between.
    """

    def __init__(
        self,
        folded: Folded,
        rules: Mapping[str, Rule],
        shared: frozenset[Ref] = frozenset(),
        like: DecisionGraph | None = None,
    ):
        self.folded, self.graph, self.rules = folded, folded.graph, rules
        self.variables = Variables(folded, shared)
        self.blocks: BlockFacts = BlockFacts(folded, rules, None if like is None else like.blocks.ways)
        self._takes: dict[tuple[str, Level], tuple[Flow, ...]] = {}
        self._flows_again: dict[Recompute, Mapping[Flow, int]] = {}
        self._as_made: dict[Recompute, AsMade] = {}

    def survey(self) -> None:
        """Walk the whole graph now, not when a mesh first asks: what comes after does not grow with its depth."""
        self.flows  # noqa: B018
        self.reshard_readers  # noqa: B018
        self.blocks.charged(NOTHING)

    @cached_property
    def reshard_readers(self) -> dict[Variable, tuple[tuple[Variable, int], ...]]:
        """Reshard point -> the (variable, operand position) of all who read any of its values."""
        found: dict[Variable, dict[tuple[Variable, int], None]] = {point: {} for point in self.variables.reshard_points}
        for source, head, _, positions in self.flows:
            if source in found and head[0] == "op":
                found[source].update(dict.fromkeys((head, position) for position in positions))
        return {point: tuple(readers) for point, readers in found.items()}

    @cached_property
    def together(self) -> dict[Variable, Together]:
        """Variable of a parameter that one operator of one block reads -> those of its block that are like it.

        They are gathered in one call as far as they are stored and used alike (:meth:`Assignment.gather_buckets`), and
        are priced as if they all were.
        """
        found: dict[Variable, Together] = {}
        for first, *_ in self.folded.kinds:
            alike: dict[object, list[Ref]] = {}
            for ref in first.block.inputs:
                if self.graph.by_name[ref.node].op == "param" and self.variables.reshard_point_of(ref) is None:
                    tensor = self.graph.type_of(ref)
                    alike.setdefault((tensor.dtype, tensor.grad), []).append(ref)
            for refs in alike.values():
                whole = sum(self.graph.type_of(ref).size_bytes for ref in refs)
                for ref in refs:
                    size = self.graph.type_of(ref).size_bytes
                    found[self.variables.variable_of[ref.node]] = Together(len(refs), whole / size if size else 1.0)
        return found

    def runs_again(self, variable: Variable, recompute: Recompute) -> int:
        """How many members of an operator's variable run again in backward."""
        if variable[0] != "op":
            return 0
        kind, at = cast(int, variable[1]), variable[2]
        levels = recompute.levels(kind)
        return sum(len(numbers) for level, numbers in levels if at in self.blocks.again(kind, level).operators)

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
        for point, ref in self.variables.reshard_points.items():
            variable = self.variables.variable_of[ref.node]
            for level, counted in recompute.levels(cast(int, variable[1])) if variable[0] == "op" else ():
                if (variable[2], ref.index) in self.blocks.again(cast(int, variable[1]), level).values:
                    flows[variable, point, ref, (0,)] += len(counted)
        return flows

    def as_made(self, recompute: Recompute) -> AsMade:
        """How often a resharding of each flow runs again in backward if it makes its value larger, and what is held."""
        if recompute not in self._as_made:
            self._as_made[recompute] = AsMade(self._count_larger(recompute), *self._held_as_made(recompute))
        return self._as_made[recompute]

    def _count_larger(self, recompute: Recompute) -> Mapping[Flow, int]:
        found = Counter[Flow]()
        for kind, (first, *_) in enumerate(self.folded.kinds):
            nodes = first.block.nodes
            for level, numbers in recompute.levels(kind):
                again = self.blocks.again(kind, level)
                for at, index in again.as_made:
                    shared = self._shared(Ref(nodes[at].name, index))
                    found.update({} if shared is None else {shared: len(numbers)})
                for node, places in zip(nodes, again.taken_if_larger, strict=True):
                    for ref, positions in _operands(node).items() if places else ():
                        if not places.isdisjoint(positions):
                            found[self._flow(ref, self.variables.variable_of[node.name], positions)] += len(numbers)
        return found

    def _held_as_made(self, recompute: Recompute) -> tuple[Mapping[tuple[Flow, int], int], Set[tuple[Flow, int]]]:
        """What is held is counted where a value leaves the operator that made it: by its first resharding."""
        held, leading = Counter[tuple[Flow, int]](), set[tuple[Flow, int]]()
        for (kind, at, place), times in self.blocks.charged_as_made(recompute).items():
            backward, (least, _) = self.blocks.backward(kind), recompute.levels(kind)[0]
            *_, (reader, first) = backward.way_up(at, place)
            node = backward.nodes[reader]
            ref = node.inputs[first]
            flow = self._flow(ref, self.variables.variable_of[node.name], _operands(node)[ref])
            shared = self._shared(ref)
            where = (flow, flow[3].index(first)) if shared is None else (shared, 0)
            held[where] += times
            if recompute.leads(kind) and place in self.blocks.again(kind, least).needed_as_made[at]:
                leading.add(where)
        return held, leading

    def _shared(self, ref: Ref) -> Flow | None:
        """The flow of a result to its reshard point, if it has one."""
        point = self.variables.reshard_point_of(ref)
        if point is None:
            return None
        return self.variables.variable_of[ref.node], point, self.variables.representative(ref), (0,)

    def _taken(self, instance: Instance, level: Level) -> tuple[Flow, ...]:
        """The flows whose reshardings an instance, the first of its way to be entered, runs again at a level."""
        key = instance.block.span.names[0], level
        if key not in self._takes:
            taken = self.blocks.again(instance.kind, level).taken
            self._takes[key] = tuple(
                self._flow(ref, self.variables.variable_of[node.name], positions)
                for at, node in enumerate(instance.block.nodes)
                for ref, positions in _operands(node).items()
                if not taken[at].isdisjoint(positions)
            )
        return self._takes[key]

    def _flow(self, ref: Ref, head: Variable, positions: tuple[int, ...]) -> Flow:
        return (
            self.variables.reshard_point_of(ref) or self.variables.variable_of[ref.node],
            head,
            self.variables.representative(ref),
            positions,
        )

    @cached_property
    def flows(self) -> dict[Flow, int]:
        """How often each flow occurs."""
        flows: Counter[Flow] = Counter()
        for instance, numbers in self._entered:
            for flow in self._read_by(instance):
                flows[flow] += len(numbers)
        for position, ref in enumerate(self.graph.leaving):
            flows[self._flow(ref, ("output", position), (0,))] += 1
        for point, ref in self.variables.reshard_points.items():
            variable = self.variables.variable_of[ref.node]
            flows[variable, point, ref, (0,)] = len(self.variables.members[variable])
        return flows

    @cached_property
    def equal_blocks(self) -> frozenset[int]:
        """The most instances of one kind with operands from the same variables, of the kind with most work."""
        most = max(
            range(len(self.blocks.flops)), key=lambda kind: self.blocks.flops[kind] * len(self.folded.kinds[kind])
        )
        alike = max((numbers for instance, numbers in self._entered if instance.kind == most), key=len)
        found = {*alike}
        return frozenset(at for at, (kind, nth) in enumerate(self.blocks.numbers) if kind == most and nth in found)

    def _read_by(self, instance: Instance) -> Iterator[Flow]:
        """The flows of all that an instance of a block reads."""
        for node in instance.block.nodes:
            for ref, positions in _operands(node).items():
                yield self._flow(ref, self.variables.variable_of[node.name], positions)

    @cached_property
    def reads(self) -> dict[Ref, tuple[tuple[Variable, tuple[int, ...]], ...]]:
        """Representative value -> the variables that read it, and at which operands."""
        found: dict[Ref, list[tuple[Variable, tuple[int, ...]]]] = {}
        for _, head, ref, positions in self.flows:
            found.setdefault(ref, []).append((head, positions))
        return {ref: tuple(heads) for ref, heads in found.items()}

    @cached_property
    def _entered(self) -> tuple[tuple[Instance, tuple[int, ...]], ...]:
        """The first instance of each block and of each way to enter it, and which of their kind all of these are."""
        found: dict[object, tuple[Instance, list[int]]] = {}
        for instance, (_, nth) in zip(self.folded.instances, self.blocks.numbers, strict=True):
            key = (
                instance.kind,
                tuple((self.variables.variable_of[ref.node], ref.index) for ref in instance.block.inputs),
            )
            found.setdefault(key, (instance, []))[1].append(nth)
        return tuple((instance, tuple(numbers)) for instance, numbers in found.values())

    @cached_property
    def distinct(self) -> tuple[Node, ...]:
        """The operators of the first instance of each block and of each way to enter it."""
        return tuple(node for instance, _ in self._entered for node in instance.block.nodes)

    def cuts(self, sizes: tuple[int, ...]) -> Cuts:
        """Where values may be cut into strips on a mesh of these sizes, by representative value."""
        return self._dataflow.on(sizes)

    @cached_property
    def _dataflow(self) -> Dataflow:
        return Dataflow(self._uses())

    def _uses(self) -> Iterator[tuple[Rule, tuple[Ref, ...], tuple[Ref, ...]]]:
        """Rule, operands and results of every operator, as representative values."""
        for instance, _ in self._entered:
            for node in instance.block.nodes:
                results = (self.variables.representative(Ref(node.name, i)) for i in range(len(node.results)))
                yield self.rules[node.name], tuple(map(self.variables.representative, node.inputs)), tuple(results)


def _operands(node: Node) -> dict[Ref, tuple[int, ...]]:
    """Every value that an operator reads, and the positions at which it does."""
    found: dict[Ref, tuple[int, ...]] = {}
    for position, ref in enumerate(node.inputs):
        found[ref] = (*found.get(ref, ()), position)
    return found
