"""Evaluations in several processes find what one finds, whatever becomes of these."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.search import process_pool
from planner.search.branch_and_bound import Searched
from planner.search.candidate_evaluation import Evaluated, Evaluator
from planner.search.candidates import Branch
from planner.search.evaluations import Asked, Evaluations
from planner.search.search import begin_search, search
from planner.search.search_context import Progress
from tests.planner.plans import cluster, residual_mlp

GRAPH = residual_mlp(layers=6, batch=64)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[process_pool.Process]]:
    """Three processes beside this one, from the first evaluation of each search on; those that were started."""
    started = list[process_pool.Process]()

    class Known(process_pool.Process):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    monkeypatch.setattr(process_pool, "Process", Known)
    monkeypatch.setattr(process_pool, "cores", lambda: 2)
    monkeypatch.setattr(process_pool, "WORTHWHILE_S", -1.0)
    yield started
    assert started
    assert all(each._process.poll() is not None for each in started), "a process outlived the search"


def searched(progress: Progress | None = None) -> Searched:
    return search(GRAPH, cluster(8), Pins(), Training(), progress=progress)


@functools.cache
def alone() -> Searched:
    """What one process finds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_pool, "cores", lambda: 1)
        return searched()


def told(found: Searched) -> object:
    """All that is said of a search but how long it took."""
    return found.best.choices, found.best.staged.cut, found.candidates, found.gap


def test_processes_find_what_one_finds(processes: list[process_pool.Process]) -> None:
    assert told(searched()) == told(alone())


def found_within_less() -> list[object]:
    """What one search after another finds, the second within less memory than the first needs."""
    with begin_search(GRAPH, cluster(8), Pins(), Training()) as begun:
        first = begun.plan(begun.context)
        second = begun.plan(begun.context.within(first.peak_bytes - 1, begun.context.deadline))
        return [told(first), told(second)]


def test_one_search_after_another_has_the_same_processes(processes: list[process_pool.Process]) -> None:
    found = found_within_less()
    assert len(processes) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_pool, "cores", lambda: 1)
        assert found_within_less() == found


def test_where_a_process_ends_the_search_goes_on(
    processes: list[process_pool.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, number = process_pool.Process.ask, [0]

    def ending(self: process_pool.Process, asked: Asked) -> Future[Evaluated | None]:
        number[0] += 1
        if number[0] == 4:
            self._process.kill()
        return ask(self, asked)

    monkeypatch.setattr(process_pool.Process, "ask", ending)
    lines = list[str]()
    found, known = searched(lines.append), alone()
    assert number[0] > 4
    assert len([line for line in lines if "a process that evaluates candidates failed" in line]) == 1
    assert found.evaluation.time_s == pytest.approx(known.evaluation.time_s, rel=1e-9)
    assert found.status == known.status


def test_what_fails_in_a_process_is_tried_here(
    processes: list[process_pool.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, evaluate, tried = process_pool.Process.ask, Evaluator.evaluate, list[Asked]()

    def failing(self: process_pool.Process, asked: Asked) -> Future[Evaluated | None]:
        return ask(self, asked if tried else (asked[0], "no plan", ()))  # type: ignore[arg-type]

    def here(self: Evaluator, *asked: Any) -> Evaluated:
        tried.append(asked)  # type: ignore[arg-type]
        return evaluate(self, *asked)

    monkeypatch.setattr(process_pool.Process, "ask", failing)
    monkeypatch.setattr(Evaluator, "evaluate", here)
    found = searched()
    assert tried
    assert found.evaluation.time_s == pytest.approx(alone().evaluation.time_s, rel=1e-9)


def test_an_interrupt_ends_the_processes(
    processes: list[process_pool.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    following, number = Evaluations.next, [0]

    def interrupted(self: Evaluations) -> tuple[Branch, ...]:
        number[0] += 1
        if number[0] == 5:
            raise KeyboardInterrupt
        return following(self)

    monkeypatch.setattr(Evaluations, "next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        searched()
