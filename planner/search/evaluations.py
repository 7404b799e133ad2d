"""Evaluations of candidates that are under way: here, or in processes beside this one where there are several cores.

All candidates that differ in micro-batches alone are evaluated by one process, in the order in which they were begun,
and what is known of them stays there (:class:`planner.search.candidate_evaluation.Evaluator`). As many are under way at
a time as :data:`AHEAD` and :data:`AHEAD_OF_PROOF` say, and their results are taken in the order in which they were
begun. What a search finds thus depends neither on the number of processes nor on how fast they are, unless one fails or
time is up.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeAlias

from planner.formulation.decisions import DecisionGraph
from planner.search.candidate_evaluation import Evaluated, Evaluator
from planner.search.candidates import Branch, FoundPlan
from planner.search.expectations import FreeSeconds
from planner.search.parallel_config import ParallelConfig
from planner.search.process_pool import Process
from planner.search.search_context import SearchContext
from planner.solve.pipeline.master import Paths
from planner.solve.pipeline.simulate import Path
from planner.solve.pipeline.stages import Pipeline

AHEAD, AHEAD_OF_PROOF = 4, 12
"""So many evaluations are under way at most: while plans are sought, since with more what they find is known too late
for those that follow; and once the best plan is settled.
"""

Asked: TypeAlias = tuple[Branch, FoundPlan | None, bool, tuple[Path, ...]]
"""The arguments of :meth:`Evaluator.evaluate`."""


class Evaluations:
    """Evaluations of branches, begun one by one, the results of which are taken in the same order.

    Attributes:
        free_s: of all whose results were taken.
    """

    def __init__(self, context: SearchContext, decision_graph: DecisionGraph):
        self._context, self._decision_graph = context, decision_graph
        self._evaluator, self.free_s = Evaluator(context, decision_graph), FreeSeconds()
        self._processes = list[Process]()
        self._places: dict[object, Process | None] = {}
        self._under_way: deque[_Evaluation] = deque()
        self._paths: dict[Pipeline, Paths] = {}

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Those that are under way."""
        return tuple(each.branch for each in self._under_way)

    def begin(self, branch: Branch, best: FoundPlan | None, is_proof: bool) -> None:
        """Begin to evaluate a branch once more, see :meth:`Evaluator.evaluate`, where this is the best plan known."""
        paths = None if branch.pipeline is None else self._paths.get(branch.pipeline)
        asked = branch, best, is_proof, () if paths is None else tuple(paths.found)
        process = self._place(branch.candidate.config)
        self._under_way.append(_Evaluation(asked, process, None if process is None else process.ask(asked)))

    def next(self) -> tuple[Branch, ...]:
        """What became of the one that was begun first; nothing yet if the time limit passes meanwhile."""
        first = self._under_way[0]
        while first.answer is not None and not first.answer.done():
            mine = next((each for each in self._under_way if each.process is None and each.found is None), None)
            if mine is not None:
                mine.found = self._evaluator.evaluate(*mine.asked)
            elif not self._wait(first.answer):
                return ()
        self._under_way.popleft()
        found = self._answered(first) if first.found is None else first.found
        self.free_s.setdefault(first.branch.candidate.config.any_micro_batches, {}).update(found.free_s)
        if first.branch.pipeline is not None:
            self._paths.setdefault(first.branch.pipeline, Paths(first.branch.pipeline)).add(found.paths)
        return found.branches

    def left(self) -> tuple[Branch, ...]:
        """What became of those under way that happen to be over, and the others as they were begun."""
        found = list[Branch]()
        for each in self._under_way:
            answer = each.answer if each.answer is not None and each.answer.done() else None
            evaluated = each.found if answer is None or answer.exception() is not None else answer.result()
            found += [each.branch] if evaluated is None else evaluated.branches
        return tuple(found)

    def _wait(self, answer: Future[Evaluated | None]) -> bool:
        """Whether there is an answer before the time limit; once that has passed, when there is one."""
        before = time.monotonic()
        left_s = self._context.deadline - before
        wait([answer], left_s if left_s > 0.0 else None)
        self._context.took("solve", before)
        return answer.done()

    def _answered(self, evaluation: _Evaluation) -> Evaluated:
        """What an evaluation found; made here where its process failed, with nothing of what was known there."""
        process, answer = evaluation.process, evaluation.answer
        if process is not None and answer is not None:
            if (error := answer.exception()) is not None:
                self._go_on_without(process, error)
            elif (found := answer.result()) is not None:
                return found
        return self._evaluator.evaluate(*evaluation.asked)

    def _go_on_without(self, process: Process, error: BaseException) -> None:
        """Evaluate here what a process that failed would have."""
        if process in self._places.values():
            self._context.say(f"a process that evaluates candidates failed, and this one goes on without it: {error!r}")
        process.kill()
        self._places = {key: None if each is process else each for key, each in self._places.items()}

    def _place(self, config: ParallelConfig) -> Process | None:
        """The process that evaluates such configurations, whatever their micro-batches; ``None``: this one."""
        key = config.any_micro_batches
        if key not in self._places:
            if not self._processes and self._context.pool is not None:
                self._processes = self._context.pool.searching(self._context.to_share, self._decision_graph)
            busy, known = Counter(each.process for each in self._under_way), Counter(self._places.values())
            places: list[Process | None] = [each for each in self._processes if each.is_running]
            self._places[key] = min(places or [None], key=lambda each: (busy[each], known[each]))
        return self._places[key]


@dataclass
class _Evaluation:
    """One that is under way: in a process that owes an ``answer``, or here, once ``found``."""

    asked: Asked
    process: Process | None
    answer: Future[Evaluated | None] | None
    found: Evaluated | None = None

    @property
    def branch(self) -> Branch:
        return self.asked[0]
