"""Memory of parameters, buffers, inputs and outputs on one rank of a micro-batched step, tensor by tensor.

``(Assignment, block) -> bytes``. A leaf is held with the first block that reads it: as it is stored, with the
optimizer's state; in the layout in which operators use it, where it is gathered once a step; and as often as the
schedule has versions of the weights. An input is there with all its micro-batches, and so is an output.

The gradient to which micro-batches add comes with the first backward, in the layout in which operators use its
parameter; what is gathered once a step has one as it is stored at the end of the step alone. What a rank sums over
ranks once a step it has twice then: as it added up, and as it is stored. A parameter that several blocks use has a
gradient of each of them until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from planner.formulation.assignment import Assignment
from planner.formulation.resharding import local_bytes
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, Layout, P, Shard


class LeafTensor(NamedTuple):
    """A tensor that is there of a leaf.

    Attributes:
        leaf: its name; ``words``: what the tensor is of it, such as ``gradient of {}``.
        use: of :data:`planner.analysis.memory.storages.USES`.
        times: how many alike there are.
    """

    leaf: str
    words: str
    use: str
    bytes: int
    times: int = 1


STORED, GRADIENT, STATE = "{}", "gradient of {}", "state of {}"
GATHERED, WHOLE = "gathered {}", "gradient of gathered {}"
SENT, SUM = "gradient of gathered {} as it is sent", "sum over ranks of the gradient of {}"


class Parts(NamedTuple):
    """What is there of leaves.

    Attributes:
        always: through all of the step.
        gradients: from the first backward on, what micro-batches add to.
        at_end: besides, when gradients are reduced at the end of the step.
        reduced: and while those of the block itself are, as they are sent together.
    """

    always: tuple[LeafTensor, ...] = ()
    gradients: tuple[LeafTensor, ...] = ()
    at_end: tuple[LeafTensor, ...] = ()
    reduced: tuple[LeafTensor, ...] = ()

    def __add__(self, other: Parts) -> Parts:  # type: ignore[override]
        return Parts(*(mine + more for mine, more in zip(self, other, strict=True)))


def by_use(parts: Iterable[LeafTensor]) -> Counter[str]:
    """Bytes of these by use."""
    found = Counter[str]()
    for part in parts:
        found[part.use] += part.bytes * part.times
    return found


class Leaves:
    """The leaves of an assignment.

    Args:
        versions: how many versions of the weights the schedule has.
    """

    def __init__(self, assignment: Assignment, versions: int):
        self.assignment, self.space, self.versions = assignment, assignment.space, versions
        self.graph, self.mesh = self.space.graph, self.space.mesh

    @cached_property
    def first_read(self) -> list[list[str]]:
        """The names of the leaves that are held with each block: with the first that reads them."""
        found: list[list[str]] = []
        seen: set[str] = set()
        for instance in self.space.folded.instances:
            names = dict.fromkeys(ref.node for ref in instance.block.inputs if self.graph.by_name[ref.node].is_leaf)
            found.append([name for name in names if name not in seen])
            seen.update(names)
        return found

    def parts(self, number: int) -> Parts:
        """Of the leaves that are held with a block, and what it takes gathered beside the blocks that they are held
        with.
        """
        own, found = self.first_read[number], Parts()
        whole = Counter({name: self.resharded(name) for name in own})
        for ref, layout in self._taken(number) if self.space.unsharding.once_per_step else ():
            whole[ref.node] += self.gathered(ref, self.assignment.consumer_layout(ref), layout)
        for name in dict.fromkeys((*own, *(+whole))):
            if name in own:
                found += self._stored(name, whole[name], is_late=whole[name] > 0 and self._is_late(name, number))
            found += self._when_gathered(name, whole[name])
        sums = [(ref, size) for ref, *ways in self._ways(number) if (size := self._summed(ref, *ways))]
        found += Parts(at_end=tuple(LeafTensor(ref.node, SUM, "gradients", size) for ref, size in sums))
        wider = ((ref.node, size * times) for ref, size in sums if (times := self.space.widening(ref)) > 1)
        wide = tuple(LeafTensor(name, SENT, "temporary", size) for name, size in wider)
        sent = max(self._sent_together(found.gradients), wide, key=_bytes_of)
        return found._replace(reduced=sent)

    def _sent_together(self, gradients: Iterable[LeafTensor]) -> tuple[LeafTensor, ...]:
        """Of a block's gradients what is most when they are sent: those that it gathers go together, those that are
        gathered before all blocks one by one.
        """
        if not self.space.unsharding.once_per_step:
            return ()
        sent = [
            part._replace(words=SENT, use="temporary", bytes=part.bytes * self.space.widening(Ref(part.leaf)))
            for part in gradients
            if part.words == WHOLE
        ]
        alone = [(part,) for part in sent if self.resharded(part.leaf)]
        together = tuple(part for part in sent if not self.resharded(part.leaf))
        return max([together, *alone], key=_bytes_of)

    def is_read_elsewhere(self, name: str) -> bool:
        """Whether a leaf is none of a block's own."""
        return len(self.space.variable_of[name]) == 2  # those that one block reads are numbered by kind and place

    def _taken(self, number: int) -> Iterator[tuple[Ref, Layout]]:
        """What operators of a block read, in which layout, each once for each operator."""
        for node in self.space.folded.instances[number].block.nodes:
            yield from dict.fromkeys(zip(node.inputs, self.assignment.choice(node).operands, strict=True))

    def _ways(self, number: int) -> Iterator[tuple[Ref, Layout, Layout]]:
        """The leaves of a block on their way to what its operators read."""
        for name in self.first_read[number]:
            yield Ref(name), self._stored_as(name), self._consumer_layout(name)
        for ref, layout in self._taken(number):
            yield ref, self.assignment.consumer_layout(ref), layout

    def _is_late(self, name: str, number: int) -> bool:
        """Whether all that read a parameter read it gathered once a step, so that its gradient as it is stored comes at
        the end.
        """
        if not self._is_gathered_twice(name):
            return False
        if self.resharded(name):
            return True
        taken = [layout for ref, layout in self._taken(number) if ref.node == name]
        is_whole = (
            self.gathered(Ref(name), self.assignment.consumer_layout(Ref(name)), layout) > 0 for layout in taken
        )
        return not self.is_read_elsewhere(name) and all(is_whole)

    def _stored(self, name: str, whole: int, *, is_late: bool) -> Parts:
        """Of a leaf as it is stored, in all versions if it is used so; nothing of one whose home is the
        host.

        Args:
            whole: see :meth:`_when_gathered`.
            is_late: whether its gradient comes at the end of the step.
        """
        node, layout = self.graph.by_name[name], self._stored_as(name)
        _, all_bytes = self.space.storage(node, layout)
        if not self._is_trained(node):
            times = self.mesh.micro_batches if self.is_cut(node) else 1
            use = "parameters" if node.op in ("param", "buffer") else "activations"
            return Parts((LeafTensor(name, STORED, use, all_bytes * times),))
        if not all_bytes:
            return Parts()
        size, versions = local_bytes(node.results[0], layout, self.mesh), self.versions
        gradient, state = (
            LeafTensor(name, GRADIENT, "gradients", size),
            LeafTensor(name, STATE, "optimizer", all_bytes - 2 * size),
        )
        if whole and self.space.unsharding.once_per_step:
            held = LeafTensor(name, STORED, "parameters", size), state
            return Parts(held, at_end=(gradient,)) if is_late else Parts(held, (gradient,))
        return Parts((LeafTensor(name, STORED, "parameters", size, versions), state), (gradient,))

    def _when_gathered(self, name: str, whole: int) -> Parts:
        """Of all versions of a parameter that is gathered, what is there beside what is stored.

        Args:
            whole: bytes of what it is gathered into; 0: it is used as it is stored.
        """
        gradient = LeafTensor(name, WHOLE, "gathered", whole)
        if not whole or not self.space.unsharding.once_per_step:
            return Parts(gradients=(gradient,)) if whole and self._is_trained(self.graph.by_name[name]) else Parts()
        gathered = LeafTensor(name, GATHERED, "gathered", whole, self.versions)
        if not self._is_gathered_twice(name):
            return Parts((gathered,))
        return Parts((gathered,), (gradient,))

    def outputs(self, number: int, terms: int | None = None) -> dict[str, int]:
        """Bytes of the model's outputs that a block makes and the step keeps, by the operator that does: whole from the
        first micro-batch on, and of what is summed over micro-batches a term of each.

        Args:
            terms: how many of these are there; left out: all.
        """
        made, found = set(self.space.folded.instances[number].block.outputs), Counter[str]()
        micro_batches = self.mesh.micro_batches
        for position, ref in enumerate(self.space.leaving):
            if ref in made and position not in self.space.discards:
                layout = self.assignment.output_layout(position)
                first = self.assignment.consumer_layout(ref)[0] if micro_batches > 1 else layout[0]
                size = local_bytes(self.graph.type_of(ref), (first, *layout[1:]), self.mesh)
                times = (
                    (micro_batches if terms is None else terms)
                    if first == P
                    else micro_batches
                    if isinstance(first, Shard)
                    else 1
                )
                found[ref.node] += size * times
        return dict(found)

    def uses(self, number: int) -> Iterator[tuple[str, int]]:
        """The trained parameters of a block that other blocks read too, and bytes as they are used all step."""
        instance, space = self.space.folded.instances[number], self.space
        leaves = (self.graph.by_name[ref.node] for ref in instance.block.inputs if self.is_read_elsewhere(ref.node))
        several = {Ref(leaf.name) for leaf in leaves if leaf.is_leaf and self._is_trained(leaf)}
        if several and space.unsharding.once_per_step:
            used = ((ref, at) for ref, at in self._taken(number) if ref in several)
            yield from ((ref.node, local_bytes(self.graph.type_of(ref), at, self.mesh)) for ref, at in used)

    def _summed(self, ref: Ref, source: Layout, target: Layout) -> int:
        space = self.space
        if source == target or not self._is_trained(self.graph.by_name[ref.node]) or space.training.tier != "device":
            return 0
        steps = space.table(ref).route(source, target)
        once = steps[: self.assignment.summed_first(ref, steps)] if not space.unsharding.once_per_step else steps
        crosses = any(self.mesh.axes[step.axis].size > 1 and self.mesh.axes[step.axis].name != MICRO for step in once)
        size = local_bytes(self.graph.type_of(ref), once[-1].after, self.mesh) if crosses else 0
        return (
            0 if self.gathered(ref, source, target) and space.unsharding.once_per_step else size
        )  # which has one of its own

    def shared(self, name: str) -> Parts:
        """Of a leaf on another rank, whose blocks read it too."""
        whole = self.resharded(name)
        found = self._stored(name, whole, is_late=whole > 0 and self._is_gathered_twice(name))
        return found + self._when_gathered(name, whole)

    def is_cut(self, leaf: Node) -> bool:
        """Whether micro-batches are parts of an input, in its memory."""
        cut = zip(self._stored_as(leaf.name), self.mesh.axes, strict=True) if leaf.op == "input" else ()
        return any(axis.name == MICRO and isinstance(local_type, Shard) for local_type, axis in cut)

    def resharded(self, name: str) -> int:
        """Bytes of what a leaf is gathered into before all blocks."""
        return self.gathered(Ref(name), self._stored_as(name), self._consumer_layout(name))

    def gathered(self, ref: Ref, source: Layout, target: Layout) -> int:
        """Bytes of what a parameter is gathered into on its way from a layout to another."""
        if source == target or self.graph.by_name[ref.node].op != "param":
            return 0
        tensor, mesh = self.graph.type_of(ref), self.space.mesh
        before, after = (local_bytes(tensor, layout, mesh) for layout in (source, target))
        return after if after > before else 0

    def _is_gathered_twice(self, name: str) -> bool:
        """Whether what a parameter is gathered into once a step has a gradient, to which micro-batches add."""
        is_once = self.space.unsharding.once_per_step and self.mesh.micro_batches > 1
        return is_once and self._is_trained(self.graph.by_name[name])

    def _is_trained(self, leaf: Node) -> bool:
        return leaf.op == "param" and leaf.results[0].grad

    def _stored_as(self, name: str) -> Layout:
        return self.assignment.produced(Ref(name))

    def _consumer_layout(self, name: str) -> Layout:
        return self.assignment.consumer_layout(Ref(name))


def _bytes_of(parts: Iterable[LeafTensor]) -> int:
    return sum(part.bytes for part in parts)
