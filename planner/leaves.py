"""Leaves: what a rank holds of parameters, buffers, inputs and outputs through a whole step in turns, one by one.

``(Assignment, block) -> bytes by use``. A leaf is held with the first block that reads it: as it is stored, with its
gradient and the optimizer's state; in the layout in which operators use it, where it is gathered once a step; and as
often as the schedule has versions of the weights. An input is there with all its micro-batches, and so is an output.

What a rank sums over ranks once a step it has twice then: as it added up, and as it is stored. A parameter that several
blocks use has a gradient of each of them until the end of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from planner.assignment import Assignment
from planner.conversion import local_bytes
from planner.graph import Node, Ref
from planner.layout import MICRO, Layout, P, Shard


class Use(NamedTuple):
    """A parameter that several operators read, in a layout in which some of a block do.

    Attributes:
        readers: how many of the block do.
        bytes: of the gradient that they find, beside the last one of them.
        held: of it, what is there from the first micro-batch on and counted nowhere else, unless this is the only use.
        together: whether those of other blocks find the same gradient, and not each block one of its own.
    """

    name: str
    readers: int
    bytes: int
    held: int
    together: bool


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

    def held(self, number: int) -> dict[str, Counter[str]]:
        """Bytes by use of each leaf that is held with a block, or that it takes gathered beside the block that does."""
        own = self.first_read[number]
        found = {name: self.stored(name) for name in own}
        grown = Counter({name: self.relayed(name) for name in own})
        if self.space.brings_once:
            for node in self.space.folded.instances[number].block.nodes:
                for ref, layout in dict.fromkeys(zip(node.inputs, self.assignment.choice(node).operands, strict=True)):
                    grown[ref.node] += self.gathered(ref, self.assignment.delivered(ref), layout)
        for name in dict.fromkeys((*own, *(+grown))):
            found.setdefault(name, Counter()).update(self.in_versions(name, grown[name]))
        return found

    def summed(self, number: int) -> Counter[str]:
        """Bytes of the gradients that a block's leaves have twice at the end of a step: as they added up, and summed
        over ranks. What is gathered has a gradient of its own anyway, which is held.
        """
        found = Counter(
            {
                name: self._summed(Ref(name), self._stored_as(name), self._relayed_as(name))
                for name in self.first_read[number]
            }
        )
        for node in self.space.folded.instances[number].block.nodes:
            for ref, layout in dict.fromkeys(zip(node.inputs, self.assignment.choice(node).operands, strict=True)):
                found[ref.node] += self._summed(ref, self.assignment.delivered(ref), layout)
        return +found

    def outputs(self, number: int, terms: int | None = None) -> dict[str, int]:
        """Bytes of the model's outputs that a block makes, by the operator that does: whole from the first micro-batch
        on, and of what is summed over micro-batches a term of each.

        Args:
            terms: how many of these are there; left out: all.
        """
        made, found = set(self.space.folded.instances[number].block.outputs), Counter[str]()
        turns = self.mesh.micro_batches
        for position, ref in enumerate(self.space.leaving):
            if ref in made:
                layout = self.assignment.output_layout(position)
                first = self.assignment.delivered(ref)[0] if turns > 1 else layout[0]
                size = local_bytes(self.graph.type_of(ref), (first, *layout[1:]), self.mesh)
                times = (turns if terms is None else terms) if first == P else turns if isinstance(first, Shard) else 1
                found[ref.node] += size * times
        return dict(found)

    def uses(self, number: int) -> Iterator[Use]:
        """The parameters of a block that several operators read, there or in other blocks; none that each micro-batch
        gathers.
        """
        instance, is_read = self.space.folded.instances[number], self.space.skeleton.readers
        if self.space.training.tier != "device":
            return
        once = self.space.brings_once
        leaves = (ref for ref in instance.block.inputs if self._is_trained(self.graph.by_name[ref.node]))
        several = {ref for ref in leaves if is_read(ref) > 1}
        readers = Counter[tuple[Ref, Layout]]()
        for node in instance.block.nodes if several else ():
            uses = zip(node.inputs, self.assignment.choice(node).operands, strict=True)
            readers.update({(ref, layout) for ref, layout in uses if ref in several})
        for (ref, layout), count in readers.items():
            size = local_bytes(self.graph.type_of(ref), layout, self.mesh)
            is_gathered = self.gathered(ref, self.assignment.delivered(ref), layout) > 0
            if once or not (is_gathered or self.relayed(ref.node)):
                held = self.versions * size if once and not is_gathered else 0
                yield Use(ref.node, count, size if once else 2 * size, held, not once)  # it waits, and the sum comes

    def _summed(self, ref: Ref, source: Layout, target: Layout) -> int:
        space = self.space
        if source == target or not self._is_trained(self.graph.by_name[ref.node]) or space.training.tier != "device":
            return 0
        steps = space.table(ref).route(source, target)
        once = steps[: self.assignment.summed_first(ref, steps)] if not space.brings_once else steps
        crosses = any(self.mesh.axes[step.axis].size > 1 and self.mesh.axes[step.axis].name != MICRO for step in once)
        size = local_bytes(self.graph.type_of(ref), once[-1].after, self.mesh) if crosses else 0
        return 0 if self.gathered(ref, source, target) and space.brings_once else size

    def shared(self, name: str, *, is_saved: bool) -> Counter[str]:
        """Bytes by use of a leaf on another rank, whose blocks read it too.

        Args:
            is_saved: whether that rank holds what each micro-batch gathers of it from forward to backward.
        """
        gathered, held = self.relayed(name), self.stored(name)
        held.update(self.in_versions(name, gathered))
        if is_saved:
            held.update(gathered=gathered)
        return held

    def stored(self, name: str) -> Counter[str]:
        """Bytes by use of a leaf as it is stored; none of one that is at home on the host."""
        node, layout = self.graph.by_name[name], self._stored_as(name)
        _, all_bytes = self.space.storage(node, layout)
        if not self._is_trained(node):
            all_bytes *= self.mesh.micro_batches if self.is_cut(node) else 1
            return Counter({"parameters" if node.op in ("param", "buffer") else "activations": all_bytes})
        size = local_bytes(node.results[0], layout, self.mesh)
        return Counter(parameters=size, gradients=size, optimizer=all_bytes - 2 * size) if all_bytes else Counter()

    def is_cut(self, leaf: Node) -> bool:
        """Whether micro-batches are parts of an input, in its memory."""
        cut = zip(self._stored_as(leaf.name), self.mesh.axes, strict=True) if leaf.op == "input" else ()
        return any(axis.name == MICRO and isinstance(local_type, Shard) for local_type, axis in cut)

    def in_versions(self, name: str, gathered: int) -> Counter[str]:
        """Bytes by use of all versions of a leaf as operators use it, less what is stored anyway.

        Args:
            gathered: of what it is gathered into, with its gradient; 0: it is used as it is stored. Where each
                micro-batch gathers it, of its whole gradient alone, which is there once, beside versions as stored.
        """
        node, is_once = self.graph.by_name[name], self.space.brings_once
        if not self._is_trained(node):
            return Counter(gathered=self.versions * gathered * is_once)
        if gathered and is_once:
            return Counter(gathered=self.versions * gathered)
        size = (self.versions - 1) * local_bytes(node.results[0], self._stored_as(name), self.mesh)
        return Counter(parameters=size, gradients=size, gathered=gathered)

    def relayed(self, name: str) -> int:
        """Bytes of what a leaf is gathered into before all blocks."""
        return self.gathered(Ref(name), self._stored_as(name), self._relayed_as(name))

    def gathered(self, ref: Ref, source: Layout, target: Layout) -> int:
        """Bytes of what a parameter is gathered into on its way from a layout to another, with its gradient."""
        if source == target or self.graph.by_name[ref.node].op != "param":
            return 0
        tensor, mesh = self.graph.type_of(ref), self.space.mesh
        before, after = (local_bytes(tensor, layout, mesh) for layout in (source, target))
        copies = 2 if tensor.grad and mesh.micro_batches > 1 and self.space.brings_once else 1
        return after * copies if after > before else 0

    def _is_trained(self, leaf: Node) -> bool:
        return leaf.op == "param" and leaf.results[0].grad

    def _stored_as(self, name: str) -> Layout:
        return self.assignment.produced(Ref(name))

    def _relayed_as(self, name: str) -> Layout:
        return self.assignment.delivered(Ref(name))
