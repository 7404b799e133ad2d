"""Fast-forwards over block instances that do what others did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from planner.analysis.memory.autograd_tape import Value
from planner.analysis.memory.steady_state import Skip
from planner.analysis.memory.storages import Direction, Place
from planner.analysis.memory.walk import Walk
from planner.ir.graph import Ref

LARGEST = 5
"""So many tensors are named at the peak."""
ENDS = LARGEST
"""So many periods of a run are simulated at either end: enough to see that they do the same, and for
:data:`LARGEST`.
"""


class UnevenError(Exception):
    """Instances that were taken to do the same do not: none may be left out."""


def skipped_leaves(walk: Walk) -> dict[str, int]:
    """The leaves that only an instance reads which is not followed -> for how many of its variable it stands."""
    own, variable_of = walk.space.decision_graph.variables.own, walk.space.variable_of
    numbers = (each for skip in walk.skips for each in range(skip.start, skip.end))
    names = (ref.node for each in numbers for ref in walk.instances[each].block.inputs)
    found = [name for name in names if name in own]
    times = Counter(variable_of[name] for name in found)
    return {name: times.pop(variable_of[name], 0) for name in found}


def skip_over(walk: Walk, skip: Skip, values: dict[Ref, Value]) -> None:
    """Let what instances hand on be handed on by those that do the same at the end of ``skip``."""
    moved: dict[Ref, Value] = {}  # all before any: a twin may be among those that hand on, too
    for number in range(skip.start - ENDS * skip.period, skip.start):
        twin = walk.instances[number + skip.times * skip.period].block
        for ref, other in zip(walk.instances[number].block.outputs, twin.outputs, strict=True):
            if ref in values:
                moved[other] = values.pop(ref)
    values.update(moved)
    # What lives on from one period into the next is gone after that.
    whole = range(skip.start - 2 * skip.period, skip.start - skip.period)
    walk.kept[skip] = walk.heap.repeat("forward", whole, skip.times)
    last = walk.instances[skip.end - 1].block.span[-1]
    walk.heap.moment(f"forward {last.path or last.name}: {last.op}")


def run_skipped_backward(walk: Walk, skip: Skip) -> None:
    """Let go what skipped instances held, and have them find the gradients that their twins find."""
    for storage in walk.kept.pop(skip):
        walk.heap.drop(storage)
    whole = range(skip.end + skip.period, skip.end + 2 * skip.period)
    walk.heap.repeat("backward", whole, skip.times)


def fill_in(walk: Walk, skip: Skip, totals: Mapping[Place, list[int]]) -> None:
    """What :class:`Usage` says by block, for blocks that were not followed.

    Raises:
        UnevenError: bytes do not rise or fall by as much in every period that was followed.
    """

    def rise(direction: Direction, before: int, after: int) -> int:
        each = [
            [total for number in range(start, start + skip.period) for total in totals.get((direction, number), ())]
            for start in (before, after)
        ]
        rises = [b - a for a, b in zip(*each, strict=False)]
        if len(each[0]) != len(each[1]) or any(rise != rises[0] for rise in rises):
            raise UnevenError
        return rises[0] if rises else 0

    period, times, by_block = skip.period, skip.times, walk.heap.by_block
    first, last = skip.start - 2 * period, skip.end
    forward, backward = rise("forward", first - period, first), rise("backward", last + period, last)
    if rise("forward", first, last) != forward * (times + 2):
        raise UnevenError
    if rise("backward", last, skip.start - period) != backward * (times + 1):
        raise UnevenError
    for number in range(skip.start, skip.end):
        past, at = divmod(number - skip.start, period)
        by_block["forward", number] = by_block["forward", first + at] + forward * (past + 2)
        if ("backward", last + at) in by_block:
            by_block["backward", number] = by_block["backward", last + at] + backward * (times - past)
        if first + at in walk.read_again:
            names = zip(walk.instances[first + at].block.inputs, walk.instances[number].block.inputs, strict=True)
            twin = {theirs.node: ours.node for theirs, ours in names}
            if not walk.read_again[first + at] <= twin.keys():
                raise UnevenError
            walk.read_again[number] = frozenset(twin[name] for name in walk.read_again[first + at])
