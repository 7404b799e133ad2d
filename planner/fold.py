"""Fold a graph: cut it into contiguous blocks and say which of them are the same block again.

``Graph -> Folded``. Everything downstream decides per *distinct* block, so its work does not grow with
depth. Repeats are found in the graph itself, whether or not modules mark them:

1. every node becomes a *token*: operator, static arguments, result types, and the type and role of each
   operand; two nodes have one token only if all of these are equal;
2. maximal periodic stretches of the token sequence are candidate *stacks* (layers, one after another);
3. a stack's windows are rotated so that the fewest values, then bytes, cross the cut between two of them,
   ties going to the cut where the module path changes most;
4. windows are of one *kind* only if they are equal as graphs, node by node and operand by operand
   (:func:`_form`); equal tokens only nominate;
5. what remains is cut into maximal stretches, which are blocks of their own.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise

import numpy as np

from planner.graph import Graph, Node, Ref, TensorType

STORED = frozenset({"param", "buffer", "const"})
"""Leaves with a storage of their own: what several blocks read of them is one decision."""

SMALL = 8
"""A unit with fewer nodes is worth folding only if it has weights and feeds the next: :func:`_is_layer`."""


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
            own = {ref for node in block.nodes for ref in _results(node)}
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
    text = _read(graph)
    stacks = _choose(text, _periodic(text.tokens, minimum), minimum)
    spans = _fill(text, [*stacks, *_strays(text, stacks)])
    groups = _group(text, spans)
    spans, groups = _merge_singles(spans, groups, minimum)
    blocks = _align([_block(text, *span) for span in spans], groups)
    return Folded(graph, tuple(Instance(kind, block) for kind, block in zip(groups, blocks, strict=True)))


def fold_off(graph: Graph) -> Folded:
    """The whole graph as one block: planning without folding."""
    text = _read(graph)
    spans = _fill(text, [])
    return Folded(graph, tuple(Instance(0, _block(text, *span)) for span in spans))


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
    text = _read(folded.graph)
    pieces: list[Block] = []
    labels: list[tuple[int, int]] = []
    for instance in folded.instances:
        block, start = instance.block, text.position[instance.block.nodes[0].name]
        bounds = (0, *sorted(cuts.get(instance.kind, ())), len(block.nodes))
        is_whole = len(bounds) == 2
        pieces += [block] if is_whole else [_block(text, start + low, start + high) for low, high in pairwise(bounds)]
        labels += [(instance.kind, low) for low in bounds[:-1]]
    numbers: dict[tuple[int, int], int] = {}
    kinds = [numbers.setdefault(label, len(numbers)) for label in labels]
    return Folded(
        folded.graph, tuple(Instance(kind, block) for kind, block in zip(kinds, _align(pieces, kinds), strict=True))
    )


# --- the graph as a text -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Text:
    """The non-leaf nodes as a sequence: positions below count these nodes only.

    ``last_use`` maps a value to the position of its last reader, or to ``len(nodes)`` if it leaves the
    model; unread values are absent. ``paths`` are those of :func:`module_paths`.
    """

    graph: Graph
    nodes: tuple[Node, ...]
    position: dict[str, int]
    last_use: dict[Ref, int]

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        return _tokens(self.graph)

    @cached_property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        return module_paths(self.nodes)


def _read(graph: Graph) -> _Text:
    nodes = tuple(node for node in graph.nodes if not node.is_leaf)
    last_use = {ref: position for position, node in enumerate(nodes) for ref in node.inputs}
    last_use.update({ref: len(nodes) for ref in (*graph.outputs, *(ref for _, ref in graph.updates))})
    position = {node.name: at for at, node in enumerate(nodes)}
    return _Text(graph, nodes, position, last_use)


def module_paths(nodes: Iterable[Node]) -> tuple[tuple[str, ...], ...]:
    """The module path of every node, in parts; one without any has its predecessor's."""
    paths: list[tuple[str, ...]] = []
    for node in nodes:
        paths.append(tuple(node.path.split(".")) if node.path else paths[-1] if paths else ())
    return tuple(paths)


def _tokens(graph: Graph) -> tuple[int, ...]:
    """A number per non-leaf node; equal numbers mean equal nodes up to which values they read.

    Nodes of equal blocks often share arguments and result types as objects, so these are looked up by identity first.
    """
    numbers: dict[object, int] = {}
    known: dict[int, int] = {}
    types: dict[int, tuple[int, ...]] = {}
    operands: dict[str, tuple[int, ...]] = {}
    tokens = []

    def number(value: object) -> int:
        return numbers.setdefault(value, len(numbers))

    def argument(pair: tuple[str, object]) -> int:
        found = known.get(id(pair))
        if found is None:
            found = known[id(pair)] = number((pair[0], _static(pair[1])))
        return found

    def type_numbers(results: tuple[TensorType, ...]) -> tuple[int, ...]:
        found = types.get(id(results))
        if found is None:
            found = types[id(results)] = tuple(map(number, results))
        return found

    for node in graph.nodes:
        arguments = tuple(map(argument, node.args))
        results = type_numbers(node.results)
        if node.is_leaf:
            operands[node.name] = tuple(number((node.op, arguments, result)) for result in results)
        else:
            operands[node.name] = results
            read = tuple([operands[ref.node][ref.index] for ref in node.inputs])
            tokens.append(number((node.op, arguments, results, read)))
    return tuple(tokens)


def _static(value: object) -> object:
    """``value`` with every reference replaced by ``None`` and every constant by its text.

    The text tells ``1``, ``1.0`` and ``True`` apart, which Python's equality does not.
    """
    if isinstance(value, Ref):
        return None
    if isinstance(value, tuple):
        return tuple(_static(item) for item in value)
    return repr(value)


def _results(node: Node) -> Iterator[Ref]:
    return (Ref(node.name, index) for index in range(len(node.results)))


# --- finding stacks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """A maximal stretch of tokens in which each equals the one ``period`` later."""

    start: int
    end: int
    period: int

    @property
    def saving(self) -> int:
        """Nodes that need no decision of their own if the run is folded."""
        return (self.end - self.start) // self.period * self.period - self.period


@dataclass(frozen=True)
class _Stack:
    """``count`` windows of ``period`` nodes, one after another; ``values`` of a window outlive it."""

    start: int
    period: int
    count: int
    values: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(at, at + self.period) for at in range(self.start, self.end, self.period)]


def _periodic(tokens: Sequence[int], minimum: int) -> list[_Run]:
    """All maximal runs of at least ``minimum`` periods, each with its smallest (primitive) period.

    Two runs with periods p < q overlap in fewer than p + q nodes (Fine and Wilf, Proc. AMS 16, 1965),
    and the second is at least 2q long: so q <= nodes outside the first + p, where the search ends.
    """
    text = np.array(tokens, dtype=np.int64)
    found: dict[tuple[int, int], int] = {}
    longest = len(text) // minimum
    period = 1
    while period <= longest:
        same = text[:-period] == text[period:]
        if np.count_nonzero(same) >= (minimum - 1) * period:
            edges = np.flatnonzero(np.diff(same.astype(np.int8), prepend=0, append=0)).tolist()
            for start, stop in zip(edges[::2], edges[1::2], strict=True):
                if stop - start >= (minimum - 1) * period:
                    end = stop + period
                    found.setdefault((start, end), period)
                    longest = min(longest, len(text) - (end - start) + period)
        period += 1
    return [_Run(start, end, period) for (start, end), period in found.items()]


def _choose(text: _Text, runs: list[_Run], minimum: int) -> list[_Stack]:
    """Disjoint stacks, by largest saving first; a run that overlaps a chosen stack is clipped and waits."""
    free = [(0, len(text.tokens))]
    known: set[tuple[int, ...]] = set()
    chosen: list[_Stack] = []
    heap = [(-run.saving, run.start, run.period, run) for run in runs]
    heapq.heapify(heap)
    while heap:
        *_, run = heapq.heappop(heap)
        parts = _clip(run, free, minimum)
        if parts != [run]:
            for part in parts:
                heapq.heappush(heap, (-part.saving, part.start, part.period, part))
            continue
        stack = _place(text, run, known, minimum)
        if not _is_layer(text, stack) or _holds_stacks(text, stack, runs, minimum):
            continue
        chosen.append(stack)
        known.add(text.tokens[slice(*stack.spans[0])])
        _occupy(free, stack)
    return sorted(chosen, key=lambda stack: stack.start)


def _clip(run: _Run, free: Sequence[tuple[int, int]], minimum: int) -> list[_Run]:
    """The parts of ``run`` inside ``free`` (ascending intervals) that still hold ``minimum`` periods."""
    first = bisect_right(free, run.start, key=lambda span: span[1])
    parts = []
    for low, high in islice(free, first, None):
        if low >= run.end:
            break
        parts.append(replace(run, start=max(run.start, low), end=min(run.end, high)))
    return [part for part in parts if part.end - part.start >= minimum * part.period]


def _occupy(free: list[tuple[int, int]], stack: _Stack) -> None:
    """Take the stack's nodes out of the free interval that holds them."""
    at = bisect_right(free, stack.start, key=lambda span: span[0]) - 1
    low, high = free[at]
    rest = ((low, stack.start), (stack.end, high))
    free[at : at + 1] = [span for span in rest if span[0] < span[1]]


def _place(text: _Text, run: _Run, known: set[tuple[int, ...]], minimum: int) -> _Stack:
    """Choose where in ``run`` the windows begin.

    Best is the cut that the fewest values of the window before it outlive, then the fewest bytes, then
    the one with the shortest common module path on its two sides. Remaining ties: a unit already in use,
    the most windows, the earliest. Cuts are compared in the middle of the run, away from its ends.
    """
    length, period = run.end - run.start, run.period
    middle = run.start + length // period // 2 * period
    values, size = np.zeros((2, period + 1), dtype=np.int64)
    for at in range(middle - period, middle + period - 1):
        node = text.nodes[at]
        for ref, kind in zip(_results(node), node.results, strict=True):
            first = max(at + 1 - middle, 0)
            last = min(text.last_use.get(ref, at), at + period, middle + period - 1) - middle
            if first <= last:
                values[[first, last + 1]] += (1, -1)
                size[[first, last + 1]] += (kind.size_bytes, -kind.size_bytes)
    values, size = np.cumsum(values), np.cumsum(size)

    def rank(offset: int) -> tuple[int, int, int]:
        before, after = text.paths[middle + offset - 1], text.paths[middle + offset]
        return int(values[offset]), int(size[offset]), len(shared_path([before, after]))

    offsets = [offset for offset in range(period) if (length - offset) // period >= minimum]
    ranks = {offset: rank(offset) for offset in offsets}
    best = min(ranks.values())

    def preference(offset: int) -> tuple[bool, int, int]:
        start = run.start + offset
        return text.tokens[start : start + period] not in known, -((length - offset) // period), offset

    offset = min((offset for offset in offsets if ranks[offset] == best), key=preference)
    return _Stack(run.start + offset, period, (length - offset) // period, int(values[offset]))


def _is_layer(text: _Text, stack: _Stack) -> bool:
    """Whether the stack is worth folding: two of a unit of some size, with weights, that feeds the next.

    Keeps neighbours that merely look alike (projections of one input, slices, masks) in one block.
    """
    first, second = stack.spans[:2]
    reads = {ref.node for node in text.nodes[slice(*second)] for ref in node.inputs}
    feeds = any(node.name in reads for node in text.nodes[slice(*first)])
    weighs = any(text.graph.by_name[name].op == "param" for name in reads)
    return (stack.period >= SMALL) + weighs + feeds >= 2


def _holds_stacks(text: _Text, stack: _Stack, runs: Iterable[_Run], minimum: int) -> bool:
    """Whether the unit is itself mostly stacks, cut as cleanly: a tower of layers, not a layer.

    Then the layers are the better unit; equal towers fold as well, because kinds are found across stacks.
    """
    free, saved = [stack.spans[0]], 0
    inner = (run for run in runs if run.period * 2 <= stack.period and run.start < free[0][1])
    for run in sorted(inner, key=lambda run: (-run.saving, run.start)):
        for part in _clip(run, free, minimum):
            nested = _place(text, part, set(), minimum)
            if nested.values <= stack.values and _is_layer(text, nested):
                _occupy(free, nested)
                saved += nested.period * (nested.count - 1)
    return saved * 2 >= stack.period


def _strays(text: _Text, stacks: Iterable[_Stack]) -> list[_Stack]:
    """Single windows outside the stacks that read like the unit of one."""
    units: dict[int, set[tuple[int, ...]]] = {}
    free = [(0, len(text.tokens))]
    for stack in stacks:
        unit = text.tokens[slice(*stack.spans[0])]
        units.setdefault(unit[0], set()).add(unit)
        _occupy(free, stack)
    found = []
    for at, high in free:
        while at < high:
            fits = [
                len(unit)
                for unit in units.get(text.tokens[at], ())
                if at + len(unit) <= high and text.tokens[at : at + len(unit)] == unit
            ]
            if fits:
                found.append(_Stack(at, max(fits), 1, 0))
            at += max(fits, default=1)
    return found


def _fill(text: _Text, stacks: Iterable[_Stack]) -> list[tuple[int, int]]:
    """The windows of all stacks and the stretches between them, in order."""
    spans = []
    at = 0
    for start, end in sorted(span for stack in stacks for span in stack.spans):
        spans += [(at, start), (start, end)]
        at = end
    return [(start, end) for start, end in [*spans, (at, len(text.tokens))] if start < end]


# --- deciding what is equal ----------------------------------------------------------------------------


def _group(text: _Text, spans: Sequence[tuple[int, int]]) -> list[int]:
    """A number per span; equal numbers mean equal forms."""
    stored = {node.name for node in text.graph.leaves if node.op in STORED}
    readers: Counter[Ref] = Counter()
    for start, end in spans:
        readers.update({ref for node in text.nodes[start:end] for ref in node.inputs if ref.node in stored})
    shared = {ref for ref, count in readers.items() if count > 1}
    forms: dict[object, int] = {}
    return [forms.setdefault(_form(text, start, end, shared), len(forms)) for start, end in spans]


def _form(text: _Text, start: int, end: int, shared: set[Ref]) -> object:
    """What two spans must have equal to be one kind; equality of forms is isomorphism in this order.

    Per node: its token and, for each operand, the local position and result number of its producer, or
    the number of the outside value in order of first use, with its identity if it is stored and shared.
    """
    outside: dict[Ref, int] = {}
    form: list[object] = []
    for at in range(start, end):
        wiring: list[tuple[object, ...]] = []
        for ref in text.nodes[at].inputs:
            producer = text.position.get(ref.node, -1)
            if producer >= start:
                wiring.append((producer - start, ref.index))
            else:
                wiring.append((outside.setdefault(ref, len(outside)), None, ref if ref in shared else None))
        form.append((text.tokens[at], tuple(wiring)))
    return tuple(form)


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


def _block(text: _Text, start: int, end: int) -> Block:
    nodes = text.nodes[start:end]
    reads = dict.fromkeys(ref for node in nodes for ref in node.inputs)
    return Block(
        nodes=nodes,
        inputs=tuple(ref for ref in reads if text.position.get(ref.node, -1) < start),
        outputs=tuple(ref for node in nodes for ref in _results(node) if text.last_use.get(ref, -1) >= end),
        path=".".join(shared_path(node.path.split(".") for node in nodes if node.path)),
    )


def _align(blocks: Sequence[Block], kinds: Sequence[int]) -> list[Block]:
    """Extend the outputs of every block to the output positions of all blocks of its kind."""
    union: dict[int, set[tuple[int, int]]] = {}
    for block, kind in zip(blocks, kinds, strict=True):
        local = {node.name: at for at, node in enumerate(block.nodes)}
        union.setdefault(kind, set()).update((local[ref.node], ref.index) for ref in block.outputs)
    return [
        replace(block, outputs=tuple(Ref(block.nodes[at].name, index) for at, index in sorted(union[kind])))
        for block, kind in zip(blocks, kinds, strict=True)
    ]


# --- names and checks ----------------------------------------------------------------------------------


def shared_path(paths: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The longest common beginning, in whole path components."""
    first, *others = [tuple(path) for path in paths] or [()]
    for path in others:
        same = next((i for i, (a, b) in enumerate(zip(first, path, strict=False)) if a != b), None)
        first = first[: min(len(first), len(path)) if same is None else same]
    return first


def _pattern(instances: Sequence[Instance]) -> str:
    """The common path of the nodes, with ``*`` where instances differ, or the names of both ends.

    Nodes that follow the most frequent beginning up to ``*`` decide: a window's last nodes may lie in
    the next module, which is another kind of module after the last instance.
    """
    columns = zip(*(instance.block.nodes for instance in instances), strict=True)
    paths = [_starred([node.path for node in column]) for column in columns if column[0].path]
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
        assert (node.op, _static(tuple(node.args))) == (copy.op, _static(tuple(copy.args))), f"{node} is not {copy}"
        for a, b in zip(node.inputs, copy.inputs, strict=True):
            pair(a, b)
        for a, b in zip(_results(node), _results(copy), strict=True):
            pair(a, b)
    for a, b in zip(first.inputs, other.inputs, strict=True):
        assert twin[a] == b, f"inputs {a} and {b} are not aligned"
        role, other_role = (graph.by_name[ref.node].op if graph.by_name[ref.node].is_leaf else "" for ref in (a, b))
        assert role == other_role, f"{a} is {role or 'computed'}, {b} is {other_role or 'computed'}"
        tied = role in STORED and max(readers[a], readers[b]) > 1
        assert a == b or not tied, f"{a} and {b} are read by several blocks, and are not one"
    assert tuple(twin[ref] for ref in first.outputs) == other.outputs, "outputs are not aligned"
