"""Gathered parameters: those that a block takes gathered for a micro-batch, and what else is there while it
works.

``(Assignment, block) -> bytes``. Of a micro-batched step: what is held from forward to backward beside activations, and
what is there only while a block runs or runs its backward. Parameters that are gathered once a step are held
throughout, see :mod:`planner.analysis.pipeline.leaf_memory`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.formulation.assignment import Assignment
from planner.formulation.remat.levels import Level
from planner.formulation.resharding import local_bytes
from planner.ir.folding import Instance
from planner.ir.graph import Node, Ref


def dropped_bytes(assignment: Assignment, instance: Instance, level: Level) -> int:
    """Bytes that an instance has recomputed while it runs its backward, at a level of recomputation."""
    if level == "none":
        return 0
    again = assignment.again(instance.kind, level)
    dropped = sum(
        assignment.space.bytes_of(node, assignment.choice(node), places)
        for node, places in zip(instance.block.nodes, again.dropped, strict=True)
    )
    return dropped + sum(own for _, own in owned(assignment, instance, level, again=True))


def owned(assignment: Assignment, instance: Instance, level: Level, *, again: bool) -> Iterator[tuple[Node, int]]:
    """The operators of an instance that keep something besides operands and results for backward, and bytes of it.

    Args:
        again: of those that draw again at a level of recomputation; else of the others, which keep it from forward on.
    """
    found = assignment.space.decision_graph.blocks.again(instance.kind, level).drawing if level != "none" else ()
    for at, node in enumerate(instance.block.nodes):
        if (at in found) == again:
            size = assignment.space.own_bytes(node, assignment.choice(node))
            if size:
                yield node, size


def parted(assignment: Assignment, instance: Instance) -> Iterator[tuple[Node, int]]:
    """What a backward in two parts keeps for the second one beside what is saved: bytes of the gradients that came to
    the operators which read parameters that are trained.
    """
    space, leaves = assignment.space, assignment.space.graph.by_name
    for node in instance.block.nodes:
        if any(leaves[ref.node].op == "param" and leaves[ref.node].results[0].grad for ref in node.inputs):
            places = range(len(node.inputs), len(node.inputs) + len(node.results))
            yield node, space.bytes_of(node, assignment.choice(node), tuple(places))


@dataclass(frozen=True)
class GatheredParameters:
    """Bytes of the parameters that a block takes gathered, by name, where each micro-batch gathers them anew.

    Attributes:
        own: those that it gathers.
        before: those gathered for it before all blocks.
        lets_go: its own that it may let go after forward and gather again when it runs its backward.
        stays: others that backward reads again: through views, or gathered before.
        parts: what its own are gathered from.
        gradients: the whole gradients of its own, by the operator that makes them.
    """

    own: Counter[str] = field(default_factory=Counter)
    before: Counter[str] = field(default_factory=Counter)
    lets_go: Counter[str] = field(default_factory=Counter)
    stays: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    gradients: Counter[str] = field(default_factory=Counter)

    def saved(self, level: Level) -> Counter[str]:
        """What is held from forward to backward."""
        return self.stays + self.lets_go if level == "none" else self.stays

    def there(self, level: Level) -> Counter[str]:
        """What is there beside that while the block runs, or runs its backward."""
        return self.own + self.before - self.saved(level)

    def saved_bytes(self, level: Level) -> int:
        """Of :meth:`saved`, all together."""
        return self.saved(level).total()

    def there_bytes(self, level: Level) -> int:
        """Of :meth:`there`, all together."""
        return self.there(level).total()


def savers_of(assignment: Assignment) -> dict[Ref, list[int]]:
    """The parameters that each micro-batch gathers before all blocks -> the blocks whose backward reads them again."""
    space, found = assignment.space, defaultdict[Ref, list[int]](list)
    if space.unsharding.once_per_step:
        return {}
    before = {leaf for leaf in space.decision_graph.variables.resharded_leaves if _grows(assignment, leaf)}
    for number, instance in enumerate(space.folded.instances):
        first, backward = space.folded.kinds[instance.kind][0], space.decision_graph.blocks.backward(instance.kind)
        for ref, like in zip(instance.block.inputs, first.block.inputs, strict=True):
            if ref in before and like in backward.read:
                found[ref].append(number)
    return found


def _grows(assignment: Assignment, leaf: Ref) -> bool:
    """Whether a parameter is gathered before all blocks."""
    space, (stored, shared) = assignment.space, (assignment.produced(leaf), assignment.consumer_layout(leaf))
    if space.graph.by_name[leaf.node].op != "param" or stored == shared:
        return False
    tensor = space.graph.type_of(leaf)
    return local_bytes(tensor, shared, space.mesh) > local_bytes(tensor, stored, space.mesh)


def gathered_by(assignment: Assignment, number: int, saved: Mapping[Ref, Sequence[int]]) -> GatheredParameters:
    """What a block takes gathered; nothing where parameters are gathered once a step.

    Args:
        saved: see :func:`savers_of`; the first of them counts what all need.
    """
    space = assignment.space
    if space.unsharding.once_per_step:
        return GatheredParameters()
    instance = space.folded.instances[number]
    backward, taken = (
        space.decision_graph.blocks.backward(instance.kind),
        space.decision_graph.blocks.again(instance.kind, "gathered").taken,
    )
    found = GatheredParameters()
    for at, node in enumerate(instance.block.nodes):
        places = {key: i for i, key in enumerate(zip(node.inputs, assignment.choice(node).operands, strict=True))}
        for (ref, layout), place in places.items():
            if space.graph.by_name[ref.node].op != "param":
                continue
            tensor = space.graph.type_of(ref)
            shared, used = (local_bytes(tensor, each, space.mesh) for each in (assignment.consumer_layout(ref), layout))
            if used > shared:
                again, is_read = place in taken[at], backward.tensors[at][place] in backward.read
                found.own[ref.node] += used
                found.parts[ref.node] += shared
                found.lets_go[ref.node] += used * again
                found.stays[ref.node] += used * (is_read and not again)
                found.gradients[node.name] += used * tensor.grad
    for ref in instance.block.inputs:
        if _grows(assignment, ref) and number in (saved.get(ref) or [number])[:1]:
            size = local_bytes(space.graph.type_of(ref), assignment.consumer_layout(ref), space.mesh)
            found.before[ref.node] += size
            found.stays[ref.node] += size * (ref in saved)
    return found


def coming(assignment: Assignment, number: int, level: Level | None = None) -> Counter[str]:
    """Bytes of the parameters that are on their way to a block while another one computes, by name: what comes, in the
    order of ranks, and what is sent, where that is copied behind one another.

    Args:
        level: at which the block recomputes what backward needs, of what it gathers again then; left out: forward.
    """
    space, instance, found = assignment.space, assignment.space.folded.instances[number], Counter[str]()
    ahead = assignment.ahead(instance.block)
    buckets = assignment.gather_buckets(instance.block) if ahead else []
    again = None if level is None else assignment.discarded(instance, level)
    for at, place in ahead.items():
        if again is None or not again.isdisjoint(buckets[at]):
            for ref, route in buckets[at].items():
                tensor, step = space.graph.type_of(ref), route[place]
                found[ref.node] += local_bytes(tensor, step.after, space.mesh)
                found[ref.node] += local_bytes(tensor, step.before, space.mesh) * (len(buckets[at]) > 1)
    return found


def working_moments(assignment: Assignment, number: int, level: Level, gathered: GatheredParameters) -> list[int]:
    """Bytes at each moment that may be the fullest while a block runs or runs its backward, beside what is held and
    saved.

    Parameters that it gathers for the micro-batch go one by one while their whole gradients come. When they are
    gathered there is also what came, in the order of ranks, and when the gradients are reduced what is sent.
    """
    space, instance = assignment.space, assignment.space.folded.instances[number]
    beside = gathered.there_bytes(level)
    again = dropped_bytes(assignment, instance, level) + beside
    found = [
        most + again + gathered.gradients.get(node.name, 0)
        for node in instance.block.nodes
        for most in space.transients(node, assignment.choice(node))
    ]
    gathering = gathered.own.total() + gathered.parts.total()
    return [*found, beside + gathering] if gathered.parts else found
