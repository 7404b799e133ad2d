"""Block facts: what is known of the operators of each distinct block before anything is decided, on any mesh.

Each fact is found once, from the first instance of a kind of block, and holds for the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property

from planner.formulation.remat.backward_slice import Again, Backward
from planner.formulation.remat.levels import NOTHING, Level, Recompute
from planner.formulation.remat.saved_accounting import Charges, Places
from planner.formulation.strategies import Ways
from planner.formulation.variables import Variable
from planner.ir.folding import Block, Folded
from planner.ir.graph import Node, Ref
from planner.ops import OPS
from planner.ops.fusion import fuse
from planner.ops.memory_traffic import MemoryTraffic, added_places, traffic
from planner.ops.sharding_rule import Rule
from planner.ops.workspace import Working, working


class BlockFacts:
    """Operations, memory traffic, workspace, saved tensors and recomputation of the blocks of a folded graph.

    Args:
        folded: the graph and its distinct blocks.
        rules: the factor rule of every operator.
        ways: those to run operators on an axis that were found already with the same rules, see
            :func:`planner.formulation.strategies.axis_ways`.
    """

    def __init__(self, folded: Folded, rules: Mapping[str, Rule], ways: dict[object, Ways] | None = None):
        self.folded, self.graph, self.rules = folded, folded.graph, rules
        self.ways: dict[object, Ways] = {} if ways is None else ways
        self._backward: dict[int, Backward] = {}
        self._again: dict[tuple[int, Level], Again] = {}
        self._working: dict[str, Working] = {}
        self._workings: dict[object, Working] = {}
        self._last: dict[int, dict[Ref, int]] = {}
        self._traffic: dict[tuple[int, int, bool], MemoryTraffic] = {}
        self._traffics: dict[object, MemoryTraffic] = {}
        self._fused: dict[tuple[int, bool], Mapping[str, MemoryTraffic]] = {}
        self._charges = Charges(folded, self.again)
        self._charged: dict[Recompute, Mapping[Variable, Counter[Places]]] = {}
        self._as_made: dict[Recompute, Counter[tuple[int, int, int]]] = {}

    @cached_property
    def numbers(self) -> tuple[tuple[int, int], ...]:
        """The kind of every instance, and which of its kind it is."""
        count: Counter[int] = Counter()
        found = []
        for instance in self.folded.instances:
            found.append((instance.kind, count[instance.kind]))
            count[instance.kind] += 1
        return tuple(found)

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

    def block_of(self, node: Node) -> Block:
        """The block in which an operator is."""
        return self.folded.instances[self.seat[node.name][0]].block

    def repeats(self, node: Node) -> bool:
        """Whether the block in which an operator is is one of several layers, of a path that differs in numbers alone,
        and so whether the graph is folded or not.
        """
        return self._layers[_layer(self.block_of(node))] > 1

    @cached_property
    def _layers(self) -> Counter[tuple[str, int]]:
        return Counter(_layer(instance.block) for instance in self.folded.instances)

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
            key = self._reading(node)
            if key not in self._workings:
                self._workings[key] = working(self.graph, node)
            self._working[node.name] = self._workings[key]
        return self._working[node.name]

    def traffic(self, node: Node, on_cpu: bool, compiled: bool = False) -> MemoryTraffic:
        """What an operator passes over, see :mod:`planner.ops.memory_traffic`; all of a variable do the same.

        Args:
            compiled: whether its block is compiled, see :mod:`planner.ops.fusion`.
        """
        number, at = self.seat[node.name]
        kind = self.folded.instances[number].kind
        if compiled:
            block = self.folded.kinds[kind][0].block
            if (kind, on_cpu) not in self._fused:
                self._fused[kind, on_cpu] = fuse(self.graph, block.nodes, block.outputs, on_cpu=on_cpu).traffic
            return self._fused[kind, on_cpu][block.nodes[at].name]
        if (kind, at, on_cpu) not in self._traffic:
            first = self.folded.kinds[kind][0].block.nodes[at]
            last = self._read_last(kind)
            where = added_places(self.graph, first, frozenset(ref for ref in first.inputs if last.get(ref, at) > at))
            key = (*self._reading(first), where, on_cpu)
            if key not in self._traffics:
                self._traffics[key] = traffic(self.graph, first, where, on_cpu=on_cpu)
            self._traffic[kind, at, on_cpu] = self._traffics[key]
        return self._traffic[kind, at, on_cpu]

    def _reading(self, node: Node) -> tuple[object, ...]:
        """A key that is the same for copies of one operator that read alike, such as those of blocks that are not
        folded: types of operands, which of them are leaves, and which are the same.
        """
        inputs, by_name = node.inputs, self.graph.by_name
        makers = [by_name[ref.node] for ref in inputs]
        types = [id(maker.results[ref.index]) for maker, ref in zip(makers, inputs, strict=True)]
        ops = [maker.op if maker.is_leaf else "" for maker in makers]
        return (id(node.first), *types, *ops, *map(inputs.index, inputs))

    def _read_last(self, kind: int) -> dict[Ref, int]:
        """Value -> the last operator with a gradient in a kind's first instance that reads it."""
        if kind not in self._last:
            nodes = enumerate(self.folded.kinds[kind][0].block.nodes)
            differentiated = [(at, node) for at, node in nodes if any(tensor.grad for tensor in node.results)]
            self._last[kind] = {ref: at for at, node in differentiated for ref in node.inputs}
        return self._last[kind]

    def charged(self, recompute: Recompute) -> Mapping[Variable, Counter[Places]]:
        """Which tensors the members of an operator's variable pay for, and how many members pay for just these; but for
        those :meth:`charged_as_made`.
        """
        recompute = recompute or NOTHING
        if recompute not in self._charged:
            self._charge_all(recompute)
        return self._charged[recompute]

    def charged_as_made(self, recompute: Recompute) -> Mapping[tuple[int, int, int], int]:
        """Of which operands (by kind, operator and place) how many instances pay for the smaller of their form as made
        and as read.
        """
        self.charged(recompute)
        return self._as_made[recompute or NOTHING]

    def _charge_all(self, recompute: Recompute) -> None:
        found: dict[Variable, Counter[Places]] = {}
        as_made = Counter[tuple[int, int, int]]()
        paid = zip(self.folded.instances, self._charges.of(recompute), strict=True)
        for (kind, each), times in Counter((instance.kind, each) for instance, each in paid).items():
            apart = self.again(kind, each.level).needed_as_made if each.level != "none" else ()
            for at, places in enumerate(each.places):
                made = apart[at].intersection(places) if apart else ()
                as_made.update({(kind, at, place): times for place in made})
                rest = tuple(place for place in places if place not in made) if made else places
                found.setdefault(("op", kind, at), Counter())[rest] += times
        self._charged[recompute], self._as_made[recompute] = found, as_made


def _layer(block: Block) -> tuple[str, int]:
    """The same for layers that are alike: their path without numbers, and how many operators they have."""
    return re.sub(r"\d+", "*", block.path), len(block.span)
