"""Runs: instances of a folded graph that do, one after another, what others did a period before them.

``Assignment -> [Run]``. To be of one kind and one level of recomputation is not enough for that: in a run an instance
also reads where its twin of a period before read, or what a period lies between, and its outputs are read for as long.
So what a period changes about a step the next one changes too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.formulate import Assignment
from planner.graph import Node, Ref
from planner.stacks import Run, periodic


@dataclass(frozen=True)
class Skip:
    """``times`` periods in the middle of a run, from instance ``start`` on, of which nothing new is to be learnt."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        return self.start + self.times * self.period


def skips(wiring: Wiring, ends: int) -> list[Skip]:
    """What lies between the first and the last ``ends`` periods of every run, in execution order."""
    found = [
        Skip(run.start + ends * run.period, run.period, (run.end - run.start) // run.period - 2 * ends)
        for run in runs(wiring, 2 * ends + 1)
    ]
    return sorted(found, key=lambda skip: skip.start)


def runs(wiring: Wiring, minimum: int) -> list[Run]:
    """Disjoint runs of at least ``minimum`` periods, the largest first."""
    chosen: list[Run] = []
    for run in sorted(periodic(wiring.labels, minimum), key=lambda run: (-run.saving, run.start)):
        for found in wiring.alike(run):
            is_free = all(found.end <= other.start or other.end <= found.start for other in chosen)
            if is_free and found.end - found.start >= minimum * found.period:
                chosen.append(found)
    return chosen


class Wiring:
    """Between which instances values pass.

    Attributes:
        labels: a number for every instance, the same for those of one kind and level of recomputation.
        made: the instance that makes a value.
        last: the last instance that reads a value, or makes it where none does.
    """

    def __init__(self, assignment: Assignment):
        self.assignment, self.space = assignment, assignment.space
        self.instances = self.space.folded.instances
        self._leaving = frozenset(self.space.leaving)
        self.made: dict[Ref, int] = {}
        self.last: dict[Ref, int] = {}
        numbers: dict[object, int] = {}
        self.labels = []
        for number, (instance, (kind, nth)) in enumerate(zip(self.instances, self.space.skeleton.numbers, strict=True)):
            self.made.update(dict.fromkeys(instance.block.outputs, number))
            self.last.update(dict.fromkeys(instance.block.outputs, number))
            self.last.update(dict.fromkeys(instance.block.inputs, number))
            key = kind, assignment.recompute.level(kind, nth)
            self.labels.append(numbers.setdefault(key, len(numbers)))

    def alike(self, run: Run) -> Iterator[Run]:
        """The parts of a run, by labels, in which each instance is wired as the one a period before it."""
        start = run.start
        for number in range(run.start + run.period, run.end):
            if not self._is_again(number - run.period, number):
                yield Run(start, number, run.period)
                start = number - run.period + 1
        yield Run(start, run.end, run.period)

    def _is_again(self, before: int, number: int) -> bool:
        """Whether instance ``number`` finds its values as ``before`` did, and leaves them so."""
        theirs, ours, apart = self.instances[before].block, self.instances[number].block, number - before
        return (
            all(self._enters_again(a, b, apart) for a, b in zip(theirs.inputs, ours.inputs, strict=True))
            and all(self._leaves_again(a, b, apart) for a, b in zip(theirs.outputs, ours.outputs, strict=True))
            and all(map(_share_alike, theirs.span.firsts, ours.span.firsts))
        )

    def _enters_again(self, theirs: Ref, ours: Ref, apart: int) -> bool:
        """Whether a value is the same, a leaf of this instance alone that stays as it is, or made so much later."""
        if theirs == ours:
            return True
        space = self.space
        if theirs.index != ours.index or space.role_of[theirs.node] != space.role_of[ours.node]:
            return False
        if ours in self.made:
            return theirs in self.made and self.made[ours] - self.made[theirs] == apart
        return not self.assignment.relay_route(ours)

    def _leaves_again(self, theirs: Ref, ours: Ref, apart: int) -> bool:
        """Whether a value is read as long as the other, so much later, and with a gradient if that has one."""
        differentiated = self.space.graph.differentiated
        is_inside = theirs not in self._leaving and ours not in self._leaving
        as_long = self.last[ours] - self.last[theirs] == apart
        return is_inside and as_long and (ours in differentiated) == (theirs in differentiated)


def _share_alike(a: Node, b: Node) -> bool:
    """Whether the results of two operators share memory with the same operands."""
    return a is b or a.shares == b.shares
