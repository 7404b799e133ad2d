"""The simulated blocks of an assignment, each known by what tells it from others.

``(block, level, Surroundings) -> BlockMemory``, simulated at most once (:mod:`planner.analysis.memory.block`).
"""

from __future__ import annotations

from functools import cached_property

from planner.analysis.memory.block import NONE, BlockMemory, BlockRun, Surroundings
from planner.formulation.assignment import Assignment
from planner.formulation.remat.levels import Level
from planner.formulation.resharding import local_bytes
from planner.formulation.stage_boundaries import crossing
from planner.ir.folding import Instance
from planner.ir.graph import Ref
from planner.ir.layout import MICRO


class BlockMemories:
    """The simulated blocks of an assignment; those that are entered and left alike are simulated once."""

    def __init__(self, assignment: Assignment):
        self.assignment, self.space = assignment, assignment.space
        self.graph, self.instances = self.space.graph, self.space.folded.instances
        self.crossing = crossing(self.space.folded)
        self._known: dict[object, BlockMemory] = {}

    def of(self, number: int, level: Level, around: Surroundings | None = None) -> BlockMemory:
        """A block at a level; without surroundings what does not depend on them: all that forward does."""
        key = self.alike(number), level, around
        if key not in self._known:
            self._known[key] = (
                self.of(number, level, self._usual(number))
                if around is None
                else BlockRun(self.assignment, number, level, around).memory
            )
        return self._known[key]

    def _usual(self, number: int) -> Surroundings:
        """The most frequent surroundings: those of a block that alone reads what the one before it hands on."""
        block = self.instances[number].block
        leaves = [self.graph.by_name[ref.node].is_leaf for ref in block.inputs]
        read = {*self.crossing[number]}
        return Surroundings(
            given=(NONE,) * len(leaves),
            ends=tuple(not is_leaf for is_leaf in leaves),
            settles=tuple(self.graph.by_name[ref.node].op == "param" for ref in block.inputs),
            returns=tuple(ref in read for ref in block.outputs),
            stays=(False,) * len(block.outputs),
        )

    def alike(self, number: int) -> int:
        """A number that blocks have in common which are entered and left alike."""
        return self._alike[number]

    @cached_property
    def _alike(self) -> list[int]:
        numbers: dict[object, int] = {}
        return [numbers.setdefault(self._told_by(instance), len(numbers)) for instance in self.instances]

    def _told_by(self, instance: Instance) -> object:
        """What tells a block from others; leaves of its own do not, which are decided for all of its kind."""
        block, differentiated = instance.block, self.graph.differentiated
        inputs = [block.inputs[place] for place in self._entering[instance.kind]]
        entered = tuple((self.assignment.consumer_layout(ref), ref in differentiated) for ref in inputs)
        left = tuple((self.space.is_read(ref), ref in differentiated, self._leaving.get(ref)) for ref in block.outputs)
        return instance.kind, entered, left

    @cached_property
    def _entering(self) -> list[list[int]]:
        """Of each kind, the inputs that are no leaves of its own."""
        own = self.space.decision_graph.variables.own
        return [
            [place for place, ref in enumerate(first.block.inputs) if ref.node not in own]
            for first, *_ in self.space.folded.kinds
        ]

    @cached_property
    def _leaving(self) -> dict[Ref, tuple[object, ...]]:
        """How values leave the model."""
        found: dict[Ref, tuple[object, ...]] = {}
        for position, ref in enumerate(self.space.leaving):
            way = self.assignment.output_layout(position), position in self.graph.roots
            found[ref] = (*found.get(ref, ()), way)
        return found

    def size(self, ref: Ref) -> int:
        """Bytes of a value as its readers find it."""
        return local_bytes(self.graph.type_of(ref), self.assignment.consumer_layout(ref), self.space.mesh)

    # ---- what is there before the first block of a stage -------------------------------------------------------------

    def given_bytes(self, ref: Ref) -> int:
        """Bytes of an input of a block, apart from those of leaves that are there anyway."""
        return self.converted_bytes(ref) if self.graph.by_name[ref.node].is_leaf else self.size(ref)

    def converted_bytes(self, ref: Ref) -> int:
        """Bytes of a leaf where each micro-batch converts it before the first block of a stage; 0: it is used in
        memory that is there anyway.
        """
        node, space = self.graph.by_name[ref.node], self.space
        if not node.is_leaf or (node.op == "param" and space.unsharding.once_per_step):
            return 0
        route = self.assignment.shared_route(ref)
        route = route[self.assignment.summed_first(ref, route) :]
        if not any(self._copies(step.axis, step.rule) for step in route):
            return 0
        return self.size(ref)

    def _copies(self, axis: int, rule: str) -> bool:
        found = self.space.mesh.axes[axis]
        return found.size > 1 and found.name != MICRO and rule not in ("I>R", "R>I")

    def is_shared_parameter(self, ref: Ref) -> bool:
        """Whether blocks find a parameter whose gradients are added up within a micro-batch."""
        node = self.graph.by_name[ref.node]
        is_trained = node.op == "param" and node.results[0].grad
        return is_trained and not self.space.unsharding.once_per_step and self.space.variables.readers(ref) > 1
