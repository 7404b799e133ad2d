"""Decides which items stay on the device between two uses, so that the links are busy as briefly as possible.

An item that goes costs the seconds of its fetch, and once for every value that its home does not hold those of an
eviction. The items that stay must fit, at every moment, beside those in use. For items of one size, gaps that do not go
on into the next step and evictions that are not shared, the constraints are an interval matrix and the linear program
has a whole solution (Fulkerson and Gross, 1965); beyond that it is solved as a mixed-integer program, by HiGHS.

What stays at a moment is what stayed at the one before, more what begins to and less what ends: written so, an item is
in two rows instead of in one for every moment of its gap.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ortools.math_opt.python import mathopt

from planner.solve import milp
from planner.solve.transfers.gaps import Gap
from planner.solve.transfers.table import Stopped
from planner.solve.transfers.trace import Trace
from planner.solve.transfers.ways import Way, less, spread, ways_of

FEW, WHOLE = 20, 150
"""Up to so many choices are searched whole, in any case and to be thorough."""
NODES, NODES_OF_PART = 200, 20
"""Nodes of a search at most, of the whole or a part; not time, so that answers are the same everywhere."""
SURE = 1e-7
"""By how much a value of the relaxation may be off 0 or 1."""
HELD = 1024.0
"""The most that is held at a moment, in what a solver is given."""
MARGIN = 1e-6
"""Part of the room that is left where a solver's tolerances have let too much stay."""
PASSED_OVER = 1e-7
"""What a search may pass over in every item, in parts of what the item that saves most does."""
GAP = 1e-9
ANSWERS = (mathopt.TerminationReason.OPTIMAL, mathopt.TerminationReason.FEASIBLE)
"""How a search ends whose choice and whose bound count: at its end, or at its node limit."""


@dataclass(frozen=True)
class KeptGaps:
    """The gaps in which items stay, by number; ``link_s`` of all links and directions; a proved bound on it; and why
    none that take less were looked for.
    """

    gaps: frozenset[int]
    link_s: float
    link_bound_s: float
    stopped: Stopped


def keep(trace: Trace, gaps: Sequence[Gap], room: Sequence[int], window: int = 0, thorough: bool = True) -> KeptGaps:
    """The choice of least seconds on the links that is found.

    Args:
        room: of every moment on the device, what is left of the budget beside the items in use and others.
        window: so many moments before each fetch ends and after each eviction starts are kept free for it, as far as
            there is room. The bound is on choices that keep as much free.
        thorough: search longer where there are many choices.
    """
    left = list(room)
    ways = ways_of(gaps, ())
    spread(ways, left, window, {})
    choices = [way for way in ways if way.gap.is_choice]
    stays = {way.gap.number for way in choices if way.back <= way.gone}
    fits = [
        way
        for way in choices
        if way.back > way.gone
        and min(left[moment % len(left)] for moment in range(way.gone, way.back)) >= way.gap.item.bytes
    ]
    bound_s = math.inf
    stopped: Stopped = "proved"
    if fits:
        more, bound_s, stopped = _solve(trace, ways, stays, fits, left, thorough)
        stays = min(stays | more, stays | _nearest(fits, left), key=lambda each: _seconds(trace, gaps, each))
    link_s = _seconds(trace, gaps, stays)
    if link_s <= bound_s * (1 + GAP):
        stopped = "proved"
    return KeptGaps(frozenset(stays), link_s, min(bound_s, link_s), stopped)


def _seconds(trace: Trace, gaps: Sequence[Gap], stays: set[int]) -> float:
    return sum(
        way.gap.reads * trace.seconds(way.gap.item, "fetch") + way.evicts * trace.seconds(way.gap.item, "evict")
        for way in ways_of(gaps, stays)
    )


def _nearest(fits: Sequence[Way], left: Sequence[int]) -> set[int]:
    """What stays if, where there is no room for all, what is used last goes (Belady, 1966); nothing if that differs
    from step to step.
    """
    steps = len(left)
    begins: dict[int, list[Way]] = defaultdict(list)
    for way in fits:
        begins[way.gone % steps].append(way)
    here: list[tuple[int, int, int]] = []  # until when, number of the gap, bytes
    stayed: list[set[int]] = []
    for moment in range(4 * steps):
        if moment % steps == 0:
            stayed.append(set())
        here = [each for each in here if each[0] > moment]
        here += [(moment + way.back - way.gone, way.gap.number, way.gap.item.bytes) for way in begins[moment % steps]]
        stayed[-1] |= {way.gap.number for way in begins[moment % steps]}
        while sum(size for _, _, size in here) > left[moment % steps]:
            gone = max(here)
            here.remove(gone)
            for each in stayed:
                each.discard(gone[1])
    fitting = ((range(way.gone, way.back), way.gap.item.bytes) for way in fits if way.gap.number in stayed[2])
    return stayed[2] if min(less(left, fitting)) >= 0 else set()


def _solve(
    trace: Trace, ways: Sequence[Way], stays: set[int], fits: Sequence[Way], left: Sequence[int], thorough: bool
) -> tuple[set[int], float, Stopped]:
    """Which of ``fits`` stay, a bound on the seconds of all, and why no better ones were looked for."""
    groups = _groups(trace, ways, stays, fits)
    beside = less(left, ((range(way.gone, way.back), way.gap.item.bytes) for way in fits))
    unit = math.gcd(*(way.gap.item.bytes for way in fits)) or 1
    room = [min(free, free - rest) // unit * unit for free, rest in zip(left, beside, strict=True)]
    found, most_s, stopped = _search(groups, room, thorough)
    if not _fit(fits, found, left):  # a solver's tolerances may let a few bytes too many stay
        strict, _, _ = _search(groups, [math.floor(free * (1 - MARGIN)) for free in room], thorough)
        both = [_fitting(fits, each, left) for each in (found, strict)]
        stopped = "solver" if stopped == "proved" else stopped
        found = max(both, key=lambda each: math.fsum(group.saved_s(each) for group in groups))
    none = _seconds(trace, [way.gap for way in ways], stays)
    return found, max(0.0, none - most_s), stopped


@dataclass(frozen=True)
class _Group:
    """Gaps with what their items save by staying: each its fetch, and all of them together ``evict_s``."""

    ways: tuple[Way, ...]
    fetch_s: float
    evict_s: float

    def saved_s(self, stays: Collection[int]) -> float:
        count = sum(way.gap.number in stays for way in self.ways)
        return count * self.fetch_s + (self.evict_s if count == len(self.ways) else 0.0)

    def most_s(self, costs: Sequence[float]) -> float:
        """The most that it saves beyond what the room that each of its gaps takes costs."""
        gains = [self.fetch_s - cost for cost in costs]
        return max(math.fsum(gain for gain in gains if gain > 0), self.evict_s + math.fsum(gains))


def _groups(trace: Trace, ways: Sequence[Way], stays: set[int], fits: Sequence[Way]) -> list[_Group]:
    """An eviction is saved where the item stays in all gaps since it was written."""
    open_ = {way.gap.number: way for way in fits}
    since: dict[tuple[str, int], list[int]] = defaultdict(list)
    for way in ways:
        if way.gap.needed and way.gap.written is not None:
            since[way.gap.item.name, way.gap.written].append(way.gap.number)
    found = []
    for (name, _), numbers in since.items():
        chosen = tuple(open_[number] for number in numbers if number in open_)
        if chosen and all(number in open_ or number in stays for number in numbers):
            item = trace.item[name]
            found.append(_Group(chosen, trace.seconds(item, "fetch"), trace.seconds(item, "evict")))
            for way in chosen:
                del open_[way.gap.number]
    return found + [_Group((way,), trace.seconds(way.gap.item, "fetch"), 0.0) for way in open_.values()]


@dataclass(frozen=True)
class _KeepProgram:
    """What saves most, for a solver: bytes in ``1 / scale`` and seconds in ``unit_s``, so that numbers are near 1.

    ``held`` is, of every moment, what stays over it, of the items in ``takes``.
    """

    model: mathopt.Model
    takes: Mapping[int, mathopt.Variable]
    held: Sequence[mathopt.Variable]
    scale: float
    unit_s: float


def _program(groups: Sequence[_Group], room: Sequence[int]) -> _KeepProgram:
    fits = sorted((way for group in groups for way in group.ways), key=lambda way: way.gap.number)
    scale = math.ldexp(HELD, -max(room).bit_length())  # a power of two: what fits to the byte still does
    unit_s = max(group.fetch_s + group.evict_s for group in groups) or 1.0
    model = mathopt.Model()
    takes = {way.gap.number: model.add_binary_variable() for way in fits}

    changes: dict[int, list[mathopt.LinearTypes]] = defaultdict(list)
    begun: list[mathopt.LinearTypes] = []
    for way in fits:
        bytes_ = way.gap.item.bytes * scale * takes[way.gap.number]
        changes[way.gone % len(room)].append(bytes_)
        changes[way.back % len(room)].append(-bytes_)
        if any(moment % len(room) == 0 for moment in range(way.gone, way.back)):
            begun.append(bytes_)
    held: list[mathopt.Variable] = []
    for moment, free in enumerate(room):
        held.append(model.add_variable(lb=0.0, ub=free * scale))
        if moment == 0:
            model.add_linear_constraint(held[0] == mathopt.fast_sum(begun))
        else:
            model.add_linear_constraint(held[-1] - held[-2] == mathopt.fast_sum(changes[moment]))

    saved: list[mathopt.LinearTypes] = []
    for group in groups:
        chosen = [takes[way.gap.number] for way in group.ways]
        alone_s = group.fetch_s + (group.evict_s if len(chosen) == 1 else 0.0)
        saved += [alone_s / unit_s * take for take in chosen]
        if len(chosen) > 1:
            together = model.add_variable(lb=0.0, ub=1.0)
            for take in chosen:
                model.add_linear_constraint(together <= take)
            saved.append(group.evict_s / unit_s * together)
    model.maximize(mathopt.fast_sum(saved))
    return _KeepProgram(model, takes, held, scale, unit_s)


def _search(groups: Sequence[_Group], room: Sequence[int], thorough: bool) -> tuple[set[int], float, Stopped]:
    """Which items to take, an upper bound on the seconds that any choice saves, and why no better ones were looked for.

    Those are fixed of which the linear relaxation is sure, and the rest is searched; then, to be thorough, only those
    are fixed that it takes, then only those that it leaves, and where there are few choices none. What a solver gives
    up or finds impossible, by its tolerances, is no answer: then nothing is taken.
    """
    program = _program(groups, room)
    values, prices = _relaxed(program)
    most_s = _most_s(groups, room, prices)
    best, saved_s = set[int](), -math.inf
    stopped: Stopped = "choices"
    parts: list[tuple[float, ...]] = [(0.0, 1.0)] if values else []
    if thorough and values:
        parts += [(1.0,), (0.0,)]
    if len(program.takes) <= (WHOLE if thorough else FEW):
        parts.append(())
    for fixed in parts:
        for number, take in program.takes.items():
            sure = [each for each in fixed if abs(values[number] - each) < SURE]
            take.lower_bound, take.upper_bound = (sure[0], sure[0]) if sure else (0.0, 1.0)
        result = milp.run(program.model, gap=GAP, node_limit=NODES_OF_PART if fixed else NODES)
        if result is None or result.termination.reason not in ANSWERS or not result.has_primal_feasible_solution():
            stopped = stopped if fixed else "solver"
            continue
        if result.objective_value() * program.unit_s > saved_s:
            best, saved_s = _taken(result, program.takes), result.objective_value() * program.unit_s
        if not fixed:
            stopped = "proved" if result.termination.reason == mathopt.TerminationReason.OPTIMAL else "nodes"
            most_s = min(most_s, _searched(result, len(program.takes)) * program.unit_s)
        if saved_s >= most_s - GAP * abs(most_s):
            break
    return best, most_s, stopped


def _searched(result: mathopt.SolveResult, takes: int) -> float:
    """The bound of a search of the whole, less sharp by what its tolerances may pass over in every item."""
    bound: float = result.termination.objective_bounds.dual_bound
    return bound + GAP * abs(bound) + takes * PASSED_OVER


def _relaxed(program: _KeepProgram) -> tuple[dict[int, float], list[float]]:
    """The solution of the linear relaxation, and the seconds that a byte more at each moment would save.

    Nothing and zeros where the solver gives none.
    """
    for take in program.takes.values():
        take.integer = False
    result = milp.relaxation(program.model)
    for take in program.takes.values():
        take.integer = True
    if result is None or result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        return {}, [0.0] * len(program.held)
    values = {number: result.variable_values(take) for number, take in program.takes.items()}
    prices = [max(0.0, result.reduced_costs(held)) * program.scale * program.unit_s for held in program.held]
    return values, prices


def _most_s(groups: Sequence[_Group], room: Sequence[int], prices: Sequence[float]) -> float:
    """A bound on the seconds that any choice saves, whatever the prices (Lagrangian relaxation of the room).

    What is paid for the room is at most that of all of it; so no choice saves more than all room at its price and, of
    every group, the most that it saves beyond the price of what it takes.
    """
    around = [*prices, *prices]
    parts = [price * free for price, free in zip(prices, room, strict=True)]
    for group in groups:
        costs = [way.gap.item.bytes * math.fsum(around[way.gone : way.back]) for way in group.ways]
        parts.append(group.most_s(costs))
    return math.fsum(parts)


def _fit(fits: Sequence[Way], stays: Collection[int], left: Sequence[int]) -> bool:
    taken = ((range(way.gone, way.back), way.gap.item.bytes) for way in fits if way.gap.number in stays)
    return min(less(left, taken)) >= 0


def _fitting(fits: Sequence[Way], stays: set[int], left: Sequence[int]) -> set[int]:
    """What is left of ``stays`` if the smallest go until the rest fits."""
    rest = set(stays)
    for way in sorted(fits, key=lambda way: way.gap.item.bytes):
        if _fit(fits, rest, left):
            break
        rest.discard(way.gap.number)
    return rest


def _taken(result: mathopt.SolveResult, takes: Mapping[int, mathopt.Variable]) -> set[int]:
    return {number for number, take in takes.items() if result.variable_values(take) > 0.5}
