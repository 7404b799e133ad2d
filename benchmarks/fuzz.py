"""Damages plan and cluster files (:mod:`tests.planner.plan.damage`): each is refused in words, or all can be done with
it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.planner.plan.damage import KINDS, Outcome, damaged, fault_of

FILES = 100_000
PRICED = 10
"""Of every so many plans that load, one is also priced for its model, which takes as long as all else with them."""
SHOWN_S = 60.0


@dataclass
class Damages:
    """What became of the damaged files of a kind.

    Attributes:
        faults: the seeds of files that raised anything else.
    """

    kind: str
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    faults: list[int] = field(default_factory=list)
    seconds: float = 0.0
    slowest_s: float = 0.0


def run(files: int = FILES, first: int = 0) -> list[Damages]:
    """Damage so many files, kind by kind in turn, each by a seed of its own from ``first`` on."""
    found = {kind: Damages(kind) for kind in KINDS}
    last = time.monotonic()
    with TemporaryDirectory() as folder:
        for seed in range(first, first + files):
            of = found[KINDS[seed % len(KINDS)]]
            before = time.monotonic()
            file = damaged(of.kind, random.Random(seed))
            outcome, fault = fault_of(file, Path(folder), priced=seed // len(KINDS) % PRICED == 0)
            took = time.monotonic() - before
            of.seconds, of.slowest_s = of.seconds + took, max(of.slowest_s, took)
            if outcome is None:
                of.faults.append(seed)
                print(f"seed {seed}, {of.kind}:\n{fault}", flush=True)
            else:
                of.outcomes[outcome] += 1
            if time.monotonic() - last > SHOWN_S:
                last = time.monotonic()
                print(f"damaged {seed + 1 - first:,} files", flush=True)
    return [*found.values()]
