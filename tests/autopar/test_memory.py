"""Predicted memory against torch's ``MemTracker`` on the emitted program of one rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch

from autopar.api import plan_traced, trace
from benchmarks.memory import observed_peak
from planner.cluster import ClusterSpec
from planner.formulate import Training
from planner.pins import Pins
from tests.autopar.models import MODELS

TOLERANCE = 0.05  # of models so small that a few numbers per row show; the issue of the benchmark is the mean


CASES = [
    *itertools.product(
        ["functional-gpt", "llama", "vit"],
        [(2, {"data": 2}), (2, {"data": 2, "zero": 3}), (4, {"data": 2, "tensor": 2})],
    ),
    ("t5", (4, {"data": 2, "tensor": 2, "zero": 3})),  # the whole model is one block that gathers again
    ("gpt2", (2, {"tensor": 2, "recompute": "selective"})),  # attention with dropout
    ("shared-layers", (2, {"data": 2, "recompute": "full"})),  # gradients that several blocks add to
]


@pytest.mark.parametrize("name, case", CASES, ids=str)
def test_the_predicted_peak_is_the_observed_one(name: str, case: tuple[int, Mapping[str, object]]) -> None:
    ranks, pin = case
    model, batch = MODELS[name].build()
    traced = trace(model, None, batch)
    plan = plan_traced(traced, ClusterSpec.local(ranks), Pins.parse(pin), Training())
    assert plan.assignment is not None
    observed = observed_peak(model, traced, plan.assignment)
    assert plan.predicted.peak_bytes == pytest.approx(observed, rel=TOLERANCE)


@pytest.mark.parametrize("name, pin", [("llama", {"data": 2, "zero": 3}), ("gpt2", {"tensor": 2})])
def test_the_predicted_peak_is_the_observed_one_with_masters(name: str, pin: Mapping[str, object]) -> None:
    model, batch = MODELS[name].build()
    model.bfloat16()
    traced = trace(model, None, batch)
    plan = plan_traced(traced, ClusterSpec.local(2), Pins.parse(pin), Training(optimizer_bytes_per_element=12))
    assert plan.assignment is not None
    observed = observed_peak(model, traced, plan.assignment, torch.float32)
    assert plan.predicted.peak_bytes == pytest.approx(observed, rel=TOLERANCE)
