"""The solver against exhaustive enumeration, and what it promises about limits, cutoffs and damaged problems."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp
from pybind11_abseil.status import BuildStatusNotOk, StatusCode, StatusNotOk

from planner.base.errors import AutoparError
from planner.solve.choices import lower_bounds, solve, window
from planner.solve.choices.model import build_model, drop_moments
from planner.solve.problem import Answer, Edge, Floats, Problem, Span, Vertex, evaluate


def random_problem(seed: int, vertices: int, choices: int, density: float, spans: bool) -> Problem:
    """Costs of one magnitude, a few forbidden pairs, and a limit that is anything from hopeless to slack."""
    random = np.random.default_rng(seed)

    def sparse(values: Floats, share: float) -> Floats:
        return values * (random.random(values.shape) < share)

    def vertex(number: int) -> Vertex:
        size = int(random.integers(1, choices + 1))
        return Vertex(
            name=f"v{number}",
            time_s=random.uniform(0, 1, size),
            background_s=sparse(random.uniform(0, 0.5, size), 0.5),
            cover_s=sparse(random.uniform(0, 0.4, size), 0.5),
            held_bytes=random.integers(0, 50, size),
            transient_bytes=random.integers(0, 30, size) * (random.random(size) < 0.7),
        )

    def span(size: int) -> Span:
        first = int(random.integers(0, 5))
        return Span(first, first + int(random.integers(0, 4)), random.integers(0, 60, size))

    def with_spans(vertex: Vertex) -> Vertex:
        return replace(vertex, spans=tuple(span(vertex.choices) for _ in range(int(random.integers(0, 3)))))

    def edge(tail: int, head: int) -> Edge:
        shape = nodes[tail].choices, nodes[head].choices
        time_s = random.uniform(0, 1, shape)
        time_s[random.random(shape) < 0.15] = math.inf
        return Edge(tail, head, time_s, sparse(random.uniform(0, 0.3, shape), 0.3), random.integers(0, 20, shape))

    nodes = tuple(vertex(number) for number in range(vertices))
    if spans:
        nodes = tuple(with_spans(node) for node in nodes)
    pairs = [pair for pair in itertools.product(range(vertices), repeat=2) if random.random() < density / 2]
    limit = int(random.integers(20, 200)) if random.random() < 0.8 else None
    return Problem(nodes, tuple(edge(*pair) for pair in pairs), limit)


def enumerate_all(problem: Problem) -> tuple[float, float]:
    """The least step time among assignments that fit, and the least peak among those that nothing forbids."""
    every = [evaluate(problem, c) for c in itertools.product(*(range(v.choices) for v in problem.vertices))]
    allowed = [found for found in every if math.isfinite(found.time_s)]
    best = min((found.time_s for found in allowed if found.feasible), default=math.inf)
    return best, min((found.peak_bytes for found in allowed), default=math.inf)


def check_optimal(problem: Problem, answer: Answer) -> None:
    """The answer is what enumeration finds, and every number in it is consistent with ``evaluate``."""
    best, least_peak = enumerate_all(problem)
    found = evaluate(problem, answer.choices)
    assert answer.objective_s == found.time_s
    if math.isfinite(best):
        assert answer.status == "optimal" and found.feasible
        assert answer.objective_s == pytest.approx(best, rel=1e-6)
        assert answer.bound_s <= best * (1 + 1e-9)
    else:
        assert answer.status == "infeasible" and answer.bound_s == math.inf
        assert found.peak_bytes == least_peak or math.isinf(least_peak)


problems = st.builds(
    random_problem,
    seed=st.integers(0, 2**32),
    vertices=st.integers(0, 6),
    choices=st.integers(1, 4),
    density=st.sampled_from([0.3, 0.6, 1.0]),
    spans=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(problems)
def test_finds_what_enumeration_finds(problem: Problem) -> None:
    check_optimal(problem, solve(problem))


@pytest.mark.parametrize(
    "max_entries, narrow, wider",
    [
        pytest.param(20, 300, window._WIDER, id="split buckets"),
        pytest.param(20, 2, ((4, 0.0), (16, 0.0)), id="overflowing beams"),
        pytest.param(5_000_000, 1, (), id="mixed-integer program"),
    ],
)
@settings(max_examples=40, deadline=None)
@given(problem=problems)
def test_every_way_through_is_exact(problem: Problem, max_entries: int, narrow: int, wider: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.solve.choices.window.MAX_ENTRIES", max_entries)
        patch.setattr("planner.solve.choices.peak.MAX_ENTRIES", max_entries)
        patch.setattr("planner.solve.choices.window._NARROW", narrow)
        patch.setattr("planner.solve.choices.window._WIDER", wider)
        check_optimal(problem, solve(problem))


def test_time_or_exposed_background_whichever_dominates() -> None:
    """By hand: (1 + max(0, 3 - 1), 2 + max(0, 1 - 1), 2.5 + 0) = (3, 2, 2.5) seconds."""
    zero = np.zeros(3, dtype=np.int64)
    vertex = Vertex("v", np.array([1.0, 2.0, 2.5]), np.array([3.0, 1.0, 0.0]), np.array([1.0, 1.0, 0.0]), zero, zero)
    answer = solve(Problem((vertex,), ()))
    assert (answer.choices, answer.objective_s, answer.status) == ((1,), 2.0, "optimal")


def test_only_the_largest_transient_counts() -> None:
    """By hand: two fast choices need 10 bytes each at different moments, so 10 suffice for both."""
    vertex = Vertex("v", np.array([1.0, 5.0]), np.zeros(2), np.zeros(2), np.array([0, 0]), np.array([10, 1]))
    problem = Problem((vertex, vertex), (), 10)
    assert solve(problem).choices == (0, 0)
    assert solve(replace(problem, limit_bytes=9)).choices == (1, 1)


def test_what_is_held_takes_of_the_room_of_spans() -> None:
    """By hand: 5 bytes held beside a span of 6 are more than 10; slow costs 2 more for one vertex, 3 for the other."""
    none, no_bytes = np.zeros(2), np.zeros(2, dtype=np.int64)
    holds = Vertex("holds", np.array([1.0, 3.0]), none, none, np.array([5, 0]), no_bytes)
    spans = Vertex("spans", np.array([1.0, 4.0]), none, none, no_bytes, no_bytes, (Span(0, 1, np.array([6, 0])),))
    problem = Problem((holds, spans), (), 10)
    roomy = replace(problem, limit_bytes=11)
    assert (solve(problem).choices, solve(roomy).choices) == ((1, 0), (0, 0))
    assert [len(drop_moments(build_model(each)).rooms) for each in (problem, roomy)] == [1, 0]
    for seed, vertices, density in ((8, 5, 1.0), (37, 6, 0.6)):
        both = random_problem(seed, vertices, 4, density, spans=True)
        check_optimal(both, solve(both))


def test_infeasible_answers_with_the_least_peak() -> None:
    vertex = Vertex("v", np.array([1.0, 5.0]), np.zeros(2), np.zeros(2), np.array([7, 3]), np.array([1, 4]))
    answer = solve(Problem((vertex, vertex), (), 5))
    assert (answer.status, answer.choices, answer.bound_s) == ("infeasible", (1, 1), math.inf)


def test_all_forbidden_is_infeasible() -> None:
    vertex = Vertex("v", np.full(2, math.inf), np.zeros(2), np.zeros(2), np.array([7, 3]), np.array([0, 0]))
    answer = solve(Problem((vertex,), (), 100))
    assert (answer.status, answer.choices, answer.objective_s) == ("infeasible", (1,), math.inf)


@settings(max_examples=40, deadline=None)
@given(problems)
def test_cutoff_stops_with_a_bound_above_it(problem: Problem) -> None:
    best, _ = enumerate_all(problem)
    if not 0 < best < math.inf:
        return
    missed, met = solve(problem, cutoff_s=0.9 * best), solve(problem, cutoff_s=1.1 * best)
    assert evaluate(problem, missed.choices).feasible
    assert 0.9 * best * (1 - 1e-8) <= missed.bound_s <= best * (1 + 1e-9)
    assert met.status == "optimal" and met.objective_s == pytest.approx(best, rel=1e-6)


def test_incumbent_is_kept_when_nothing_is_better() -> None:
    vertex = Vertex("v", np.array([2.0, 1.0, 1.0]), np.zeros(3), np.zeros(3), *np.zeros((2, 3), np.int64))
    assert solve(Problem((vertex,), ()), incumbent=(2,)).choices == (2,)
    assert solve(Problem((vertex,), ()), incumbent=(0,)).choices == (1,)


@pytest.mark.parametrize(
    "broken, message",
    [
        ({"time_s": np.array([math.nan, 1.0])}, "vertex v: a cost is NaN"),
        ({"time_s": np.array([1.0])}, "vertex v: every array needs one entry per choice"),
        ({"cover_s": np.array([math.inf, 0.0])}, "vertex v: cover_s must be finite"),
    ],
)
def test_damaged_problems_raise(broken: dict[str, Floats], message: str) -> None:
    vertex = Vertex("v", np.ones(2), np.zeros(2), np.zeros(2), *np.zeros((2, 2), np.int64))
    with pytest.raises(AutoparError, match=message):
        solve(Problem((replace(vertex, **broken),), ()))


def test_one_choice_of_many_neighbours_is_no_axis_too_many() -> None:
    """A hub of two choices, and 80 vertices of one choice that all touch one another: more than an array has axes."""

    def vertex(name: str, size: int) -> Vertex:
        none, no_bytes = np.zeros(size), np.zeros(size, np.int64)
        return Vertex(name, np.arange(1.0, size + 1), none, none, no_bytes, no_bytes)

    def edge(tail: int, head: int, rows: int) -> Edge:
        none = np.zeros((rows, 1))
        return Edge(tail, head, np.arange(float(rows))[:, None], none, none.astype(np.int64))

    vertices = (vertex("hub", 2), *(vertex(str(n), 1) for n in range(80)))
    pairs = itertools.combinations(range(len(vertices)), 2)
    problem = Problem(vertices, tuple(edge(tail, head, 1 if tail else 2) for tail, head in pairs), None)
    answer = solve(problem)
    assert (answer.status, answer.objective_s, answer.choices) == ("optimal", 81.0, (0,) * 81)
    assert lower_bounds(problem).time_s == pytest.approx(81.0)


def test_a_solver_that_breaks_off_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """OR-Tools raises then, by a fault of its own an AttributeError; what is known without it is the answer."""
    broken = []

    def break_off(*_: object, **__: object) -> None:
        broken.append(1)
        try:
            raise BuildStatusNotOk(StatusCode.INTERNAL, "torn down")
        except StatusNotOk as error:
            raise AttributeError("canonical_code") from error

    rng = np.random.default_rng(0)
    vertices = tuple(
        Vertex(f"v{n}", rng.random(4), np.zeros(4), np.zeros(4), rng.integers(1, 9, 4), np.zeros(4, np.int64))
        for n in range(6)
    )
    problem = Problem(vertices, (), 18)
    monkeypatch.setattr("planner.solve.choices.window._NARROW", 1)
    monkeypatch.setattr("planner.solve.choices.window._WIDER", ())
    whole = solve(problem)
    monkeypatch.setattr("ortools.math_opt.python.mathopt.solve", break_off)
    answer = solve(problem)
    assert broken, "elimination was enough"
    assert answer.bound_s <= whole.objective_s <= answer.objective_s
    assert (answer.status == "optimal") == (answer.bound_s >= answer.objective_s * (1 - 1e-6))


def test_prices_that_a_linear_program_does_not_find_are_those_of_before(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """GLOP gives up on planes that hardly differ: what it left has no values, and asking for them is an error."""
    failed = []

    def fail(program: pywraplp.Solver) -> int:
        failed.append(program)
        return int(pywraplp.Solver.ABNORMAL)

    monkeypatch.setattr(pywraplp.Solver, "Solve", fail)
    for seed in range(8):
        problem = random_problem(seed, 5, 4, 0.6, spans=True)
        check_optimal(problem, solve(problem))
    assert failed, "nothing was priced"
    assert capfd.readouterr().err == ""


def test_spans_of_a_vertex_that_differ_by_moments_that_do_not_count_add_up() -> None:
    def vertex(name: str, time_s: list[float], held_bytes: list[int], *spans: Span) -> Vertex:
        nothing = np.zeros(2)
        return Vertex(name, np.array(time_s), nothing, nothing, np.array(held_bytes), np.zeros(2, np.int64), spans)

    first = vertex("a", [0.426, 0.235], [22, 36], Span(0, 2, np.array([46, 38])))
    twice = [Span(0, 2, np.array([3, 36])), Span(1, 2, np.array([41, 19]))]
    problem = Problem((first, vertex("b", [0.706, 0.586], [3, 31], *twice)), (), 155)
    answer = solve(problem)
    assert answer.status == "optimal" and answer.choices == (1, 0)
    assert answer.objective_s == pytest.approx(enumerate_all(problem)[0])


@given(st.integers(0, 10**6))
def test_two_spans_of_every_vertex_are_solved_as_enumerated(seed: int) -> None:
    random = np.random.default_rng(seed)
    plain = random_problem(seed, vertices=4, choices=4, density=0.0, spans=False)

    def spans(size: int) -> tuple[Span, ...]:
        return tuple(Span(first, 3, random.integers(0, 60, size)) for first in random.permutation(3)[:2].tolist())

    free = Problem(tuple(replace(v, spans=spans(v.choices)) for v in plain.vertices), (), 0)
    problem = replace(free, limit_bytes=int(1.1 * enumerate_all(free)[1]))
    assert solve(problem).objective_s == pytest.approx(enumerate_all(problem)[0])
