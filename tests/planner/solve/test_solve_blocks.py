"""Chains of transformer-like blocks: solved to the end, within time limits, and alike in every process."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.solve.choices import solve
from planner.solve.problem import Edge, Ints, Problem, Vertex, evaluate

ROOT = Path(__file__).resolve().parents[3]
LAYOUTS = 9

# Within a block: what each operator reads. "x" is the block's input, its last operator the next block's.
BLOCK = {
    "norm": ["x"],
    "q": ["norm"],
    "k": ["norm"],
    "v": ["norm"],
    "attention": ["q", "k", "v"],
    "residual": ["x", "attention"],
    "mlp": ["residual"],
    "out": ["residual", "mlp"],
}


def chain(blocks: int, choices: int, seed: int = 0) -> Problem:
    """Equal blocks; a choice is fast or frugal and has a layout, an edge costs what changing the layout costs."""
    random = np.random.default_rng(seed)
    change_s = random.uniform(0, 1e-3, (LAYOUTS, LAYOUTS))
    change_s[random.random((LAYOUTS, LAYOUTS)) < 0.3] = math.inf
    change_s[0], change_s[:, 0] = 1e-3, 1e-3
    np.fill_diagonal(change_s, 0.0)
    kinds = {name: operator(random, name, choices) for name in ["x", *BLOCK]}
    vertices, layouts, edges = [kinds["x"][0]], [kinds["x"][1]], []
    at = {"x": 0}
    for _ in range(blocks):
        for name, reads in BLOCK.items():
            vertex, layout = kinds[name]
            for read in reads:
                time_s = change_s[np.ix_(layouts[at[read]], layout)]
                moved = np.where(np.isfinite(time_s) & (time_s > 0), 1_000_000, 0)
                edges.append(Edge(at[read], len(vertices), time_s, np.zeros(time_s.shape), moved))
            at[name] = len(vertices)
            vertices.append(vertex)
            layouts.append(layout)
        at["x"] = at["out"]
    return Problem(tuple(vertices), tuple(edges))


def operator(random: np.random.Generator, name: str, choices: int) -> tuple[Vertex, Ints]:
    speed = random.uniform(0.2, 1.0, choices)
    vertex = Vertex(
        name=name,
        time_s=speed * 1e-3,
        background_s=random.uniform(0, 4e-4, choices),
        cover_s=random.uniform(0, 4e-4, choices),
        held_bytes=(random.uniform(1e7, 1e8, choices) / speed).astype(np.int64),
        transient_bytes=random.integers(0, 20_000_000, choices),
    )
    layout = random.integers(0, LAYOUTS, choices)
    layout[0] = 0
    return vertex, layout


def with_limit(problem: Problem, tightness: float) -> Problem:
    """A limit between the peak of the fastest assignment (0) and the least peak of all (1)."""
    most = evaluate(problem, solve(problem).choices).peak_bytes
    least = evaluate(problem, solve(replace(problem, limit_bytes=0)).choices).peak_bytes
    return replace(problem, limit_bytes=round(most + tightness * (least - most)))


def test_forty_blocks_of_forty_choices_without_a_limit() -> None:
    answer = solve(chain(40, 40))
    assert answer.status == "optimal" and answer.gap < 1e-6


@pytest.mark.parametrize("tightness", [0.1, 0.5, 0.9, 1.0])
def test_eight_blocks_under_a_limit_are_solved_to_the_end(tightness: float) -> None:
    problem = with_limit(chain(8, 40), tightness)
    answer = solve(problem)
    assert answer.status == "optimal" and answer.gap < 1e-6
    assert evaluate(problem, answer.choices).feasible


def test_time_limit_answers_with_an_honest_gap() -> None:
    problem = with_limit(chain(8, 40), 0.7)
    hurried, thorough = solve(problem, time_limit_s=0.0), solve(problem)
    assert hurried.status == "feasible" and hurried.gap > 0
    assert evaluate(problem, hurried.choices).feasible
    assert hurried.bound_s <= thorough.objective_s <= hurried.objective_s


def test_an_incumbent_does_not_change_the_optimum() -> None:
    problem = with_limit(chain(4, 20), 0.5)
    cold = solve(problem)
    warm = solve(problem, incumbent=solve(problem, time_limit_s=0.0).choices)
    assert warm.status == "optimal" and warm.objective_s == pytest.approx(cold.objective_s, rel=1e-6)


def test_every_process_answers_alike() -> None:
    code = (
        "from tests.planner.solve.test_solve_blocks import chain, with_limit, solve;"
        "a = solve(with_limit(chain(4, 20), 0.6)); print(a.choices, a.objective_s.hex(), a.bound_s.hex())"
    )

    def answer(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        arguments = [sys.executable, "-c", code]
        return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    assert answer("1") == answer("2") != ""
