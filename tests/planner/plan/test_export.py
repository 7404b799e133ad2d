"""Plans as configurations of other tools: golden texts with what they lose, and what they say when they are read again.

The plans are of a Llama of 8 layers and a mixture of experts of 4, on 8 H100.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.base.errors import ConfigError, InputError
from planner.cost.cluster import ClusterSpec
from planner.formulation.training import Training
from planner.interchange.formats import FORMATS
from planner.interchange.parallelism import WORDS, resolved
from planner.interchange.pricing import cost_of, searched
from planner.plan.export.described import described
from planner.plan.plan import Plan
from tests.planner.plans import GOLDEN, check_golden, plan_of, residual_mlp

PLANS = ("dense", "pipelined", "sequence", "sparse")


def load(name: str) -> Plan:
    return Plan.load(GOLDEN / "export" / f"{name}.json")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("to", FORMATS)
def test_a_plan_is_written_and_what_is_lost_is_said(name: str, to: str) -> None:
    check_golden(f"export/{name}.{to}.txt", str(load(name).export(to)))


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("to", FORMATS)
def test_what_is_written_says_what_the_plan_was_rounded_to(name: str, to: str) -> None:
    exported = load(name).export(to)
    found = resolved(exported.format.read(exported.text), 8, exported.description.batch)
    differ = {field for field in WORDS if getattr(found, field) != getattr(exported.description, field)}
    assert differ <= exported.format.elsewhere
    assert found.size == 8


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_described_by_its_pins(name: str) -> None:
    plan = load(name)
    description, lost = described(plan)
    assert not lost
    pin = {**plan.pin, "zero": {"sequence": 3}.get(name, plan.pin["zero"])}  # blocks that recompute gather again
    data = pin["data"] * pin.get("expert", 1)
    expected = {
        **{name: pin.get(name, 1) for name in ("tensor", "expert", "pipeline", "micro_batches")},
        **{"data": data, "zero": pin["zero"], "recompute": pin.get("recompute", "none"), "batch": 16, "sequence": 2048},
    }
    assert {field: getattr(description, field) for field in expected} == expected


def test_the_price_of_what_is_rounded_is_that_of_the_best_plan_with_its_pins() -> None:
    pin = {"pipeline": 2, "data": 2, "micro_batches": 2, "zero": 1, "recompute": "none"}
    plan = plan_of(residual_mlp(layers=4, batch=64), pin=pin)
    exported = plan.export("deepspeed")
    assert any("pipeline parallel 2 -> 1" in each.what for each in exported.lost)
    rounded = plan_of(
        residual_mlp(layers=4, batch=64),
        pin={"pipeline": 1, "data": 4, "micro_batches": 2, "zero": 1, "recompute": "none"},
    )
    assert exported.price is not None
    assert exported.price.step_s == pytest.approx(rounded.predicted.step_time_s, rel=0.02)
    assert exported.price.step_s != exported.planned.step_s


def test_what_loses_nothing_costs_what_the_plan_costs() -> None:
    plan = plan_of(residual_mlp(layers=4, batch=64), pin={"data": 4, "zero": 3, "pipeline": 1, "micro_batches": 1})
    exported = plan.export("hf")
    assert not exported.lost
    assert exported.price == exported.planned
    assert "nothing is lost" in exported.report
    assert "as fast" in exported.report


def test_what_fits_in_no_way_is_said_to_have_no_price() -> None:
    plan = plan_of(residual_mlp(layers=4, batch=64), pin={"pipeline": 4, "micro_batches": 2, "data": 1})
    assert plan.assignment is not None
    small = plan.cluster.model_copy(update={"device": plan.cluster.device.model_copy(update={"memory_bytes": 20_000})})
    exported = replace(plan, cluster=small, decided=plan.assignment).export("deepspeed")
    assert exported.price is None
    assert "budget" in exported.why_not or "memory" in exported.why_not
    assert "the configuration has none" in exported.report


def test_what_fits_with_model_data_on_the_host_alone_is_not_priced_so() -> None:
    graph, pin = residual_mlp(layers=4, batch=64), {"pipeline": 4, "micro_batches": 2, "data": 1, "offload": "none"}
    plan = plan_of(graph, ClusterSpec.local(4, "1 GiB", cores=2, host_memory_bytes="1 GiB"), pin)
    assert plan.assignment is not None
    price = plan.export("deepspeed").price
    assert price is not None
    small = ClusterSpec.local(4, int(price.peak_bytes * 0.8), cores=2, host_memory_bytes="1 GiB")
    exported = replace(plan, cluster=small, decided=plan.assignment).export("deepspeed")
    on_host = searched(graph, small, replace(exported.description, offload="host"), Training(), time_limit_s=10)
    assert cost_of(on_host).peak_bytes < price.peak_bytes
    assert exported.description.offload == "none" and exported.price is None
    assert "on the host" not in exported.why_not


def test_what_would_leave_ranks_without_samples_is_refused() -> None:
    plan = plan_of(residual_mlp(layers=4, batch=2), pin={"pipeline": 4, "micro_batches": 2, "data": 1})
    with pytest.raises(ConfigError, match=r"pipeline parallel 4 -> 1.*: a batch of 2 does not divide by 4 parts"):
        plan.export("accelerate")


def test_wrong_words_are_refused() -> None:
    plan = load("dense")
    with pytest.raises(ConfigError, match=r"no format 'megatrn'; did you mean 'megatron'\? there are: .*deepspeed"):
        plan.export("megatrn")
    with pytest.raises(InputError, match="time_limit_s is 0"):
        plan.export("megatron", time_limit_s=0)
