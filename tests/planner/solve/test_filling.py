"""No step is shorter than its stages' work times how often the pipeline takes that at least as it fills and empties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.solve.pipeline.filling import least_rounds
from planner.solve.pipeline.schedule import NAMES, VIRTUAL_STAGES
from planner.solve.pipeline.simulate import Times, step_s
from planner.solve.pipeline.stages import Pipeline

SECONDS = st.sampled_from((0.0, 0.01, 0.5, 1.0, 3.0))


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    name = draw(st.sampled_from(NAMES))
    least, most = VIRTUAL_STAGES[name]
    ranks = draw(st.integers(1, 8))
    fewest = ranks if name == "2bw" else 1
    return Pipeline(name, ranks, draw(st.integers(fewest, 20)), draw(st.integers(least, most or 4)))


@given(pipelines(), st.data())
def test_no_step_is_shorter(pipeline: Pipeline, data: st.DataObject) -> None:
    stages = st.lists(SECONDS, min_size=pipeline.stages, max_size=pipeline.stages)
    forward, backward = (np.array(data.draw(stages)) for _ in range(2))
    times = Times(forward, backward / 2, backward / 2, np.zeros(pipeline.stages - 1))
    simulated_s = step_s(pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.virtual_stages, times)
    assert least_rounds(pipeline) * float((forward + backward).sum()) <= simulated_s * (1 + 1e-9)
    assert least_rounds(pipeline) >= pipeline.micro_batches / pipeline.ranks


@pytest.mark.parametrize("ranks, micro_batches", [(2, 2), (4, 4), (4, 64), (16, 32)])
def test_it_is_a_geometric_sum_with_a_stage_a_rank(ranks: int, micro_batches: int) -> None:
    """Each rank is a share of a micro-batch shorter than the one before: rank 0 never waits for a first forward."""
    least = 1 / (1 - (1 - 1 / micro_batches) ** ranks)
    assert least_rounds(Pipeline("1f1b", ranks, micro_batches)) == pytest.approx(least)


def test_it_is_half_of_what_equal_stages_wait_at_least() -> None:
    for virtual_stages in (2, 4, 8):
        pipeline = Pipeline("interleaved_1f1b", 8, 16, virtual_stages)
        average, equal = 16 / 8, (16 + 7 / virtual_stages) / 8
        assert (average + equal) / 2 <= least_rounds(pipeline) < equal
