"""The linear relaxation of a pipelined step: what it says is settled."""

from __future__ import annotations

import numpy as np
import pytest

from planner.solve.pipeline.master import CLOSE, Master, Paths, Variant
from planner.solve.pipeline.stages import Pipeline


@pytest.mark.parametrize("seed", range(12))
def test_what_is_settled_is_about_the_simulated_schedule(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks, virtual_stages, blocks = int(random.integers(2, 5)), int(random.choice([1, 2, 4])), 40
    schedule = "1f1b" if virtual_stages == 1 else "interleaved_1f1b"
    pipeline = Pipeline(schedule, ranks, ranks * int(random.integers(1, 4)), virtual_stages)
    master = Master(Paths(pipeline), [blocks, 1, 1], [None, 0, pipeline.stages - 1], 1e6, 100.0)
    for _ in range(4):  # more memory is quicker, and others are heavier at the ends
        saved = float(random.uniform(1e3, 3e4))
        seconds = 1.0 + 4e3 / saved
        master.add(0, Variant(seconds, 2 * seconds, 0.0, 1e3, saved))
    for group in (1, 2):
        seconds = float(random.uniform(1.0, 8.0))
        master.add(group, Variant(seconds, 2 * seconds, 0.0, 1e3, 1e3))
    found = master.solve(1e4, rounds=120)
    assert found.is_settled
    before = len(master.paths.found)
    seconds = master.paths.longest(master._times(found.shares), 1)
    assert seconds <= found.step_s * (1 + 2 * CLOSE) or len(master.paths.found) == before
