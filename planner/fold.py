"""Fold a graph: cut it into contiguous blocks and say which of them are the same block again.

``Graph -> Folded``. Everything downstream decides per *distinct* block, so its work does not grow with
depth. Repeats are found in the graph itself, whether or not modules mark them:

1. the graph is cut into windows that look alike, and what lies between (:mod:`planner.stacks`);
2. windows are of one *kind* only if they are equal as graphs, node by node and operand by operand
   (:func:`_form`); equal tokens only nominate;
3. what remains is cut into maximal stretches, which are blocks of their own.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from planner.graph import Graph, Node, Ref
from planner.stacks import Text, read, results_of, shared_path, static, windows

STORED = frozenset({"param", "buffer", "const"})
"""Leaves with a storage of their own: what several blocks read of them is one decision."""


@dataclass(frozen=True)
class Block:
    """A contiguous segment of the graph's non-leaf nodes.

    Attributes:
        nodes: the segment, in topological order.
        inputs: values read from outside, leaves included, in order of first use, each once.
        outputs: values read outside or leaving the model, in definition order. Instances of one kind
            have aligned outputs: a position that is an output of *any* of them is listed for *all*,
            so an output may have no reader.
        path: longest common module path of the nodes that have one.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    path: str


@dataclass(frozen=True)
class Instance:
    """One occurrence of distinct block number ``kind``."""

    kind: int
    block: Block


@dataclass(frozen=True)
class Folded:
    """A graph's blocks in execution order; together they hold every non-leaf node exactly once.

    Blocks of one kind correspond position by position in ``nodes``, ``inputs`` and ``outputs``. A stored
    leaf (param, buffer, const) that more than one block reads is the *same* leaf in all instances of a
    kind; other leaves may be fresh per instance. Kinds are numbered by first occurrence.
    """

    graph: Graph
    instances: tuple[Instance, ...]

    @cached_property
    def kinds(self) -> tuple[tuple[Instance, ...], ...]:
        """The instances of each kind, in execution order."""
        found: dict[int, list[Instance]] = {}
        for instance in self.instances:
            found.setdefault(instance.kind, []).append(instance)
        return tuple(tuple(found[kind]) for kind in range(len(found)))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """A readable, unique name for each kind: its path, ``*`` where instances differ."""
        seen: Counter[str] = Counter()
        names = []
        for instances in self.kinds:
            name = _pattern(instances)
            seen[name] += 1
            names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
        return tuple(names)

    def check(self) -> None:
        """Assert all that the class promises, from the graph alone."""
        nodes = tuple(node for instance in self.instances for node in instance.block.nodes)
        assert nodes == tuple(node for node in self.graph.nodes if not node.is_leaf), "nodes lost or reordered"
        readers = Counter(ref for instance in self.instances for ref in instance.block.inputs)
        needed = {*self.graph.outputs, *(ref for _, ref in self.graph.updates), *readers}
        for instance in self.instances:
            block = instance.block
            own = {ref for node in block.nodes for ref in results_of(node)}
            assert block.inputs == tuple(dict.fromkeys(r for n in block.nodes for r in n.inputs if r not in own))
            assert own & needed <= set(block.outputs) <= own, f"wrong outputs of {block.path}"
        for first, *others in self.kinds:
            for other in others:
                _check_equal(self.graph, first.block, other.block, readers)


def fold(graph: Graph, *, minimum: int = 2) -> Folded:
    """Fold ``graph``; blocks that occur fewer than ``minimum`` times are not counted as repeats.

    Leaves do not count as nodes and lie in no block. A window of a stack that is not equal to enough
    others joins the stretches beside it. Finding stacks takes O(nodes * (unit + nodes outside the longest
    stack)) vectorised comparisons; the rest is near linear.

    Raises:
        ValueError: ``minimum`` is less than 2.
    """
    if minimum < 2:
        raise ValueError(f"a repeat occurs at least twice, got minimum={minimum}")
    text = read(graph)
    spans = windows(text, minimum)
    groups = _group(text, spans)
    spans, groups = _merge_singles(spans, groups, minimum)
    blocks = _blocks(text, spans, groups)
    return Folded(graph, tuple(Instance(kind, block) for kind, block in zip(groups, blocks, strict=True)))


def fold_off(graph: Graph) -> Folded:
    """The whole graph as one block: planning without folding."""
    text = read(graph)
    spans = [(0, len(text.nodes))] if text.nodes else []
    return Folded(graph, tuple(Instance(0, block) for block in _blocks(text, spans, [0] * len(spans))))


def relabel(folded: Folded, labels: Sequence[Hashable]) -> Folded:
    """Split kinds: instances stay of one kind only where their labels are equal too.

    Args:
        labels: one for each instance, in order.
    """
    number: dict[tuple[int, Hashable], int] = {}
    return Folded(
        folded.graph,
        tuple(
            Instance(number.setdefault((instance.kind, label), len(number)), instance.block)
            for instance, label in zip(folded.instances, labels, strict=True)
        ),
    )


def split(folded: Folded, places: Iterable[tuple[int, int]]) -> Folded:
    """Cut all instances of some kinds into several blocks, which are kinds of their own.

    Args:
        places: (kind, position): before which nodes of its blocks a kind is cut. In a kind of several instances none
            may lie between two readers of a stored leaf that only one instance reads.
    """
    cuts: dict[int, set[int]] = {}
    for kind, position in places:
        cuts.setdefault(kind, set()).add(position)
    text = read(folded.graph)
    spans: list[tuple[int, int]] = []
    labels: list[tuple[int, int]] = []
    for instance in folded.instances:
        block, start = instance.block, text.position[instance.block.nodes[0].name]
        bounds = (0, *sorted(cuts.get(instance.kind, ())), len(block.nodes))
        spans += [(start + low, start + high) for low, high in pairwise(bounds)]
        labels += [(instance.kind, low) for low in bounds[:-1]]
    numbers: dict[tuple[int, int], int] = {}
    kinds = [numbers.setdefault(label, len(numbers)) for label in labels]
    blocks = _blocks(text, spans, kinds)
    return Folded(folded.graph, tuple(Instance(kind, block) for kind, block in zip(kinds, blocks, strict=True)))


# --- deciding what is equal ----------------------------------------------------------------------------


def _group(text: Text, spans: Sequence[tuple[int, int]]) -> list[int]:
    """A number per span; equal numbers mean equal forms."""
    stored = {node.name for node in text.graph.leaves if node.op in STORED}
    wired = [_wiring(text, start, end) for start, end in spans]
    readers = Counter(ref for _, outside in wired for ref in outside if ref.node in stored)
    forms: dict[object, int] = {}
    found = []
    for (start, end), (wiring, outside) in zip(spans, wired, strict=True):
        shared = tuple([ref if readers[ref] > 1 else None for ref in outside])
        found.append(forms.setdefault((text.tokens[start:end], wiring, shared), len(forms)))
    return found


def _wiring(text: Text, start: int, end: int) -> tuple[tuple[int, ...], tuple[Ref, ...]]:
    """Where the operands of a span's nodes come from, and what it reads from outside, in order of first use.

    Two spans of one kind have equal tokens, node by node, and equal wiring, and what they read that is stored and
    shared is one: equality of these is isomorphism in this order. An operand is the local position and result number
    of its producer, or the number of an outside value.
    """
    outside: dict[Ref, int] = {}
    wiring: list[int] = []
    position = text.position
    for node in text.nodes[start:end]:
        for ref in node.inputs:
            producer = position.get(ref[0], -1)
            if producer >= start:
                wiring += (producer - start, ref[1])
            else:
                wiring.append(~outside.setdefault(ref, len(outside)))
    return tuple(wiring), tuple(outside)


def _merge_singles(
    spans: Sequence[tuple[int, int]], groups: Sequence[int], minimum: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Join neighbouring spans that are not repeated, and number kinds by first occurrence.

    Joining never makes a leaf unshared that a repeated block reads, so forms stay as they are.
    """
    sizes = Counter(groups)
    merged: list[tuple[int, int]] = []
    keys: list[int | None] = []
    for span, group in zip(spans, groups, strict=True):
        if sizes[group] >= minimum:
            merged.append(span)
            keys.append(group)
        elif keys and keys[-1] is None:
            merged[-1] = (merged[-1][0], span[1])
        else:
            merged.append(span)
            keys.append(None)
    numbers: dict[object, int] = {}
    kinds = [numbers.setdefault(("single", at) if key is None else key, len(numbers)) for at, key in enumerate(keys)]
    return merged, kinds


def _blocks(text: Text, spans: Sequence[tuple[int, int]], kinds: Sequence[int]) -> list[Block]:
    """The blocks of some spans; those of one kind have their outputs at the positions of all of them."""
    reads: dict[int, list[tuple[int, int]]] = {}
    for (start, end), kind in zip(spans, kinds, strict=True):
        if kind not in reads:
            reads[kind] = _outside(text, start, text.nodes[start:end])
    inputs = [
        tuple([text.nodes[start + at].inputs[place] for at, place in reads[kind]])
        for (start, _), kind in zip(spans, kinds, strict=True)
    ]
    leaving: dict[int, set[tuple[int, int]]] = {kind: set() for kind in kinds}
    spans_from = [start for start, _ in spans]
    for ref in itertools.chain(text.leaving, *inputs):
        at = text.position.get(ref.node)
        if at is not None:
            number = bisect_right(spans_from, at) - 1
            leaving[kinds[number]].add((at - spans_from[number], ref.index))
    outputs = {kind: sorted(places) for kind, places in leaving.items()}
    blocks = []
    for (start, end), kind, entering in zip(spans, kinds, inputs, strict=True):
        nodes = text.nodes[start:end]
        left = tuple([Ref(nodes[at].name, index) for at, index in outputs[kind]])
        paths = dict.fromkeys([node.path for node in nodes if node.path])
        blocks.append(Block(nodes, entering, left, ".".join(shared_path(path.split(".") for path in paths))))
    return blocks


def _outside(text: Text, start: int, nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """Which operand of which node is the first to read each value from outside."""
    found: dict[Ref, tuple[int, int]] = {}
    for at, node in enumerate(nodes):
        for place, ref in enumerate(node.inputs):
            if text.position.get(ref.node, -1) < start:
                found.setdefault(ref, (at, place))
    return list(found.values())


# --- names and checks ----------------------------------------------------------------------------------


def _pattern(instances: Sequence[Instance]) -> str:
    """The common path of the nodes, with ``*`` where instances differ, or the names of both ends.

    Nodes that follow the most frequent beginning up to ``*`` decide: a window's last nodes may lie in
    the next module, which is another kind of module after the last instance.
    """
    columns = list(zip(*([node.path for node in instance.block.nodes] for instance in instances), strict=True))
    starred = {column: _starred(column) for column in set(columns) if column[0]}
    paths = [starred[column] for column in columns if column[0]]
    stems = Counter(path[: path.index("*") + 1] for path in paths if "*" in path)
    stem = max(stems, key=stems.__getitem__, default=())
    name = ".".join(shared_path(path for path in paths if path[: len(stem)] == stem))
    first, last = instances[0].block.nodes[0], instances[0].block.nodes[-1]
    return name or "..".join(dict.fromkeys((first.path or first.name, last.path or last.name)))


def _starred(paths: Iterable[str]) -> tuple[str, ...]:
    """Paths as one, with ``*`` for the components in which they differ."""
    columns = zip(*(path.split(".") for path in paths), strict=False)
    return tuple("*" if len(set(parts)) > 1 else parts[0] for parts in columns)


def _check_equal(graph: Graph, first: Block, other: Block, readers: Counter[Ref]) -> None:
    """Assert that two blocks are isomorphic in the order of their nodes, inputs and outputs."""
    twin: dict[Ref, Ref] = {}
    back: dict[Ref, Ref] = {}

    def pair(a: Ref, b: Ref) -> None:
        assert twin.setdefault(a, b) == b and back.setdefault(b, a) == a, f"{a} and {b} are wired differently"
        assert graph.type_of(a) == graph.type_of(b), f"{a} and {b} differ in type"

    assert len(first.nodes) == len(other.nodes), f"{first.path} and {other.path} differ in length"
    for node, copy in zip(first.nodes, other.nodes, strict=True):
        assert (node.op, static(tuple(node.args))) == (copy.op, static(tuple(copy.args))), f"{node} is not {copy}"
        for a, b in zip(node.inputs, copy.inputs, strict=True):
            pair(a, b)
        for a, b in zip(results_of(node), results_of(copy), strict=True):
            pair(a, b)
    for a, b in zip(first.inputs, other.inputs, strict=True):
        assert twin[a] == b, f"inputs {a} and {b} are not aligned"
        role, other_role = (graph.by_name[ref.node].op if graph.by_name[ref.node].is_leaf else "" for ref in (a, b))
        assert role == other_role, f"{a} is {role or 'computed'}, {b} is {other_role or 'computed'}"
        tied = role in STORED and max(readers[a], readers[b]) > 1
        assert a == b or not tied, f"{a} and {b} are read by several blocks, and are not one"
    assert tuple(twin[ref] for ref in first.outputs) == other.outputs, "outputs are not aligned"
