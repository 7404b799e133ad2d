"""Processes beside this one, for all searches of a plan: one more than there are cores, started once that is worth it.

What they answer is said in :mod:`planner.search.evaluating_process`, what they are asked in
:mod:`planner.search.evaluations`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from planner.base.host import cores
from planner.formulation.decisions import DecisionGraph

MOST = 8
"""Processes at most: each keeps what it finds, and few evaluations are under way."""
WORTHWHILE_S = 0.3
"""Searches that take no longer have no other processes: one is ready after about as long."""


class ProcessPool:
    """Processes that evaluate candidates, for one search after another.

    Used as a context, which ends them, whatever they are at.
    """

    def __init__(self) -> None:
        self._processes, self._is_over = list[Process](), False
        self._starting = threading.Timer(WORTHWHILE_S, self._start)
        self._starting.daemon = True
        self._known: dict[DecisionGraph, int] = {}

    def __enter__(self) -> ProcessPool:
        with contextlib.suppress(RuntimeError):  # there may be no thread for it
            self._starting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._starting.cancel()
        self._end()

    def searching(self, context: object, decision_graph: DecisionGraph) -> list[Process]:
        """The processes, told what is searched from now on; none where that is not worthwhile yet, or none can start.

        Each keeps the decision graphs that it was told, and what it found of them, for later searches.
        """
        if self._starting.is_alive():
            return []
        running = [each for each in self._processes if each.is_running]
        if not running:
            return []
        told = None if decision_graph in self._known else decision_graph
        number = self._known.setdefault(decision_graph, len(self._known))
        try:
            search = pickle.dumps((context, number, told), pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError):
            self._end()
            return []
        for process in running:
            process.tell(search)
        return running

    def _end(self) -> None:
        self._is_over = True
        try:
            if self._starting.is_alive():
                self._starting.join()
        finally:
            ended, self._processes = self._processes, []
            for process in ended:
                process.kill()
        for process in ended:
            process.end()

    def _start(self) -> None:
        """Add a process for each core and one more, where there are several, as far as they can be started: what one is
        asked may have to wait for what it was asked before.

        The planning process then only waits for them: its own products of matrices would take all cores.
        """
        usable = cores()
        if usable < 2 or not sys.executable or getattr(sys, "frozen", False):
            return
        with contextlib.suppress(OSError, RuntimeError):
            for _ in range(min(usable + 1, MOST)):
                if not self._is_over:
                    self._processes.append(Process())


class Process:
    """A process that answers, :mod:`planner.search.evaluating_process`; asked on a thread of its own."""

    def __init__(self) -> None:
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
            self._thread.submit(int)  # a thread that cannot be started says so now
            unless_begun.pop_all()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def tell(self, search: bytes) -> None:
        """Let it evaluate branches of this search from now on."""
        self._thread.submit(self._send, search)

    def ask(self, asked: object) -> Future[Any]:
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

    def _answer(self, asked: object) -> Any:
        """The answer; ``None`` where the model or the cluster allows none."""
        assert self._process.stdout is not None
        self._send(pickle.dumps(asked, pickle.HIGHEST_PROTOCOL))
        return pickle.load(self._process.stdout)

    def _send(self, sent: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(sent)
        self._process.stdin.flush()
