"""Finds where a graph repeats itself, whether or not modules mark it.

1. every node becomes a *token*: operator, static arguments, result types, and the type and role of each
   operand; two nodes have one token only if all of these are equal;
2. maximal periodic stretches of the token sequence are candidate *stacks* (layers, one after another);
3. a stack's windows are rotated so that the fewest values, then bytes, cross the cut between two of them,
   ties going to the cut where the module path changes most.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np

from planner.ir.graph import Graph, Node, Ref, static
from planner.ir.node_table import Ints, Nodes, ints

SMALL = 8
"""A unit with fewer nodes is worth folding only if it has weights and feeds the next: :func:`_is_layer`."""


# --- the graph as a text -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """The non-leaf nodes of a graph as a sequence: positions below count these nodes only."""

    graph: Graph

    @property
    def nodes(self) -> Nodes:
        return self.graph.operators

    @cached_property
    def position(self) -> Ints:
        """The position of every node of the graph; -1 for leaves, and, at the end, for what is no node."""
        columns = self.graph.columns
        found = np.full(len(columns.names) + 1, -1)
        found[:-1][~columns.is_leaf] = np.arange(len(self.nodes))
        return found

    @cached_property
    def ends(self) -> Ints:
        """Where the operands of each position end in the graph's columns; begins with where those of the first begin.

        Leaves have none.
        """
        ends = self.graph.columns.ends
        return np.append(ends[:-1][self.position[:-1] >= 0], ends[-1])

    @cached_property
    def makers(self) -> Ints:
        """For every operand the position of the node that makes it; -1 where that is a leaf."""
        return self.position[self.graph.columns.makers]

    @cached_property
    def last_use(self) -> Ints:
        """For every value the last reader's position; ``len(nodes)`` if it leaves the model, -1 if it has none."""
        columns = self.graph.columns
        found = np.full(columns.starts[-1], -1)
        np.maximum.at(found, columns.read, self.position[columns.readers])
        found[[columns.value(ref) for ref in self.graph.leaving]] = len(self.nodes)
        return found

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        return _tokens(self.graph)

    @cached_property
    def _paths(self) -> tuple[str, ...]:
        return self.nodes.paths

    def path(self, at: int) -> tuple[str, ...]:
        """As :func:`module_paths` have it."""
        before = (self._paths[place] for place in range(at, -1, -1))
        return next((tuple(path.split(".")) for path in before if path), ())


def module_paths(nodes: Iterable[Node]) -> tuple[tuple[str, ...], ...]:
    """The module path of every node, in parts; one without any has its predecessor's."""
    paths: list[tuple[str, ...]] = []
    for node in nodes:
        paths.append(tuple(node.path.split(".")) if node.path else paths[-1] if paths else ())
    return tuple(paths)


def shared_path(paths: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The longest common beginning, in whole path components."""
    found = [tuple(path) for path in paths] or [()]
    first, last = min(found), max(found)  # what these share, all between them have too
    length = min(len(first), len(last))
    return first[: next((at for at in range(length) if first[at] != last[at]), length)]


def _tokens(graph: Graph) -> tuple[int, ...]:
    """A number per non-leaf node; equal numbers mean equal nodes (views copy alike) up to which values they read."""
    numbers: dict[object, int] = {}

    def number(value: object) -> int:
        return numbers.setdefault(value, len(numbers))

    def looked_at(node: Node) -> tuple[int, list[int]]:
        """The node's own number, and those of its results as operands."""
        results = tuple(map(number, node.results))
        arguments = tuple((name, static(value)) for name, value in node.args)
        if node.is_leaf:
            return -1, [number((node.op, arguments, result)) for result in results]
        copies = tuple(place < 0 for place in node.shares)
        return number((node.op, arguments, results, copies)), list(results)

    columns = graph.columns
    found = [looked_at(node) for node in columns.firsts]
    operands = columns.of_values([results for _, results in found])[columns.read]
    tokens, counts = ints(own for own, _ in found)[columns.first], np.diff(columns.ends)
    for place in range(counts.max(initial=0)):
        nodes = np.flatnonzero(counts > place)
        pairs = tokens[nodes] * len(numbers) + operands[columns.ends[nodes] + place]
        tokens[nodes] = tokens.max() + 1 + np.unique(pairs, return_inverse=True)[1]
    return tuple(tokens[~columns.is_leaf].tolist())


def results_of(node: Node) -> Iterator[Ref]:
    """The values that a node makes."""
    return (Ref(node.name, index) for index in range(len(node.results)))


# --- finding stacks ------------------------------------------------------------------------------------


def windows(text: Text) -> list[tuple[int, int]]:
    """Every node's window: those of stacks, single ones that read like them, and the stretches between, in order."""
    stacks = _choose(text, periodic(text.tokens, 2))
    return _fill(text, [*stacks, *_strays(text, stacks)])


@dataclass(frozen=True)
class Run:
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


def periodic(tokens: Sequence[int], minimum: int) -> list[Run]:
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
    return [Run(start, end, period) for (start, end), period in found.items()]


def _choose(text: Text, runs: list[Run]) -> list[_Stack]:
    """Disjoint stacks, by largest saving first; a run that overlaps a chosen stack is clipped and waits."""
    free = [(0, len(text.tokens))]
    known: set[tuple[int, ...]] = set()
    chosen: list[_Stack] = []
    heap = [(-run.saving, run.start, run.period, run) for run in runs]
    heapq.heapify(heap)
    while heap:
        *_, run = heapq.heappop(heap)
        parts = _clip(run, free)
        if parts != [run]:
            for part in parts:
                heapq.heappush(heap, (-part.saving, part.start, part.period, part))
            continue
        stack = _place(text, run, known)
        if not _is_layer(text, stack) or _holds_stacks(text, stack, runs):
            continue
        chosen.append(stack)
        known.add(text.tokens[slice(*stack.spans[0])])
        _occupy(free, stack)
    return sorted(chosen, key=lambda stack: stack.start)


def _clip(run: Run, free: Sequence[tuple[int, int]]) -> list[Run]:
    """The parts of ``run`` inside ``free`` (ascending intervals) that still hold two periods."""
    first = bisect_right(free, run.start, key=lambda span: span[1])
    parts = []
    for low, high in islice(free, first, None):
        if low >= run.end:
            break
        parts.append(replace(run, start=max(run.start, low), end=min(run.end, high)))
    return [part for part in parts if part.end - part.start >= 2 * part.period]


def _occupy(free: list[tuple[int, int]], stack: _Stack) -> None:
    """Take the stack's nodes out of the free interval that holds them."""
    at = bisect_right(free, stack.start, key=lambda span: span[0]) - 1
    low, high = free[at]
    rest = ((low, stack.start), (stack.end, high))
    free[at : at + 1] = [span for span in rest if span[0] < span[1]]


def _place(text: Text, run: Run, known: set[tuple[int, ...]]) -> _Stack:
    """Choose where in ``run`` the windows begin.

    Best is the cut that the fewest values of the window before it outlive, then the fewest bytes, then
    the one with the shortest common module path on its two sides. Remaining ties: a unit already in use,
    the most windows, the earliest. Cuts are compared in the middle of the run, away from its ends.
    """
    length, period = run.end - run.start, run.period
    middle = run.start + length // period // 2 * period
    values, size = np.zeros((2, period + 1), dtype=np.int64)
    columns = text.graph.columns
    for at in range(middle - period, middle + period - 1):
        node = text.nodes[at]
        value = int(columns.starts[columns.position[node.name]])
        for last_use, kind in zip(text.last_use[value : value + len(node.results)].tolist(), node.results, strict=True):
            first = max(at + 1 - middle, 0)
            last = min(max(last_use, at), at + period, middle + period - 1) - middle
            if first <= last:
                values[[first, last + 1]] += (1, -1)
                size[[first, last + 1]] += (kind.size_bytes, -kind.size_bytes)
    values, size = np.cumsum(values), np.cumsum(size)

    def rank(offset: int) -> tuple[int, int, int]:
        before, after = text.path(middle + offset - 1), text.path(middle + offset)
        return int(values[offset]), int(size[offset]), len(shared_path([before, after]))

    offsets = [offset for offset in range(period) if (length - offset) // period >= 2]
    ranks = {offset: rank(offset) for offset in offsets}
    best = min(ranks.values())

    def preference(offset: int) -> tuple[bool, int, int]:
        start = run.start + offset
        return text.tokens[start : start + period] not in known, -((length - offset) // period), offset

    offset = min((offset for offset in offsets if ranks[offset] == best), key=preference)
    return _Stack(run.start + offset, period, (length - offset) // period, int(values[offset]))


def _is_layer(text: Text, stack: _Stack) -> bool:
    """Whether the stack is worth folding: two of a unit of some size, with weights, that feeds the next.

    Keeps neighbours that merely look alike (projections of one input, slices, masks) in one block.
    """
    first, second = stack.spans[:2]
    reads = {ref.node for node in text.nodes[slice(*second)] for ref in node.inputs}
    feeds = any(node.name in reads for node in text.nodes[slice(*first)])
    weighs = any(text.graph.by_name[name].op == "param" for name in reads)
    return (stack.period >= SMALL) + weighs + feeds >= 2


def _holds_stacks(text: Text, stack: _Stack, runs: Iterable[Run]) -> bool:
    """Whether the unit is itself mostly stacks, cut as cleanly: a tower of layers, not a layer.

    Then the layers are the better unit; equal towers fold as well, because kinds are found across stacks.
    """
    free, saved = [stack.spans[0]], 0
    inner = (run for run in runs if run.period * 2 <= stack.period and run.start < free[0][1])
    for run in sorted(inner, key=lambda run: (-run.saving, run.start)):
        for part in _clip(run, free):
            nested = _place(text, part, set())
            if nested.values <= stack.values and _is_layer(text, nested):
                _occupy(free, nested)
                saved += nested.period * (nested.count - 1)
    return saved * 2 >= stack.period


def _strays(text: Text, stacks: Iterable[_Stack]) -> list[_Stack]:
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


def _fill(text: Text, stacks: Iterable[_Stack]) -> list[tuple[int, int]]:
    """The windows of all stacks and the stretches between them, in order."""
    spans = []
    at = 0
    for start, end in sorted(span for stack in stacks for span in stack.spans):
        spans += [(at, start), (start, end)]
        at = end
    return [(start, end) for start, end in [*spans, (at, len(text.tokens))] if start < end]
