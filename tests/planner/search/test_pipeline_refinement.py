"""Filling: with micro-batches, plans of growing memory are no slower, and use what memory there is."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.search.branch_and_bound import Searched
from planner.search.search import search
from tests.planner.plans import cluster, residual_mlp

CASES = [(2, 128, 512, {"data": 2}), (4, 32, 64, {"pipeline": 2})]
SHARES = (0.81, 0.85, 0.9, 0.94, 1.0)


@pytest.mark.parametrize("devices, width, batch, pin", CASES, ids=str)
def test_more_memory_gives_no_slower_step(devices: int, width: int, batch: int, pin: dict[str, Any]) -> None:
    graph = residual_mlp(layers=4, width=width, batch=batch)

    def planned(usable: float) -> Searched:
        spec = cluster(devices, math.ceil(usable / 0.9))
        found = search(graph, spec, Pins.parse({**pin, "micro_batches": 4}), Training())
        assert found.peak_bytes <= spec.device.usable_bytes
        (row,) = (row for row in found.candidates if row.config == found.best.config)
        assert row.status in ("optimal", "feasible") and row.objective_s == found.evaluation.time_s
        return found

    least = planned(2**40)
    most = least.peak_bytes
    found = [planned(share * most) for share in SHARES]
    for less, more in itertools.pairwise(found):
        assert more.evaluation.time_s <= less.evaluation.time_s * (1 + 1e-9)
        assert more.bound_s <= less.evaluation.time_s * (1 + 1e-9)
    assert found[-1].evaluation.time_s == pytest.approx(least.evaluation.time_s)
    assert sum(each.peak_bytes > 0.93 * share * most for each, share in zip(found, SHARES, strict=True)) >= 3
