"""Schedules evictions and fetches, given which items stay, where they delay the device least.

Without waiting, evictions end and fetches start when the order and the room left allow; how long an eviction takes is
known only once the whole is simulated. So a transfer schedule is placed, simulated, and placed again with what was
seen; and fetches are let start a few moments early or many, since an early one takes room from others. The best is
taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from planner.solve.transfers.gaps import Gap
from planner.solve.transfers.simulate import SimulatedTransfers, simulate
from planner.solve.transfers.table import ACTIONS, Entry, TransferSchedule
from planner.solve.transfers.trace import Trace
from planner.solve.transfers.ways import Way, room_of, spread, ways_of

DEPTHS = (4, 1_000_000)
"""By how many moments evictions and fetches may be spread, in turn."""
ROUNDS = 2
"""How often a transfer schedule is placed with what the simulation of the one before has shown."""


def place(
    trace: Trace, budget_bytes: int, gaps: Sequence[Gap], room: Sequence[int], kept: Collection[int]
) -> tuple[TransferSchedule, SimulatedTransfers]:
    """The transfer schedule of shortest step that was found in which items stay in the gaps ``kept``, and its
    simulation.
    """
    found: list[tuple[TransferSchedule, SimulatedTransfers]] = []
    for depth in DEPTHS:
        ended: dict[int, int] = {}
        for _ in range(ROUNDS):
            ways = _spread(gaps, room, kept, depth, ended)
            table = TransferSchedule(trace, budget_bytes, entries(trace, ways))
            found.append((table, simulate(table)))
            seen = _ended(trace, ways, found[-1][1])
            if seen == ended:
                break
            ended = seen
    return min(found, key=lambda each: each[1].step_s)


def _spread(
    gaps: Sequence[Gap], room: Sequence[int], kept: Collection[int], depth: int, ended: Mapping[int, int]
) -> list[Way]:
    """How items go; one that would be fetched where it is gone at last might as well have stayed, and does."""
    stays = set(kept)
    while True:
        ways = ways_of(gaps, stays)
        spread(ways, room_of(room, gaps, stays), depth, ended)
        idle = {way.gap.number for way in ways if way.gap.is_choice and way.back <= way.gone}
        if not idle:
            return ways
        stays |= idle


def _ended(trace: Trace, ways: Iterable[Way], seen: SimulatedTransfers) -> dict[int, int]:
    """On which entry each eviction has ended, by gap: on the first one that the device reaches after its end."""
    reached = [span.start_s - seen.waiting_s.get(span.name, 0.0) for span in seen.spans if span.lane == "device"]
    ends = {(span.name, span.moment): span.end_s for span in seen.spans if span.lane.startswith("evict")}
    found = {}
    for way in ways:
        if way.evicts:
            next_step, place = divmod(trace.on_device[way.gap.after] + 1, len(trace.moments))
            end = ends[way.gap.item.name, trace.moments[place].name] + next_step * seen.step_s
            found[way.gap.number] = next(
                (
                    moment
                    for moment in range(way.gap.after + 1, way.gap.before)
                    if reached[moment % len(reached)] + moment // len(reached) * seen.step_s >= end
                ),
                way.gap.before,
            )
    return found


def entries(trace: Trace, ways: Iterable[Way]) -> tuple[Entry, ...]:
    """What entering each moment of the step does."""
    steps, places = len(trace.on_device), trace.on_device
    lists: list[dict[str, list[tuple[int, str]]]] = [defaultdict(list) for _ in trace.moments]
    for way in ways:
        gap, name = way.gap, way.gap.item.name
        leave = (places[gap.after] + 1) % len(trace.moments)
        gone, back, before = (places[moment % steps] for moment in (way.gone, way.back, gap.before))
        wait = gap.before - gap.after
        if way.evicts:
            lists[leave]["evict"].append((wait, name))
            lists[gone]["evicted"].append((wait, name))
        else:
            lists[leave]["drop"].append((wait, name))
        if gap.reads:
            lists[back]["fetch"].append((gap.before - way.back, name))
            lists[before]["fetched"].append((wait, name))
        else:
            lists[before]["make"].append((wait, name))
    return tuple(
        Entry(**{action: tuple(name for _, name in sorted(done[action])) for action in ACTIONS if action in done})
        for done in lists
    )
