"""Simulates a transfer schedule: when everything in it starts and ends.

The device computes one moment after the other, the host its own, and each direction of each link moves one item after
the other, in the order in which they were started; all of these run at once. Entering a moment on the device starts
what is listed and waits for what must be finished; nothing else keeps the device from computing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.solve.transfers.table import TransferSchedule

STEPS = 3
"""Steps that are simulated; the last one counts, whose beginning the ones before have settled."""


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """What a lane does from ``start_s`` to ``end_s`` after the step began.

    ``lane`` is ``device``, ``host``, or ``fetch`` or ``evict`` and a tier (``fetch host``); ``name`` is a moment or an
    item, and ``moment`` the moment on whose entry it was started.
    """

    lane: str
    name: str
    moment: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class SimulatedTransfers:
    """A step in the middle of a run.

    Attributes:
        spans: all that starts in the step, by lane in the order of time.
        step_s: from the beginning of the step to the beginning of the next.
        waiting_s: of this, what the device waits, by moment on whose entry it does.
        high_water_bytes: the most that is taken at a time, at these speeds.
    """

    spans: tuple[LaneSpan, ...]
    step_s: float
    waiting_s: dict[str, float]
    high_water_bytes: int

    @property
    def exposed_s(self) -> float:
        """Seconds of the step in which the device waits."""
        return sum(self.waiting_s.values())


def simulate(table: TransferSchedule) -> SimulatedTransfers:
    """Follow a checked transfer schedule for a few steps, and say when everything in the last of them happens."""
    follow = _Follow(table)
    for _ in range(STEPS):
        follow.step()
    begin = follow.begin
    spans = sorted(
        (replace(span, start_s=span.start_s - begin, end_s=span.end_s - begin) for span in follow.spans),
        key=lambda span: (span.lane, span.start_s, span.end_s),
    )
    return SimulatedTransfers(tuple(spans), follow.now - begin, follow.waiting, follow.high_water())


class _Follow:
    """The clocks of all lanes, and when each item's last movement or computing on the host ends."""

    def __init__(self, table: TransferSchedule):
        self.table, self.trace = table, table.trace
        self.now = self.begin = 0.0
        self.free: dict[str, float] = {}
        self.ends = {item.name: 0.0 for item in self.trace.items}
        self.spans: list[LaneSpan] = []
        self.waiting: dict[str, float] = {}
        self.changes: list[tuple[float, int]] = []
        there = ("resident", "coming")  # before the first step of all nothing is leaving
        self.begun = sum(self.trace.item[name].bytes for name, state in table.beginning.items() if state in there)

    def step(self) -> None:
        self.begin, self.spans, self.waiting = self.now, [], {}
        for moment, entry, used in zip(self.trace.moments, self.table.entries, self.trace.used, strict=True):
            arrived = self.now
            for action, name in entry.actions():
                size = self.trace.item[name].bytes
                if action in ("evicted", "fetched"):
                    self.now = max(self.now, self.ends[name])
                elif action in ("evict", "fetch"):
                    self._move(action, name, moment.name)
                elif action == "make":
                    self.changes.append((self.now, size))
                else:
                    self.changes.append((self.now, -size))
            if moment.on == "device":
                if self.now > arrived:
                    self.waiting[moment.name] = self.now - arrived
                self.changes += [(self.now, moment.other_bytes), (self.now + moment.seconds, -moment.other_bytes)]
                self._run("device", moment.name, moment.name, self.now, moment.seconds)
                self.now += moment.seconds
            else:
                start = max([self.now, *(self.ends[item.name] for item, _ in used)])
                end = self._run("host", moment.name, moment.name, start, moment.seconds)
                self.ends.update((item.name, end) for item, _ in used)

    def _move(self, way: str, name: str, moment: str) -> None:
        """An eviction's value is there, since the device has just used it; a fetch waits for whoever has it at home."""
        item = self.trace.item[name]
        start = max(self.now, self.ends[name])
        end = self._run(f"{way} {item.home}", name, moment, start, self.trace.seconds(item, way))
        self.changes.append((self.now, item.bytes) if way == "fetch" else (end, -item.bytes))
        self.ends[name] = end

    def _run(self, lane: str, name: str, moment: str, start: float, seconds: float) -> float:
        start = max(start, self.free.get(lane, 0.0))
        self.free[lane] = start + seconds
        self.spans.append(LaneSpan(lane, name, moment, start, start + seconds))
        return start + seconds

    def high_water(self) -> int:
        """At equal times in the order in which they were noted: what a moment of no time takes is there before it ends,
        and what was waited for is free before what waited takes it.
        """
        held = most = self.begun
        for _, change in sorted(self.changes, key=lambda each: each[0]):
            held += change
            most = max(most, held)
        return most
