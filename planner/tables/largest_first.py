"""Places embedding tables by rule: the largest first, then moved, swapped and placed anew as long as it gets faster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.tables.placement import Options, PlacedTable, sums
from planner.tables.sharding_options import ShardingOption

Floats = NDArray[np.float64]


def largest_first(options: Options, ranks: int, memory_bytes: int) -> tuple[PlacedTable, ...] | None:
    """Each table, the most expensive first, where it makes the slowest rank least slow; ``None`` without room."""
    seconds, used = np.zeros(ranks), np.zeros(ranks)
    found: dict[str, PlacedTable] = {}
    for name in sorted(options, key=lambda name: -min(option.total_s for option in options[name])):
        best = _least_slow(name, options[name], seconds, used, memory_bytes)
        if best is None:
            return None
        found[name] = best[1]
        for rank in best[1].holders:
            seconds[rank] += best[1].option.seconds
            used[rank] += best[1].option.bytes
    return tuple(found[name] for name in options)


def _least_slow(
    name: str, options: Iterable[ShardingOption], seconds: Floats, used: Floats, memory_bytes: int
) -> tuple[float, PlacedTable] | None:
    """The option of one table with which the slowest rank is least slow; of equal ones the cheapest.

    Args:
        seconds, used: of what each rank holds so far.
    """
    best: tuple[tuple[float, float], PlacedTable] | None = None
    for option in options:
        members = np.array(option.groups)
        room = np.flatnonzero((used[members] + option.bytes <= memory_bytes).all(1))
        if len(room) < option.parts:
            continue
        groups = room[np.argsort(seconds[members[room]].max(1), kind="stable")[: option.parts]]
        slowest = max(seconds.max(), seconds[members[groups]].max() + option.seconds)
        if best is None or (slowest, option.total_s) < best[0]:
            best = (slowest, option.total_s), PlacedTable(name, option, tuple(sorted(groups.tolist())))
    return None if best is None else (best[0][0], best[1])


def improve(
    tables: tuple[PlacedTable, ...], options: Options, ranks: int, memory_bytes: int
) -> tuple[PlacedTable, ...]:
    """Exchange parts, then place a table of the slowest rank anew in any of its options, as long as it gets faster."""
    while True:
        tables = exchange(tables, ranks, memory_bytes)
        seconds, used = (np.array(sums(tables, ranks, what)) for what in ("seconds", "bytes"))
        slowest = int(seconds.argmax())
        best: tuple[float, int, PlacedTable] | None = None
        for number, table in enumerate(tables):
            if slowest not in table.holders:
                continue
            left_s, left_bytes = seconds.copy(), used.copy()
            left_s[list(table.holders)] -= table.option.seconds
            left_bytes[list(table.holders)] -= table.option.bytes
            found = _least_slow(table.name, options[table.name], left_s, left_bytes, memory_bytes)
            if found is not None and (best is None or found[0] < best[0]):
                best = found[0], number, found[1]
        if best is None or best[0] >= seconds[slowest] * (1 - 1e-9):
            return tables
        tables = (*tables[: best[1]], best[2], *tables[best[1] + 1 :])


def exchange(tables: tuple[PlacedTable, ...], ranks: int, memory_bytes: int) -> tuple[PlacedTable, ...]:
    """Move a part from the slowest rank, or swap it for one of another, as long as that makes it faster.

    Of each other rank the exchange that levels the two best is tried; parts that several ranks hold together stay.
    """
    held = [set(table.groups) for table in tables]
    alone = [number for number, table in enumerate(tables) if len(table.option.groups[0]) == 1]
    each_s = np.array([table.option.seconds for table in tables])
    each_bytes = np.array([table.option.bytes for table in tables], dtype=np.float64)
    seconds, used = (np.array(sums(tables, ranks, what)) for what in ("seconds", "bytes"))
    while True:
        rank = int(seconds.argmax())
        mine = [number for number in alone if rank in held[number]]
        best: tuple[float, int, int | None, int] | None = None
        for other in np.argsort(seconds, kind="stable")[: ranks - 1].tolist():
            ours = [number for number in mine if other not in held[number]]
            theirs = [number for number in alone if other in held[number] and rank not in held[number]]
            if not ours:
                continue
            gain = each_s[ours][:, None] - np.append(each_s[theirs], 0.0)
            moved = each_bytes[ours][:, None] - np.append(each_bytes[theirs], 0.0)
            fits = (used[other] + moved <= memory_bytes) & (used[rank] - moved <= memory_bytes)
            slower = np.where(fits, np.maximum(seconds[rank] - gain, seconds[other] + gain), np.inf)
            at, against = np.unravel_index(slower.argmin(), slower.shape)
            if best is None or slower[at, against] < best[0]:
                swapped = None if against == len(theirs) else theirs[against]
                best = float(slower[at, against]), ours[at], swapped, other
        if best is None or best[0] >= seconds[rank] * (1 - 1e-9):
            return tuple(replace(table, groups=tuple(sorted(g))) for table, g in zip(tables, held, strict=True))
        _, ours_, theirs_, other = best
        for number, source, target in ((ours_, rank, other), (theirs_, other, rank)):
            if number is not None:
                held[number] = held[number] - {source} | {target}
                seconds[[source, target]] += each_s[number] * np.array([-1, 1])
                used[[source, target]] += each_bytes[number] * np.array([-1, 1])
