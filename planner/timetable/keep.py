"""Keep: which items stay on the device between two uses, so that the links are busy for the shortest time.

An item that goes costs the seconds of its fetch, and once for every value that its home does not hold those of an
eviction. The items that stay must fit, at every moment, beside those in use. For items of one size, gaps that do not go
on into the next step and evictions that are not shared, the constraints are an interval matrix and the linear program
has a whole solution (Fulkerson and Gross, 1965); beyond that it is solved as a mixed-integer program, by HiGHS.

What stays at a moment is what stayed at the one before, more what begins to and less what ends: written so, an item is
in two rows instead of in one for every moment of its gap.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers.highs_pb2 import HighsOptionsProto

from planner.timetable.gaps import Gap
from planner.timetable.trace import Trace
from planner.timetable.ways import Way, less, spread, ways_of

FEW, WHOLE = 20, 150
"""Up to so many choices are searched whole, in any case and to be thorough."""
NODES, NODES_OF_PART = 200, 20
"""Nodes of a search at most, of the whole or a part; not time, so that answers are the same everywhere."""
SURE = 1e-7
"""By how much a value of the relaxation may be off 0 or 1."""
GAP = 1e-9
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Kept:
    """The gaps in which items stay, by number; ``link_s`` of all links and directions, and a proved bound on it."""

    gaps: frozenset[int]
    link_s: float
    bound_s: float


def keep(trace: Trace, gaps: Sequence[Gap], room: Sequence[int], window: int = 0, thorough: bool = True) -> Kept:
    """The choice of least seconds on the links.

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
    if fits:
        more, bound_s = _solve(trace, ways, stays, fits, left, thorough)
        stays = min(stays | more, stays | _nearest(fits, left), key=lambda each: _seconds(trace, gaps, each))
    link_s = _seconds(trace, gaps, stays)
    return Kept(frozenset(stays), link_s, min(bound_s, link_s))


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
) -> tuple[set[int], float]:
    """Which of ``fits`` stay, and a bound on the seconds of all."""
    steps = len(left)
    unit = math.gcd(*(way.gap.item.bytes for way in fits)) or 1
    program = mathopt.Model()
    takes = {way.gap.number: program.add_binary_variable() for way in fits}

    begins: dict[int, list[mathopt.LinearTypes]] = defaultdict(list)
    begun: list[mathopt.LinearTypes] = []
    for way in fits:
        size, take = way.gap.item.bytes // unit, takes[way.gap.number]
        begins[way.gone % steps].append(size * take)
        begins[way.back % steps].append(-size * take)
        if any(moment % steps == 0 for moment in range(way.gone, way.back)):
            begun.append(size * take)
    before = None
    for moment, free in enumerate(left):
        held = program.add_variable(lb=0.0, ub=free // unit)
        if before is None:
            program.add_linear_constraint(held == mathopt.fast_sum(begun))
        else:
            program.add_linear_constraint(held - before == mathopt.fast_sum(begins[moment]))
        before = held

    # An eviction is saved where the item stays in all gaps since it was written.
    saved = [trace.seconds(way.gap.item, "fetch") * takes[way.gap.number] for way in fits]
    since: dict[tuple[str, int], list[int]] = defaultdict(list)
    for way in ways:
        if way.gap.needed and way.gap.written is not None:
            since[way.gap.item.name, way.gap.written].append(way.gap.number)
    for (name, _), numbers in since.items():
        if all(number in takes or number in stays for number in numbers):
            seconds = trace.seconds(trace.item[name], "evict")
            chosen = [takes[number] for number in numbers if number in takes]
            if len(chosen) == 1:
                saved.append(seconds * chosen[0])
            elif chosen:
                all_stay = program.add_variable(lb=0.0, ub=1.0)
                for take in chosen:
                    program.add_linear_constraint(all_stay <= take)
                saved.append(seconds * all_stay)
    program.maximize(mathopt.fast_sum(saved))

    found, most = _search(program, takes, thorough)
    for way in fits:  # a solver's tolerances may let a few bytes too many stay
        taken = ((range(each.gone, each.back), each.gap.item.bytes) for each in fits if each.gap.number in found)
        if min(less(left, taken)) >= 0:
            break
        found.discard(way.gap.number)
    none = _seconds(trace, [way.gap for way in ways], stays)
    return found, none - most


def _search(program: mathopt.Model, takes: Mapping[int, mathopt.Variable], thorough: bool) -> tuple[set[int], float]:
    """Which items to take, and an upper bound on what any choice saves.

    Those are fixed of which the linear relaxation is sure, and the rest is searched; then, to be thorough, only those
    are fixed that it takes, then only those that it leaves, and where there are few choices none.
    """
    relaxed = _relaxed(program, takes)
    most = relaxed.termination.objective_bounds.dual_bound
    best, saved = set[int](), -math.inf
    parts: list[tuple[float, ...]] = [(0.0, 1.0)]
    if thorough:
        parts += [(1.0,), (0.0,)]
    if len(takes) <= (WHOLE if thorough else FEW):
        parts.append(())
    for fixed in parts:
        for take in takes.values():
            value = relaxed.variable_values(take)
            sure = [each for each in fixed if abs(value - each) < SURE]
            take.lower_bound, take.upper_bound = (sure[0], sure[0]) if sure else (0.0, 1.0)
        result = _run(program, NODES_OF_PART if fixed else NODES)
        if result.objective_value() > saved:
            best, saved = _taken(result, takes), result.objective_value()
        if not fixed:
            most = min(most, result.termination.objective_bounds.dual_bound)
        if saved >= most - GAP * abs(most):
            break
    return best, most


def _relaxed(program: mathopt.Model, takes: Mapping[int, mathopt.Variable]) -> mathopt.SolveResult:
    for take in takes.values():
        take.integer = False
    result = mathopt.solve(program, mathopt.SolverType.GLOP)
    for take in takes.values():
        take.integer = True
    return result


def _taken(result: mathopt.SolveResult, takes: Mapping[int, mathopt.Variable]) -> set[int]:
    return {number for number, take in takes.items() if result.variable_values(take) > 0.5}


def _run(program: mathopt.Model, nodes: int) -> mathopt.SolveResult:
    """Solve on a thread of its own, so that an interrupt reaches the caller while HiGHS is at work."""
    tolerances = {"mip_feasibility_tolerance": _TOLERANCE, "primal_feasibility_tolerance": _TOLERANCE}
    parameters = mathopt.SolveParameters(
        node_limit=nodes,
        relative_gap_tolerance=GAP,
        absolute_gap_tolerance=0.0,
        random_seed=0,
        highs=HighsOptionsProto(int_options={"threads": 1}, double_options=tolerances),
    )
    outcome: Future[mathopt.SolveResult] = Future()

    def work() -> None:
        try:
            outcome.set_result(mathopt.solve(program, mathopt.SolverType.HIGHS, params=parameters))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome.result()
