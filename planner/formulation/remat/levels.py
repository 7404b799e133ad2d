"""Levels of recomputation: which values of a block are recomputed in backward instead of saved.

Of the instances of a block some run at level ``full``, which keeps what enters the block and makes everything else
again, some at levels that also keep the results of certain operators, some at ``resharded``, which keeps all that was
computed and gathers again what that was gathered into, some at ``gathered``, which does so with parameters alone, and
the others at ``none``. Which operators' results are worth keeping :mod:`planner.search.remat_selection` finds for each
distinct block; at ``selective`` they are those of all contractions, convolutions and attention. What each level comes
to in a block says :mod:`planner.formulation.remat.backward_slice`.

Which instances are which matters for the moment of the peak alone: those at the end of forward are the first to run
backward, while all others still hold what they saved. So the first instances recompute, the very first in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from planner.ir.folding import Folded

Kept = tuple[int, ...]
"""The operators of a block whose results are kept, by position in ``block.nodes``; all else is recomputed."""
Level = Literal["none", "gathered", "resharded", "selective", "full"] | Kept
LEVELS: tuple[Level, ...] = ("none", "gathered", "resharded", "selective", "full")
"""Those with a name: what they keep follows from the kinds of operators."""
ALONE: tuple[Level, ...] = ("none", "gathered")
"""Those of blocks that do not repeat."""
GATHERING: tuple[Level, ...] = ("gathered", "resharded")
"""Those at which nothing is computed again."""
COMPUTED: tuple[Level, ...] = ("none", "resharded", "selective", "full")
"""Those that differ where parameters are gathered once a step, for all micro-batches."""


def least_memory_first(level: Level) -> tuple[int, int, Kept]:
    """The order of levels, from those that keep least: a key to sort by."""
    if isinstance(level, tuple):
        return 1, len(level), level
    return {"full": 0, "selective": 2, "resharded": 3, "gathered": 4, "none": 5}[level], 0, ()


@dataclass(frozen=True)
class Amount:
    """How many instances of a block recompute, and which.

    Attributes:
        levels: the levels above ``none`` at which instances run, with the numbers of those instances.
        leads: what an instance recomputes is counted among what is held. Only one instance does so at a time: where
            equal blocks are kinds of their own, the first of them stands for all.
    """

    levels: tuple[tuple[Level, Sequence[int]], ...] = ()
    leads: bool = True

    @classmethod
    def of(cls, counts: Mapping[Any, int], leads: bool = True) -> Amount:
        """So many instances at each of some levels: the first at the one that keeps least, and so on."""
        found: list[tuple[Level, range]] = []
        for level in sorted(counts, key=least_memory_first):
            if level != "none" and counts[level]:
                start = found[-1][1].stop if found else 0
                found.append((level, range(start, start + counts[level])))
        return cls(tuple(found), leads)

    @classmethod
    def at(cls, levels: Iterable[Level]) -> Amount:
        """The level of every instance, in order."""
        numbers: dict[Level, list[int]] = {}
        for number, level in enumerate(levels):
            numbers.setdefault(level, []).append(number)
        found = ((level, numbers[level]) for level in sorted(numbers, key=least_memory_first) if level != "none")
        return cls(tuple((level, _as_range(each)) for level, each in found))

    def level(self, nth: int) -> Level:
        """The level of instance number ``nth`` of its kind."""
        return next((level for level, numbers in self.levels if nth in numbers), "none")

    def count(self, level: Level) -> int:
        """How many instances run at a level above ``none``."""
        return sum(len(numbers) for each, numbers in self.levels if each == level)

    def mapped(self, to: Callable[[Level], Level]) -> Amount:
        """The same with another level in place of each."""
        found: dict[Level, Sequence[int]] = {}
        for level, numbers in self.levels:
            other = to(level)
            if other != "none":
                found[other] = _as_range(sorted((*found[other], *numbers))) if other in found else numbers
        return replace(self, levels=tuple(sorted(found.items(), key=lambda each: least_memory_first(each[0]))))


def _as_range(numbers: Sequence[int]) -> Sequence[int]:
    """Rising numbers, as a range if none is left out."""
    found = range(numbers[0], numbers[-1] + 1)
    return found if len(found) == len(numbers) else tuple(numbers)


@dataclass(frozen=True)
class Recompute:
    """How much is recomputed: the amount of every kind of block; empty: nothing."""

    amounts: tuple[Amount, ...] = ()

    def __bool__(self) -> bool:
        return self._is_any

    @cached_property
    def _is_any(self) -> bool:
        return any(amount.levels for amount in self.amounts)

    @property
    def gathers(self) -> bool:
        """Whether any instance runs at a level at which nothing is computed again."""
        return any(amount.count(level) for amount in self.amounts for level in GATHERING)

    def level(self, kind: int, nth: int) -> Level:
        """The level of instance number ``nth`` of a kind."""
        return self.amounts[kind].level(nth) if self.amounts else "none"

    def leads(self, kind: int) -> bool:
        """Whether what an instance of a kind recomputes is counted; see :class:`Amount`."""
        return not self.amounts or self.amounts[kind].leads

    def levels(self, kind: int) -> tuple[tuple[Level, Sequence[int]], ...]:
        """The levels above ``none`` at which instances of a kind run, with the numbers of those instances."""
        return self.amounts[kind].levels if self.amounts else ()

    def mapped(self, to: Callable[[int, Level], Level]) -> Recompute:
        """The same with another level in place of each that a kind of block runs at."""
        return Recompute(tuple(each.mapped(partial(to, kind)) for kind, each in enumerate(self.amounts)))

    def without_gathered(self) -> Recompute:
        """The same where no block only gathers its parameters again."""
        return self.mapped(lambda _, level: "none" if level == "gathered" else level)


NOTHING = Recompute()


def at_levels(folded: Folded, levels: Iterable[Level]) -> Recompute:
    """Every instance at a level of its own, in execution order."""
    found: list[list[Level]] = [[] for _ in folded.kinds]
    for instance, level in zip(folded.instances, levels, strict=True):
        found[instance.kind].append(level)
    return Recompute(tuple(map(Amount.at, found)))


def unfolded(recompute: Recompute, numbers: Sequence[tuple[int, int]]) -> Recompute:
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


@dataclass(frozen=True)
class Levels:
    """The levels at which instances of each kind of block may run.

    Attributes:
        first: of every kind, where all instances begin.
        moves: kinds and their next levels, in the order in which their instances go there one after another.
    """

    first: tuple[Level, ...]
    moves: tuple[tuple[int, Level], ...] = ()

    def of(self, kind: int) -> tuple[Level, ...]:
        """Those of a kind, each of which keeps less than the one before."""
        return (self.first[kind], *(level for mover, level in self.moves if mover == kind))

    def of_kinds(self, kinds: Mapping[int, int]) -> Levels:
        """The same for a folding that tells more blocks apart.

        Args:
            kinds: of every kind there, the one that it is here.
        """
        moves = ((kind, level) for mover, level in self.moves for kind in sorted(kinds) if kinds[kind] == mover)
        return Levels(tuple(self.first[kinds[kind]] for kind in sorted(kinds)), tuple(moves))

    def ends(self, folded: Folded) -> tuple[Recompute, Recompute]:
        """The least that may be recomputed, every block at its first level, and the most, every block at its last."""
        each = [(self.of(kind), len(instances)) for kind, instances in enumerate(folded.kinds)]
        least, most = (Recompute(tuple(Amount.of({of[end]: size}) for of, size in each)) for end in (0, -1))
        return least, most

    def computed(self, kind: int) -> tuple[Level, ...]:
        """Those of a kind that differ where parameters are gathered once a step, for all micro-batches."""
        return tuple(dict.fromkeys("none" if level == "gathered" else level for level in self.of(kind)))


def named_by_kind(folded: Folded, both: Iterable[tuple[Sequence[Level], Sequence[Level]]]) -> Levels:
    """Levels by name: kind after kind goes to the second, then to the third, and so on.

    Args:
        both: for every kind its levels in their order, if its blocks repeat, and if they do not.
    """
    pairs = zip(both, folded.kinds, strict=True)
    own = [levels if len(instances) > 1 else alone for (levels, alone), instances in pairs]
    moves = ((kind, level) for level in LEVELS for kind, each in enumerate(own) if level in each[1:])
    return Levels(tuple(each[0] for each in own), tuple(moves))


def used(recompute: Recompute, folded: Folded) -> Levels:
    """The levels at which instances run, and ``none``."""
    kinds = range(len(folded.kinds))
    first: list[Level] = ["none" for _ in kinds]
    return Levels(tuple(first), tuple((kind, level) for kind in kinds for level, _ in reversed(recompute.levels(kind))))


def pareto_frontier(folded: Folded, levels: Levels) -> tuple[Recompute, ...]:
    """Amounts of recomputation in a row, each of which takes more time than the one before, and is there to hold less:
    from every block at its first level, by one more instance at a time at its next one, move after move, to every block
    at its last.
    """
    sizes = [len(instances) for instances in folded.kinds]
    at = list(levels.first)
    step = [Amount.of({level: size}) for level, size in zip(at, sizes, strict=True)]
    steps = [Recompute(tuple(step))]
    for kind, level in levels.moves:
        below, at[kind] = at[kind], level
        for moved in range(1, sizes[kind] + 1):
            step[kind] = Amount.of({level: moved, below: sizes[kind] - moved})
            steps.append(Recompute(tuple(step)))
    return tuple(steps)
