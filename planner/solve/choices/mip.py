"""Turn a model into a mixed-integer program for HiGHS, and its outcome into an assignment and a proven bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from ortools.math_opt.python import mathopt

from planner.solve import milp
from planner.solve.choices.model import EXPOSED, HELD, TIME, WALL, ChoiceModel, Mask
from planner.solve.problem import Floats, Ints

_GAP = 1e-7
_LEAST_S = 0.01
"""HiGHS is given so much time at least."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """The best assignment found, if any, and a lower bound in seconds (inf: nothing lies below the target)."""

    assignment: Ints | None
    bound: float


def solve_mip(model: ChoiceModel, floor_bytes: float, target_s: float, time_limit_s: float) -> Outcome:
    """Minimise the step time of assignments within the limit that take at most ``target_s``.

    Transient bytes count as at least ``floor_bytes``.
    """
    program = mathopt.Model()
    allowed_singles, allowed_pairs = _within(model, target_s)
    picks = [[program.add_integer_variable(lb=0.0, ub=float(may)) for may in mask] for mask in allowed_singles]
    variables = [pick for each in picks for pick in each]
    # What a choice costs that cannot be taken does not matter; its size would only cost digits.
    costs = [np.where(mask[:, None], each, 0.0) for mask, each in zip(allowed_singles, model.singles, strict=True)]
    for pick in picks:
        # Every vertex takes exactly one choice.
        program.add_linear_constraint(mathopt.fast_sum(pick) == 1.0)
    for (tail, head), table in model.pairs.items():
        allowed = allowed_pairs[tail, head]
        flow = {(int(a), int(b)): program.add_variable(lb=0.0, ub=1.0) for a, b in np.argwhere(allowed)}
        variables += flow.values()
        costs.append(table[allowed])
        # The pair taken agrees with the choice at its tail, and with the choice at its head.
        for a, pick in enumerate(picks[tail]):
            program.add_linear_constraint(mathopt.fast_sum(flow[a, int(b)] for b in np.flatnonzero(allowed[a])) == pick)
        for b, pick in enumerate(picks[head]):
            program.add_linear_constraint(
                mathopt.fast_sum(flow[int(a), b] for a in np.flatnonzero(allowed[:, b])) == pick
            )
    columns = np.concatenate(costs)
    # In units of the target: HiGHS' tolerances are absolute, and single costs may be far above it.
    second = abs(target_s) if 0.0 < abs(target_s) < math.inf else float(np.abs(columns[:, TIME]).max()) or 1.0
    byte = max(float(columns[:, HELD].max()), abs(model.limit_bytes)) or 1.0

    # What is exposed of the background is at least zero, and at least the background that no work covers.
    exposed = program.add_variable(lb=0.0)
    program.add_linear_constraint(_sum(variables, (columns[:, EXPOSED] - columns[:, TIME]) / second) <= exposed)
    # The largest transient is at least the floor, and at least what each vertex's choice needs.
    transient = program.add_variable(lb=floor_bytes / byte)
    for pick, values in zip(picks, model.transient, strict=True):
        if values.max() > floor_bytes:
            program.add_linear_constraint(_sum(pick, values / byte) <= transient)
    # Held bytes and the largest transient fit into the limit together.
    program.add_linear_constraint(_sum(variables, columns[:, HELD] / byte) + transient <= model.limit_bytes / byte)
    held = _sum(variables, columns[:, HELD] / byte)
    for moment, room in enumerate(model.rooms):
        alive = [
            _sum(pick, span.bytes / byte)
            for pick, spans in zip(picks, model.spans, strict=True)
            for span in spans
            if span.first <= moment < span.last
        ]
        # So do held bytes and what is alive at each moment into its room.
        program.add_linear_constraint(held + mathopt.fast_sum(alive) <= float(room) / byte)
    # The step takes the plain time and what is exposed; only steps up to the target matter.
    step = _sum(variables, columns[:, TIME] / second) + exposed
    if math.isfinite(target_s):
        program.add_linear_constraint(step <= target_s / second)
    program.minimize(step)

    result = milp.run(program, gap=_GAP, time_limit_s=max(_LEAST_S, time_limit_s))
    if result is None:
        return Outcome(None, -math.inf)
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Outcome(None, math.inf)
    bound = float(result.termination.objective_bounds.dual_bound) * second
    if not result.has_primal_feasible_solution():
        return Outcome(None, bound)
    values = result.variable_values()
    return Outcome(np.array([int(np.argmax([values[x] for x in pick])) for pick in picks]), bound)


def _within(model: ChoiceModel, target_s: float) -> tuple[list[Mask], dict[tuple[int, int], Mask]]:
    """Choices and pairs that are not forbidden, nor beyond the target with the least of everything else."""
    singles = [single[:, TIME] + single[:, WALL] for single in model.singles]
    pairs = {pair: costs[..., TIME] + costs[..., WALL] for pair, costs in model.pairs.items()}
    slack = target_s - sum(float(times.min()) for times in (*singles, *pairs.values()))
    within = [times - times.min() <= slack for times in singles]
    return within, {pair: np.isfinite(times) & (times - times.min() <= slack) for pair, times in pairs.items()}


def _sum(variables: list[mathopt.Variable], factors: Floats) -> mathopt.LinearSum:
    return mathopt.fast_sum(float(factor) * x for factor, x in zip(factors, variables, strict=True) if factor != 0.0)
