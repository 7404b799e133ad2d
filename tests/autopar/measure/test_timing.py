"""Timing: what counts of a collective is by how much it makes computing longer, by hand on a clock of our own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from autopar.measure import timing

COMPUTED_S, COUNT = 0.010, 3


class Machine:
    """Two ranks on each core: what one of them computes takes twice as long on the wall."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int):
        self.wall_s = self.thread_s = 0.0
        self.taken_s = 0.0
        clocks = {"perf_counter": lambda: self.wall_s, "thread_time": lambda: self.thread_s}
        monkeypatch.setattr(timing, "time", SimpleNamespace(**clocks))
        monkeypatch.setattr(timing, "dist", SimpleNamespace(barrier=lambda: None, get_world_size=lambda: 4))
        monkeypatch.setattr(timing, "host", SimpleNamespace(cores=lambda: 2))
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def compute(self) -> None:
        """Longer by what the threads of a call take of the core."""
        self.thread_s += COMPUTED_S
        self.wall_s += 2 * COMPUTED_S + self.taken_s
        self.taken_s = 0.0

    def call(self, seconds: float, taken_s: float) -> Callable[[], Callable[[], None]]:
        """One that takes so long, and so much of the core."""

        def send() -> Callable[[], None]:
            done_s, self.taken_s = self.wall_s + seconds, taken_s

            def wait() -> None:
                self.wall_s, self.taken_s = max(self.wall_s, done_s), 0.0

            return wait

        return send


@pytest.mark.parametrize("threads", [1, 2], ids=["CPU seconds", "wall seconds"])
@pytest.mark.parametrize(
    "seconds, is_beside, expected_s",
    [
        (0.007, False, 0.007),  # all of it
        (0.007, True, 0.003),  # what it takes of the core
        (0.021, True, 0.003),
        (0.030, True, 0.010),  # and what computing is too short to hide
    ],
)
def test_what_counts_of_a_call(
    monkeypatch: pytest.MonkeyPatch, threads: int, seconds: float, is_beside: bool, expected_s: float
) -> None:
    machine = Machine(monkeypatch, threads)
    send = machine.call(seconds, taken_s=0.003)
    found_s = timing._lengthened_s(send, COUNT, machine.compute, is_beside=is_beside)
    assert found_s == pytest.approx(expected_s)


def test_a_call_is_never_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise may make what goes with a call shorter than computing alone."""
    machine = Machine(monkeypatch, threads=1)
    send = machine.call(0.0, taken_s=-0.001)
    assert timing._lengthened_s(send, COUNT, machine.compute, is_beside=True) == timing.LEAST_S
