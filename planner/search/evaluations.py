"""Evaluations of candidates that are under way: here, or in processes beside this one where there are several cores.

All candidates that differ in micro-batches alone are evaluated by one process, in the order in which they were begun,
and what is known of them stays there (:class:`planner.search.candidate_evaluation.Evaluator`). As many are under way at
a time as :data:`AHEAD` says, and their results are taken in the order in which they were begun. What a search finds
thus depends neither on the number of processes nor on how fast they are, unless one fails or time is up.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeAlias

from planner.base.host import cores
from planner.formulation.decisions import DecisionGraph
from planner.search.candidate_evaluation import Evaluated, Evaluator, FreeSeconds
from planner.search.candidates import Branch, FoundPlan
from planner.search.parallel_config import ParallelConfig
from planner.search.search_context import SearchContext
from planner.solve.pipeline.master import Paths
from planner.solve.pipeline.simulate import Path
from planner.solve.pipeline.stages import Pipeline

AHEAD = 4
"""So many evaluations are under way at most: with more, what they find is known too late for those that follow."""
WORTHWHILE_S = 0.3
"""A search that takes no longer has no other processes: one is ready after about as long."""

Asked: TypeAlias = tuple[Branch, FoundPlan | None, tuple[Path, ...]]
"""The arguments of :meth:`Evaluator.evaluate`."""


class Evaluations:
    """Evaluations of branches, begun one by one, the results of which are taken in the same order.

    Used as a context, which ends the processes.

    Attributes:
        free_s: of all whose results were taken.
    """

    def __init__(self, context: SearchContext, decision_graph: DecisionGraph):
        self._context, self._decision_graph = context, decision_graph
        self._evaluator, self.free_s = Evaluator(context, decision_graph), FreeSeconds()
        self._since = time.monotonic()
        self._processes: list[_Process] | None = None
        self._places: dict[object, _Process | None] = {}
        self._under_way: deque[_Evaluation] = deque()
        self._paths: dict[Pipeline, Paths] = {}

    def __enter__(self) -> Evaluations:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes or ():
            process.kill()
        for process in self._processes or ():
            process.end()

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Those that are under way."""
        return tuple(each.branch for each in self._under_way)

    def begin(self, branch: Branch, best: FoundPlan | None) -> None:
        """Begin to evaluate a branch once more, where this is the best plan known."""
        paths = None if branch.pipeline is None else self._paths.get(branch.pipeline)
        asked = branch, best, () if paths is None else tuple(paths.found)
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

    def _go_on_without(self, process: _Process, error: BaseException) -> None:
        """Evaluate here what a process that failed would have."""
        if process in self._places.values():
            self._context.say(f"a process that evaluates candidates failed, and this one goes on without it: {error!r}")
        process.kill()
        self._places = {key: None if each is process else each for key, each in self._places.items()}

    def _place(self, config: ParallelConfig) -> _Process | None:
        """The process that evaluates such configurations, whatever their micro-batches; ``None``: this one."""
        key = config.any_micro_batches
        if key not in self._places:
            if self._processes is None and time.monotonic() - self._since > WORTHWHILE_S:
                self._processes = []
                self._start(self._processes)
            busy, known = Counter(each.process for each in self._under_way), Counter(self._places.values())
            places: list[_Process | None] = [each for each in self._processes or () if each.is_running]
            self._places[key] = min(places or [None], key=lambda each: (busy[each], known[each]))
        return self._places[key]

    def _start(self, processes: list[_Process]) -> None:
        """Add a process for each core, where there are several; none where none can be started.

        The planning process then only waits for them: its own products of matrices would take all cores.
        """
        most = min(cores(), AHEAD)
        if most < 2 or not sys.executable or getattr(sys, "frozen", False):
            return
        shared = replace(self._context, progress=None, seconds={}, known={}, formulated={}, chains={})
        with contextlib.suppress(OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError):
            setup = pickle.dumps((shared, self._decision_graph), pickle.HIGHEST_PROTOCOL)
            for _ in range(most):
                processes.append(_Process(setup))


@dataclass
class _Evaluation:
    """One that is under way: in a process that owes an ``answer``, or here, once ``found``."""

    asked: Asked
    process: _Process | None
    answer: Future[Evaluated | None] | None
    found: Evaluated | None = None

    @property
    def branch(self) -> Branch:
        return self.asked[0]


class _Process:
    """Another process that evaluates, :mod:`planner.search.evaluating_process`; asked on a thread of its own."""

    def __init__(self, setup: bytes):
        paths = [os.path.abspath(each) for each in sys.path if isinstance(each, str)]
        code = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "  # who began it ends it
            f"sys.path[:] = {paths!r}; from planner.search.evaluating_process import run; run()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        with contextlib.ExitStack() as unless_begun:
            unless_begun.callback(self._process.kill)
            self._thread = ThreadPoolExecutor(1)
            self._thread.submit(self._send, setup)
            unless_begun.pop_all()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ask(self, asked: Asked) -> Future[Evaluated | None]:
        """Have a branch evaluated, after those that it was asked before."""
        return self._thread.submit(self._answer, asked)

    def kill(self) -> None:
        """End it, whatever it is at."""
        self._process.kill()

    def end(self) -> None:
        """Let go of what is left of it once it was killed."""
        self._thread.shutdown(cancel_futures=True)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was not sent
                assert pipe is not None
                pipe.close()
        self._process.wait()

    def _answer(self, asked: Asked) -> Evaluated | None:
        """The answer; ``None`` where the model or the cluster allows none."""
        assert self._process.stdout is not None
        self._send(pickle.dumps(asked, pickle.HIGHEST_PROTOCOL))
        answer: Evaluated | None = pickle.load(self._process.stdout)
        return answer

    def _send(self, sent: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(sent)
        self._process.stdin.flush()
