"""Turn a model into a CP-SAT program and its outcome into an assignment and a proven bound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from ortools.sat.python import cp_model

from planner.problem import Floats, Ints
from planner.solve.model import EXPOSED, HELD, TIME, WALL, Model

_RESOLUTION = 2.0**45  # integer steps over the spread of the whole objective


@dataclass(frozen=True, eq=False)
class Outcome:
    """The best assignment found, if any, and a lower bound on the objective (inf: proven that there is none)."""

    assignment: Ints | None
    bound: float


def minimise_exactly(
    model: Model, objective: Literal["time", "peak"], hint: Ints | None, time_limit_s: float
) -> Outcome:
    """Minimise seconds within the memory limit, or peak bytes without one."""
    program = cp_model.CpModel()
    picks = [[program.new_bool_var(f"pick{v}_{c}") for c in range(size)] for v, size in enumerate(model.sizes)]
    terms: list[tuple[cp_model.IntVar, Floats]] = []
    for v, pick in enumerate(picks):
        # Every vertex takes exactly one choice.
        program.add_exactly_one(pick)
        terms += zip(pick, model.singles[v], strict=True)
    for (tail, head), costs in model.pairs.items():
        flow: dict[tuple[int, int], cp_model.IntVar] = {
            (int(a), int(b)): program.new_bool_var(f"pair{tail}_{a}_{head}_{b}")
            for a, b in np.argwhere(np.isfinite(costs[..., WALL]))
        }
        # The pair taken agrees with the choice at its tail and with the choice at its head.
        for a, pick_tail in enumerate(picks[tail]):
            program.add(sum(y for (i, _), y in flow.items() if i == a) == pick_tail)
        for b, pick_head in enumerate(picks[head]):
            program.add(sum(y for (_, j), y in flow.items() if j == b) == pick_head)
        terms += [(y, costs[pair]) for pair, y in flow.items()]

    variables = [variable for variable, _ in terms]
    matrix = np.array([row for _, row in terms]).reshape(len(terms), 4)
    held = cp_model.LinearExpr.weighted_sum(variables, [int(x) for x in matrix[:, HELD]])
    transient = program.new_int_var(0, int(max((t.max() for t in model.transient), default=0)), "transient")
    # The transient peak is at least what each vertex's choice needs.
    for pick, values in zip(picks, model.transient, strict=True):
        program.add(transient >= cp_model.LinearExpr.weighted_sum(pick, [int(x) for x in values]))

    scale = 1.0
    if objective == "peak":
        program.minimize(held + transient)
    else:
        # Held bytes and the largest transient fit into the limit together.
        if math.isfinite(model.limit_bytes):
            program.add(held + transient <= int(model.limit_bytes))
        # The step takes at least the plain time, and at least the time with all background exposed.
        spread = float(np.abs(matrix[:, : EXPOSED + 1]).sum(axis=0).max(initial=0.0))
        scale = _RESOLUTION / spread if spread > 0 else 1.0
        step = program.new_int_var(-int(2 * _RESOLUTION), int(2 * _RESOLUTION), "step")
        for column in (TIME, EXPOSED):
            # Rounding costs down keeps the program's bound a bound.
            floored = [int(x) for x in np.floor(matrix[:, column] * scale)]
            program.add(step >= cp_model.LinearExpr.weighted_sum(variables, floored))
        program.minimize(step)
    if hint is not None:
        for pick, choice in zip(picks, hint, strict=True):
            for c, variable in enumerate(pick):
                program.add_hint(variable, c == choice)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, time_limit_s)
    solver.parameters.num_workers = 2
    solver.parameters.interleave_search = True
    solver.parameters.random_seed = 0
    status = solver.solve(program)
    if status == cp_model.INFEASIBLE:
        return Outcome(None, math.inf)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Outcome(None, solver.best_objective_bound / scale)
    assignment = np.array([next(c for c, x in enumerate(pick) if solver.value(x)) for pick in picks], dtype=np.int64)
    return Outcome(assignment, solver.best_objective_bound / scale)
