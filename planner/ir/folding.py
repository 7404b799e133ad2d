"""Folds a graph: cuts it into contiguous blocks and says which of them are the same block again.

``Graph -> Folded``. Everything downstream decides per *distinct* block, so its work does not grow with
depth. Repeats are found in the graph itself, whether or not modules mark them:

1. the graph is cut into windows that look alike, and what lies between (:mod:`planner.ir.repetition`);
2. windows are of one *kind* only if they are equal as graphs, node by node and operand by operand
   (:func:`_form`); equal tokens only nominate;
3. what remains is cut into maximal stretches, which are blocks of their own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.ir.graph import Graph, Node, Ref, static
from planner.ir.node_table import Ints, Nodes, ints, joined
from planner.ir.repetition import Text, results_of, shared_path, windows

STORED = frozenset({"param", "buffer", "const"})
"""Leaves with a storage of their own: what several blocks read of them is one decision."""


@dataclass(frozen=True)
class Block:
    """A contiguous segment of the graph's non-leaf nodes.

    Attributes:
        span: the segment, in topological order, not written out.
        inputs: values read from outside, leaves included, in order of first use, each once.
        outputs: values read outside or leaving the model, in definition order. Instances of one kind
            have aligned outputs: a position that is an output of *any* of them is listed for *all*,
            so an output may have no reader.
        path: longest common module path of the nodes that have one.
    """

    span: Nodes
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    path: str

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The segment written out: of what is a copy every node is made, so ask it of few blocks."""
        return tuple(self.span)


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
        nodes = tuple(node for instance in self.instances for node in instance.block.span)
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


def fold(graph: Graph) -> Folded:
    """Fold ``graph``: blocks that occur twice or more are repeats.

    Leaves do not count as nodes and lie in no block. A window of a stack that is equal to no other joins the stretches
    beside it. Finding stacks takes O(nodes * (unit + nodes outside the longest stack)) vectorised comparisons; the rest
    is near linear.
    """
    text = Text(graph)
    spans = windows(text)
    groups = _group(text, spans)
    spans, groups = _merge_singles(spans, groups)
    blocks = _blocks(text, spans, groups)
    return Folded(graph, tuple(Instance(kind, block) for kind, block in zip(groups, blocks, strict=True)))


def fold_off(graph: Graph) -> Folded:
    """The whole graph as one block: planning without folding."""
    text = Text(graph)
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


def refold(folded: Folded, graph: Graph) -> Folded:
    """The same blocks of another graph, which has operators of the same names wired alike."""
    spans = [graph.all.among([graph.position[name] for name in each.block.span.names]) for each in folded.instances]
    pairs = zip(folded.instances, spans, strict=True)
    return Folded(graph, tuple(Instance(each.kind, replace(each.block, span=span)) for each, span in pairs))


def split(folded: Folded, places: Iterable[tuple[int, int]]) -> Folded:
    """Cut all instances of some kinds into several blocks, which are kinds of their own.

    Args:
        places: (kind, position): before which nodes of its blocks a kind is cut. In a kind of several instances none
            may lie between two readers of a stored leaf that only one instance reads.
    """
    cuts: dict[int, set[int]] = {}
    for kind, position in places:
        cuts.setdefault(kind, set()).add(position)
    text = Text(folded.graph)
    spans: list[tuple[int, int]] = []
    labels: list[tuple[int, int]] = []
    for instance in folded.instances:
        block, start = instance.block, int(text.position[folded.graph.position[instance.block.span.names[0]]])
        bounds = (0, *sorted(cuts.get(instance.kind, ())), len(block.span))
        spans += [(start + low, start + high) for low, high in pairwise(bounds)]
        labels += [(instance.kind, low) for low in bounds[:-1]]
    numbers: dict[tuple[int, int], int] = {}
    kinds = [numbers.setdefault(label, len(numbers)) for label in labels]
    blocks = _blocks(text, spans, kinds)
    return Folded(folded.graph, tuple(Instance(kind, block) for kind, block in zip(kinds, blocks, strict=True)))


# --- deciding what is equal ----------------------------------------------------------------------------


def _group(text: Text, spans: Sequence[tuple[int, int]]) -> list[int]:
    """A number per span; equal numbers mean equal forms."""
    same: dict[tuple[int, ...], list[int]] = {}
    for number, (start, end) in enumerate(spans):
        same.setdefault(text.tokens[start:end], []).append(number)
    alike = [each for numbers in same.values() for each in _alike(text, spans, numbers)]
    columns = text.graph.columns
    readers = np.bincount(joined(each.entering.ravel() for each in alike), minlength=int(columns.starts[-1]))
    stored = columns.of_values([[node.op in STORED] * len(node.results) for node in columns.firsts])
    readers[stored == 0] = 0
    forms: list[object] = [None] * len(spans)
    for form, each in enumerate(alike):
        shared = np.where(readers[each.entering] > 1, each.entering, -1)
        for number, row in zip(each.numbers, shared, strict=True):
            forms[number] = form, row.tobytes()
    found: dict[object, int] = {}
    return [found.setdefault(form, len(found)) for form in forms]


class _Alike(NamedTuple):
    """Spans of equal tokens that are wired alike, by number, and the values that each reads from outside, a row each.

    Two spans of one kind have equal tokens, node by node, and equal wiring, and what they read that is stored and
    shared is one: equality of these is isomorphism in this order. An operand is the local position and result number
    of its producer, or the number of an outside value in order of first use.
    """

    numbers: list[int]
    entering: Ints


def _alike(text: Text, spans: Sequence[tuple[int, int]], numbers: Sequence[int]) -> Iterator[_Alike]:
    """Spans of equal tokens, by how they are wired."""
    columns, left = text.graph.columns, ints(numbers)
    starts = ints(spans[number][0] for number in numbers)
    operands = _operands(text, starts, spans[numbers[0]][1] - spans[numbers[0]][0])
    makers = text.makers[operands] - starts[:, None]
    values, indices = columns.read[operands], columns.indices[operands]
    while len(left):
        own, (places, number) = makers[0] >= 0, _entering(makers[0], values[0])
        entering = values[:, places]
        ordered = np.sort(entering, axis=1)
        same = (
            ((makers >= 0) == own).all(axis=1)
            & (makers[:, own] == makers[0, own]).all(axis=1)
            & (indices[:, own] == indices[0, own]).all(axis=1)
            & (values[:, ~own] == entering[:, number]).all(axis=1)
            & (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
        )
        yield _Alike(left[same].tolist(), entering[same])
        left, makers, values, indices = (each[~same] for each in (left, makers, values, indices))


def _operands(text: Text, starts: Ints, length: int) -> Ints:
    """The operands of spans of one length and equal tokens as places in the graph's columns, a row each."""
    begin = text.ends[starts]
    found: Ints = begin[:, None] + np.arange(text.ends[starts[0] + length] - begin[0])
    return found


def _entering(makers: Ints, values: Ints) -> tuple[Ints, Ints]:
    """Of a span's operands the first to read each value from outside, in order, and for each from outside which it is.

    Args:
        makers: for every operand the position of its maker in the span, below 0 outside.
        values: for every operand which value it is.
    """
    outside = np.flatnonzero(makers < 0)
    _, first, number = np.unique(values[outside], return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return outside[first[order]], rank[number]


def _merge_singles(spans: Sequence[tuple[int, int]], groups: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Join neighbouring spans that are not repeated, and number kinds by first occurrence.

    Joining never makes a leaf unshared that a repeated block reads, so forms stay as they are.
    """
    sizes = Counter(groups)
    merged: list[tuple[int, int]] = []
    keys: list[int | None] = []
    for span, group in zip(spans, groups, strict=True):
        if sizes[group] > 1:
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
    columns, starts = text.graph.columns, ints(start for start, _ in spans)
    alike: dict[int, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(number)
    entering: dict[int, Ints] = {}
    for numbers in alike.values():
        start, end = spans[numbers[0]]
        operands = _operands(text, starts[numbers], end - start)
        places, _ = _entering(text.makers[operands[0]] - start, columns.read[operands[0]])
        entering.update(zip(numbers, columns.read[operands[:, places]], strict=True))
    rows, leaving = [entering[number] for number in range(len(spans))], map(columns.value, text.graph.leaving)
    outputs = _outputs(text, starts, kinds, np.unique(joined((ints(leaving), *rows))))
    inputs = iter(columns.refs(joined(rows)))
    blocks = []
    for (start, end), kind, row in zip(spans, kinds, rows, strict=True):
        span = text.nodes[start:end]
        left = tuple([Ref(span.names[at], index) for at, index in outputs[kind]])
        paths = dict.fromkeys(filter(None, span.paths))
        path = ".".join(shared_path(path.split(".") for path in paths))
        blocks.append(Block(span, tuple(itertools.islice(inputs, len(row))), left, path))
    return blocks


def _outputs(text: Text, starts: Ints, kinds: Sequence[int], needed: Ints) -> dict[int, list[tuple[int, int]]]:
    """The outputs of each kind of block: position and result number.

    Args:
        starts: where the blocks begin.
        needed: values that blocks read from outside, or that leave the model.
    """
    columns = text.graph.columns
    makers = np.searchsorted(columns.starts, needed, side="right") - 1
    made, indices = text.position[makers], needed - columns.starts[makers]
    is_made = made >= 0
    made, indices = made[is_made], indices[is_made]
    numbers = np.searchsorted(starts, made, side="right") - 1
    found: dict[int, set[tuple[int, int]]] = {kind: set() for kind in kinds}
    for number, at, index in zip(numbers.tolist(), (made - starts[numbers]).tolist(), indices.tolist(), strict=True):
        found[kinds[number]].add((at, index))
    return {kind: sorted(places) for kind, places in found.items()}


# --- names and checks ----------------------------------------------------------------------------------


def _pattern(instances: Sequence[Instance]) -> str:
    """The common path of the nodes, with ``*`` where instances differ, or the names of both ends.

    Nodes that follow the most frequent beginning up to ``*`` decide: a window's last nodes may lie in
    the next module, which is another kind of module after the last instance.
    """
    columns = list(zip(*(instance.block.span.paths for instance in instances), strict=True))
    starred = {column: _starred(column) for column in set(columns) if column[0]}
    paths = [starred[column] for column in columns if column[0]]
    stems = Counter(path[: path.index("*") + 1] for path in paths if "*" in path)
    stem = max(stems, key=stems.__getitem__, default=())
    name = ".".join(shared_path(path for path in paths if path[: len(stem)] == stem))
    first, last = instances[0].block.span[0], instances[0].block.span[-1]
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
