"""When items leave and return in their gaps, as far as there is room.

An item that goes is away at the least from the entry after its last use until the entry of its next one. An eviction
need not be waited for at once, nor a fetch be started only when its item is needed: both may take the time of other
moments, and the room that these have left. That is double buffering, a moment at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.solve.transfers.gaps import Gap


@dataclass
class Way:
    """How an item goes in a gap.

    Attributes:
        gone: the moment on whose entry its memory is free: it was dropped then, or its eviction is waited for.
        back: the moment on whose entry it is fetched, or made.
    """

    gap: Gap
    evicts: bool
    gone: int
    back: int


def ways_of(gaps: Sequence[Gap], kept: Collection[int]) -> list[Way]:
    """The ways of all gaps in which items go, each away for as long as can be; ``kept``: the gaps where they stay."""
    found = []
    behind: set[tuple[str, int]] = set()
    steps = 1 + max((gap.after for gap in gaps), default=0)

    def since_written(gap: Gap) -> int:
        return 0 if gap.written is None else (gap.after - gap.written) % steps

    for gap in sorted(gaps, key=since_written):
        if gap.must_go or (gap.is_choice and gap.number not in kept):
            evicts = gap.needed and gap.written is not None and (gap.item.name, gap.written) not in behind
            if evicts and gap.written is not None:
                behind.add((gap.item.name, gap.written))
            found.append(Way(gap, evicts, gap.after + 1, gap.before))
    return sorted(found, key=lambda way: way.gap.number)


def room_of(room: Sequence[int], gaps: Iterable[Gap], kept: Collection[int]) -> list[int]:
    """What is left of every moment's room beside the items that stay."""
    return less(room, ((gap.inside, gap.item.bytes) for gap in gaps if gap.number in kept))


def less(room: Sequence[int], taken: Iterable[tuple[range, int]]) -> list[int]:
    """What is left of every moment's room beside bytes taken over stretches, each less than a whole step."""
    steps = len(room)
    more = [0] * (2 * steps + 1)
    for moments, size in taken:
        more[moments.start] += size
        more[moments.stop] -= size
    held = [*accumulate(more)]
    return [free - held[at] - held[at + steps] for at, free in enumerate(room)]


def spread(ways: Iterable[Way], room: list[int], depth: int, ended: Mapping[int, int]) -> None:
    """Let evictions take longer and fetches start earlier, by up to ``depth`` moments each, where there is room.

    Nearest moments first: all by one, then all by another. ``room`` becomes what is left of it. ``ended`` says by gap
    on which entry an eviction has ended anyway, so that more time would be of no use; gaps that it leaves out may take
    any.
    """
    steps = len(room)
    out = {way.gap.number: way for way in ways if way.evicts}
    into = {way.gap.number: way for way in ways if way.gap.reads}
    for _ in range(depth):
        for number, way in [*out.items()]:
            if way.gone < min(way.back, ended.get(number, way.back)) and room[way.gone % steps] >= way.gap.item.bytes:
                room[way.gone % steps] -= way.gap.item.bytes
                way.gone += 1
            else:
                del out[number]
        for number, way in [*into.items()]:
            if way.back > max(way.gone, way.gap.ready) and room[(way.back - 1) % steps] >= way.gap.item.bytes:
                way.back -= 1
                room[way.back % steps] -= way.gap.item.bytes
            else:
                del into[number]
        if not out and not into:
            return
