"""Leaves: what a rank holds of parameters, buffers and inputs through a whole step in turns, leaf by leaf.

``(Assignment, block) -> bytes by use``. A leaf is held with the first block that reads it: as it is stored, with its
gradient and the optimizer's state; in the layout in which operators use it, where it is gathered once a step; and as
often as the schedule has versions of the weights.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from planner.assignment import Assignment
from planner.conversion import local_bytes
from planner.graph import Node, Ref
from planner.layout import Layout


class Leaves:
    """The leaves of an assignment.

    Args:
        versions: how many versions of the weights the schedule has.
    """

    def __init__(self, assignment: Assignment, versions: int):
        self.assignment, self.space, self.versions = assignment, assignment.space, versions
        self.graph = self.space.graph

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
            return Counter({"parameters" if node.op in ("param", "buffer") else "activations": all_bytes})
        size = local_bytes(node.results[0], layout, self.space.mesh)
        return Counter(parameters=size, gradients=size, optimizer=all_bytes - 2 * size) if all_bytes else Counter()

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
        size = (self.versions - 1) * local_bytes(node.results[0], self._stored_as(name), self.space.mesh)
        return Counter(parameters=size, gradients=size, gathered=gathered)

    def relayed(self, name: str) -> int:
        """Bytes of what a leaf is gathered into before all blocks."""
        return self.gathered(Ref(name), self._stored_as(name), self.assignment.delivered(Ref(name)))

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
