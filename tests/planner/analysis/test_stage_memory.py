"""A stage that is put together from simulated blocks holds what it holds when it is simulated as a whole."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.analysis.memory import usage
from planner.analysis.pipeline.block_memories import BlockMemories
from planner.analysis.pipeline.stage_memory import StageRun
from planner.cost.cluster import ClusterSpec
from planner.formulation.remat.levels import Level, at_levels
from tests.planner.analysis.test_staged import assignments, space_of


@pytest.mark.parametrize("which", ["residual", "chain", "tapped", "deep"])
@pytest.mark.parametrize("levels", [("none",), ("full",), ("none", "full", "selective")])
def test_blocks_together_are_the_stage(which: str, levels: tuple[Level, ...]) -> None:
    """What is saved, and the fullest moment of forward and of the first backward, for random decisions."""
    rng = random.Random(f"{which} {levels}")
    space = space_of(which, ClusterSpec.preset("dgx-h100", devices=2), 1, 4, gathers="each", tensor=2)
    size = len(space.folded.instances)
    for _, found in assignments(space, rng, 6):
        chosen = [rng.choice(levels) for _ in range(size)]
        assignment = replace(found, recompute=at_levels(space.folded, chosen))
        whole = usage(assignment)
        run = StageRun(BlockMemories(assignment), range(size), chosen, prefetch=True, splits=False)
        peak = max(at.bytes for part in ("F", "first B") for at in run.memory.parts[part])
        assert (run.saved_bytes, peak) == (whole.saved_bytes, whole.peak_bytes - whole.leaf_bytes)
