"""Evaluations in several processes find what one finds, whatever becomes of these."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.search import branch_and_bound, candidate_evaluation, process_pool
from planner.search.branch_and_bound import Searched
from planner.search.candidate_evaluation import Evaluated, Evaluator
from planner.search.candidates import Branch
from planner.search.evaluations import Asked, Evaluations
from planner.search.search import begin_search, search
from planner.search.search_context import Progress, SearchContext
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
    monkeypatch.setattr(process_pool, "WORTHWHILE_S", 0.0)
    enter = process_pool.ProcessPool.__enter__

    def entered(self: process_pool.ProcessPool) -> process_pool.ProcessPool:
        enter(self)._starting.join()
        return self

    monkeypatch.setattr(process_pool.ProcessPool, "__enter__", entered)
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


@pytest.mark.parametrize("number", [2, 7])
def test_processes_that_come_amid_a_search_find_what_one_finds(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was begun before stays here."""
    enter, pools = process_pool.ProcessPool.__enter__, list[process_pool.ProcessPool]()
    evaluate, ask = Evaluator.evaluate, process_pool.Process.ask
    here, there = list[Branch](), list[Asked]()

    def entered(self: process_pool.ProcessPool) -> process_pool.ProcessPool:
        pools.append(self)
        return enter(self)

    def evaluated(self: Evaluator, branch: Branch, *asked: Any) -> Evaluated:
        here.append(branch)
        if len(here) == number:
            pools[-1]._starting.cancel()
            pools[-1]._starting.join()
            pools[-1]._start()
        return evaluate(self, branch, *asked)

    def asked(self: process_pool.Process, question: Asked) -> Future[Evaluated | None]:
        there.append(question)
        return ask(self, question)

    known = told(alone())
    monkeypatch.setattr(process_pool, "cores", lambda: 2)
    monkeypatch.setattr(process_pool.ProcessPool, "__enter__", entered)
    monkeypatch.setattr(process_pool.Process, "ask", asked)
    monkeypatch.setattr(Evaluator, "evaluate", evaluated)
    assert told(searched()) == known
    assert len(here) >= number and there


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


def test_pipelines_that_are_packed_together_are_bounded_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first plan on most evaluations are for the proof, of pipelines with the same costs together."""
    evaluate, together = Evaluator.evaluate, list[int]()

    def compared(self: Evaluator, branch: Branch, *asked: Any) -> Evaluated:
        found = evaluate(self, branch, *asked)
        if branch.pipeline is not None and branch.others:
            together.append(len(branch.every))
            for each, at in zip(branch.others, found.branches[-len(branch.others) :], strict=True):
                assert at.pipeline == each.pipeline and at.bound_s >= each.bound_s
                assert at.bound_s == self._bounded_by_packing(each, asked[0]).bound_s
        return found

    monkeypatch.setattr(process_pool, "cores", lambda: 1)
    monkeypatch.setattr(branch_and_bound, "SETTLED", -1)
    monkeypatch.setattr(Evaluator, "evaluate", compared)
    found = searched()
    assert sum(together) >= 6
    assert found.evaluation.time_s == pytest.approx(alone().evaluation.time_s, rel=1e-6)
    assert found.status == alone().status


def test_what_is_over_when_time_is_up_counts(
    processes: list[process_pool.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, answers = process_pool.Process.ask, list[Future[Evaluated | None]]()

    def asked(self: process_pool.Process, question: Asked) -> Future[Evaluated | None]:
        answers.append(ask(self, question))
        return answers[-1]

    def is_late(self: SearchContext) -> bool:
        if len(answers) < 12:
            return False
        wait(answers)
        return True

    def bounds() -> dict[object, float]:
        answers.clear()
        return {row.config: row.bound_s for row in searched().candidates}

    monkeypatch.setattr(process_pool.Process, "ask", asked)
    monkeypatch.setattr(SearchContext, "is_late", is_late)
    found = bounds()
    monkeypatch.setattr(Evaluations, "left", lambda self: self.branches)
    without = bounds()
    assert all(found[config] >= bound_s for config, bound_s in without.items())
    assert any(found[config] > bound_s for config, bound_s in without.items())


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


def test_no_chain_is_cut_twice_for_one_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several solutions of a relaxation may make the same chain."""
    cut, links_of, stage = Evaluator._cut, SearchContext.links, candidate_evaluation.stage
    chains, cuts, skipped = list[object](), list[object](), 0

    def counted(self: Evaluator, *args: Any) -> Branch:
        nonlocal skipped
        chains.clear(), cuts.clear()
        found = cut(self, *args)
        assert all(each not in cuts[:number] for number, each in enumerate(cuts))
        skipped += len({id(each) for each in chains}) > len(cuts)
        return found

    def looked_up(self: SearchContext, *args: Any) -> Any:
        chains.append(links_of(self, *args))
        return chains[-1]

    def staged(links: object, *args: Any) -> Any:
        cuts.append(links)
        return stage(links, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Evaluator, "_cut", counted)
    monkeypatch.setattr(SearchContext, "links", looked_up)
    monkeypatch.setattr(candidate_evaluation, "stage", staged)
    monkeypatch.setattr(process_pool, "cores", lambda: 1)
    searched()
    assert skipped
