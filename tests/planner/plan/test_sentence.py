"""The sentence that begins a report: of plans of every kind, as people read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from planner.cost.cluster import ClusterSpec
from planner.plan.document.detail import Account
from planner.plan.plan import Plan
from tests.planner.formulation.test_pins import attention
from tests.planner.plans import GOLDEN, check_golden, cluster, plan_of, residual_mlp
from tests.planner.search.test_offload import offload

BIG, DEEP = residual_mlp(layers=2, batch=4096), residual_mlp(layers=10, width=64, batch=4096)


def nodes(count: int) -> ClusterSpec:
    return ClusterSpec.preset("dgx-h100", nodes=count)


PLANS: dict[str, Callable[[], Plan]] = {
    "one device": lambda: plan_of(residual_mlp(), cluster(1)),
    "searched": lambda: plan_of(residual_mlp()),
    "searched, two nodes": lambda: plan_of(residual_mlp(layers=2, batch=2048), nodes(2)),
    "FSDP": lambda: plan_of(residual_mlp(), pin={"data": 4}),
    "hierarchical": lambda: plan_of(BIG, nodes(4), {"replicate": 4, "data": 8, "zero": 3}),
    "tensor and data": lambda: plan_of(BIG, nodes(4), {"tensor": 8}),
    "sequence parallel": lambda: Plan.load(GOLDEN / "gpt2.plan.json"),
    "context": lambda: plan_of(attention(), cluster(6), {"data": 2, "context": 3}),
    "pipeline": lambda: plan_of(
        DEEP, nodes(4), {"pipeline": 4, "virtual_stages": 1, "data": 4, "tensor": 2, "micro_batches": 16}
    ),
    "interleaved, recomputing": lambda: plan_of(
        residual_mlp(layers=4), pin={"pipeline": 2, "micro_batches": 2, "data": 2, "recompute": "full"}
    ),
    "micro-batches": lambda: plan_of(BIG, nodes(1), {"pipeline": 1, "data": 8, "micro_batches": 4, "zero": 3}),
    "offload": offload,
}


def test_every_kind_of_plan_is_said_in_a_sentence() -> None:
    plans = {name: make() for name, make in PLANS.items()}
    check_golden("sentences.txt", "".join(f"{name}: {plan.sentence}\n" for name, plan in plans.items()))
    for name, plan in plans.items():
        told = " ".join(str(plan).partition("\n  mesh ")[0].partition("\n")[2].split())
        assert told == plan.sentence, name
        assert plan.sentence.replace("<", "&lt;") in plan.to_html()
        assert Plan.from_dict(plan.to_dict()).sentence == plan.sentence


@pytest.mark.parametrize(
    "status, gap, said",
    [("optimal", 0.0, "proven the best."), ("feasible", 0.034, "within 3.4 % of the best."),
     ("feasible", 1e-9, "within 0.01 % of the best."), ("edited", 0.5, "within 50 % of the best.")],
)  # fmt: skip
def test_a_gap_is_said(status: str, gap: float, said: str) -> None:
    plan = plan_of(residual_mlp())
    assert replace(plan, search=replace(plan.search, status=status, gap=gap)).sentence.endswith(said)


def test_a_plan_without_details_is_read_by_the_names_of_its_axes() -> None:
    plan = replace(plan_of(residual_mlp(), pin={"data": 2, "tensor": 2}), recorded=Account())
    assert plan.sentence.startswith("Splits weights over groups of 2 processes (tensor parallel), ")


def test_time_that_is_lost_is_said_where_it_weighs() -> None:
    plan = plan_of(residual_mlp())
    lost: dict[str, Any] = {"bubble": 0.3 * plan.predicted.step_time_s, "offload": 0.001 * plan.predicted.step_time_s}
    told = replace(plan, predicted=replace(plan.predicted, time_s={**plan.predicted.time_s, **lost})).sentence
    assert "30 % of it in the bubble" in told and "transfers" not in told
