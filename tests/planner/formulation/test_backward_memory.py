"""What backward of a stage has at least beside all that is saved, against stages that are simulated."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.analysis.pipeline.block_memories import BlockMemories
from planner.analysis.pipeline.stage_memory import StageRun
from planner.formulation.backward_memory import least_working_bytes
from planner.formulation.remat.levels import COMPUTED, LEVELS
from planner.formulation.unsharding import Gathers
from tests.planner.analysis.test_staged import assignments, model, space_of
from tests.planner.plans import cluster


@pytest.mark.parametrize("which", ["residual", "chain", "tapped", "deep"])
@pytest.mark.parametrize("gathers", ["once", "each"])
def test_no_stage_has_less_beside_what_it_saves(which: str, gathers: Gathers) -> None:
    rng = random.Random(f"{which} {gathers}")
    space = space_of(which, cluster(4), 2, 4, gathers=gathers, outer=2, inner=2)
    levels, instances, parts = COMPUTED if gathers == "once" else LEVELS, model(which)[1].instances, []
    for choices, assignment in assignments(space, rng, 12):
        memories = BlockMemories(assignment)
        kept = {variable: np.array([choice]) for variable, choice in zip(space.variables, choices, strict=True)}
        for stop in range(2, min(8, len(instances)) + 1):
            at = [rng.choice(levels) for _ in range(stop - 1)]
            stage = StageRun(memories, range(1, stop), at, prefetch=True, splits=False).memory
            working = max(moment.bytes for moment in stage.parts["B"]) - stage.saved_bytes
            least = least_working_bytes(space, instances[stop - 1].kind, kept)
            assert least <= working
            parts.append(least / working)
    assert which != "deep" or max(parts) > 0.8  # with many samples there is hardly more where the last block keeps all


def test_of_several_choices_the_least_counts() -> None:
    space = space_of("residual", cluster(4), 2, 4, outer=2, inner=2)
    every = {variable: np.arange(len(space.options[variable])) for variable in space.variables}
    for choices, _ in assignments(space, random.Random(0), 12):
        kept = {variable: np.array([choice]) for variable, choice in zip(space.variables, choices, strict=True)}
        for kind in range(len(space.folded.kinds)):
            assert least_working_bytes(space, kind, every) <= least_working_bytes(space, kind, kept)
