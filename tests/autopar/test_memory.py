"""Predicted memory against torch's ``MemTracker`` on the emitted program of one rank."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autopar.api import plan_traced, trace
from benchmarks.memory import observed_peak
from planner.cluster import ClusterSpec
from planner.formulate import Training
from planner.pins import Pins
from tests.autopar.models import MODELS

TOLERANCE = 0.05  # of models so small that a few numbers per row show; the issue of the benchmark is the mean


@pytest.mark.parametrize("name", ["functional-gpt", "llama", "vit"])
@pytest.mark.parametrize(
    "ranks, pin", [(2, {"data": 2}), (2, {"data": 2, "zero": 3}), (4, {"data": 2, "tensor": 2})], ids=str
)
def test_the_predicted_peak_is_the_observed_one(name: str, ranks: int, pin: Mapping[str, int]) -> None:
    model, batch = MODELS[name].build()
    traced = trace(model, None, batch)
    plan = plan_traced(traced, ClusterSpec.local(ranks), Pins.parse(pin), Training())
    assert plan.assignment is not None
    observed = observed_peak(model, traced, plan.assignment)
    assert plan.predicted.peak_bytes == pytest.approx(observed, rel=TOLERANCE)
