"""Chain: the blocks of an assignment, one after another, as a pipeline is cut from them.

An assignment says how one stage's ranks share each block; here its blocks, in the order of the graph, become a chain of
:class:`planner.pipeline.stages.Block`: seconds and bytes of one micro-batch on one rank, with the levels of
recomputation as ways to save. What happens once a step is told apart: the update, and gathering parameters and reducing
gradients, unless each micro-batch does so.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from planner.assignment import Assignment
from planner.conversion import local_bytes
from planner.exchange import crossing
from planner.fold import Instance
from planner.graph import Node, Ref
from planner.layout import MICRO, PIPELINE, Axis, Layout
from planner.ops import OPS
from planner.ops.table import contraction_flops
from planner.pipeline.schedule import versions
from planner.pipeline.stages import Block, Chain, Saving
from planner.recompute import NOTHING, Amount, Level, Levels, Recompute
from planner.seconds import at_least_zero


@dataclass(frozen=True)
class Shared:
    """What a rank of a pipeline has to do with a leaf that blocks of another one read too.

    Attributes:
        held: bytes by use.
        gather_s, reduce_s, update_s: once a step, as in :class:`Link`.
        sum_s: adding up its gradients, those of two ranks; of more it is hardly more.
    """

    held: Mapping[str, int]
    gather_s: float
    reduce_s: float
    update_s: float
    sum_s: float


@dataclass(frozen=True)
class Link:
    """One block of the chain, and what :class:`planner.pipeline.stages.Block` leaves out.

    Attributes:
        communication_s: what of the block's seconds is communication.
        gather_s, reduce_s, update_s: once a step: gathering parameters, reducing gradients as far as the last backward
            does not hide it, the optimizer's update.
        held: what of the block's held bytes is of which use, see :data:`planner.heap.USES`.
        levels: for each way to save, the level of recomputation that it is.
        working_bytes: for each way to save, what its operators need while they run and what it has made again.
        gathered_bytes: for each way to save, how much of that is parameters gathered for this micro-batch.
        gathered_s: for each way to save, what of its recomputing is gathering parameters again.
        shared: the leaves that other blocks read too, by name. The first block that reads one counts it as its own.
    """

    block: Block
    communication_s: float
    gather_s: float
    reduce_s: float
    update_s: float
    held: Mapping[str, int]
    levels: tuple[Level, ...]
    working_bytes: tuple[int, ...]
    gathered_bytes: tuple[int, ...]
    gathered_s: tuple[float, ...]
    shared: tuple[tuple[str, Shared], ...] = ()

    @property
    def once_s(self) -> float:
        """Seconds once a step."""
        return self.gather_s + self.reduce_s + self.update_s

    @property
    def leanest(self) -> Link:
        """The same that saves least, whatever it takes."""
        return replace(
            self,
            block=replace(self.block, savings=self.block.savings[-1:]),
            levels=self.levels[-1:],
            working_bytes=self.working_bytes[-1:],
            gathered_bytes=self.gathered_bytes[-1:],
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


def dropped_bytes(assignment: Assignment, instance: Instance, level: Level) -> int:
    """Bytes that an instance has made again while it is undone, at a level of recomputation."""
    if level == "none":
        return 0
    again = assignment.space.skeleton.again(instance.kind, level)
    return sum(
        assignment.space.bytes_of(node, assignment.choice(node), places)
        for node, places in zip(instance.block.nodes, again.dropped, strict=True)
    )


@dataclass(frozen=True)
class Brought:
    """Bytes of the parameters that a block takes gathered, where each micro-batch gathers them anew.

    Attributes:
        own: those that it gathers.
        before: those gathered for it before all blocks.
        lets_go: its own that it may let go after forward and gather again when it is undone.
        stays: others that backward reads again: through views, or gathered before.
        parts: what its own are gathered from.
        gradients: the whole gradients of its own, by the operator that makes them.
    """

    own: int = 0
    before: int = 0
    lets_go: int = 0
    stays: int = 0
    parts: int = 0
    gradients: Mapping[str, int] = field(default_factory=dict)

    def saved_bytes(self, level: Level) -> int:
        """What is held from forward to backward."""
        return self.stays + self.lets_go * (level == "none")

    def there_bytes(self, level: Level) -> int:
        """What is there beside that while the block runs, or is undone."""
        return self.own + self.before - self.saved_bytes(level)


def savers_of(assignment: Assignment) -> dict[Ref, list[int]]:
    """The parameters that each micro-batch gathers before all blocks -> the blocks whose backward reads them again."""
    space, found = assignment.space, defaultdict[Ref, list[int]](list)
    if space.brings_once:
        return {}
    before = {leaf for leaf in space.skeleton.relayed_leaves if _grows(assignment, leaf)}
    for number, instance in enumerate(space.folded.instances):
        first, backward = space.folded.kinds[instance.kind][0], space.skeleton.backward(instance.kind)
        for ref, like in zip(instance.block.inputs, first.block.inputs, strict=True):
            if ref in before and like in backward.read:
                found[ref].append(number)
    return found


def _grows(assignment: Assignment, leaf: Ref) -> bool:
    """Whether a parameter is gathered before all blocks."""
    space, (stored, delivered) = assignment.space, (assignment.produced(leaf), assignment.delivered(leaf))
    if space.graph.by_name[leaf.node].op != "param" or stored == delivered:
        return False
    tensor = space.graph.type_of(leaf)
    return local_bytes(tensor, delivered, space.mesh) > local_bytes(tensor, stored, space.mesh)


def brought_by(assignment: Assignment, number: int, saved: Mapping[Ref, Sequence[int]]) -> Brought:
    """What a block takes gathered; nothing where parameters are gathered once a step.

    Args:
        saved: see :func:`savers_of`; the first of them counts what all need.
    """
    space = assignment.space
    if space.brings_once:
        return Brought()
    instance = space.folded.instances[number]
    backward, taken = space.skeleton.backward(instance.kind), space.skeleton.again(instance.kind, "gathered").taken
    sums, gradients = Counter[str](), Counter[str]()
    for at, node in enumerate(instance.block.nodes):
        places = {key: i for i, key in enumerate(zip(node.inputs, assignment.choice(node).operands, strict=True))}
        for (ref, layout), place in places.items():
            if space.graph.by_name[ref.node].op != "param":
                continue
            tensor = space.graph.type_of(ref)
            delivered, used = (local_bytes(tensor, each, space.mesh) for each in (assignment.delivered(ref), layout))
            if used > delivered:
                again, is_read = place in taken[at], backward.tensors[at][place] in backward.read
                sums.update(own=used, parts=delivered, lets_go=used * again, stays=used * (is_read and not again))
                gradients[node.name] += used * tensor.grad
    for ref in instance.block.inputs:
        if _grows(assignment, ref) and number in (saved.get(ref) or [number])[:1]:
            size = local_bytes(space.graph.type_of(ref), assignment.delivered(ref), space.mesh)
            sums.update(before=size, stays=size * (ref in saved))
    return Brought(**sums, gradients=gradients)


def working_moments(assignment: Assignment, number: int, level: Level, brought: Brought) -> list[int]:
    """Bytes at each moment that may be the fullest while a block runs or is undone, beside what is held and saved.

    Parameters that it gathers for the micro-batch go one by one while their whole gradients come. When they are
    gathered there is also what came, in the order of ranks, and when the gradients are reduced what is sent.
    """
    space, instance = assignment.space, assignment.space.folded.instances[number]
    beside = brought.there_bytes(level)
    again = dropped_bytes(assignment, instance, level) + beside
    found = [
        most + again + brought.gradients.get(node.name, 0)
        for node in instance.block.nodes
        for most in space.transients(node, assignment.choice(node))
    ]
    return [*found, beside + brought.own + brought.parts] if brought.parts else found


@dataclass
class _Sums:
    """What a block comes to while its leaves and operators are gone through, as in :class:`Link`.

    Attributes:
        reduce_s, hidden_s: reducing gradients, and how much of it backward could hide.
        grown: bytes of what each leaf is gathered into.
    """

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    communication_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    hidden_s: float = 0.0
    update_s: float = 0.0
    held: Counter[str] = field(default_factory=Counter)
    grown: Counter[str] = field(default_factory=Counter)


class _Chain:
    """The links of one assignment; blocks that are entered and left alike are worked out once."""

    def __init__(self, assignment: Assignment, levels: Levels, versions: int):
        self.assignment, self.space, self.versions = assignment, assignment.space, versions
        self.graph, self.folded = self.space.graph, self.space.folded
        self.levels = levels
        self._known: dict[object, Link] = {}

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._link(number, sent) for number, sent in enumerate(self._sent_s()))

    def _sent_s(self) -> list[float]:
        """Seconds to send on, after each block, all values of it and earlier ones that later ones read."""
        space, graph, delivered = self.space, self.graph, self.assignment.delivered
        axis = Axis(PIPELINE, space.stages, space.mesh.size)
        sizes = (
            sum(local_bytes(graph.type_of(ref), delivered(ref), space.mesh) for ref in refs)
            for refs in crossing(self.folded)
        )
        return [space.collective_s("send", axis, size) if size else 0.0 for size in sizes]

    def _link(self, number: int, send_s: float) -> Link:
        instance = self.folded.instances[number]
        leaves = self._leaves[number]
        shared = tuple(name for name in leaves if len(self.space.role_of[name]) == 2)
        entered = tuple(self.assignment.delivered(ref) for ref in instance.block.inputs)
        left = tuple((self.space.is_read(ref), self._leaving(ref)) for ref in instance.block.outputs)
        first = tuple(self._savers.get(ref, [number])[0] == number for ref in instance.block.inputs)
        key = (instance.kind, entered, left, shared, first, send_s)
        if key not in self._known:
            self._known[key] = self._work_out(number, leaves, send_s)
        read = dict.fromkeys(ref.node for ref in instance.block.inputs if ref.node in self._shared)
        return replace(self._known[key], shared=tuple((name, self._shared[name]) for name in read))

    @cached_property
    def _savers(self) -> dict[Ref, list[int]]:
        return savers_of(self.assignment)

    @cached_property
    def _shared(self) -> dict[str, Shared]:
        """The leaves that several blocks read."""
        readers = Counter(name for each in self.folded.instances for name in {ref.node for ref in each.block.inputs})
        pair, times = Axis(PIPELINE, 2, self.space.stages * self.space.mesh.size // 2), self.space.brought
        found: dict[str, Shared] = {}
        for leaf in (leaf for leaf in self.graph.leaves if readers[leaf.name] > 1 and self.space.stages > 1):
            name = leaf.name
            layout, delivered = self.assignment.produced(Ref(name)), self.assignment.delivered(Ref(name))
            update_s, held = self._stored(name)
            gather_s, reduce_s, gathered = self._conversion(Ref(name), layout, delivered)
            size = local_bytes(leaf.results[0], layout, self.space.mesh) if leaf.op == "param" else 0
            is_summed = leaf.op == "param" and leaf.results[0].grad
            sum_s = self.space.cost.collective_s("all_reduce", pair, size) if is_summed else 0.0
            held.update(self._versions_of(name, gathered))
            if len(self._savers.get(Ref(name), ())) > 1:  # other ranks save it, too
                held.update(gathered=gathered)
            found[name] = Shared(held, gather_s * times, reduce_s * times, update_s, sum_s)
        return found

    def _stored(self, name: str) -> tuple[float, Counter[str]]:
        """Seconds to update a leaf, and the bytes that are held of it, by use."""
        node, layout = self.graph.by_name[name], self.assignment.produced(Ref(name))
        update_s, all_bytes = self.space.storage(node, layout)
        if node.op != "param" or not node.results[0].grad:
            return update_s, Counter({"parameters" if node.op in ("param", "buffer") else "activations": all_bytes})
        size = local_bytes(node.results[0], layout, self.space.mesh)
        if not all_bytes:  # at home on the host
            return update_s, Counter()
        return update_s, Counter(parameters=size, gradients=size, optimizer=all_bytes - 2 * size)

    def _versions_of(self, name: str, gathered: int) -> Counter[str]:
        """Bytes of all versions of a leaf as operators use it, less what is stored anyway.

        Args:
            gathered: of what it is gathered into, with its gradient; 0: it is used as it is stored. Where each
                micro-batch gathers it, of its whole gradient alone, which is there once, beside versions as stored.
        """
        node, is_once = self.graph.by_name[name], self.space.brings_once
        if node.op != "param" or not node.results[0].grad:
            return Counter(gathered=self.versions * gathered * is_once)
        if gathered and is_once:
            return Counter(gathered=self.versions * gathered)
        size = (self.versions - 1) * local_bytes(node.results[0], self.assignment.produced(Ref(name)), self.space.mesh)
        return Counter(parameters=size, gradients=size, gathered=gathered)

    @cached_property
    def _leaves(self) -> list[list[str]]:
        """The leaves that are held with each block: with the first that reads them."""
        found: list[list[str]] = []
        seen: set[str] = set()
        for instance in self.folded.instances:
            names = dict.fromkeys(ref.node for ref in instance.block.inputs if self.graph.by_name[ref.node].is_leaf)
            found.append([name for name in names if name not in seen])
            seen.update(names)
        return found

    def _work_out(self, number: int, leaves: list[str], send_s: float) -> Link:
        instance, sums = self.folded.instances[number], _Sums()
        for name in leaves:
            update_s, stored = self._stored(name)
            sums.update_s += update_s
            sums.held.update(stored)
            self._convert_once(
                sums, Ref(name), self.assignment.produced(Ref(name)), self.assignment.delivered(Ref(name))
            )
            if not self.space.brings_once:
                sums.held.update(self._versions_of(name, sums.grown[name]))
        for node in instance.block.nodes:
            self._run(sums, node)
        for name in {**dict.fromkeys(leaves), **+sums.grown} if self.space.brings_once else ():
            sums.held.update(self._versions_of(name, sums.grown[name]))
        brought = brought_by(self.assignment, number, self._savers)
        levels = self.levels.of(instance.kind) if brought.lets_go else self.levels.computed(instance.kind)
        again_s = [self._again_s(number, level) for level in levels]
        savings = tuple(
            Saving(made_s + gathered_s, self._saved(number, level) + brought.saved_bytes(level))
            for (made_s, gathered_s), level in zip(again_s, levels, strict=True)
        )
        name, held_bytes = self.folded.names[instance.kind], sum(sums.held.values())
        return Link(
            Block(name, sums.forward_s, sums.input_s, sums.weight_s, held_bytes, savings, send_s),
            sums.communication_s,
            sums.gather_s,
            at_least_zero(sums.reduce_s - sums.hidden_s),
            sums.update_s,
            sums.held,
            levels,
            tuple(max(working_moments(self.assignment, number, each, brought), default=0) for each in levels),
            tuple(map(brought.there_bytes, levels)),
            tuple(gathered_s for _, gathered_s in again_s),
        )

    def _run(self, sums: _Sums, node: Node) -> None:
        """Add an operator, with the conversions of its operands and of what it delivers."""
        work = self.space.work(node, self.assignment.choice(node))
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
                there_s, back_s, _ = self._conversion(ref, source, target)
                sums.forward_s += there_s
                sums.input_s += back_s
                sums.communication_s = sums.communication_s + there_s + back_s

    def _convert_once(self, sums: _Sums, ref: Ref, source: Layout, target: Layout) -> None:
        """Add what is gathered before all micro-batches and reduced after them, and adding up the gradients of each; or
        both for each.
        """
        there_s, back_s, gathered = self._conversion(ref, source, target)
        summed_s = self._summed_s(ref, source, target)
        if not self.space.brings_once:
            sums.forward_s += there_s
            sums.weight_s += back_s
            sums.communication_s += there_s + back_s - summed_s * self.space.mesh.micro_batches
            sums.grown[ref.node] += gathered
            return
        sums.weight_s += summed_s
        sums.gather_s += there_s
        sums.reduce_s = sums.reduce_s + back_s - self.space.mesh.micro_batches * summed_s
        sums.grown[ref.node] += gathered

    def _moves(self, node: Node) -> list[tuple[Ref, Layout, Layout]]:
        """Conversions of a node's operands, each value to each layout once, then of what it delivers."""
        assignment = self.assignment
        wanted = dict.fromkeys(zip(node.inputs, assignment.choice(node).operands, strict=True))
        found = [(ref, assignment.delivered(ref), layout) for ref, layout in wanted]
        for ref in (Ref(node.name, index) for index in range(len(node.results))):
            found.append((ref, assignment.produced(ref), assignment.delivered(ref)))
            found += [(ref, assignment.delivered(ref), layout) for layout in self._leaving(ref)]
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

    def _conversion(self, ref: Ref, source: Layout, target: Layout) -> tuple[float, float, int]:
        """Seconds forward and backward, and the bytes of what a parameter is gathered into."""
        if source == target:
            return 0.0, 0.0, 0
        tensor, mesh, more = self.graph.type_of(ref), self.space.mesh, 0
        if self.graph.by_name[ref.node].op == "param":
            before, after = (local_bytes(tensor, layout, mesh) for layout in (source, target))
            copies = 2 if tensor.grad and mesh.micro_batches > 1 and self.space.brings_once else 1
            more = after * copies if after > before else 0
        return *self.space.conversion_s(ref, source, target), more

    def _summed_s(self, ref: Ref, source: Layout, target: Layout) -> float:
        """Seconds to add a parameter's gradient of one micro-batch to that of the others."""
        space, table = self.space, self.space.table(ref)
        steps = table.route(source, target) if source != target else ()
        summed = (step for step in steps if space.mesh.axes[step.axis].name == MICRO)
        pairs = [(table.index[step.before], table.index[step.after]) for step in summed]
        return math.fsum(float(table.backward_s[pair]) for pair in pairs) / space.mesh.micro_batches

    def _has_weights(self, node: Node) -> bool:
        """Whether an operator is a product with a parameter, so that half of its backward is the weight's."""
        row = OPS.get(node.op)
        return row is not None and row.flops is contraction_flops and any(map(self._is_weight, node.inputs))

    def _is_weight(self, ref: Ref) -> bool:
        node = self.graph.by_name[ref.node]
        row = OPS.get(node.op)
        if row is not None and row.view and len(node.inputs) == 1:
            return self._is_weight(node.inputs[0])
        return node.op == "param"

    def _saved(self, number: int, level: Level) -> int:
        """Bytes that a block keeps for backward, where others keep as little as they may."""
        instance, recompute = self.folded.instances[number], NOTHING
        if level != "none":
            last = [self.levels.computed(kind)[-1] for kind in range(len(self.folded.kinds))]
            last[instance.kind] = level
            sizes = map(len, self.folded.kinds)
            recompute = Recompute(tuple(Amount.of({each: size}) for each, size in zip(last, sizes, strict=True)))
        return sum(
            self.space.saved_bytes(node, self.assignment.choice(node), recompute) for node in instance.block.nodes
        )

    def _again_s(self, number: int, level: Level) -> tuple[float, float]:
        """Seconds of what a block makes again, and of gathering parameters for that."""
        if level == "none":
            return 0.0, 0.0
        instance, space, made_s, gathered_s = self.folded.instances[number], self.space, 0.0, 0.0
        again = space.skeleton.again(instance.kind, level)
        for at, node in enumerate(instance.block.nodes):
            choice = self.assignment.choice(node)
            if at in again.operators:
                work = space.work(node, choice)
                made_s += work.forward_s + work.inner_forward_s
            wanted = {(node.inputs[i], choice.operands[i]) for i in again.taken[at]}
            moves = [(ref, self.assignment.delivered(ref), to) for ref, to in wanted]
            made = [Ref(node.name, index) for index in range(len(node.results)) if (at, index) in again.values]
            moves += [(ref, self.assignment.produced(ref), self.assignment.delivered(ref)) for ref in made]
            for ref, source, target in moves:
                seconds = self._conversion(ref, source, target)[0]
                if self.graph.by_name[ref.node].op != "param":
                    made_s += seconds
                elif not space.brings_once:
                    gathered_s += seconds
        return made_s, gathered_s
