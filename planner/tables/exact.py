"""Places embedding tables by CP-SAT, which proves its answer, or says how far it may be from the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ortools.sat.python import cp_model

from planner.tables.placement import Options, PlacedTable

UNITS = 10**7
"""The bound that is known has so many units of time in the solver, whose numbers are integers."""
BYTES = 10**9
"""And the memory of a rank at most about so many units of bytes."""
LATE = 4
"""So many times its limit the solver may take where it gets little of the machine."""


class Solved(NamedTuple):
    """A placement, a bound on the slowest rank of all, and whether this one is as fast, but for the gap."""

    tables: tuple[PlacedTable, ...]
    bound_s: float
    is_optimal: bool


class PlacementProgram:
    """One variable for each group of ranks that may hold a part of a table.

    Args:
        bound_s: no placement has a faster slowest rank.
        gap: relative, at which the solver ends.
    """

    def __init__(self, options: Options, ranks: int, memory_bytes: int, bound_s: float, gap: float):
        self.options, self.gap = options, gap
        self.unit_s, unit_bytes = bound_s / UNITS, max(1, memory_bytes // BYTES)
        self.model = cp_model.CpModel()
        self.parts: dict[tuple[str, int, int], cp_model.IntVar] = {}
        times: list[list[cp_model.LinearExprT]] = [[] for _ in range(ranks)]
        sizes: list[list[cp_model.LinearExprT]] = [[] for _ in range(ranks)]
        for name, each in options.items():
            chosen = [self.model.new_bool_var(f"{name} as {option.kind}") for option in each]
            self.model.add_exactly_one(chosen)
            for number, option in enumerate(each):
                parts = [self.model.new_bool_var("") for _ in option.groups]
                # Parts of a table are alike: it only matters which groups have one.
                self.model.add(sum(parts) == option.parts * chosen[number])
                for at, (part, group) in enumerate(zip(parts, option.groups, strict=True)):
                    self.parts[name, number, at] = part
                    for rank in group:
                        times[rank].append(part * math.ceil(option.seconds / self.unit_s))
                        sizes[rank].append(part * -(-option.bytes // unit_bytes))
        self.slowest = self.model.new_int_var(UNITS - 1, 2**50, "slowest")
        self.fullest = self.model.new_int_var(0, memory_bytes // unit_bytes, "fullest")
        for time, size in zip(times, sizes, strict=True):
            self.model.add(sum(time) <= self.slowest)
            self.model.add(sum(size) <= self.fullest)

    def fastest(self, start: Sequence[PlacedTable], time_limit_s: float) -> Solved | None:
        """The placement whose slowest rank is fastest; ``None`` where none was found.

        Args:
            start: a placement to begin with, or nothing.
        """
        self._begin_with(start)
        self.model.minimize(self.slowest)
        solver, status = self._solve(time_limit_s)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        # Every part of a table may have been rounded up by a unit.
        bound_s = solver.best_objective_bound * self.unit_s * (1 - len(self.options) / UNITS)
        return Solved(self._read(solver), bound_s, status == cp_model.OPTIMAL)

    def emptiest(self, start: Sequence[PlacedTable], slowest_s: float, time_limit_s: float) -> tuple[PlacedTable, ...]:
        """A placement as fast as ``start``, but for rounding, whose fullest rank is as empty as was found."""
        self._begin_with(start)
        self.model.add(self.slowest <= math.ceil(slowest_s / self.unit_s) + len(start))
        self.model.minimize(self.fullest)
        solver, status = self._solve(time_limit_s)
        return self._read(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else tuple(start)

    def _begin_with(self, tables: Sequence[PlacedTable]) -> None:
        self.model.clear_hints()
        placed = {table.name: table for table in tables}
        for (name, number, at), part in self.parts.items():
            if name in placed:
                table = placed[name]
                self.model.add_hint(part, table.option == self.options[name][number] and at in table.groups)

    def _solve(self, time_limit_s: float) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
        solver = cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = False  # it would leave Ctrl-C to kill the process afterwards
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = time_limit_s  # counts work: answers do not depend on the machine
        solver.parameters.max_time_in_seconds = LATE * time_limit_s
        solver.parameters.relative_gap_limit = self.gap
        return solver, solver.solve(self.model)

    def _read(self, solver: cp_model.CpSolver) -> tuple[PlacedTable, ...]:
        found: dict[str, tuple[int, list[int]]] = {}
        for (name, number, at), part in self.parts.items():
            if solver.value(part):
                found.setdefault(name, (number, []))[1].append(at)
        chosen = ((name, *found[name]) for name in self.options)
        return tuple(PlacedTable(name, self.options[name][number], tuple(groups)) for name, number, groups in chosen)
