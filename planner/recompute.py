"""Recompute: which values of a block are made again in backward instead of being kept since forward.

Of the instances of a block some run at level ``full``, which keeps what enters the block and makes everything else
again, some at ``selective``, which also keeps the results of contractions, convolutions and attention, some at
``gathered``, which keeps everything but parameters that were gathered for use and gathers them again, and the others
at ``none``. What was drawn at random is drawn again, alike; what operators without a row made is always kept. What the
block converts for an operator that needs it is converted again unless it is the result of a kept operator: gathered
parameters too.

Which instances are which matters for the moment of the peak alone: those at the end of forward are the first to run
backward, while all others still hold what they saved. So the first instances recompute, the very first in full.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from planner.fold import Block, Folded
from planner.graph import Graph, Node, Ref
from planner.ops import OPS, saved_places
from planner.ops.table import OWN, no_flops

Level = Literal["none", "gathered", "selective", "full"]
LEVELS: tuple[Level, ...] = ("none", "gathered", "selective", "full")
ALONE: tuple[Level, ...] = ("none", "gathered")
"""Those of blocks that do not repeat."""
COMPUTED: tuple[Level, ...] = ("none", "selective", "full")
"""Those that differ where parameters are gathered once a step, for all turns."""


@dataclass(frozen=True)
class Amount:
    """How many instances of a block recompute: the first ``full`` at that level, the next ``selective`` at theirs, and
    those after them ``gathered``.

    ``leads``: what an instance makes again is counted among what is held. Only one instance does so at a time: where
    equal blocks are kinds of their own, the first of them stands for all.
    """

    full: int = 0
    selective: int = 0
    gathered: int = 0
    leads: bool = True

    @classmethod
    def of(cls, counts: Mapping[Any, int], leads: bool = True) -> Amount:
        """So many instances at each of some levels."""
        return cls(counts.get("full", 0), counts.get("selective", 0), counts.get("gathered", 0), leads)

    def level(self, nth: int) -> Level:
        """The level of instance number ``nth`` of its kind."""
        return next((level for level, numbers in self.levels if nth in numbers), "none")

    @cached_property
    def levels(self) -> tuple[tuple[Level, range], ...]:
        """The levels above ``none`` at which instances run, with the numbers of those instances."""
        ends = [0, *accumulate((self.full, self.selective, self.gathered))]
        found = zip(reversed(LEVELS[1:]), map(range, ends, ends[1:]), strict=True)
        return tuple((level, numbers) for level, numbers in found if numbers)


@dataclass(frozen=True)
class Recompute:
    """How much is made again: the amount of every kind of block; empty: nothing."""

    amounts: tuple[Amount, ...] = ()

    def __bool__(self) -> bool:
        return self._is_any

    @cached_property
    def _is_any(self) -> bool:
        return any(amount.levels for amount in self.amounts)

    @property
    def gathers(self) -> bool:
        """Whether any instance runs at level ``gathered``."""
        return any(amount.gathered for amount in self.amounts)

    def level(self, kind: int, nth: int) -> Level:
        """The level of instance number ``nth`` of a kind."""
        return self.amounts[kind].level(nth) if self.amounts else "none"

    def leads(self, kind: int) -> bool:
        """Whether what an instance of a kind makes again is counted; see :class:`Amount`."""
        return not self.amounts or self.amounts[kind].leads

    def levels(self, kind: int) -> tuple[tuple[Level, range], ...]:
        """The levels above ``none`` at which instances of a kind run, with the numbers of those instances."""
        return self.amounts[kind].levels if self.amounts else ()

    def without_gathering(self, kinds: Collection[int] | None = None) -> Recompute:
        """The same where these kinds, or all, gather nothing."""
        amounts = enumerate(self.amounts)
        return Recompute(
            tuple(replace(each, gathered=0) if kinds is None or kind in kinds else each for kind, each in amounts)
        )


NOTHING = Recompute()


def apart(recompute: Recompute, numbers: Sequence[tuple[int, int]]) -> Recompute:
    """The same for a folding in which every instance is a kind of its own.

    Args:
        numbers: of every instance, its kind and which of its kind it is.
    """
    levels = [recompute.level(kind, nth) for kind, nth in numbers]
    return Recompute(
        tuple(
            Amount.of({level: 1}, leads=nth == 0 and recompute.leads(kind))
            for level, (kind, nth) in zip(levels, numbers, strict=True)
        )
    )


def together(recompute: Recompute, kinds: Sequence[int]) -> Recompute:
    """The inverse of :func:`apart`, for a folding that joins only instances of one level.

    Args:
        kinds: of every instance, its kind in that folding.
    """
    amounts = [Amount(leads=False)] * (max(kinds, default=-1) + 1)
    for kind, more in zip(kinds, recompute.amounts, strict=True):
        old = amounts[kind]
        counts = {level: getattr(old, level) + getattr(more, level) for level in LEVELS[1:]}
        amounts[kind] = Amount.of(counts, leads=old.leads or more.leads)
    return Recompute(tuple(amounts))


@dataclass(frozen=True)
class Ladder:
    """Amounts of recomputation in a row: each step takes more time and holds less than the one before.

    Attributes:
        steps: the amounts.
        bends: the steps between which what is held changes evenly.
    """

    steps: tuple[Recompute, ...]
    bends: tuple[int, ...] = ()

    def between(self, low: int, high: int) -> list[Recompute]:
        """The amounts from step ``low`` to step ``high`` between which what is held changes evenly."""
        return [self.steps[step] for step in (low, *(bend for bend in self.bends if low < bend < high), high)]

    def apart(self, numbers: Sequence[tuple[int, int]]) -> Ladder:
        """The same for a folding in which every instance is a kind of its own; see :func:`apart`."""
        return Ladder(tuple(apart(step, numbers) for step in self.steps), self.bends)


def ladder(folded: Folded, levels: Sequence[Level] = LEVELS, alone: Sequence[Level] = ALONE) -> Ladder:
    """From every block at its first level, by one more instance at a time at its next one, level after level and kind
    after kind, to every block at its last.

    Args:
        levels: of blocks that repeat, in their order.
        alone: of blocks that do not; they are gathered again at most.
    """
    sizes = [len(instances) for instances in folded.kinds]
    own = [levels if size > 1 else alone for size in sizes]
    step: list[Mapping[Level, int]] = [{each[0]: size} for each, size in zip(own, sizes, strict=True)]
    steps, bends = [_amounts(step)], {0}
    for above in LEVELS:
        for kind, each in enumerate(own):
            if above in each[1:]:
                below = each[each.index(above) - 1]
                bends |= {len(steps) - 1, len(steps)}
                for moved in range(1, sizes[kind] + 1):
                    step[kind] = {above: moved, below: sizes[kind] - moved}
                    steps.append(_amounts(step))
    return Ladder(tuple(steps), tuple(sorted(bends | {len(steps) - 1})))


def _amounts(step: Sequence[Mapping[Level, int]]) -> Recompute:
    return Recompute(tuple(map(Amount.of, step)))


@dataclass(frozen=True)
class Again:
    """What one instance of a block makes again, by position in ``block.nodes``.

    Attributes:
        values: (operator, result) of every value that is made again.
        lasting: operators whose results are kept.
        taken: per operator, the operands of which its own conversion runs again.
        dropped: per operator, the places (operands, then results) that its backward needs and that are not kept; a
            value counts once, for the first operator that needs it, and its views not at all.
        kept: per operator, the places that its backward, or it when it runs again, needs and that are kept.
        drawing: operators that run again for what they drew, and keep nothing of it in between.
    """

    values: frozenset[tuple[int, int]]
    lasting: frozenset[int]
    taken: tuple[frozenset[int], ...]
    dropped: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    drawing: frozenset[int] = frozenset()

    @cached_property
    def operators(self) -> frozenset[int]:
        """Operators that run again."""
        return frozenset(at for at, _ in self.values)


def again(graph: Graph, block: Block, level: Level) -> Again:
    """What a block makes again at a level other than ``none``; the same for all instances of a kind."""
    nodes = block.nodes
    at_of = {node.name: at for at, node in enumerate(nodes)}
    is_kept = [_is_kept(node, level) for node in nodes]
    root = _roots(nodes)

    def is_converted_again(ref: Ref) -> bool:
        if level == "gathered":
            return graph.by_name[ref.node].op == "param"
        return not _is_result(ref, at_of, is_kept)

    def is_made_again(ref: Ref) -> bool:
        return ref.node in at_of and not is_kept[at_of[ref.node]]

    tensors = [(*node.inputs, *(Ref(node.name, i) for i in range(len(node.results)))) for node in nodes]
    saved = [saved_places(node, graph.input_types(node)) if any(t.grad for t in node.results) else () for node in nodes]
    values: set[tuple[int, int]] = set()
    drawing = frozenset(at for at, node in enumerate(nodes) if not is_kept[at] and _keeps_what_it_draws(graph, node))
    waiting = [refs[place] for places, refs in zip(saved, tensors, strict=True) for place in places]
    waiting += [Ref(nodes[at].name) for at in drawing]
    while waiting:
        ref = waiting.pop()
        if is_made_again(ref) and (at_of[ref.node], ref.index) not in values:
            values.add((at_of[ref.node], ref.index))
            waiting.extend(nodes[at_of[ref.node]].inputs)
    running = {at for at, _ in values}
    taken, dropped, kept = [], [], []
    counted: set[Ref] = set()
    for at, node in enumerate(nodes):
        operands = range(len(node.inputs))
        wanted = dict.fromkeys((*saved[at], *(operands if at in running else ())))
        origin = {place: root.get(tensors[at][place], tensors[at][place]) for place in wanted}
        taken.append(frozenset(i for i in operands if i in wanted and is_converted_again(node.inputs[i])))
        kept.append(tuple(place for place in wanted if not is_made_again(origin[place])))
        gone = {origin[place]: place for place in reversed(saved[at]) if is_made_again(origin[place])}
        more = {place for ref, place in gone.items() if ref not in counted}
        if at in drawing:
            more |= {*saved_places(node, graph.input_types(node), own=True)} - {*saved[at]}
        dropped.append(tuple(sorted(more)))
        counted.update(gone)
    lasting = frozenset(at for at, keeps in enumerate(is_kept) if keeps)
    return Again(frozenset(values), lasting, tuple(taken), tuple(dropped), tuple(kept), drawing)


def _is_kept(node: Node, level: Level) -> bool:
    """Whether what an operator makes is kept."""
    row = OPS.get(node.op)
    return row is None or level == "gathered" or (level == "selective" and row.flops is not no_flops)


def _keeps_what_it_draws(graph: Graph, node: Node) -> bool:
    """Whether backward of an operator needs what it drew, as of dropout that drops anything."""
    row = OPS.get(node.op)
    if row is None or not row.random or shares(node) or not any(tensor.grad for tensor in node.results):
        return False
    rate = node["p"] if node["dropout_p"] is None else node["dropout_p"]
    return rate != 0 and any(word in OWN for word in row.saved(node, graph.input_types(node)))


def _is_result(ref: Ref, at_of: dict[str, int], is_kept: list[bool]) -> bool:
    """Whether a kept operator of the block made a value."""
    return ref.node in at_of and is_kept[at_of[ref.node]]


def _roots(nodes: tuple[Node, ...]) -> dict[Ref, Ref]:
    """View -> what it is a view of, within a block."""
    root: dict[Ref, Ref] = {}
    for node in nodes:
        for index, shared in enumerate(shares(node)):
            if shared >= 0:
                root[Ref(node.name, index)] = root.get(node.inputs[shared], node.inputs[shared])
    return root


def shares(node: Node) -> tuple[int, ...]:
    """For each result the operand whose memory it shares, -1 for none; nothing if it shares none."""
    row = OPS.get(node.op)
    found = node.shares or ((0,) * len(node.results) if row is not None and row.view and node.inputs else ())
    return found if any(shared >= 0 for shared in found) else ()
