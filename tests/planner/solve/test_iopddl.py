"""``python -m planner.solve`` on files in the public format: answers against enumeration, and clear errors."""

import copy
import gzip
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.base.errors import AutoparError
from planner.solve import __main__ as solve_main
from planner.solve.__main__ import main
from planner.solve.choices import front
from planner.solve.choices.best import BestFound
from planner.solve.choices.model import ChoiceModel, build_model
from planner.solve.choices.read import read_problem
from planner.solve.choices.reduce import reduce
from planner.solve.choices.window import search
from planner.solve.problem import Answer, evaluate

ROOT = Path(__file__).resolve().parents[3]
FORBIDDEN = 10**18

SMALL: dict[str, Any] = {
    "problem": {
        "name": "small",
        "nodes": {
            "intervals": [[0, 2], [1, 3], [2, 2]],
            "costs": [[3, 1], [2, 0], [5]],
            "usages": [[1, 6], [1, 5], [100]],
        },
        "edges": {"nodes": [[0, 1], [2, 0]], "costs": [[0, 4, 4, 0], [1, 2]]},
        "usage_limit": 7,
    }
}


def write(folder: Path, document: object) -> Path:
    path = folder / "problem.json"
    path.write_text(json.dumps(document))
    return path


def run(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([str(path), *options]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed.keys() == {"assignment", "cost", "bound", "status", "seconds"}
    return printed


def test_an_example_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both fast choices cost 1 + 0 + 5 + 2 + 0 but use 11 at moment 1; both slow ones cost 3 + 2 + 5 + 1."""
    answer = run(write(tmp_path, SMALL), capsys)
    assert (answer["assignment"], answer["cost"], answer["bound"], answer["status"]) == ([0, 0, 0], 11, 11, "optimal")
    roomy = copy.deepcopy(SMALL)
    roomy["problem"]["usage_limit"] = 11
    assert run(write(tmp_path, roomy), capsys)["assignment"] == [1, 1, 0]


@pytest.mark.parametrize("cost, gap", [(5 * 10**6 - 10, 0), (2**50, 2**50 * 2e-7)])
def test_optimal_is_proven_to_the_tolerance_and_for_small_whole_costs_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cost: int, gap: float
) -> None:
    answer = run(write(tmp_path, broken(*NODES, "costs", 0, value=[cost, cost - 2])), capsys)
    assert (answer["cost"], answer["status"]) == (min(cost + 2 + 5 + 1, cost - 2 + 2 + 4 + 5 + 2), "optimal")
    assert 0 <= answer["cost"] - answer["bound"] <= gap


@pytest.mark.parametrize(
    "costs, bound, printed, status",
    [
        ([3, 1], 2.99999, 3, "optimal"),
        ([4_999_999, 1], 4_999_997.9999999, 4_999_998, "feasible"),
        ([2.5, 1], 2.4999999, 2.4999999, "optimal"),
        ([2.5, 1], 2.499999, 2.499999, "feasible"),
        ([3, 1], 3.5, 3, "optimal"),
    ],
)
def test_bounds_of_whole_costs_are_rounded_up_and_decide_the_status(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    costs: list[float],
    bound: float,
    printed: float,
    status: str,
) -> None:
    """Whatever the solver calls it."""
    answer = Answer((0, 0, 0), float(costs[0]), bound, "optimal", 0.0)
    monkeypatch.setattr("planner.solve.__main__.solve", lambda problem, **_: answer)
    shown = run(write(tmp_path, broken(*NODES, "costs", 0, value=costs)), capsys)
    assert (shown["cost"], shown["bound"], shown["status"]) == (costs[0], printed, status)


def test_gzipped_files_are_read_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "problem.json.gz"
    path.write_bytes(gzip.compress(json.dumps(SMALL).encode()))
    assert run(path, capsys)["cost"] == 11


def random_document(seed: int, nodes: int, moments: int) -> dict[str, Any]:
    """Whole costs, forbidden pairs, loops and parallel edges, and a limit from hopeless to slack."""
    random = np.random.default_rng(seed)
    sizes = [int(size) for size in random.integers(1, 5, nodes)]
    spans = np.sort(random.integers(0, moments + 1, (nodes, 2)), axis=1)
    ends = random.integers(0, nodes, (int(random.integers(0, 2 * nodes)), 2))

    def table(entries: int) -> list[int]:
        costs = random.integers(0, 9, entries)
        kind = random.integers(0, 3)
        if kind == 0:
            return [int(cost) for cost in costs]
        return [FORBIDDEN if random.random() < kind * 0.2 else int(cost) for cost in costs]

    return {
        "problem": {
            "nodes": {
                "intervals": spans.tolist(),
                "costs": [random.integers(0, 20, size).tolist() for size in sizes],
                "usages": [random.integers(0, 10, size).tolist() for size in sizes],
            },
            "edges": {"nodes": ends.tolist(), "costs": [table(sizes[a] * sizes[b]) for a, b in ends]},
            "usage_limit": int(random.integers(0, 6 * nodes)),
        }
    }


def cost_and_usage(document: dict[str, Any], choices: tuple[int, ...]) -> tuple[int, int]:
    """From the description of the format alone."""
    nodes, edges = document["problem"]["nodes"], document["problem"]["edges"]
    cost = sum(costs[c] for costs, c in zip(nodes["costs"], choices, strict=True))
    for (tail, head), costs in zip(edges["nodes"], edges["costs"], strict=True):
        cost += costs[choices[tail] * len(nodes["costs"][head]) + choices[head]]
    last = max((last for _, last in nodes["intervals"]), default=0)
    usage = [
        sum(u[c] for (lo, hi), u, c in zip(nodes["intervals"], nodes["usages"], choices, strict=True) if lo <= t < hi)
        for t in range(last)
    ]
    return cost, max(usage, default=0)


def least_cost(document: dict[str, Any]) -> float:
    limit = document["problem"]["usage_limit"]
    every = itertools.product(*(range(len(costs)) for costs in document["problem"]["nodes"]["costs"]))
    found = [cost_and_usage(document, choices) for choices in every]
    return min((cost for cost, usage in found if cost < FORBIDDEN and usage <= limit), default=math.inf)


documents = st.builds(random_document, seed=st.integers(0, 2**32), nodes=st.integers(1, 7), moments=st.integers(1, 8))


@pytest.mark.parametrize("large", [pytest.param(False, id="as it is"), pytest.param(True, id="as if it were large")])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=documents)
def test_answers_are_those_of_enumeration(tmp_path: Path, document: dict[str, Any], large: bool) -> None:
    least = least_cost(document)
    problem = read_problem(write(tmp_path, document))
    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr(front, "_MANY", -1)
        answer = front.solve(problem)
    if least == math.inf:
        assert answer.status == "infeasible"
        return
    cost, usage = cost_and_usage(document, answer.choices)
    assert answer.status == "optimal" and usage <= document["problem"]["usage_limit"]
    assert answer.objective_s == cost == least >= answer.bound_s * (1 - 1e-9)
    assert evaluate(problem, answer.choices).peak_bytes == usage


def grid(side: int, choices: int, seed: int) -> dict[str, Any]:
    """A grid, whose elimination would be too large, with all nodes of a row alive together."""
    random = np.random.default_rng(seed)
    at = {(row, column): row * side + column for row in range(side) for column in range(side)}
    ends = [[at[r, c], at[r + 1, c]] for r, c in at if r + 1 < side] + [
        [at[r, c], at[r, c + 1]] for r, c in at if c + 1 < side
    ]
    speed = random.integers(1, 1000, (len(at), choices))
    return {
        "problem": {
            "nodes": {
                "intervals": [[row, row + 2] for row, _ in at],
                "costs": speed.tolist(),
                "usages": (1001 - speed).tolist(),
            },
            "edges": {"nodes": ends, "costs": random.integers(0, 300, (len(ends), choices**2)).tolist()},
            "usage_limit": 500 * side,
        }
    }


def test_the_time_limit_does_not_break_into_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that ended just before it, of a problem so large that what is printed takes a while."""
    document = solve_main._document

    def slowly(*given: Any) -> dict[str, object]:
        time.sleep(0.6)
        return document(*given)

    monkeypatch.setattr(solve_main, "_document", slowly)
    assert main([str(write(tmp_path, SMALL)), "--time-limit", "0.8"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"] == 11


def test_what_native_code_prints_is_not_among_the_answer(tmp_path: Path) -> None:
    """HiGHS says a line now and then that no option of it stops."""
    code = (
        "import ctypes, runpy, sys\n"
        "from planner.solve.choices import front\n"
        "solve = front.solve\n"
        "def loud(*given, **named):\n"
        "    ctypes.CDLL(None).puts(b'tmpSolver.run();')\n"
        "    return solve(*given, **named)\n"
        "front.solve = loud\n"
        "runpy.run_module('planner.solve', run_name='__main__')\n"
    )
    path = write(tmp_path, SMALL)
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["cost"] == 11
    assert "tmpSolver.run();" in done.stderr


def test_the_same_answer_in_every_process(tmp_path: Path) -> None:
    path = write(tmp_path, grid(5, 4, seed=1))

    def answer(hash_seed: str) -> tuple[object, ...]:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", "planner.solve", str(path), "--time-limit", "100"]
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        printed = json.loads(result.stdout)
        return printed["assignment"], printed["cost"], printed["bound"], printed["status"]

    assert answer("1") == answer("2")


def test_no_time_at_all_answers_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for limit in ("0", "1e-7"):
        answer = run(write(tmp_path, SMALL), capsys, "--time-limit", limit)
        assert answer["status"] in ("unknown", "feasible", "optimal")


def test_a_time_limit_ends_with_what_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = grid(12, 8, seed=2)
    hurried = run(write(tmp_path, document), capsys, "--time-limit", "8")
    assert hurried["status"] == "feasible" and hurried["bound"] < hurried["cost"]
    cost, usage = cost_and_usage(document, tuple(hurried["assignment"]))
    assert cost == hurried["cost"] and usage <= document["problem"]["usage_limit"]


def test_an_interrupt_ends_with_what_is_known(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "planner.solve",
        str(write(tmp_path, grid(25, 9, seed=3))),
        "--time-limit",
        "200",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    answer = json.loads(out)
    assert process.returncode == 0 and not err
    assert answer["status"] in ("feasible", "unknown") and answer["bound"] is not None


@pytest.mark.parametrize("by_clock", [pytest.param(True, id="the limit"), pytest.param(False, id="Ctrl-C")])
def test_stopped_before_any_assignment_nothing_more_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, by_clock: bool
) -> None:
    def search_forever(model: ChoiceModel, best: BestFound, deadline: float) -> float:
        best.prove(7.0)
        while True:
            if not by_clock:
                signal.raise_signal(signal.SIGINT)
            time.sleep(0.01)

    def find_nothing(*_: object) -> None:
        pytest.fail("the time is up")

    monkeypatch.setattr(front, "_easy", lambda model: False)
    monkeypatch.setattr(front, "_exact", lambda model: False)
    monkeypatch.setattr(front, "search_large", search_forever)
    monkeypatch.setattr(front, "least_peak", find_nothing)
    handlers = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)
    answer = run(write(tmp_path, SMALL), capsys, "--time-limit", "0.4" if by_clock else "100")
    assert (answer["assignment"], answer["cost"], answer["bound"], answer["status"]) == (None, None, 7, "unknown")
    assert answer["seconds"] < 3
    assert handlers == (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT))
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_reading_counts_towards_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.solve.__main__.read_problem", lambda path: time.sleep(60))
    answer = run(write(tmp_path, SMALL), capsys, "--time-limit", "0.4")
    assert (answer["assignment"], answer["bound"], answer["status"]) == (None, None, "unknown")
    assert answer["seconds"] < 3


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=documents)
def test_a_reduction_cut_short_leaves_the_same_problem(tmp_path: Path, document: dict[str, Any]) -> None:
    problem = read_problem(write(tmp_path, document))
    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: math.inf if next(ticks) > 5 else 0.0)
        patch.setattr("planner.solve.choices.reduce.time", clock)
        smaller = reduce(build_model(problem), 1.0)
    least = least_cost(document)
    assert (smaller is not None) or math.isinf(least)
    if smaller is not None:
        best = BestFound(problem, math.inf)
        assert search(smaller, best, math.inf) >= least * (1 - 1e-9) - 1e-9
        assert best.objective_s == least


def test_starting_up_loads_no_torch() -> None:
    code = "import sys, planner.solve.__main__; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def broken(*path: object, value: object = None, drop: bool = False) -> dict[str, Any]:
    """The small document with one value changed, or dropped."""
    document = copy.deepcopy(SMALL)
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    if drop:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


NODES, EDGES = ("problem", "nodes"), ("problem", "edges")


@pytest.mark.parametrize(
    "document, message",
    [
        ([], "the document: must be an object, is a list"),
        ({}, "problem: missing"),
        (broken("problem", value=3), "problem: must be an object, is a number"),
        (broken(*NODES, drop=True), "problem.nodes: missing"),
        (broken(*NODES, "usages", drop=True), "problem.nodes.usages: missing"),
        (broken(*NODES, "usages", value=[[1, 2]]), "problem.nodes.usages: must have 3 entries, has 1"),
        (broken(*NODES, "usages", 1, value=[1]), "problem.nodes.usages[1]: must have 2 entries, has 1"),
        (broken(*NODES, "usages", 1, value=[1, 0.5]), "problem.nodes.usages[1][1]: must be whole, 2^53 at most, is 0"),
        (broken(*NODES, "usages", 1, value=[1, -5]), "problem.nodes.usages[1][1]: must be 0 or more, is -5"),
        (broken(*NODES, "usages", 1, value=[2**53 + 2, 1]), "nodes.usages[1][0]: must be whole, 2^53 at most, is 9"),
        (broken(*NODES, "costs", 0, value=[1, 10**400]), "costs[0][1]: must be 1.8e+308 at most, is a number of 401"),
        (broken(*NODES, "usages", 0, value=[10**400, 1]), "usages[0][0]: must be 1.8e+308 at most, is a"),
        (broken(*NODES, "costs", 0, value=[]), "problem.nodes.costs[0]: must have at least one entry"),
        (broken(*NODES, "costs", 0, value="x"), "problem.nodes.costs[0]: must be a list, is a string"),
        (broken(*NODES, "costs", 0, value=[1, None]), "problem.nodes.costs[0][1]: must be a number, is null"),
        (broken(*NODES, "costs", 0, value=[1, True]), "problem.nodes.costs[0][1]: must be a number, is a boolean"),
        (broken(*NODES, "costs", 0, value=[1, math.nan]), "problem.nodes.costs[0][1]: must be 0 or more, is nan"),
        (broken(*NODES, "intervals", 0, value=[2, 1]), "problem.nodes.intervals[0]: must not end before it starts"),
        (broken(*NODES, "intervals", 0, value=[0]), "problem.nodes.intervals[0]: must have 2 entries, has 1"),
        (broken(*NODES, "intervals", 0, 0, value=-1), "problem.nodes.intervals[0][0]: must be a whole number, 0 or"),
        (broken(*NODES, "intervals", 0, 1, value=2**70), "problem.nodes.intervals[0][1]: must be a whole number, 0 or"),
        (broken(*NODES, "intervals", 0, 1, value=2**53 + 1), "2^53 at most, is 9007199254740993"),
        (broken(*NODES, "intervals", 0, 1, value=True), "must be a whole number, 0 or more and 2^53 at most, is a bo"),
        (broken(*EDGES, "costs", 1, 0, value=10**400), "problem.edges.costs[1][0]: must be 1.8e+308 at most, is"),
        (broken(*EDGES, "nodes", 1, value=[2, 2**70]), "problem.edges.nodes[1][1]: must be a whole number, 0 or"),
        (broken(*EDGES, "costs", 1, value=[1]), "problem.edges.costs[1]: must have 2 entries, has 1"),
        (broken(*EDGES, "costs", 1, 1, value=-2), "problem.edges.costs[1][1]: must be 0 or more, is -2"),
        (broken(*EDGES, "costs", 1, 1, value=[2]), "problem.edges.costs[1][1]: must be a number, is a list"),
        (broken(*EDGES, "nodes", 1, value=[2, 3]), "problem.edges.nodes[1]: there is no node 3, only 3 nodes"),
        (broken("problem", "usage_limit", value=-1), "problem.usage_limit: must be a whole number, 0 or more"),
        (broken("problem", "usage_limit", value=2**53 + 1), "2^53 at most, is 9007199254740993"),
        (broken("problem", "usage_limit", value="7"), "2^53 at most, is a string"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], document: object, message: str
) -> None:
    assert main([str(write(tmp_path, document))]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err and "Traceback" not in printed.err


@pytest.mark.parametrize("content", [b"{", b"", b"\x1f\x8b broken", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "problem.json"
    path.write_bytes(content)
    with pytest.raises(AutoparError, match=r"problem\.json: cannot be read as JSON"):
        read_problem(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing.json")]) == 2
    assert "nothing.json: cannot be read" in capsys.readouterr().err


def test_an_impossible_limit_is_infeasible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run(write(tmp_path, broken("problem", "usage_limit", value=1)), capsys)
    assert (answer["status"], answer["assignment"], answer["cost"], answer["bound"]) == ("infeasible", None, None, None)
