"""A decision for every decision variable, and what follows from it for values, parameters and blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.formulation.remat.backward_slice import Again
from planner.formulation.remat.larger_forms import Effect, with_larger_forms
from planner.formulation.remat.levels import NOTHING, Level, Recompute
from planner.formulation.resharding import GATHERED, ReshardStep, Route, local_bytes
from planner.formulation.search_space import Space
from planner.formulation.strategies import Choice
from planner.formulation.unsharding import Unsharding
from planner.formulation.variables import Variable
from planner.ir.folding import Block, Instance
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, Layout

GatherBucket = dict[Ref, Route]
"""Parameters that are gathered together, from how they are stored to how they are used, by the same steps in order."""


@dataclass(frozen=True)
class Assignment:
    """A decision for every variable, and what is recomputed: what the rewrite obeys and the report shows.

    Attributes:
        prefetch: whether what micro-batches gather is gathered ahead, see :attr:`unsharding`.
    """

    space: Space
    chosen: Mapping[Variable, Choice | Layout]
    recompute: Recompute = NOTHING
    prefetch: bool = True

    @property
    def unsharding(self) -> Unsharding:
        """When a step gathers parameters and reduces their gradients."""
        return replace(self.space.unsharding, prefetch=self.prefetch)

    def choice(self, node: Node) -> Choice:
        """How an operator is run."""
        choice = self.chosen[self.space.variable_of[node.name]]
        assert isinstance(choice, Choice)
        return choice

    def produced(self, ref: Ref) -> Layout:
        """The layout in which a value is produced, or a leaf is stored."""
        decision = self.chosen[self.space.variable_of[ref.node]]
        return decision.results[ref.index] if isinstance(decision, Choice) else decision

    def consumer_layout(self, ref: Ref) -> Layout:
        """The layout in which a value's readers find it: that of its reshard point, if it has one."""
        point = self.space.reshard_point_of(ref)
        if point is None:
            return self.produced(ref)
        layout = self.chosen[point]
        assert isinstance(layout, tuple)
        return layout

    def shared_route(self, ref: Ref) -> Route:
        """The resharding done once, right after a value is produced."""
        return self._route(ref, self.produced(ref), self.consumer_layout(ref))

    def only_sums_gradient(self, ref: Ref) -> bool:
        """Whether readers find a parameter as it is stored, and its gradient summed in one call an axis."""
        is_param = self.space.graph.by_name[ref.node].op == "param"
        return is_param and all(step.rule == "I>R" for step in self.shared_route(ref))

    def operand_route(self, node: Node, position: int) -> Route:
        """The resharding of one operand, done by its reader."""
        ref = node.inputs[position]
        return self._route(ref, self.consumer_layout(ref), self.choice(node).operands[position])

    def gathering_route(self, node: Node, position: int) -> Route:
        """The resharding of a parameter operand that its block does together with those of its other parameters.

        Empty unless the operand is a parameter of this reader alone, in one layout, that is used replicated where it
        is stored whole or sharded: for those a block makes one call per axis and dtype, to gather them and to reduce
        their gradients.
        """
        ref = node.inputs[position]
        operands = self.choice(node).operands
        if len({operands[i] for i, other in enumerate(node.inputs) if other == ref}) > 1:
            return ()
        if self.space.graph.by_name[ref.node].op != "param" or self.space.reshard_point_of(ref) is not None:
            return ()
        route = self.operand_route(node, position)
        if any(step.rule not in GATHERED for step in route):
            return ()
        return _by_axis(route) if all(step.rule == "I>R" for step in route) else route

    def summed_first(self, ref: Ref, route: Route) -> int:
        """How many of the first steps of a value's way to its readers are taken once a micro-batched step: of a
        parameter that is gathered in each micro-batch those that only sum its gradients.
        """
        if not self.space.unsharding.all_reduces_once or self.space.graph.by_name[ref.node].op != "param":
            return 0
        return next((place for place, step in enumerate(route) if step.rule != "I>R"), len(route))

    def summed_together(self, bucket: GatherBucket) -> int:
        """The same of a bucket, all of whose parameters take the same steps."""
        return self.summed_first(*next(iter(bucket.items())))

    def what_it_comes_to(self, recompute: Recompute) -> Recompute:
        """An amount without gathering again where blocks have nothing to gather again."""
        return recompute.mapped(self.comes_to)

    def comes_to(self, kind: int, level: Level) -> Level:
        """The level that a kind of block runs at: a lower one where it has nothing to gather again."""
        if level == "resharded" and not self._reshards_again(kind):
            level = "gathered"
        return "none" if level == "gathered" and not self._unshards_again(kind) else level

    def _reshards_again(self, kind: int) -> bool:
        """Whether a kind of block saves anything computed in a larger form than it was made in."""
        found, params = self.again(kind, "resharded"), self.again(kind, "gathered")
        return bool(found.delivered) or found.taken != params.taken

    def _unshards_again(self, kind: int) -> bool:
        """Whether a kind of block has copies of parameters to let go, and does not use what is gathered once a step."""
        if self.space.unsharding.once_per_step:
            return False
        nodes = self.space.folded.kinds[kind][0].block.nodes
        taken = zip(nodes, self.again(kind, "gathered").taken, strict=True)
        return any(self.operand_effect(node, place) != "same" for node, places in taken for place in places)

    @cached_property
    def _again(self) -> dict[tuple[int, Level], Again]:
        return {}

    def again(self, kind: int, level: Level) -> Again:
        """What the instances of a kind recompute at a level other than ``none``, with the reshardings that run again
        since they make larger what is kept.
        """
        if (kind, level) not in self._again:
            blocks = self.space.decision_graph.blocks
            backward, found = blocks.backward(kind), blocks.again(kind, level)
            self._again[kind, level] = with_larger_forms(
                found, backward, lambda at, place: self.operand_effect(backward.nodes[at], place), self.shared_effect
            )
        return self._again[kind, level]

    def operand_effect(self, node: Node, position: int) -> Effect:
        """What the resharding of one operand makes."""
        return self._effect(node.inputs[position], self.operand_route(node, position))

    def shared_effect(self, ref: Ref) -> Effect:
        """What the resharding of a value for all its readers makes."""
        return self._effect(ref, self.shared_route(ref))

    def _effect(self, ref: Ref, route: Route) -> Effect:
        if route and self.is_larger(ref, route[0].before, route[-1].after):
            return "larger"
        axes = (self.space.mesh.axes[step.axis] for step in route if step.rule not in ("I>R", "R>I"))
        return "copy" if any(axis.size > 1 and axis.name != MICRO for axis in axes) else "same"

    def is_larger(self, ref: Ref, source: Layout, target: Layout) -> bool:
        """Whether a resharding makes a value larger."""
        tensor, mesh = self.space.graph.type_of(ref), self.space.mesh
        return source != target and local_bytes(tensor, target, mesh) > local_bytes(tensor, source, mesh)

    def saved_bytes(self, node: Node) -> int:
        """Bytes of the tensors that an operator pays for as kept for backward."""
        blocks = self.space.decision_graph.blocks
        number, at = blocks.seat[node.name]
        kind, nth = blocks.numbers[number]
        level, places = self.recompute.level(kind, nth), blocks.charge(node, self.recompute)
        as_made = () if level == "none" else self.again(kind, level).needed_as_made[at].intersection(places)
        found = self.space.bytes_of(node, self.choice(node), tuple(place for place in places if place not in as_made))
        return found + sum(self._bytes_as_made(kind, at, place) for place in as_made)

    def _bytes_as_made(self, kind: int, at: int, place: int) -> int:
        """Bytes of an operand in the form in which it is kept: as it is read, or before what makes it larger."""
        backward, size = self.space.decision_graph.blocks.backward(kind), 0
        for reader, position in backward.way_up(at, place):
            node = backward.nodes[reader]
            ref = node.inputs[position]
            forms = (
                (self.choice(node).operands[position], self.operand_effect(node, position)),
                (self.consumer_layout(ref), self.shared_effect(ref)),
                (self.produced(ref), "same"),
            )
            for layout, effect in forms:
                size = local_bytes(self.space.graph.type_of(ref), layout, self.space.mesh)
                if effect == "copy":
                    return size
        return size

    def gather_buckets(self, block: Block) -> list[GatherBucket]:
        """The parameters of a block that are gathered together."""
        found: dict[object, GatherBucket] = {}
        for node in block.nodes:
            for position, ref in enumerate(node.inputs):
                route, tensor = self.gathering_route(node, position), self.space.graph.type_of(ref)
                if route:
                    key = (tuple((step.axis, step.rule) for step in route), tensor.dtype, tensor.grad)
                    found.setdefault(key, {})[ref] = route
        return list(found.values())

    def gathered_again(self, instance: Instance, level: Level) -> set[Ref]:
        """The parameters that an instance of a block gathers again in backward, with all others of their bucket."""
        return self.discarded(instance, level) if self.space.runs_backward(instance) else set()

    def discarded(self, instance: Instance, level: Level) -> set[Ref]:
        """Those of them that a level lets go, whether backward passes the instance or not."""
        space, nodes, found = self.space, instance.block.nodes, set[Ref]()
        if not space.unsharding.unshards_again(level):
            return found
        for node, positions in zip(nodes, self.again(instance.kind, level).taken, strict=True):
            found.update(node.inputs[position] for position in positions if self.gathering_route(node, position))
        return found

    def ahead(self, block: Block) -> dict[int, int]:
        """The gather buckets of a block that are gathered while the block before computes, by number -> which step
        does.

        Those whose parts are stored here; where parameters are gathered once for all micro-batches, or waited for,
        none.
        """
        found: dict[int, int] = {}
        if not self.unsharding.prefetches:
            return found
        for number, bucket in enumerate(self.gather_buckets(block)):
            for place, step in enumerate(next(iter(bucket.values()))):  # like those of the others
                if step.rule == "S>R" and self.space.mesh.axes[step.axis].size > 1:
                    found.setdefault(number, place)
        return found

    def output_layout(self, position: int) -> Layout:
        """The layout in which output number ``position`` leaves the model."""
        layout = self.chosen["output", position]
        assert isinstance(layout, tuple)
        return layout

    def output_route(self, position: int) -> Route:
        """The resharding of an output before it leaves the model."""
        ref = self.space.leaving[position]
        return self._route(ref, self.consumer_layout(ref), self.output_layout(position))

    def _route(self, ref: Ref, source: Layout, target: Layout) -> Route:
        """The steps of a resharding; what stays as it is asks for no table."""
        return self.space.table(ref).route(source, target) if source != target else ()


def assignment_of(space: Space, choices: Sequence[int], recompute: Recompute = NOTHING) -> Assignment:
    """What choices for :meth:`planner.formulation.search_space.Space.problem` decide."""
    chosen = {
        variable: space.options[variable][choice] for variable, choice in zip(space.variables, choices, strict=True)
    }
    found = Assignment(space, chosen, recompute)
    return replace(found, recompute=found.what_it_comes_to(recompute)) if recompute.gathers else found


def _by_axis(route: Route) -> Route:
    """Steps of which each goes for itself, in the order of axes."""
    found: list[ReshardStep] = []
    for step in sorted(route, key=lambda step: step.axis):
        found.append(replace(step, before=found[-1].after if found else route[0].before))
    return tuple(found)
