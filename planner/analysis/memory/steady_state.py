"""Finds the layers whose memory repeats that of layers before them, so that only some need be simulated.

``Assignment -> [Run]``. To be of one kind and one level of recomputation is not enough for that: in a run an instance
also reads where its twin of a period before read, or what a period lies between, and its outputs are read for as long.
So what a period changes about a step the next one changes too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from planner.formulation.assignment import Assignment
from planner.formulation.variables import Variable
from planner.ir.graph import Node, Ref
from planner.ir.repetition import Run, periodic


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
        self._converted: dict[Variable, bool] = {}

    @cached_property
    def labels(self) -> list[int]:
        numbers: dict[object, int] = {}
        each = zip(self.instances, self.space.decision_graph.blocks.numbers, strict=True)
        keys = ((kind, self.assignment.recompute.level(kind, nth)) for _, (kind, nth) in each)
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    @cached_property
    def made(self) -> dict[Ref, int]:
        return {ref: number for number, instance in enumerate(self.instances) for ref in instance.block.outputs}

    @cached_property
    def last(self) -> dict[Ref, int]:
        found: dict[Ref, int] = {}
        for number, instance in enumerate(self.instances):
            found.update(dict.fromkeys(instance.block.outputs, number))
            found.update(dict.fromkeys(instance.block.inputs, number))
        return found

    def alike(self, run: Run) -> Iterator[Run]:
        """The parts of a run, by labels, in which each instance is wired as the one a period before it."""
        start, entering = run.start, [self._entering(number) for number in range(run.start, run.end)]
        for number in range(run.start + run.period, run.end):
            before = number - run.period
            ways = entering[before - run.start], entering[number - run.start]
            if not (self._enters_again(before, number, *ways) and self._leaves_again(before, number)):
                yield Run(start, number, run.period)
                start = before + 1
        yield Run(start, run.end, run.period)

    def _entering(self, number: int) -> list[object]:
        """For each input of an instance its variable, and how long ago it was made: a leaf as it is stored, never."""
        found: list[object] = []
        for ref in self.instances[number].block.inputs:
            variable, made = self.space.variable_of[ref.node], self.made.get(ref)
            if made is None and self._is_converted(variable, ref):
                found.append(ref)
            else:
                found.append((variable, ref.index, None if made is None else number - made))
        return found

    def _is_converted(self, variable: Variable, leaf: Ref) -> bool:
        """Whether leaves of a variable are converted where they enter."""
        if variable not in self._converted:
            self._converted[variable] = bool(self.assignment.shared_route(leaf))
        return self._converted[variable]

    def _enters_again(self, before: int, number: int, theirs: list[object], ours: list[object]) -> bool:
        """Whether instance ``number`` finds its values as ``before`` did: the same, or others in the same way."""
        a, b = self.instances[before].block, self.instances[number].block
        same = map(operator.eq, a.inputs, b.inputs)
        return all(map(operator.or_, same, map(operator.eq, theirs, ours))) and (
            all(map(_share_alike, a.span.firsts, b.span.firsts))
        )

    def _leaves_again(self, before: int, number: int) -> bool:
        """Whether the values that an instance makes are read as long as those of another, and with gradients alike."""
        outputs = (self.instances[each].block.outputs for each in (before, number))
        differentiated = self.space.graph.differentiated
        return all(
            theirs not in self._leaving
            and ours not in self._leaving
            and self.last[ours] - self.last[theirs] == number - before
            and (ours in differentiated) == (theirs in differentiated)
            for theirs, ours in zip(*outputs, strict=True)
        )


def _share_alike(a: Node, b: Node) -> bool:
    """Whether the results of two operators share memory with the same operands."""
    return a is b or a.shares == b.shares
