"""Places embedding tables on ranks: the slowest rank as fast as it can be, within the memory of each.

Of every table one option is taken (:mod:`planner.tables.sharding_options`), and each of its parts is given to a group
of ranks, no group having two. Seconds and bytes of a rank are sums. Up to :data:`EXACT` choices this is solved by
CP-SAT, which proves its answer or says how far it may be from the best; beyond, tables are placed largest first, then
exchanged, and the bound is that of the average rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from planner.base.errors import InfeasibleError
from planner.base.formatting import in_bytes, in_seconds
from planner.cost.cluster import ClusterSpec
from planner.tables.embedding_table import EmbeddingTable
from planner.tables.sharding_options import KINDS, Kind, ShardingOption, TableStep, sharding_options

EXACT = 20_000
"""So many pairs of an option and a group are decided together."""
UNITS = 10**7
"""The least step of the slowest rank has at least so many units of time in the solver, whose numbers are integers."""
GAP = 1e-4
"""Relative; closer than this to the bound a placement is called optimal."""

Options = Mapping[str, tuple[ShardingOption, ...]]
"""By table."""


@dataclass(frozen=True)
class PlacedTable:
    """Which option a table has, and which of its groups have a part, in the order of the parts."""

    name: str
    option: ShardingOption
    groups: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        """The dimension along which it is sharded."""
        return self.option.kind

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each part."""
        return tuple(self.option.groups[group] for group in self.groups)


@dataclass(frozen=True)
class Placement:
    """A placement of all tables.

    Attributes:
        tables: in the order in which they were given.
        ranks: how many there are.
        status: whether it is proven that no other is faster.
        bound_s: no placement has a slowest rank that is faster.
    """

    tables: tuple[PlacedTable, ...]
    ranks: int
    status: Literal["optimal", "feasible"]
    bound_s: float

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of a step, by rank."""
        return _sums(self.tables, self.ranks, "seconds")

    @property
    def bytes(self) -> tuple[int, ...]:
        """By rank."""
        return tuple(map(int, _sums(self.tables, self.ranks, "bytes")))

    @property
    def step_s(self) -> float:
        """Seconds of the slowest rank."""
        return max(self.seconds)

    @property
    def gap(self) -> float:
        """By how much, relative to it, a placement could be faster at most."""
        return max(0.0, 1 - self.bound_s / self.step_s) if self.step_s else 0.0

    def __str__(self) -> str:
        proven = self.status if self.status == "optimal" else f"feasible, at most {self.gap:.2%} from the best"
        lines = [
            f"{len(self.tables)} tables on {self.ranks} ranks, {proven}",
            f"slowest rank {in_seconds(self.step_s)} a step, fullest {in_bytes(max(self.bytes))}",
        ]
        width = max(len(table.name) for table in self.tables)
        for table in self.tables:
            where = " ".join(",".join(map(str, part)) if len(part) < self.ranks else "all" for part in table.ranks)
            lines.append(f"  {table.name:{width}}  {table.kind:12}  {where}")
        return "\n".join(lines)


def place_tables(
    tables: Sequence[EmbeddingTable],
    cluster: ClusterSpec,
    *,
    batch: int,
    optimizer_state: int = 2,
    kinds: Sequence[Kind] = KINDS,
    memory_bytes: int | None = None,
    time_limit_s: float = 10.0,
) -> Placement:
    """Place tables on the ranks of a cluster.

    Args:
        batch: samples of all ranks together.
        optimizer_state: numbers that the optimizer keeps for each weight: 2 of Adam, 1 of Adagrad, 0 of SGD.
        kinds: the dimensions to choose from.
        memory_bytes: that tables may take on a device; what is left to all but the runtime, when left out.
        time_limit_s: after which the best placement so far is returned with its gap.

    Raises:
        InfeasibleError: they do not fit; says how many bytes they take, and what there is.
    """
    limit = cluster.device.usable_bytes if memory_bytes is None else memory_bytes
    step = TableStep(batch, optimizer_state)
    options = {table.name: sharding_options(table, cluster, step, tuple(kinds)) for table in tables}
    assert len(options) == len(tables), "tables have names of their own"
    return place(options, cluster.world_size, limit, time_limit_s=time_limit_s)


def place(
    options: Options, ranks: int, memory_bytes: int, *, time_limit_s: float = 10.0, gap: float = GAP
) -> Placement:
    """Place tables of which the options are known; see :func:`place_tables`."""
    bound_s, cheapest = average_rank(options, ranks, memory_bytes)
    starts = [largest_first(each, ranks, memory_bytes) for each in (cheapest, options, _first_options(options))]
    improved = [exchange(start, ranks, memory_bytes) for start in starts if start is not None]
    start = min(improved, key=lambda tables: slowest_s(tables, ranks), default=None)
    found = None if start is None else _placement(start, ranks, bound_s, gap)
    few = sum(len(option.groups) for each in options.values() for option in each) <= EXACT
    if few and (found is None or found.status != "optimal"):
        found = _solve(options, ranks, memory_bytes, bound_s, start, time_limit_s, gap)
    if found is None:
        raise _does_not_fit(options, ranks, memory_bytes)
    return found


def _first_options(options: Options) -> Options:
    return {name: each[:1] for name, each in options.items()}


def slowest_s(tables: Iterable[PlacedTable], ranks: int) -> float:
    """Seconds of the slowest rank."""
    return max(_sums(tables, ranks, "seconds"))


def _placement(tables: tuple[PlacedTable, ...], ranks: int, bound_s: float, gap: float) -> Placement:
    step_s = slowest_s(tables, ranks)
    return Placement(tables, ranks, "optimal" if step_s - bound_s <= gap * step_s else "feasible", min(bound_s, step_s))


def largest_first(options: Options, ranks: int, memory_bytes: int) -> tuple[PlacedTable, ...] | None:
    """Each table, the most expensive first, where it makes the slowest rank least slow; ``None`` without room."""
    seconds, used = np.zeros(ranks), np.zeros(ranks)
    found: dict[str, PlacedTable] = {}
    for name in sorted(options, key=lambda name: -min(option.total_s for option in options[name])):
        best: tuple[tuple[float, float], PlacedTable] | None = None
        for option in options[name]:
            members = np.array(option.groups)
            room = np.flatnonzero((used[members] + option.bytes <= memory_bytes).all(1))
            if len(room) < option.parts:
                continue
            groups = room[np.argsort(seconds[members[room]].max(1), kind="stable")[: option.parts]]
            slowest = max(seconds.max(), seconds[members[groups]].max() + option.seconds)
            if best is None or (slowest, option.total_s) < best[0]:
                best = (slowest, option.total_s), PlacedTable(name, option, tuple(sorted(groups.tolist())))
        if best is None:
            return None
        found[name] = best[1]
        for part in best[1].ranks:
            seconds[list(part)] += best[1].option.seconds
            used[list(part)] += best[1].option.bytes
    return tuple(found[name] for name in options)


def exchange(tables: tuple[PlacedTable, ...], ranks: int, memory_bytes: int) -> tuple[PlacedTable, ...]:
    """Move a part from the slowest rank, or swap it for one of another, as long as that makes it faster.

    Of each other rank the exchange that levels the two best is tried; parts that several ranks hold together stay.
    """
    held = [set(table.groups) for table in tables]
    alone = [number for number, table in enumerate(tables) if len(table.option.groups[0]) == 1]
    each_s = np.array([table.option.seconds for table in tables])
    each_bytes = np.array([table.option.bytes for table in tables], dtype=np.float64)
    seconds, used = (np.array(_sums(tables, ranks, what)) for what in ("seconds", "bytes"))
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


def average_rank(options: Options, ranks: int, memory_bytes: int) -> tuple[float, Options]:
    """Seconds that the slowest rank takes at least, and the options with which the average rank takes them.

    No rank is faster than the average one, nor than the cheapest part of the costliest table. Where the average rank's
    memory does not suffice, bytes have a price; the bound holds under any, and is best where the memory is just full.
    """

    def priced(price: float) -> tuple[float, float, Options]:
        """The bound under a price on bytes, and by how many bytes the average rank exceeds its memory."""
        cheapest = {
            name: (min(each, key=lambda option: (option.total_s + price * option.total_bytes, option.total_bytes)),)
            for name, each in options.items()
        }
        over = sum(option.total_bytes for (option,) in cheapest.values()) / ranks - memory_bytes
        total_s = sum(option.total_s for (option,) in cheapest.values())
        return total_s / ranks + price * over, over, cheapest

    bound_s, over, cheapest = priced(0.0)
    low, high = 0.0, 1.0 / memory_bytes
    for _ in range(60) if over > 0 else ():
        middle = (low + high) / 2
        found_s, over, found = priced(middle)
        bound_s = max(bound_s, found_s)
        if over > 0:
            low = middle
        else:
            high, cheapest = middle, found
    largest_s = max(min(option.seconds for option in each) for each in options.values())
    return max(bound_s, largest_s), cheapest


def _sums(tables: Iterable[PlacedTable], ranks: int, what: Literal["seconds", "bytes"]) -> tuple[float, ...]:
    total = [0.0] * ranks
    for table in tables:
        for part in table.ranks:
            for rank in part:
                total[rank] += getattr(table.option, what)
    return tuple(total)


def _solve(
    options: Options,
    ranks: int,
    memory_bytes: int,
    bound_s: float,
    start: tuple[PlacedTable, ...] | None,
    time_limit_s: float,
    gap: float,
) -> Placement | None:
    """By CP-SAT: the slowest rank first, then, with that, the fullest one."""
    from ortools.sat.python import cp_model

    unit_s = bound_s / UNITS
    unit_bytes = max(1, memory_bytes // 10**9)
    model = cp_model.CpModel()
    loads: list[list[tuple[cp_model.IntVar, int, int]]] = [[] for _ in range(ranks)]
    held: dict[tuple[str, int, int], cp_model.IntVar] = {}
    for name, each in options.items():
        chosen = [model.new_bool_var(f"{name} as {option.kind}") for option in each]
        model.add_exactly_one(chosen)
        for number, option in enumerate(each):
            parts = [model.new_bool_var("") for _ in option.groups]
            # Parts are alike, so that it only matters which groups have one.
            model.add(sum(parts) == option.parts * chosen[number])
            for at, (part, group) in enumerate(zip(parts, option.groups, strict=True)):
                held[name, number, at] = part
                for rank in group:
                    loads[rank].append((part, math.ceil(option.seconds / unit_s), -(-option.bytes // unit_bytes)))
    slowest = model.new_int_var(0, 2**50, "slowest")
    fullest = model.new_int_var(0, memory_bytes // unit_bytes, "fullest")
    for load in loads:
        model.add(sum(part * seconds for part, seconds, _ in load) <= slowest)
        model.add(sum(part * size for part, _, size in load) <= fullest)
    model.add(slowest >= UNITS - 1)
    started = {} if start is None else {table.name: table for table in start}
    for (name, number, at), part in held.items():
        if name in started:
            table = started[name]
            model.add_hint(part, int(table.option is options[name][number] and at in table.groups))

    def solved(limit_s: float) -> tuple[cp_model.CpSolver, bool] | None:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.relative_gap_limit = gap
        status = solver.solve(model)
        return (solver, status == cp_model.OPTIMAL) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None

    def read(solver: cp_model.CpSolver) -> tuple[PlacedTable, ...]:
        found: dict[str, tuple[int, list[int]]] = {}
        for (name, number, at), part in held.items():
            if solver.value(part):
                found.setdefault(name, (number, []))[1].append(at)
        return tuple(PlacedTable(name, options[name][found[name][0]], tuple(found[name][1])) for name in options)

    model.minimize(slowest)
    first = solved(time_limit_s)
    if first is None:
        return None if start is None else _placement(start, ranks, bound_s, gap)
    solver, is_proven = first
    tables = read(solver)
    bound_s = max(bound_s, solver.best_objective_bound * unit_s * (1 - len(options) / UNITS))
    model.add(slowest <= solver.value(slowest))
    model.clear_hints()
    for part in held.values():
        model.add_hint(part, solver.value(part))
    model.minimize(fullest)
    if (second := solved(time_limit_s / 4)) is not None:
        tables = read(second[0])
    tables = min((tables, start or tables), key=lambda each: slowest_s(each, ranks))  # by less than the solver's unit
    found = _placement(tables, ranks, bound_s, gap)
    return replace(found, status="optimal") if is_proven else found


def _does_not_fit(options: Options, ranks: int, memory_bytes: int) -> InfeasibleError:
    least = {name: min(option.total_bytes for option in each) for name, each in options.items()}
    part = {name: min(option.bytes for option in each) for name, each in options.items()}
    largest = max(part, key=lambda name: part[name])
    return InfeasibleError(
        f"no placement of {len(options)} tables fits {ranks} devices of {in_bytes(memory_bytes)}: with gradients and "
        f"optimizer state they take {in_bytes(sum(least.values()))} at least, and the smallest part of {largest!r} "
        f"{in_bytes(part[largest])}; give more devices, or an optimizer with less state, or keep tables on the host"
    )
