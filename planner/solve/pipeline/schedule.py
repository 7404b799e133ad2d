"""Schedules: in which order each rank of a pipeline runs its stages' micro-batches, as data.

A pipeline of ``ranks`` holds ``ranks * virtual_stages`` stages. An action such as ``2F0`` says what is done: stage 2,
forward, micro-batch 0. Kinds are ``F`` forward, ``B`` the whole backward, or its two parts: ``I`` the gradient of the
stage's input, which the stage before waits for, and ``W`` the gradients of its weights, which nobody waits for.

==================  =================================================================================================
gpipe               all forwards, then all backwards (Huang et al., 2019)
1f1b                forward and backward in turn, as many micro-batches in flight as stages follow (PipeDream-Flush)
interleaved_1f1b    the same with several stages per rank, taken in rounds (Narayanan et al., 2021, section 2.2)
zero_bubble         with the backward split, W where a rank would wait (ZB-H1: Qi et al., 2023); any virtual stages
zbv                 two stages per rank, placed as a V (Qi et al., 2023, section 6)
dualpipev           a V again, forwards of one half next to backwards of the other (DeepSeek, DualPipe)
2bw                 1f1b without flush: the last backwards are left to the next step (Narayanan et al., 2021b)
==================  =================================================================================================

Orders, and how actions are written, are those of ``torch.distributed.pipelining``, with its paired actions one after
the other, as it runs them. A micro-batch count that the pattern does not divide gets
the order of the next larger one, less the actions on micro-batches that do not exist; ``2bw`` alone needs at least as
many micro-batches as stages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from planner.base.errors import ScheduleError


class Action(NamedTuple):
    """One stage's work on one micro-batch; written ``2F0``."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Row = list[Action]


class InFlight(NamedTuple):
    """What a rank holds at a moment.

    Attributes:
        counts: how many micro-batches each of its stages (in ascending order) holds.
        added: whether gradients are there, since a backward is over.
        backward: the stage whose whole backward runs; -1: none does.
    """

    counts: tuple[int, ...]
    added: bool
    backward: int = -1

    def covers(self, other: InFlight) -> bool:
        """Whether no less of anything is there than at another moment."""
        runs = other.backward in (self.backward, -1)
        return runs and self.added >= other.added and all(map(int.__ge__, self.counts, other.counts))


@dataclass(frozen=True, eq=False)
class Flow:
    """A schedule's actions so that each comes after all that it waits for.

    ``before`` is the action that its rank runs before it, ``needs`` the one on another stage whose result it takes;
    both are positions in ``actions``, or its length where there is none, or where the step before did it.
    """

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    before: tuple[int, ...]
    needs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Each rank's actions of one step, in order.

    A step may take over backwards from the one before, and leave as many to the next: 2bw does. In its list their
    micro-batch is below 0, counted from the end of the batch before. The :attr:`first` step has none to take over.
    """

    name: str
    stages: int
    micro_batches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank that holds each stage."""
        return tuple(rank for _, rank in sorted({(a.stage, rank) for rank, row in enumerate(self.rows) for a in row}))

    @cached_property
    def overlaps(self) -> bool:
        """Whether a step takes over what the one before has left."""
        return any(map(is_left_over, self.actions))

    @cached_property
    def late(self) -> tuple[int, ...]:
        """Of how many micro-batches each stage finds the gradients of weights in an action of their own."""
        found = Counter(action.stage for action in self.actions if action.kind == "W")
        return tuple(found[stage] for stage in range(self.stages))

    @property
    def actions(self) -> Iterator[Action]:
        """Those of all ranks, in no order."""
        return (action for row in self.rows for action in row)

    @cached_property
    def first(self) -> Schedule:
        """The step that nothing was left to."""
        if not self.overlaps:
            return self
        return replace(self, rows=tuple(tuple(a for a in row if not is_left_over(a)) for row in self.rows))

    @cached_property
    def flow(self) -> Flow:
        """The actions in an order in which they can run."""
        return _flow(self)

    @cached_property
    def held(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Per rank: how many micro-batches each of its stages (in ascending order) holds at its fullest moments.

        A micro-batch is held from its forward to the end of its backward. A rank of one stage has one such moment; of
        several stages, each may be fullest at another, and moments at which no stage holds more are left out. Since a
        rank does one thing after the other, this follows from the order alone. Running ranks are held to it.
        """
        counts = (sorted({moment.counts for moment in moments}, reverse=True) for moments in self.moments)
        return tuple(tuple(_undominated(each)) for each in counts)

    @cached_property
    def moments(self) -> tuple[tuple[InFlight, ...], ...]:
        """Per rank, its fullest moments: those at which it holds no less of anything than at any other.

        In gpipe all forwards come before the first backward. In other schedules a rank is as full when gradients are
        there, unless its micro-batches are too few for that; then too, and for a single one, they count from the start,
        so that what is held grows evenly.
        """
        is_after = self.name == "gpipe" and self.micro_batches > 1
        return tuple(_moments(row, after=int(is_after)) for row in self.rows)

    @cached_property
    def certain_moments(self) -> tuple[tuple[InFlight, ...], ...]:
        """The same, of moments as they are: ``added`` are those at which the gradients of all its stages are there."""
        return tuple(_moments(row, after=self.stages // len(self.rows)) for row in self.rows)


@lru_cache(maxsize=256)
def schedule(name: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> Schedule:
    """The order of a step by the schedule's name.

    Args:
        name: one of :data:`NAMES`.
        ranks: of the pipeline.
        micro_batches: of a step, at least 1.
        virtual_stages: stages per rank.
    """
    check_fits(name, ranks, micro_batches, virtual_stages)
    rows = tuple(tuple(_PATTERNS[name](rank, ranks, micro_batches, virtual_stages)) for rank in range(ranks))
    return Schedule(name, ranks * virtual_stages, micro_batches, rows)


@lru_cache(maxsize=256)
def placed(name: str, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of every stage: round and round, or down and up a V."""
    chunks = range(virtual_stages)
    if name in ("zbv", "dualpipev"):
        return tuple(rank if chunk == 0 else ranks - 1 - rank for chunk in chunks for rank in range(ranks))
    return tuple(rank for _ in chunks for rank in range(ranks))


def period(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> int | None:
    """Micro-batches after which the middle of a long step repeats itself; ``None`` where it does not."""
    if name == "gpipe":
        return None
    in_rounds = virtual_stages > 1 and VIRTUAL_STAGES[name][1] is None
    if in_rounds:
        return None if micro_batches % ranks else ranks
    return 1


def fullest(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> tuple[tuple[InFlight, ...], ...]:
    """:attr:`Schedule.moments` by the schedule's name: those of a shorter step, since longer ones hold no more."""
    return shortened(name, ranks, micro_batches, virtual_stages).moments


def certain(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> tuple[tuple[InFlight, ...], ...]:
    """:attr:`Schedule.certain_moments` by the schedule's name, likewise."""
    return shortened(name, ranks, micro_batches, virtual_stages).certain_moments


def shortened(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> Schedule:
    """A step that has all moments of one of so many micro-batches."""
    short = 4 * ranks * min(virtual_stages, 2)
    is_long = short < micro_batches and period(name, ranks, micro_batches, virtual_stages)
    return schedule(name, ranks, short if is_long else micro_batches, virtual_stages)


def versions(name: str | None) -> int:
    """How many versions of the weights a schedule keeps; 2bw that of the batch before, whose backwards are left."""
    return 2 if name == "2bw" else 1


def check_fits(name: str, ranks: int, micro_batches: int, virtual_stages: int = 1) -> None:
    """Raise :class:`ScheduleError` unless there is such a schedule."""
    if name not in _PATTERNS:
        raise ScheduleError(f"there is no schedule {name!r}; there are: {', '.join(NAMES)}")
    for what, count in (("ranks", ranks), ("micro-batches", micro_batches), ("virtual stages", virtual_stages)):
        if count < 1:
            raise ScheduleError(f"schedule {name}: {count} {what}; it takes at least 1")
    least, most = VIRTUAL_STAGES[name]
    if not least <= virtual_stages <= (most or virtual_stages):
        raise ScheduleError(
            f"schedule {name} has {least if least == most else f'at least {least}'} virtual stage(s) per rank, not "
            f"{virtual_stages}; with one it is 1f1b, with two zbv, with any number interleaved_1f1b"
        )
    if name == "2bw" and micro_batches < ranks:
        raise ScheduleError(
            f"schedule 2bw needs at least as many micro-batches as stages, so that gradients are one update late and "
            f"not more: {micro_batches} micro-batches, {ranks} stages. Take more micro-batches, or 1f1b"
        )


def _gpipe(rank: int, ranks: int, count: int, virtual: int) -> Row:
    return [Action(rank, kind, i) for kind in "FB" for i in range(count)]


def _1f1b(rank: int, ranks: int, count: int, virtual: int) -> Row:
    return _in_turn(
        [Action(rank, "F", i) for i in range(count)], [Action(rank, "B", i) for i in range(count)], ranks - 1 - rank
    )


def _2bw(rank: int, ranks: int, count: int, virtual: int) -> Row:
    """A long run of 1f1b, cut into steps of as many forwards as there are micro-batches.

    A step is over when its last forward is through, since all ranks are then told the loss. Who waits for a first
    forward longer than a backward takes (twice as long as a forward, about) begins with a backward; the others have
    time for one more at the end.
    """
    begins_forward = rank < min(2, ranks - 1)
    left = ranks - rank - begins_forward
    pairs = ((Action(rank, "F", i), Action(rank, "B", i - left)) for i in range(count))
    return [action for pair in pairs for action in (pair if begins_forward else reversed(pair))]


def _in_turn(forwards: Row, backwards: Row, first: int) -> Row:
    """``first`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    first = min(first, len(forwards))
    pairs = zip(forwards[first:], backwards, strict=False)
    return [*forwards[:first], *(action for pair in pairs for action in pair), *backwards[len(forwards) - first :]]


def _interleaved(rank: int, ranks: int, count: int, virtual: int) -> Row:
    forwards, backwards = (_in_rounds(kind, rank, ranks, count, virtual) for kind in "FB")
    first = (virtual - 1) * per_round(ranks, count, virtual) + 2 * (ranks - 1 - rank)
    return _existing(_in_turn(forwards, backwards, first), count)


def _zero_bubble(rank: int, ranks: int, count: int, virtual: int) -> Row:
    """Half the interleaved schedule's warm-up, and each W as many backwards late as there are ranks before this one."""
    forwards, inputs, weights = (_in_rounds(kind, rank, ranks, count, virtual) for kind in "FIW")
    first = (virtual - 1) * per_round(ranks, count, virtual) + ranks - 1 - rank
    row: Row = []
    done = 0
    for action in _in_turn(forwards, inputs, first):
        row.append(action)
        done += action.kind == "I"
        if action.kind == "I" and done > rank:
            row.append(weights[done - 1 - rank])
    return _existing([*row, *weights[max(0, done - rank) :]], count)


def _in_rounds(kind: str, rank: int, ranks: int, count: int, virtual: int) -> Row:
    """A rank's actions of one kind.

    In each round every stage of the rank takes as many micro-batches, forwards from its first stage, backwards from
    its last. There are as many rounds as ``ranks`` micro-batches fit, filled evenly; the last may take some too many.
    A single stage has nobody to take turns with, and no rounds.
    """
    size = per_round(ranks, count, virtual)
    stages = range(rank, ranks * virtual, ranks)
    return [
        Action(stage, kind, which * size + i)
        for which in range(_rounds(ranks, count, virtual))
        for stage in (stages if kind == "F" else reversed(stages))
        for i in range(size)
    ]


def _rounds(ranks: int, count: int, virtual: int) -> int:
    return max(1, count // ranks) if virtual > 1 else count


def per_round(ranks: int, micro_batches: int, virtual_stages: int) -> int:
    """How many micro-batches a rank takes at most on one of its stages before it turns to the next."""
    return -(-micro_batches // _rounds(ranks, micro_batches, virtual_stages))


def _zbv(rank: int, ranks: int, count: int, virtual: int) -> Row:
    full = max(2 * ranks - 1, count)
    down, up = rank, 2 * ranks - 1 - rank  # the rank's stages on both ways of the V
    after = ranks - rank
    do = _Writer()
    do.times(2 * after - 1, (down, "F"))
    do.times(rank, (up, "F"), (down, "F"))
    do.times(after, (up, "FIW"))
    do.times(full - ranks - after + 1, (down, "FIW"), (up, "FIW"))
    do.times(after - 1, (down, "IW"), (up, "FIW"))
    do.times(rank, (down, "I"), (up, "I"))
    do.times(after, (down, "IW"))
    do.times(rank, (up, "W"))
    do.times(rank, (down, "W"))
    return _existing(do.row, count)


def _dualpipev(rank: int, ranks: int, count: int, virtual: int) -> Row:
    full = max(2 * ranks, count)
    down, up = rank, 2 * ranks - 1 - rank
    after = ranks - rank - 1
    do = _Writer()
    do.times(2 * after, (down, "F"))
    do.times(rank + 1, (down, "F"), (up, "F"))
    do.times(after, (up, "IWF"))
    do.times(full - ranks - after, (down, "F"), (up, "B"), (up, "F"), (down, "B"))
    do.times(after, (up, "B"), (up, "F"), (down, "B"))
    # Both ways empty in turn; the second half leaves its W for the end.
    ends = [stage for _ in range(rank + 1) for stage in (up, down)]
    for stage in ends[: rank + 1]:
        do.times(1, (stage, "B"))
    split = [*ends[rank + 1 :], *[down] * after]
    for position, stage in enumerate(split):
        if position > rank:
            do.times(1, (split[position - rank - 1], "W"))
        do.times(1, (stage, "I"))
    for stage in split[after:]:
        do.times(1, (stage, "W"))
    return _existing(do.row, count)


class _Writer:
    """Writes a rank's row; every action takes the micro-batch that its stage has next."""

    def __init__(self) -> None:
        self.row: Row = []
        self._next: dict[tuple[int, str], int] = defaultdict(int)

    def times(self, count: int, *work: tuple[int, str]) -> None:
        """As often as said: these stages' actions, each kind one letter."""
        for _ in range(count):
            for stage, kinds in work:
                for kind in kinds:
                    self.row.append(Action(stage, kind, self._next[stage, "I" if kind == "B" else kind]))
                    for part in "IW" if kind == "B" else kind:
                        self._next[stage, part] += 1


def _existing(row: Row, count: int) -> Row:
    """Without what the pattern does on micro-batches that do not exist."""
    return [action for action in row if action.micro_batch < count]


_PATTERNS: dict[str, Callable[[int, int, int, int], Row]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved_1f1b": _interleaved,
    "zero_bubble": _zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
    "2bw": _2bw,
}
NAMES = tuple(_PATTERNS)
VIRTUAL_STAGES: dict[str, tuple[int, int | None]] = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, None),
    "zero_bubble": (1, None),
    "zbv": (2, 2),
    "dualpipev": (2, 2),
    "2bw": (1, 1),
}
"""Fewest and most stages per rank; ``None``: as many as wanted."""
OUT_OF_ORDER = ("zero_bubble", "zbv", "dualpipev", "2bw")
"""Schedules in which a micro-batch need not be through with one stage's backward before the next one's."""


def _flow(found: Schedule) -> Flow:
    """Run every rank as far as it gets, in turn, until all is done or nobody can go on."""
    total = sum(map(len, found.rows))
    place: dict[tuple[int, bool, int], int] = {}  # of F, and of B or I
    actions: list[Action] = []
    ranks: list[int] = []
    before: list[int] = []
    needs: list[int] = []
    last = [total] * found.ranks
    at = [0] * found.ranks
    final = found.stages - 1
    left = {(a.stage, a.micro_batch) for a in found.actions if is_left_over(a)}
    while len(actions) < total:
        moved = False
        for rank, row in enumerate(found.rows):
            position, end = at[rank], len(row)
            while position < end:
                action = row[position]
                stage, kind, micro_batch = action
                need = total
                if kind == "F":
                    if stage:
                        need = place.get((stage - 1, True, micro_batch), -1)
                elif kind != "W" and stage < final:
                    is_done_before = micro_batch < 0 and (stage + 1, micro_batch) not in left
                    need = total if is_done_before else place.get((stage + 1, False, micro_batch), -1)
                if need < 0:
                    break
                if kind != "W":
                    place[stage, kind == "F", micro_batch] = len(actions)
                before.append(last[rank])
                needs.append(need)
                ranks.append(rank)
                last[rank] = len(actions)
                actions.append(action)
                position += 1
            moved |= position > at[rank]
            at[rank] = position
        assert moved, f"schedule {found.name} comes to a standstill at {at}"
    return Flow(tuple(actions), tuple(ranks), tuple(before), tuple(needs))


def _moments(row: tuple[Action, ...], *, after: int) -> tuple[InFlight, ...]:
    """The fullest moments of a rank.

    Args:
        after: of how many of its stages a backward is over from when on gradients of all count.
    """
    stages = sorted({action.stage for action in row})
    column = {stage: i for i, stage in enumerate(stages)}
    now, met, over = [0] * len(stages), set[InFlight](), set[int]()
    for action in filter(is_left_over, row):
        now[column[action.stage]] += 1
    for action in row:
        at = column[action.stage]
        now[at] += action.kind == "F"
        met.add(InFlight(tuple(now), len(over) >= after, action.stage if action.kind == "B" else -1))
        now[at] -= action.kind in "BW"
        over |= {action.stage} if action.kind in "BW" else set()
    found: list[InFlight] = []
    for each in sorted(met, reverse=True):
        if not any(other.covers(each) for other in found):
            found.append(each)
    return tuple(found)


def _undominated(counts: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Those that are not below another one throughout, of some in descending order."""
    found: list[tuple[int, ...]] = []
    for each in counts:
        if not any(all(map(int.__le__, each, other)) for other in found):
            found.append(each)
            yield each


def is_left_over(action: Action) -> bool:
    """Whether it is work on the batch before."""
    return action.micro_batch < 0
