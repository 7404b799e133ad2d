"""Exactness: what a search says of random small models on clusters of random memory, against brute force over all plans
(:mod:`tests.planner.search.one_space`).
"""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.planner.search.one_space import Tally, Violation, check, drawn

PROBLEMS = 300
AT_ONCE = 16
"""Seeds that are handed out together; at the end of such a lot the run ends."""


def run(problems: int = PROBLEMS, seed: int = 0) -> Tally:
    """At least so many problems, of seeds from a first one on, on all cores."""
    tally = Tally()
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        while tally.problems < problems:
            for found in pool.map(of_seed, range(seed, seed + AT_ONCE)):
                tally.add(found)
                for violation in found.violations:
                    print(violation, flush=True)
            seed += AT_ONCE
            print(f"seeds up to {seed}: {tally}", flush=True)
    return tally


def of_seed(seed: int) -> Tally:
    """What becomes of one model on one cluster; nothing where it has too many plans."""
    tally, case = Tally(), drawn(seed)
    if case is not None:
        check(case, tally)
    return tally


def table(tally: Tally) -> list[dict[str, str]]:
    """Violations by what is said wrongly and why."""
    found = Counter((each.what, each.cause) for each in tally.violations)
    rows = []
    for (what, cause), count in sorted(found.items()):
        worst = max((v for v in tally.violations if (v.what, v.cause) == (what, cause)), key=_size)
        rows.append({"what": what, "cause": cause, "times": str(count), "an example": str(worst).replace("|", "/")})
    return rows or [{"what": "none", "cause": "", "times": "0", "an example": ""}]


def _size(violation: Violation) -> float:
    return violation.off
