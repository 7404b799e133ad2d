"""Fusion: what the operators of a compiled block pass over in memory, and in which kernels, as inductor fuses them.

``(Graph, nodes of a block, values that leave it) -> Fused``. What streams bytes joins what reads it: a kernel makes
values that lie in memory (*roots*: what a product, attention or another block reads) from others that do, and all that
is between stays in registers. The rules are inductor's own, in words:

* elementwise operators and copies are inlined into each of their readers, unless they read many tensors and several
  kernels would make them again (``realize_reads_threshold``);
* a reduction joins what reads its rows and what it reads, where both run over as many elements;
* kernels over as many elements that read the same tensor are one, unless one waits for a product of the other.

Backward of a kernel reads the gradients of its roots and the memory that it read, from which it recomputes what it
needs (the partitioner of AOTAutograd saves what forward has in memory anyhow), and writes the gradient of each operand
once, with what other readers have found of it added. Gradients of weights that are broadcast are sums over the other
dims, a kernel of their own, for all weights of a block that need the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from planner.ir.graph import Graph, Node, Ref
from planner.ops import OPS, elementwise, passed_places, random
from planner.ops.aliasing import shares
from planner.ops.memory_traffic import MemoryTraffic, Passes, is_view, traffic

READS = 4
"""Tensors that a value may read to be made again in each kernel that needs it (inductor's
``realize_reads_threshold``)."""
REDUCTIONS = ("normalization", "softmax", "reduction", "loss")
"""Families of operators that reduce rows."""


class Kernel(NamedTuple):
    """Operators that run as one, by name, and the values that they leave in memory."""

    operators: frozenset[str]
    roots: tuple[str, ...]


@dataclass(frozen=True)
class Fused:
    """A compiled block.

    Attributes:
        kernels: of forward, products and attention aside.
        backward: how many there are of backward, without those that autograd adds to products.
        traffic: what each operator of the block moves; of a kernel all its operators together.
    """

    kernels: tuple[Kernel, ...]
    backward: int
    traffic: Mapping[str, MemoryTraffic]


def fuse(graph: Graph, nodes: Sequence[Node], leaving: Iterable[Ref], *, on_cpu: bool = False) -> Fused:
    """Fuse one block.

    Args:
        graph: that it is of.
        nodes: its operators, in order.
        leaving: values that are read outside.
    """
    block = _BlockInMemory(graph, tuple(nodes), frozenset(leaving))
    moved = _Moved(graph, block.nodes)
    _forward(block, moved)
    backward = _backward(block, moved)
    found = {node.name: moved.traffic(node, node.name in block.members, on_cpu) for node in block.nodes}
    return Fused(tuple(Kernel(frozenset(k.closure), tuple(k.roots)) for k in block.kernels), backward, found)


def joins(node: Node) -> str:
    """How an operator is fused: ``each`` element by itself, by ``rows``, or (empty) not at all."""
    row = OPS.get(node.op)
    if row is None or row.contracts or row.kernel in ("linear", "matmul", "attention", "embedding", "other"):
        return ""
    if row.kernel in REDUCTIONS:
        return "rows"
    return "each" if row.kernel == "copy" or node.op in elementwise.ROWS or node.op in random.ROWS else ""


class Read(NamedTuple):
    """An operator reads a value, or a view of it, as operand number ``place``."""

    node: Node
    place: int
    numel: int


@dataclass
class _Kernel:
    """Roots that are made together, all that is made for them, and what is read for that."""

    roots: list[str]
    closure: dict[str, None]
    reads: dict[Ref, None]
    space: int


class _BlockInMemory:
    """A block seen through its views: what is in memory, who reads it, and which kernels make it."""

    def __init__(self, graph: Graph, nodes: tuple[Node, ...], leaving: frozenset[Ref]):
        self.graph, self.nodes = graph, nodes
        self.at = {node.name: number for number, node in enumerate(nodes)}
        self.views = {node.name for node in nodes if is_view(node)}
        self.members = {node.name: node for node in nodes if node.name not in self.views and joins(node)}
        self.readers: dict[Ref, list[Read]] = {}
        self._origins: dict[Ref, Ref] = {}
        for node in nodes:
            if node.name in self.views:
                continue
            for place, ref in enumerate(node.inputs):
                read = Read(node, place, graph.type_of(ref).numel)
                self.readers.setdefault(self.origin(ref), []).append(read)
        self.leaving = frozenset(map(self.origin, leaving))

    def origin(self, ref: Ref) -> Ref:
        """The value that a view is of."""
        if ref not in self._origins:
            found = ref
            if ref.node in self.views:
                node = self.nodes[self.at[ref.node]]
                found = self.origin(node.inputs[shares(node)[ref.index]])
            self._origins[ref] = found
        return self._origins[ref]

    def operands(self, node: Node) -> dict[Ref, None]:
        """What an operator reads, without views, each once."""
        return dict.fromkeys(map(self.origin, node.inputs))

    def space(self, node: Node) -> int:
        """How many elements an operator runs over."""
        return max(t.numel for t in (*self.graph.input_types(node), *node.results))

    @cached_property
    def ancestors(self) -> dict[str, frozenset[str]]:
        """Operator -> all of the block that it waits for."""
        found: dict[str, frozenset[str]] = {}
        for node in self.nodes:
            above = [ref.node for ref in node.inputs if ref.node in self.at]
            found[node.name] = frozenset(above).union(*(found[name] for name in above))
        return found

    def waits(self, first: str, second: str) -> bool:
        """Whether the second of two operators waits for one that is not fused and waits for the first."""
        between = (name for name in self.ancestors[second] if name not in self.members and name not in self.views)
        return any(first in self.ancestors[name] for name in between)

    @cached_property
    def in_memory(self) -> frozenset[str]:
        """Members whose results are written: others need them there."""
        found = {
            name
            for name, node in self.members.items()
            if any(
                Ref(name, index) in self.leaving
                or any(read.node.name not in self.members for read in self.readers.get(Ref(name, index), ()))
                for index in range(len(node.results))
            )
        }
        while True:
            more = self._too_many_reads(found) | self._reduced_otherwise(found)
            if more <= found:
                return frozenset(found)
            found |= more

    def _too_many_reads(self, found: set[str]) -> set[str]:
        """What several would make again from more tensors than is worth it."""
        reads: dict[str, set[Ref]] = {}
        more = set()
        for name, node in self.members.items():
            reads[name] = set()
            for ref in self.operands(node):
                inlined = ref.node in self.members and ref.node not in found and ref.node not in more
                reads[name] |= reads[ref.node] if inlined else {ref}
            users = {read.node.name for i in range(len(node.results)) for read in self.readers.get(Ref(name, i), ())}
            if len(users) > 1 and len(reads[name]) > READS:
                more.add(name)
        return more

    def _reduced_otherwise(self, found: set[str]) -> set[str]:
        """Reductions that are read by what runs over more or fewer elements than they do."""
        more = set()
        for root in found:
            closure, _ = self.made_for(root, found)
            spaces = {name: self.space(self.members[name]) for name in closure}
            most = max(spaces.values())
            more |= {n for n in closure if n != root and joins(self.members[n]) == "rows" and spaces[n] != most}
        return more

    def made_for(self, root: str, in_memory: Iterable[str]) -> tuple[dict[str, None], dict[Ref, None]]:
        """What is made for one value, and what is read for that."""
        closure: dict[str, None] = {}
        reads: dict[Ref, None] = {}
        waiting = [root]
        while waiting:
            name = waiting.pop()
            if name in closure:
                continue
            closure[name] = None
            for ref in self.operands(self.members[name]):
                if ref.node in self.members and ref.node not in in_memory:
                    waiting.append(ref.node)
                else:
                    reads[ref] = None
        return dict.fromkeys(sorted(closure, key=self.at.__getitem__)), reads

    @cached_property
    def kernels(self) -> list[_Kernel]:
        """Of forward, in order of their first root."""
        found: list[_Kernel] = []
        for root in sorted(self.in_memory, key=self.at.__getitem__):
            closure, reads = self.made_for(root, self.in_memory)
            space = max(self.space(self.members[name]) for name in closure)
            kernel = _Kernel([root], closure, reads, space)
            other = next((each for each in found if self._one(each, kernel)), None)
            if other is None:
                found.append(kernel)
                continue
            other.roots.append(root)
            other.closure |= closure
            other.reads |= {ref: None for ref in reads if ref.node not in other.roots}
        return found

    def _one(self, first: _Kernel, second: _Kernel) -> bool:
        """Whether two kernels are one: they run over as many elements, and read or make the same."""
        made = {Ref(root, i) for root in first.roots for i in range(len(self.members[root].results))}
        shared = (first.reads.keys() & second.reads.keys()) | (made & second.reads.keys())
        if first.space != second.space or not shared:
            return False
        return not any(self.waits(a, b) for a in first.roots for b in second.roots)

    @cached_property
    def kernel_of(self) -> dict[str, int]:
        """Member -> the first kernel that makes it, in which its backward runs."""
        found: dict[str, int] = {}
        for number, kernel in enumerate(self.kernels):
            for name in kernel.closure:
                found.setdefault(name, number)
        return found


@dataclass
class _Moved:
    """Passes over the tensors of every operator, as they are found."""

    graph: Graph
    nodes: tuple[Node, ...]
    forward: dict[str, list[float]] = field(init=False)
    backward: dict[str, list[float]] = field(init=False)
    besides: dict[str, list[float]] = field(init=False)
    launches: dict[str, list[int]] = field(init=False)
    within: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        def nothing() -> dict[str, list[float]]:
            return {node.name: [0.0] * (len(node.inputs) + len(node.results)) for node in self.nodes}

        self.forward, self.backward, self.besides = nothing(), nothing(), nothing()
        self.launches = {node.name: [0, 0, 0] for node in self.nodes}

    def traffic(self, node: Node, is_member: bool, on_cpu: bool) -> MemoryTraffic:
        """Of an operator that is not fused, as it is by itself, and what is found besides."""
        forward, backward, besides = (tuple(each[node.name]) for each in (self.forward, self.backward, self.besides))
        starts = self.launches[node.name]
        if is_member:
            fused = starts[0], starts[1]
            return MemoryTraffic(forward, backward, besides, starts[2], any(forward) or any(backward), fused)
        alone = traffic(self.graph, node, on_cpu=on_cpu)
        if node.name in self.within:  # the gradient of what it is a view of is made in one kernel
            return replace(alone, besides=tuple(0.0 for _ in alone.besides), starts=0)
        return replace(alone, besides=_added(alone.besides, besides), starts=alone.starts + starts[2])


def _added(first: Passes, second: Passes) -> Passes:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def _passes(block: _BlockInMemory, into: Mapping[str, list[float]], ref: Ref, names: Iterable[str]) -> None:
    """One pass over a value, where it is made, or shared out among operators that read views of it."""
    within = set(names)
    if ref.node in within:
        into[ref.node][len(block.members[ref.node].inputs) + ref.index] += 1
        return
    left = block.graph.type_of(ref).numel
    views = {r.node.inputs[r.place]: r for r in block.readers.get(ref, ()) if r.node.name in within}
    for read in sorted(views.values(), key=lambda read: -read.numel):
        taken = min(read.numel, left)
        into[read.node.name][read.place] += taken / max(1, read.numel)
        left -= taken


def _forward(block: _BlockInMemory, moved: _Moved) -> None:
    for kernel in block.kernels:
        moved.launches[kernel.roots[0]][0] += 1
        for ref in kernel.reads:
            _passes(block, moved.forward, ref, kernel.closure)
        for root in kernel.roots:
            for index in range(len(block.members[root].results)):
                _passes(block, moved.forward, Ref(root, index), kernel.closure)


# ---- backward --------------------------------------------------------------------------------------------------------

Gradient = tuple[object, ...]
"""A name for a tensor of gradients; what is passed on has that of what it was."""


@dataclass
class _WeightSums:
    """The gradients of broadcast weights of one kernel: what is read for them, by value."""

    space: int
    gradients: dict[Gradient, Ref]
    reads: dict[Ref, None]
    names: dict[str, None]


def _backward(block: _BlockInMemory, moved: _Moved) -> int:
    """Fills in backward; returns how many kernels it has."""
    gradients = _Gradients(block)
    sums: list[_WeightSums] = []
    count = 0
    for number, kernel in enumerate(block.kernels):
        own = [name for name in kernel.closure if block.kernel_of[name] == number and gradients.flows(name)]
        if not own:
            continue
        arriving, needed = gradients.arriving(own), gradients.needed(own)
        written = gradients.written(own, arriving)
        for each in gradients.weights(own):
            other = next((s for s in sums if s.space == each.space and s.reads.keys() & each.reads.keys()), None)
            if other is None:
                sums.append(each)
            else:
                other.gradients |= each.gradients
                other.reads |= each.reads
                other.names |= each.names
        if not written:
            continue
        count += 1
        moved.launches[own[0]][1] += 1
        for ref in (*arriving.values(), *needed, *written.values(), *gradients.accumulated(own, number)):
            _passes(block, moved.backward, ref, kernel.closure)
    for each in sums:
        count += 1
        moved.launches[next(iter(each.names))][1] += 1
        for ref in (*each.gradients.values(), *each.reads):
            _passes(block, moved.backward, ref, block.members)
    for read, times in gradients.added_apart():
        moved.besides[read.node.name][read.place] += times + 1
        moved.launches[read.node.name][2] += 1
    for name in block.views:
        node = block.nodes[block.at[name]]
        readers = list(block.readers.get(block.origin(node.inputs[0]), ())) if node.inputs else []
        if readers and all(r.node.name in block.members and gradients.flows(r.node.name) for r in readers):
            moved.within.add(name)
    return count


class _Gradients:
    """Which tensors of gradients there are in backward of a block, and which kernel makes and reads them."""

    def __init__(self, block: _BlockInMemory):
        self.block, self.graph = block, block.graph
        self._of: dict[Ref, Gradient] = {}
        self._sums_at: dict[Ref, int] = {}

    def flows(self, name: str) -> bool:
        """Whether an operator has a backward."""
        return any(tensor.grad for tensor in self.block.nodes[self.block.at[name]].results)

    def _trains(self, ref: Ref) -> bool:
        """Whether a value is a parameter with a gradient."""
        return self.graph.by_name[ref.node].op == "param" and self.graph.type_of(ref).grad

    def _is_value(self, ref: Ref) -> bool:
        return self.graph.type_of(ref).grad and self.graph.by_name[ref.node].op != "param"

    def found_by(self, read: Read, origin: Ref) -> Gradient:
        """What one reader finds of the gradient of a value."""
        node = read.node
        if node.name in self.block.members:
            types = self.graph.input_types(node)
            if read.place in passed_places(node, types) and read.numel == self.graph.type_of(origin).numel:
                return self.of(Ref(node.name))
            return ("of operand", node.name, read.place)
        return ("of operand", node.name, self.block.origin(node.inputs[read.place]))

    def found(self, ref: Ref, readers: Iterable[Read] | None = None) -> dict[Gradient, None]:
        """What readers find of the gradient of a value, each tensor once."""
        every = self.block.readers.get(ref, ()) if readers is None else readers
        found = dict.fromkeys(self.found_by(read, ref) for read in every if self.flows(read.node.name))
        if readers is None and ref in self.block.leaving:
            found["of output", ref] = None
        return found

    def of(self, ref: Ref) -> Gradient:
        """The gradient of a member's result."""
        if ref not in self._of:
            found = [*self.found(ref)]
            self._of[ref] = found[0] if len(found) == 1 else ("sum", ref)
        return self._of[ref]

    def _results(self, own: Iterable[str]) -> Iterable[Ref]:
        for name in own:
            for index, tensor in enumerate(self.block.members[name].results):
                if tensor.grad:
                    yield Ref(name, index)

    def arriving(self, own: Sequence[str]) -> dict[Gradient, Ref]:
        """Gradients that come from outside of a kernel, and what of."""
        within = set(own)
        found: dict[Gradient, Ref] = {}
        for ref in self._results(own):
            outside = [read for read in self.block.readers.get(ref, ()) if read.node.name not in within]
            for gradient in self.found(ref, outside):
                found.setdefault(gradient, ref)
            if ref in self.block.leaving:
                found.setdefault(("of output", ref), ref)
        return found

    def needed(self, own: Iterable[str]) -> dict[Ref, None]:
        """Memory that backward reads to make again what it needs."""
        found: dict[Ref, None] = {}
        for name in own:
            found |= self._needed(self.block.members[name])
        return found

    def _needed(self, node: Node) -> dict[Ref, None]:
        row, types = OPS[node.op], self.graph.input_types(node)
        found: dict[Ref, None] = {}
        for saved in row.saved(node, types):
            place = 0 if saved.kind == "own" else saved.among(len(types))
            if place is None or place >= len(types) + len(node.results):
                continue
            is_operand = place < len(types)
            ref = self.block.origin(node.inputs[place]) if is_operand else Ref(node.name, place - len(types))
            if ref.node not in self.block.members or (is_operand and ref.node in self.block.in_memory):
                found[ref] = None
            else:
                found |= self.block.made_for(ref.node, self.block.in_memory - {ref.node})[1]
        return found

    def _operands(self, own: Iterable[str]) -> dict[Ref, list[Read]]:
        """Values from outside that operators of a kernel read, and how."""
        within = set(own)
        found: dict[Ref, list[Read]] = {}
        for name in own:
            node = self.block.members[name]
            for place, ref in enumerate(node.inputs):
                origin = self.block.origin(ref)
                if origin.node not in within:
                    read = Read(node, place, self.graph.type_of(ref).numel)
                    found.setdefault(origin, []).append(read)
        return found

    def written(self, own: Sequence[str], arriving: Mapping[Gradient, Ref]) -> dict[Gradient, Ref]:
        """Gradients of operands that a kernel writes, and what of."""
        found: dict[Gradient, Ref] = {}
        for ref, reads in self._operands(own).items():
            if not self._is_value(ref):
                continue
            several = [*self.found(ref, reads)]
            gradient: Gradient = several[0] if len(several) == 1 else ("sum in", own[0], ref)
            if gradient not in arriving and several:
                found.setdefault(gradient, ref)
        return found

    def accumulated(self, own: Sequence[str], number: int) -> list[Ref]:
        """Values whose gradients a kernel adds to what others have found, once for each of these."""
        found = []
        for ref, reads in self._operands(own).items():
            if not self._is_value(ref) or self._last(ref) != ("kernel", number):
                continue
            within = set(own)
            others = [read for read in self.block.readers[ref] if read.node.name not in within]
            ours = self.found(ref, reads)
            found += [ref] * len(self.found(ref, others).keys() - ours.keys())
        return found

    def _last(self, ref: Ref) -> tuple[str, object]:
        """Who finds the last of the gradients of a value that no kernel of the block makes."""
        if ref.node in self.block.members:
            return ("", ref)
        for read in self.block.readers[ref]:
            if self.flows(read.node.name):
                kernel = self.block.kernel_of.get(read.node.name)
                return ("kernel", kernel) if kernel is not None else ("operator", read.node.name)
        return ("", ref)

    def added_apart(self) -> list[tuple[Read, int]]:
        """Values whose gradients are added up in no kernel that finds one, and how many there are."""
        found = []
        for ref, reads in self.block.readers.items():
            if self._is_value(ref) and self._last(ref)[0] == "operator" and len(self.found(ref)) > 1:
                first = next(read for read in reads if self.flows(read.node.name))
                found.append((first, len(self.found(ref))))
        return found

    def weights(self, own: Sequence[str]) -> list[_WeightSums]:
        """Sums for the gradients of the weights that a kernel reads."""
        found = []
        for ref, reads in self._operands(own).items():
            if not self._trains(ref):
                continue
            for read in reads:
                below = [name for name in own if name == read.node.name or read.node.name in self.block.ancestors[name]]
                needed = {r: None for r in self._needed(read.node) if not self._trains(r)}
                found.append(
                    _WeightSums(
                        self.block.space(read.node), self.arriving(below), needed, dict.fromkeys((read.node.name,))
                    )
                )
        return found
