"""Damages plan and cluster files (:mod:`tests.planner.plan.damage`): each is refused in words, or all can be done with
it.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.planner.plan.damage import KINDS, Outcome, damaged, fault_of

FILES = 100_000
AT_ONCE = 1000
PRICED = 10
"""Of every so many plans that load, one is also priced for its model, which takes as long as all else with them."""


@dataclass
class Damages:
    """What became of the damaged files of a kind; ``faults``: the seeds of those that raised anything else."""

    kind: str
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    faults: list[int] = field(default_factory=list)
    seconds: float = 0.0
    slowest_s: float = 0.0

    @property
    def files(self) -> int:
        """How many there were."""
        return sum(self.outcomes.values()) + len(self.faults)

    def add(self, other: Damages) -> None:
        """Count those of another process too."""
        self.outcomes += other.outcomes
        self.faults += other.faults
        self.seconds += other.seconds
        self.slowest_s = max(self.slowest_s, other.slowest_s)


def run(files: int = FILES) -> list[Damages]:
    """Damage so many files, kind by kind in turn, each by a seed of its own, on all cores."""
    found = {kind: Damages(kind) for kind in KINDS}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        parts = [pool.submit(some, range(at, min(at + AT_ONCE, files))) for at in range(0, files, AT_ONCE)]
        for number, part in enumerate(as_completed(parts), 1):
            for kind, each in part.result().items():
                found[kind].add(each)
            print(f"damaged {min(number * AT_ONCE, files):,} files", flush=True)
    return [*found.values()]


def some(seeds: range) -> dict[str, Damages]:
    """Damage the files of these seeds."""
    found = {kind: Damages(kind) for kind in KINDS}
    with TemporaryDirectory() as folder:
        for seed in seeds:
            of = found[KINDS[seed % len(KINDS)]]
            before = time.perf_counter()
            file = damaged(of.kind, random.Random(seed))
            outcome, fault = fault_of(file, Path(folder), priced=seed // len(KINDS) % PRICED == 0)
            took = time.perf_counter() - before
            of.seconds, of.slowest_s = of.seconds + took, max(of.slowest_s, took)
            if outcome is None:
                of.faults.append(seed)
                print(f"seed {seed}, {of.kind}:\n{fault}", flush=True)
            else:
                of.outcomes[outcome] += 1
    return found
