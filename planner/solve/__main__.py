"""Solve a problem file: ``python -m planner.solve problem.json[.gz] [--time-limit SECONDS]``.

Prints one JSON object: ``assignment`` (a strategy per node), ``cost``, ``bound`` (no assignment costs less),
``status`` and ``seconds``. The status is optimal, if the bound is at most 2e-7 of the cost below it, and so the same
where costs are whole and below 5 million; feasible, if the search ended before that was proven; infeasible, if it is
proven that nothing fits; or unknown, if nothing that fits was found. Then ``assignment`` and ``cost`` are null, and so
is a bound that is not known. Ctrl-C ends it at any time with what was found. So does the time limit, which also counts
reading.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np

from planner.base.errors import AutoparError
from planner.base.stdout import keep_stdout
from planner.solve.choices.front import solve
from planner.solve.choices.read import read_problem
from planner.solve.problem import Answer, Problem

_PRINTING_S = 1.0  # kept back from the time limit, for what follows the search
_PROVED = 2e-7  # relative gap at which an answer counts as optimal: twice what HiGHS may leave
_ERROR = 1e-9  # of a bound, relative: HiGHS's tolerance, and far above what adding up floats loses
_ENDING_S = 0.5  # before the limit, at which a search that is still at work is broken off


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, solve, print; the exit status is 2 for a file that cannot be used."""
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m planner.solve",
        description="Solve a problem file and print one JSON object: assignment, cost, bound, status, seconds.",
        epilog=f"A status of optimal means that the bound is at most {_PROVED:g} of the cost below it. Where all costs "
        "are whole it is rounded up, so that a cost below 5 million is the same as its bound then.",
    )
    parser.add_argument("problem", type=Path, help="problem in the public iopddl format, JSON or gzipped JSON")
    parser.add_argument("--time-limit", type=_seconds, default=60.0, metavar="SECONDS", help="default: 60")
    options = parser.parse_args(arguments)
    # What is known before anything is read.
    problem, answer = Problem((), ()), Answer((), math.inf, -math.inf, "infeasible", 0.0)
    with _one_interrupt() as (after, no_more):
        try:
            after(max(options.time_limit - _ENDING_S, options.time_limit / 2))
            problem = read_problem(options.problem)
            left = options.time_limit - (time.monotonic() - start) - _PRINTING_S
            answer = solve(problem, time_limit_s=max(0.0, left), interruptible=True, least_memory=False)
            no_more()  # what was found is printed, however long that takes
        except AutoparError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            pass  # before the search began
        print(json.dumps(_document(problem, answer, time.monotonic() - start)))
    return 0


@contextmanager
def _one_interrupt() -> Iterator[tuple[Callable[[float], None], Callable[[], None]]]:
    """Raise ``KeyboardInterrupt`` at Ctrl-C or after some seconds, whichever is first, and not again.

    So the time ends what does not look at the clock, like reading, and nothing breaks into what ends it. Given are what
    sets the seconds, and what ends both.
    """

    def after(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))  # 0 would mean never

    def no_more() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def interrupt(number: int, frame: FrameType | None) -> None:
        no_more()
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT)}
    signal.signal(signal.SIGALRM, interrupt)
    if before[signal.SIGINT] != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield after, no_more
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


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
        # So is the least cost: the next whole number is a bound as well, but for the error of the bound itself.
        bound = math.ceil(bound - max(1e-6, _ERROR * abs(bound))) if math.isfinite(bound) else bound
    if found:
        bound = min(bound, answer.objective_s)
        status = "optimal" if answer.objective_s - bound <= _PROVED * answer.objective_s else "feasible"
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
    keep_stdout()
    gc.disable()  # millions of numbers are read that all stay: looking for garbage among them only takes time
    sys.exit(main())
