"""What a rank of a pipeline holds while each of its actions runs: micro-batches, gradients and messages.

``Schedule -> Running`` of every rank: those of its actions besides which it holds no more of anything. Messages are
received and let go as :mod:`autopar.runtime.pipeline.p2p` does it: the next one of every sender has its room while
others are worked on, and what was sent is held until its receiver answers with something that it sends later.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from planner.solve.pipeline.schedule import Action, Schedule, is_left_over, shortened

Message = tuple[int, str]
"""Of any micro-batch: the stage that it is for, and ``F`` a value or ``B`` a gradient."""


class Running(NamedTuple):
    """An action, and what is there beside it.

    Attributes:
        stage, kind: of the action.
        is_first: whether it is the first to find gradients of weights in its stage.
        counts: how many other micro-batches each stage of the rank (in ascending order) holds.
        parted: of how many of these, or of its own, the first part of a split backward is over.
        added: of which stages the gradients are there to which micro-batches add.
        messages: of each kind that was sent and not let go, or has come and was not taken, how many there are;
            those that are being received count once.
    """

    stage: int
    kind: str
    is_first: bool
    counts: tuple[int, ...]
    parted: tuple[int, ...]
    added: tuple[bool, ...]
    messages: tuple[tuple[Message, bool, int], ...]

    @property
    def form(self) -> tuple[object, ...]:
        """All but numbers."""
        kinds = tuple(each[:2] for each in self.messages)
        return self.stage, self.kind, self.is_first, self.added, kinds, len(self.counts)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All numbers."""
        return *self.counts, *self.parted, *(each[2] for each in self.messages)

    @property
    def held(self) -> tuple[int, ...]:
        """Micro-batches, and whether gradients are there."""
        return *self.counts, *self.parted, *self.added

    def with_numbers(self, numbers: Iterable[int]) -> Running:
        """The same with other numbers."""
        every, count = tuple(numbers), len(self.counts)
        messages = zip(self.messages, every[2 * count :], strict=True)
        return self._replace(
            counts=every[:count],
            parted=every[count : 2 * count],
            messages=tuple((*each[:2], number) for each, number in messages),
        )


@lru_cache(maxsize=256)
def running(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> tuple[tuple[Running, ...], ...]:
    """Of every rank; of long schedules those of a shorter one, since they hold no more."""
    short = shortened(name, ranks, micro_batches, virtual_stages)
    return tuple(tuple(_fullest(_RankActions(short, rank).run())) for rank in range(short.ranks))


def every_action(schedule: Schedule, rank: int) -> list[Running]:
    """Of all actions of one rank, in order."""
    return [*_RankActions(schedule, rank).run()]


class MessageFlight(NamedTuple):
    """A message of a rank that is on its way.

    Attributes:
        message: the action that waits for it.
        is_sent: by this rank; else received.
        beside: the actions of the rank that run meanwhile; none: it is waited for at once.
    """

    message: Action
    is_sent: bool
    beside: tuple[Action, ...]


def message_flights(schedule: Schedule, rank: int) -> list[MessageFlight]:
    """Every message that a rank exchanges with others in a step."""
    actions = _RankActions(schedule, rank)
    for _ in actions.run():
        pass
    actions.close()
    return actions.flights


def _fullest(every: Iterable[Running]) -> Iterator[Running]:
    """Those besides which no other one of the same action holds more of anything."""
    groups = defaultdict[object, dict[Running, None]](dict)
    for each in every:
        groups[each.stage, each.kind][each] = None
    for group in groups.values():
        kept: list[Running] = []
        for each in sorted(group, key=_size, reverse=True):
            if not any(_covers(other, each) for other in kept):
                kept.append(each)
                yield each


def _size(each: Running) -> tuple[int, ...]:
    return sum(each.counts) + sum(each.parted), sum(each.added), sum(number for *_, number in each.messages)


def _covers(more: Running, less: Running) -> bool:
    """Whether a moment holds no less than another one. A micro-batch in flight holds more than a message of it, and
    gradients that are there more than those that are coming.
    """
    if any(a < b for a, b in zip(more.held, less.held, strict=True)):
        return False
    if more.is_first or (less.is_first and less.kind == "W"):
        return more.is_first == less.is_first and _has_messages(more, less)
    return _has_messages(more, less)


def _has_messages(more: Running, less: Running) -> bool:
    has = {each[:2]: each[2] for each in more.messages}
    missing = sum(max(0, count - has.get((message, is_sent), 0)) for message, is_sent, count in less.messages)
    return missing <= sum(more.counts) - sum(less.counts)


class _RankActions:
    """One rank of a schedule, action by action."""

    def __init__(self, schedule: Schedule, rank: int):
        self.schedule, self.rank, self.row = schedule, rank, schedule.rows[rank]
        self.home, self.last = schedule.rank_of, schedule.stages - 1
        self.stages = sorted({action.stage for action in self.row})
        beside = (stage + way for stage in self.stages for way in (-1, 1) if 0 <= stage + way <= self.last)
        senders = dict.fromkeys(self.home[stage] for stage in beside if self.home[stage] != rank)
        self.expected = {other: deque(self._arriving(other)) for other in senders}
        self.coming: dict[int, tuple[Action, list[Action]]] = {}
        self.aside: set[Action] = set()
        self.sent: set[Action] = set()
        self.now = Counter[tuple[Message, bool]]()
        self.done = 0
        self.begun: dict[tuple[Action, bool], int] = {}
        self.flights: list[MessageFlight] = []

    def run(self) -> Iterator[Running]:
        """What is there beside each action."""
        at = {stage: number for number, stage in enumerate(self.stages)}
        counts, parted, added = ([0] * len(at) for _ in range(3))
        for action in filter(is_left_over, self.row):
            counts[at[action.stage]] += 1
            message = Action(action.stage, "B", action.micro_batch)
            if action.stage < self.last and not self._is_sent_now(message):
                self._set_aside(message)
        if self.schedule.overlaps:
            added = [1] * len(at)
        for sender in self.expected:
            self._receive(sender)
        for stage, kind, number in self.row:
            mine, way = at[stage], "F" if kind == "F" else "B"
            if kind != "W" and (stage > 0 if kind == "F" else stage < self.last):
                self._take(Action(stage, way, number))
            parted[mine] -= kind == "W"
            counts[mine] -= kind != "F"
            messages = tuple(sorted((*each, count) for each, count in self.now.items() if count))
            is_first = kind in "BW" and not added[mine]
            gradients = tuple(map(bool, added))
            yield Running(stage, kind, is_first, tuple(counts), tuple(parted), gradients, messages)
            self.done += 1
            counts[mine] += kind in "FI"
            parted[mine] += kind == "I"
            added[mine] += kind in "BW"
            if kind != "W" and (stage < self.last if kind == "F" else stage > 0):
                self._put(Action(stage + 1 if kind == "F" else stage - 1, way, number))

    def close(self) -> None:
        """The step is over: what is still coming is for the next one, and what was sent is let go."""
        for sender in self.expected:
            while sender in self.coming:
                self._arrive(sender)
        for message in [*self.sent]:
            self._let_go(message)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _sender(self, message: Action) -> int:
        return self.home[message.stage - 1 if message.kind == "F" else message.stage + 1]

    def _is_sent_now(self, message: Action) -> bool:
        """Whether the gradient for a stage is sent in this step."""
        row = self.schedule.rows[self._sender(message)]
        return any(Action(message.stage + 1, kind, message.micro_batch) in row for kind in "BI")

    def _arriving(self, sender: int) -> Iterator[tuple[Action, list[Action]]]:
        """What another rank sends here, in order, with what it takes from here before each."""
        taken: list[Action] = []
        for stage, kind, number in self.schedule.rows[sender]:
            if kind == "W":
                continue
            way = "F" if kind == "F" else "B"
            source, goal = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            if 0 <= source <= self.last and self.home[source] == self.rank:
                taken.append(Action(stage, way, number))
            if 0 <= goal <= self.last and self.home[goal] == self.rank:
                yield Action(goal, way, number), taken
                taken = []

    def _receive(self, sender: int) -> None:
        if self.expected[sender]:
            self.coming[sender] = self.expected[sender].popleft()
            self.begun[self.coming[sender][0], False] = self.done
            self._count(self.coming[sender][0], False, 1)

    def _take(self, message: Action) -> None:
        sender = self._sender(message)
        if sender == self.rank:
            self._let_go(message)
            return
        while message not in self.aside:
            self._arrive(sender)
        self.aside.discard(message)
        self._count(message, False, -1)

    def _arrive(self, sender: int) -> None:
        come, taken = self.coming.pop(sender)
        self._end(come, False)
        self._count(come, False, -1)
        for each in taken:
            self._let_go(each)
        self._set_aside(come)
        self._receive(sender)

    def _end(self, message: Action, is_sent: bool) -> None:
        beside = self.row[self.begun.pop((message, is_sent)) : self.done]
        self.flights.append(MessageFlight(message, is_sent, beside))

    def _set_aside(self, message: Action) -> None:
        self.aside.add(message)
        self._count(message, False, 1)

    def _put(self, message: Action) -> None:
        self.sent.add(message)
        if self.home[message.stage] != self.rank:
            self.begun[message, True] = self.done
        self._count(message, True, 1)

    def _let_go(self, message: Action) -> None:
        if message in self.sent:
            self.sent.discard(message)
            if (message, True) in self.begun:
                self._end(message, True)
            self._count(message, True, -1)

    def _count(self, message: Action, is_sent: bool, more: int) -> None:
        self.now[message[:2], is_sent] += more
