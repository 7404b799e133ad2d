"""Solve a problem file: ``python -m planner.solve problem.json[.gz] [--time-limit SECONDS]``.

Prints one JSON object: ``assignment`` (a strategy per node), ``cost``, ``bound`` (no assignment costs less),
``status`` and ``seconds``. The status is optimal; feasible, if the search ended before that was proven; infeasible, if
it is proven that nothing fits; or unknown, if nothing that fits was found. Then ``assignment`` and ``cost`` are null,
and so is a bound that is not known. Ctrl-C ends the search with what was found.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner.errors import AutoparError
from planner.problem import Answer, Problem
from planner.solve.front import solve
from planner.solve.read import read_problem

_PRINTING_S = 1.0  # kept back from the time limit, for what follows the search


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, solve, print; the exit status is 2 for a file that cannot be used."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m planner.solve", description="Solve a problem file.")
    parser.add_argument("problem", type=Path, help="problem in the public iopddl format, JSON or gzipped JSON")
    parser.add_argument("--time-limit", type=_seconds, default=60.0, metavar="SECONDS", help="default: 60")
    options = parser.parse_args(arguments)
    try:
        problem = read_problem(options.problem)
        left = options.time_limit - (time.monotonic() - start) - _PRINTING_S
        answer = solve(problem, time_limit_s=max(0.0, left), interruptible=True)
    except AutoparError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before the problem was read", file=sys.stderr)
        return 130
    print(json.dumps(_document(problem, answer, time.monotonic() - start)))
    return 0


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more seconds, is {text}")
    return seconds


def _document(problem: Problem, answer: Answer, seconds: float) -> dict[str, object]:
    found = answer.status != "infeasible"
    bound = answer.bound_s
    status = "unknown" if not found and bound < math.inf else answer.status
    if _whole(problem):
        # So is the least cost: the next whole number is a bound as well.
        bound = math.ceil(bound - 1e-6 * max(1.0, abs(bound) * 1e-3)) if math.isfinite(bound) else bound
    if found and bound >= answer.objective_s:
        status, bound = "optimal", answer.objective_s
    return {
        "assignment": list(answer.choices) if found else None,
        "cost": _number(answer.objective_s) if found else None,
        "bound": _number(bound) if math.isfinite(bound) else None,
        "status": status,
        "seconds": round(seconds, 3),
    }


def _whole(problem: Problem) -> bool:
    """Whether all costs are whole numbers."""
    arrays = [vertex.time_s for vertex in problem.vertices] + [edge.time_s for edge in problem.edges]
    distinct = {id(array): array for array in arrays}.values()
    return all(bool((array == np.floor(array)).all()) for array in distinct)


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


if __name__ == "__main__":
    gc.disable()  # millions of numbers are read that all stay: looking for garbage among them only takes time
    sys.exit(main())
