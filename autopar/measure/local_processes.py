"""A few ranks on this machine over gloo, kept for several calls, for the demo and for tests.

Programs of one's own are started by ``torchrun``; this is for a parent that wants its children's results.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from planner.base.errors import AutoparError

OnEvent = Callable[[int, Any], None]


class RankError(AutoparError):
    """A rank failed; the message holds its traceback."""


class LocalProcesses:
    """Processes that form a gloo group for each call.

    Use as a context. A function is called as ``function(*args)`` in every process with the default process
    group initialised; if it is a generator, what it yields goes to ``on_event`` while it runs.

    Args:
        count: how many processes.
        preload: modules that are slow to import; imported once for all processes where the platform can.
        timeout_s: after this many seconds without a collective's partner, a rank gives up.
    """

    def __init__(self, count: int, preload: Sequence[str] = ("torch",), timeout_s: float = 120.0):
        forks = sys.platform == "linux"
        context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            context.set_forkserver_preload(list(preload))
        self.count, self._timeout_s, self._context = count, timeout_s, context
        self._directory = tempfile.TemporaryDirectory(prefix="autopar-")
        self._calls = 0
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(count):
            pipe, process = self._start(rank)
            self._pipes.append(pipe)
            self._processes.append(process)

    def _start(self, rank: int) -> tuple[Connection, Any]:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(rank, self.count, theirs, self._timeout_s), daemon=True)
        process.start()
        theirs.close()
        return mine, process

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 5
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int | None = None, on_event: OnEvent | None = None
    ) -> list[Any]:
        """Results of ``function(*args)`` by rank.

        Args:
            function: importable by name in the processes.
            ranks: size of the process group; the first that many processes take part.
            on_event: called with (rank, value) for everything that a generator function yields.

        Raises:
            RankError: the first failure, with the rank's traceback.
        """
        ranks = self.count if ranks is None else ranks
        self._calls += 1
        store = str(Path(self._directory.name) / f"store{self._calls}")
        for pipe in self._pipes[:ranks]:
            pipe.send((function, args, ranks, store))
        results: list[Any] = [None] * ranks
        failures: list[str] = []
        waiting = {self._pipes[rank]: rank for rank in range(ranks)}
        try:
            self._collect(waiting, results, failures, on_event)
        finally:  # answers of ranks that nobody waits for any more would be those of the next call
            self._replace([*waiting.values()])
        if failures:
            raise RankError(failures[0])
        return results

    def _collect(
        self, waiting: dict[Connection, int], results: list[Any], failures: list[str], on_event: OnEvent | None
    ) -> None:
        """Take the answers of ranks that are waited for, until all came, or a failure makes others hang."""
        while waiting:
            ready = wait(list(waiting), timeout=10.0 if failures else None)
            if not ready:  # the others hang, waiting for the rank that failed
                break
            for pipe in [pipe for pipe in ready if isinstance(pipe, Connection)]:
                rank = waiting[pipe]
                try:
                    what, value = pipe.recv()
                except EOFError:
                    self._processes[rank].join(1)
                    what, value = "error", f"the process ended with exit code {self._processes[rank].exitcode}"
                    self._replace([rank])
                if what == "event":
                    if on_event is not None:
                        on_event(rank, value)
                    continue
                del waiting[pipe]
                if what == "error":
                    failures.append(f"rank {rank}: {value}")
                else:
                    results[rank] = value

    def _replace(self, ranks: Sequence[int]) -> None:
        """Start processes anew in place of those that hang or ended."""
        for rank in ranks:
            self._processes[rank].kill()
            self._processes[rank].join()
            self._pipes[rank], self._processes[rank] = self._start(rank)


def _serve(rank: int, count: int, pipe: Connection, timeout_s: float) -> None:
    """A process's life: carry out calls until the parent says stop or goes away."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    gc.freeze()  # what was imported stays: collections need not walk over it
    while True:
        try:
            call = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if call is None:
            return
        try:
            pipe.send(("result", _call(rank, pipe, timeout_s, *call)))
        except KeyboardInterrupt:
            return
        except BaseException as error:
            pipe.send(("error", "".join(traceback.format_exception(error))))
        _let_groups_go()


def _let_groups_go() -> None:
    """A group's threads poll as long as it is: modules and meshes are cycles, and DTensor's caches keep meshes."""
    from torch.distributed.device_mesh import DeviceMesh

    gc.collect()
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            vars(mesh).get("_pg_registry", {}).clear()


def _call(
    rank: int,
    pipe: Connection,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    ranks: int,
    store: str,
) -> Any:
    with _process_group(rank, ranks, store, timeout_s):
        if not inspect.isgeneratorfunction(function):
            return function(*args)
        events = function(*args)
        while True:
            try:
                pipe.send(("event", next(events)))
            except StopIteration as stop:
                return stop.value


@contextlib.contextmanager
def _process_group(rank: int, ranks: int, store: str, timeout_s: float) -> Iterator[None]:
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
