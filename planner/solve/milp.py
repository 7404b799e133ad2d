"""Solves a mixed-integer program with HiGHS, on one thread, or its linear relaxation with GLOP."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from datetime import timedelta

from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers.highs_pb2 import HighsOptionsProto
from pybind11_abseil.status import StatusCode, StatusNotOk

LATE_S = 0.5
"""How much later than its time limit HiGHS may end."""
TOLERANCE = 1e-9
"""Of integrality and of rows; absolute, so the numbers of a program should be near one."""


def run(
    program: mathopt.Model, *, gap: float, time_limit_s: float | None = None, node_limit: int | None = None
) -> mathopt.SolveResult | None:
    """Solve a program, or search until a limit; ``None`` where HiGHS breaks off, which says nothing of the program.

    It runs on a thread of its own, so that an interrupt reaches the caller while HiGHS is at work. Where a program is
    large HiGHS heeds its time limit late, by a minute at times: then it is left to itself.

    Args:
        gap: relative, between the solution and the bound at which the search ends.
    """
    tolerances = {"mip_feasibility_tolerance": TOLERANCE, "primal_feasibility_tolerance": TOLERANCE}
    parameters = mathopt.SolveParameters(
        time_limit=None if time_limit_s is None else timedelta(seconds=time_limit_s),
        node_limit=node_limit,
        relative_gap_tolerance=gap,
        absolute_gap_tolerance=0.0,
        random_seed=0,
        highs=HighsOptionsProto(int_options={"threads": 1}, double_options=tolerances),
    )
    outcome: Future[mathopt.SolveResult | None] = Future()

    def work() -> None:
        try:
            outcome.set_result(_solved(program, mathopt.SolverType.HIGHS, parameters))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    wait([outcome], None if time_limit_s is None else time_limit_s + LATE_S)
    return outcome.result() if outcome.done() else None


def relaxation(program: mathopt.Model) -> mathopt.SolveResult | None:
    """Solve a program without integer variables; ``None`` where GLOP breaks off."""
    return _solved(program, mathopt.SolverType.GLOP, mathopt.SolveParameters())


def _solved(
    program: mathopt.Model, solver: mathopt.SolverType, parameters: mathopt.SolveParameters
) -> mathopt.SolveResult | None:
    """What a solver says; ``None`` where it breaks off: torn down halfway, often by its limit, or by its numerics."""
    try:
        return mathopt.solve(program, solver, params=parameters)
    except Exception as error:
        status = error.__context__
        if isinstance(status, StatusNotOk) and status.status.code() != StatusCode.INVALID_ARGUMENT:
            return None
        raise  # of a malformed program
