"""The blocks of an assignment in a row, with seconds and bytes of each, for a pipeline to be cut from.

An assignment says how one stage's ranks share each block; here its blocks, in the order of the graph, become a chain of
:class:`planner.solve.pipeline.stages.ChainBlock`: seconds and bytes of one micro-batch on one rank, with the levels of
recomputation as ways to save. What happens once a step is told apart: the update, and gathering parameters and reducing
gradients, unless each micro-batch does so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise

from planner.analysis.memory.block import BlockMemory
from planner.analysis.memory.gather import keeps_gradients, summed_by, sums_of
from planner.analysis.pipeline.block_memories import BlockMemories
from planner.analysis.pipeline.leaf_memory import Leaves, Parts, by_use
from planner.base.symbolic_float import at_least_zero
from planner.formulation.assignment import Assignment
from planner.formulation.local_costs import Work
from planner.formulation.remat.levels import Level, Levels
from planner.formulation.resharding import local_bytes
from planner.formulation.stage_boundaries import crossing, sent
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, PIPELINE, Axis, Layout
from planner.ops import OPS
from planner.solve.pipeline.schedule import versions
from planner.solve.pipeline.stages import Chain, ChainBlock, Cut, Pipeline, RematOption


@dataclass(frozen=True)
class Shared:
    """What a rank of a pipeline has to do with a leaf that blocks of another one read too.

    Attributes:
        held, gradients: bytes by use, through all of a step and from the first backward on.
        at_end_bytes: besides, at the end of the step.
        gather_s, reduce_s, update_s: once a step, as in :class:`Link`.
        sum_s: adding up its gradients, those of two ranks; of more it is hardly more.
    """

    held: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)
    at_end_bytes: int = 0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    sum_s: float = 0.0


@dataclass(frozen=True)
class Link:
    """One block of the chain, and what :class:`planner.solve.pipeline.stages.ChainBlock` leaves out.

    Attributes:
        communication_s: what of the block's seconds is communication.
        gather_s, reduce_s, update_s: once a step: gathering parameters, reducing gradients as far as the last backward
            of the block does not hide it, the optimizer's update.
        hiding_s: of a step in one piece, how much of all that reduces gradients the block's backward may hide.
        held: what of the block's held bytes is of which use, see :data:`planner.analysis.memory.storages.USES`.
        input_bytes: what of them are inputs of the model, which every rank is given.
        gradients: of the gradients that come when it runs its backward first, bytes by use.
        levels: for each way to save, the level of recomputation that it is.
        working_bytes: for each way to save, what backward has at its fullest beside what is saved.
        gathered_s: for each way to save, what of its recomputing is gathering parameters again.
        gathers_ahead: whether its parameters are gathered while the block before computes.
        at_end_bytes: what is there besides at the end of the step, when gradients are reduced.
        reduced_bytes: and while those of the block are, which go together.
        memories: the simulated blocks of the assignment.
        shared: the leaves that other blocks read too, by name. The first block that reads one counts it as its own.
        uses: the trained parameters among these that are gathered once a step, and bytes of the gradient of each use.
    """

    block: ChainBlock
    communication_s: float
    gather_s: float
    reduce_s: float
    update_s: float
    held: Mapping[str, int]
    input_bytes: int
    gradients: Mapping[str, int]
    levels: tuple[Level, ...]
    working_bytes: tuple[int, ...]
    gathered_s: tuple[float, ...]
    gathers_ahead: bool
    at_end_bytes: int
    reduced_bytes: int
    memories: BlockMemories = field(compare=False, repr=False)
    shared: tuple[tuple[str, Shared], ...] = ()
    uses: tuple[tuple[str, int], ...] = ()
    hiding_s: float = 0.0

    @property
    def once_s(self) -> float:
        """Seconds once a step."""
        return self.gather_s + self.reduce_s + self.update_s

    @property
    def least_memory(self) -> Link:
        """The same that saves least, whatever it takes."""
        return replace(
            self,
            block=replace(self.block, savings=self.block.savings[-1:]),
            levels=self.levels[-1:],
            working_bytes=self.working_bytes[-1:],
            gathered_s=self.gathered_s[-1:],
        )


def links_of(assignment: Assignment, levels: Levels, schedule: str | None = None) -> tuple[Link, ...]:
    """The blocks of an assignment as a chain; its own recomputation aside, which the cut decides anew.

    Args:
        levels: those at which blocks may run.
        schedule: that of the pipeline, where it is known, since 2bw holds two versions of the weights.
    """
    return _Chain(assignment, levels, versions(schedule)).links


def chain_of(links: Sequence[Link]) -> Chain:
    """Links as a chain with counts."""
    return [(block, len(list(same))) for block, same in groupby(link.block for link in links)]


def placed(links: Sequence[Link], cut: Cut) -> Iterator[tuple[int, Link, int]]:
    """Of a chain that is cut, the stage of every block, the block, and how it saves."""
    for stage, (low, high) in enumerate(pairwise(cut.bounds)):
        for link, way in zip(links[low:high], cut.savings[low:high], strict=True):
            yield stage, link, way


def also_read(links: Sequence[Link], pipeline: Pipeline, bounds: Sequence[int]) -> Iterator[tuple[int, str, Shared]]:
    """What ranks have to do with leaves, by name, that blocks of others read too, beside what the first such block
    counts.
    """
    readers: dict[str, dict[int, Shared]] = {}
    for home, (low, high) in zip(pipeline.placed, pairwise(bounds), strict=True):
        for link in links[low:high]:
            for name, each in link.shared:
                readers.setdefault(name, {})[home] = each
    for name, ranks in readers.items():
        for number, (rank, each) in enumerate(ranks.items() if len(ranks) > 1 else ()):
            yield rank, name, each if number else Shared(sum_s=each.sum_s)


@dataclass
class _Sums:
    """What a block comes to while its leaves and operators are gone through, as in :class:`Link`.

    Attributes:
        reduce_s, hidden_s: reducing gradients, and how much of it backward could hide.
    """

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    communication_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    hidden_s: float = 0.0
    update_s: float = 0.0


class _Chain:
    """The links of one assignment; blocks that are entered and left alike are worked out once."""

    def __init__(self, assignment: Assignment, levels: Levels, versions: int):
        self.assignment, self.space = assignment, assignment.space
        self.graph, self.folded = self.space.graph, self.space.folded
        self.levels, self.leaves = levels, Leaves(assignment, versions)
        self.memories = BlockMemories(assignment)
        self._known: dict[object, Link] = {}
        self._works: dict[str, Work] = {}
        self._crossing_places: dict[int, tuple[int, ...]] = {}

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._link(number, refs) for number, refs in enumerate(crossing(self.folded)))

    def _link(self, number: int, crosses: Sequence[Ref]) -> Link:
        """A block, and the values of it and earlier ones that later ones read."""
        instance = self.folded.instances[number]
        sizes = sent(self.assignment, crosses)
        back = sum(size for ref, size in sizes.items() if ref in self.graph.differentiated)
        leaves = self.leaves.first_read[number]
        shared = tuple(name for name in leaves if self.leaves.is_read_elsewhere(name))
        saved = self._crossing_into(number)
        first = tuple(self._first_savers.get(ref, number) == number for ref in saved)
        key = (self.memories.alike(number), shared, first, sum(sizes.values()), back, self._kept_bytes(number))
        if key not in self._known:
            self._known[key] = self._work_out(number, leaves, sum(sizes.values()), back)
        read = dict.fromkeys(ref.node for ref in instance.block.inputs if ref.node in self._shared)
        uses = tuple(self.leaves.uses(number))
        return replace(self._known[key], shared=tuple((name, self._shared[name]) for name in read), uses=uses)

    @cached_property
    def _shared(self) -> dict[str, Shared]:
        """The leaves that several blocks read."""
        readers = Counter(name for each in self.folded.instances for name in {ref.node for ref in each.block.inputs})
        pair, times = Axis(PIPELINE, 2, self.space.stages * self.space.mesh.size // 2), self.space.gathers_per_step
        found: dict[str, Shared] = {}
        for leaf in (leaf for leaf in self.graph.leaves if readers[leaf.name] > 1 and self.space.stages > 1):
            name = leaf.name
            layout, wanted = self.assignment.produced(Ref(name)), self.assignment.consumer_layout(Ref(name))
            gather_s, reduce_s = self._conversion(Ref(name), layout, wanted)
            size = local_bytes(leaf.results[0], layout, self.space.mesh) if leaf.op == "param" else 0
            is_summed = leaf.op == "param" and leaf.results[0].grad
            sum_s = self.space.cost.collective_s("all_reduce", pair, size) if is_summed else 0.0
            update_s, _ = self.space.storage(leaf, layout)
            parts = self.leaves.shared(name)
            held, gradients, at_end, _ = map(by_use, parts if leaf.op != "input" else Parts())
            once = gather_s * times, reduce_s * times, update_s, sum_s
            found[name] = Shared(held, gradients, at_end.total(), *once)
        return found

    def _work_out(self, number: int, leaves: list[str], sent_bytes: int, returned_bytes: int) -> Link:
        instance, sums = self.folded.instances[number], _Sums()
        way = Axis(PIPELINE, self.space.stages, self.space.mesh.size)
        send_s = self.space.collective_s("send", way, sent_bytes) if sent_bytes else 0.0
        for name in leaves:
            layout = self.assignment.produced(Ref(name))
            sums.update_s += self.space.storage(self.graph.by_name[name], layout)[0]
            self._convert_once(sums, Ref(name), layout, self.assignment.consumer_layout(Ref(name)))
        for node in instance.block.nodes:
            self._run(sums, node)
        parts = self.leaves.parts(number)
        held, gradients = by_use(parts.always), by_use(parts.gradients)
        held["activations"] += self._kept_bytes(number)
        held["gradients"] += self._bucket_bytes(number)
        before = (self.leaves.versions - 1) * gradients.total()
        kind = instance.kind
        levels = tuple(dict.fromkeys(self.assignment.comes_to(kind, level) for level in self.levels.of(kind)))
        again_s = [self._again_s(number, level) for level in levels]
        memories = [self.memories.of(number, level) for level in levels]
        saved = [self._saved_bytes(number, memory) for memory in memories]
        is_beside = self.space.unsharding.overlaps_reduce
        return Link(
            block=ChainBlock(
                name=self.folded.names[kind],
                forward_s=sums.forward_s,
                input_s=sums.input_s,
                weight_s=sums.weight_s,
                held_bytes=sum(held.values()) + before,
                savings=tuple(RematOption(sum(each_s), size) for each_s, size in zip(again_s, saved, strict=True)),
                send_s=send_s,
                gradient_bytes=gradients.total(),
            ),
            communication_s=sums.communication_s,
            gather_s=sums.gather_s,
            reduce_s=sums.reduce_s if is_beside else at_least_zero(sums.reduce_s - sums.hidden_s),
            update_s=sums.update_s,
            held=held,
            input_bytes=sum(
                part.bytes * part.times for part in parts.always if self.graph.by_name[part.leaf].op == "input"
            ),
            gradients=gradients,
            levels=levels,
            working_bytes=tuple(memory.working_bytes for memory in memories),
            gathered_s=tuple(gathered_s for _, gathered_s in again_s),
            gathers_ahead=memories[0].coming_bytes > 0,
            at_end_bytes=by_use(parts.at_end).total(),
            reduced_bytes=by_use(parts.reduced).total(),
            memories=self.memories,
            hiding_s=sums.hidden_s * is_beside,
        )

    def _bucket_bytes(self, number: int) -> int:
        """Bytes of gradients of the parameters that are held with a block for which memory is there throughout."""
        if not keeps_gradients(self.space):
            return 0
        refs = summed_by(self.assignment, self.folded.instances[number].block)
        refs += [Ref(name) for name in self.leaves.first_read[number] if sums_of(self.assignment, Ref(name))]
        kinds = ((self.graph.type_of(ref), self.assignment.produced(ref)) for ref in refs)
        return sum(local_bytes(kind, layout, self.space.mesh) for kind, layout in kinds if kind.grad)

    def _kept_bytes(self, number: int) -> int:
        """Bytes of the outputs that a block makes, where micro-batches are put together to them."""
        return sum(self.leaves.outputs(number).values()) if self.space.micro_batched else 0

    def _saved_bytes(self, number: int, memory: BlockMemory) -> int:
        """Bytes that a block saves of a micro-batch: what it makes, and inputs that no earlier block saves, where
        others save as little as they may.
        """
        inputs = dict(zip(self.folded.instances[number].block.inputs, memory.saves, strict=True))
        first = (ref for ref in self._crossing_into(number) if self._first_savers.get(ref, number) == number)
        return memory.saved_bytes + sum(self.memories.given_bytes(ref) for ref in first if inputs[ref])

    def _crossing_into(self, number: int) -> tuple[Ref, ...]:
        """The inputs of a block that are in memory of a micro-batch."""
        inputs = self.folded.instances[number].block.inputs
        found = self._crossing_places.get(self.memories.alike(number))
        if found is None:
            found = tuple(place for place, ref in enumerate(inputs) if self.memories.given_bytes(ref))
            self._crossing_places[self.memories.alike(number)] = found
        return tuple(inputs[place] for place in found)

    @cached_property
    def _first_savers(self) -> dict[Ref, int]:
        """The first block that saves a value which crosses from block to block, if those that could save less do."""
        found: dict[Ref, int] = {}
        known: dict[int, tuple[list[int], list[int]]] = {}
        for number, instance in enumerate(self.folded.instances):
            alike, block = self.memories.alike(number), instance.block
            if alike not in known:
                memory = self.memories.of(number, self.levels.computed(instance.kind)[-1])
                crossing = {*self._crossing_into(number)}
                inputs = zip(block.inputs, memory.saves, strict=True)
                saved = [place for place, (ref, saves) in enumerate(inputs) if saves and ref in crossing]
                made = [at for at, output in enumerate(memory.outputs) if output.is_saved or output.like < 0]
                known[alike] = saved, made
            saved, made = known[alike]
            for ref in (*(block.inputs[place] for place in saved), *(block.outputs[place] for place in made)):
                found.setdefault(ref, number)
        return found

    def _run(self, sums: _Sums, node: Node) -> None:
        """Add an operator, with the reshardings of its operands and of what it delivers."""
        work = self._work(node)
        weighted_s = work.backward_s / 2 if self._has_weights(node) else 0.0
        sums.forward_s += work.forward_s + work.inner_forward_s
        sums.input_s += work.backward_s - weighted_s + work.inner_backward_s
        sums.weight_s += weighted_s
        sums.communication_s += work.inner_s
        sums.hidden_s += work.backward_s * self.space.overlap
        for ref, source, target in self._moves(node):
            if self.graph.by_name[ref.node].op == "param":
                self._convert_once(sums, ref, source, target)
            else:
                there_s, back_s = self._conversion(ref, source, target)
                sums.forward_s += there_s
                sums.input_s += back_s
                sums.communication_s = sums.communication_s + there_s + back_s

    def _work(self, node: Node) -> Work:
        """Seconds of an operator, asked for once for all levels."""
        if node.name not in self._works:
            self._works[node.name] = self.space.work(node, self.assignment.choice(node))
        return self._works[node.name]

    def _convert_once(self, sums: _Sums, ref: Ref, source: Layout, target: Layout) -> None:
        """Add what is gathered before all micro-batches and reduced after them, and adding up the gradients of each; or
        both for each; or in a step in one piece what is reduced while it computes.
        """
        there_s, back_s = self._conversion(ref, source, target)
        summed_s = self._summed_s(ref, source, target)
        if self.space.unsharding.overlaps_reduce:
            sums.forward_s += there_s
            sums.reduce_s += back_s
            sums.communication_s += there_s
            return
        if not self.space.unsharding.once_per_step:
            sums.forward_s += there_s
            sums.weight_s += back_s
            sums.communication_s += there_s + back_s - summed_s * self.space.mesh.micro_batches
            return
        sums.weight_s += summed_s
        sums.gather_s += there_s
        sums.reduce_s = sums.reduce_s + back_s - self.space.mesh.micro_batches * summed_s

    def _moves(self, node: Node) -> list[tuple[Ref, Layout, Layout]]:
        """Reshardings of a node's operands, each value to each layout once, then of what it delivers."""
        assignment = self.assignment
        wanted = dict.fromkeys(zip(node.inputs, assignment.choice(node).operands, strict=True))
        found = [(ref, assignment.consumer_layout(ref), layout) for ref, layout in wanted]
        for ref in (Ref(node.name, index) for index in range(len(node.results))):
            found.append((ref, assignment.produced(ref), assignment.consumer_layout(ref)))
            found += [(ref, assignment.consumer_layout(ref), layout) for layout in self._leaving(ref)]
        return [(ref, source, target) for ref, source, target in found if source != target]

    def _leaving(self, ref: Ref) -> tuple[Layout, ...]:
        """The layouts in which a value leaves the model."""
        return tuple(map(self.assignment.output_layout, self._positions.get(ref, ())))

    @cached_property
    def _positions(self) -> dict[Ref, list[int]]:
        """The numbers as which values leave the model."""
        found: dict[Ref, list[int]] = {}
        for position, ref in enumerate(self.space.leaving):
            found.setdefault(ref, []).append(position)
        return found

    def _conversion(self, ref: Ref, source: Layout, target: Layout) -> tuple[float, float]:
        """Seconds forward and backward."""
        return (0.0, 0.0) if source == target else self.space.conversion_s(ref, source, target)

    def _summed_s(self, ref: Ref, source: Layout, target: Layout) -> float:
        """Seconds to add a parameter's gradient of one micro-batch to that of the others."""
        space = self.space
        steps = space.table(ref).route(source, target) if source != target else ()
        summed = (step for step in steps if space.mesh.axes[step.axis].name == MICRO)
        all_s = sum(space.conversion_s(ref, step.before, step.after)[1] for step in summed)
        return all_s / space.mesh.micro_batches if all_s else 0.0

    def _has_weights(self, node: Node) -> bool:
        """Whether an operator is a product with a parameter, so that half of its backward is the weight's."""
        row = OPS.get(node.op)
        return row is not None and row.contracts and any(map(self._is_weight, node.inputs))

    def _is_weight(self, ref: Ref) -> bool:
        node = self.graph.by_name[ref.node]
        row = OPS.get(node.op)
        if row is not None and row.view and len(node.inputs) == 1:
            return self._is_weight(node.inputs[0])
        return node.op == "param"

    def _again_s(self, number: int, level: Level) -> tuple[float, float]:
        """Seconds of what a block recomputes, and of gathering parameters for that."""
        if level == "none":
            return 0.0, 0.0
        instance, space, made_s, gathered_s = self.folded.instances[number], self.space, 0.0, 0.0
        again = space.decision_graph.blocks.again(instance.kind, level)
        for at, node in enumerate(instance.block.nodes):
            choice = self.assignment.choice(node)
            if at in again.operators:
                work = self._work(node)
                made_s += work.forward_s + work.inner_forward_s
            larger = {i for i in again.taken_if_larger[at] if self.assignment.operand_effect(node, i) == "larger"}
            wanted = {(node.inputs[i], choice.operands[i]) for i in again.taken[at] | larger}
            moves = [(ref, self.assignment.consumer_layout(ref), to) for ref, to in wanted]
            for ref in (Ref(node.name, index) for index in range(len(node.results))):
                is_larger = (at, ref.index) in again.as_made and self.assignment.shared_effect(ref) == "larger"
                if is_larger or (at, ref.index) in again.delivered:
                    moves.append((ref, self.assignment.produced(ref), self.assignment.consumer_layout(ref)))
            for ref, source, target in moves:
                seconds = self._conversion(ref, source, target)[0]
                if self.graph.by_name[ref.node].op != "param":
                    made_s += seconds
                elif not space.unsharding.once_per_step:
                    gathered_s += seconds
        return made_s, gathered_s
