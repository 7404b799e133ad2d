"""By default nothing is refused that fits with micro-batches, in a pipeline, or with model data on host or disk."""

from __future__ import annotations

from typing import Any

import pytest

from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.decisions import DecisionGraph
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, Search, describe
from planner.plan.rebinding.rebind import rebind
from planner.search import offload_search
from planner.search.branch_and_bound import ParallelConfigs, Searched
from planner.search.home_search import NOT_PROVED
from planner.search.search import TIME_LIMIT_S, search
from planner.search.search_context import SearchContext
from tests.planner.plans import WHOLE, residual_mlp, unwrapped


def on(devices: int, memory: int | str, host: str | None = None, disk: str | None = None) -> ClusterSpec:
    return ClusterSpec.local(devices, memory, cores=2, host_memory_bytes=host, disk_bytes=disk)


def planned(
    graph: Graph, spec: ClusterSpec, pin: dict[str, Any] | None = None, time_limit_s: float = TIME_LIMIT_S
) -> Searched:
    return search(graph, spec, Pins.parse(pin), Training(), time_limit_s=time_limit_s)


def refused(graph: Graph, spec: ClusterSpec, pin: dict[str, Any]) -> str:
    with pytest.raises(InfeasibleError) as caught:
        planned(graph, spec, pin)
    return str(caught.value)


def document(found: Searched) -> Plan:
    tables, predicted = found.planned_step
    result = Search(found.status, found.gap, {"solve": 0.5}, left_out=found.left_out)
    facts = model_facts(found.assignment.space.graph, "ResidualMLP")
    return describe(found.assignment, facts, {}, predicted, result, found.staged, tables)


def test_what_fits_in_micro_batches_alone_is_planned() -> None:
    """Of a large batch the activations take most, of which a micro-batch has a part."""
    graph, spec = residual_mlp(layers=2, width=64, batch=4096), on(1, "3 MiB")
    refused(graph, spec, WHOLE)
    found = planned(graph, spec)
    assert found.best.config.mesh.micro_batches > 1 and found.peak_bytes <= spec.device.usable_bytes
    assert not found.left_out


def test_what_fits_in_a_pipeline_alone_is_planned() -> None:
    """Parameters are whole on every rank, as is pinned, but a stage has those of its own layers."""
    graph, spec, pin = residual_mlp(layers=2, width=64, batch=512), on(4, 1_200_000), {"zero": 0}
    refused(graph, spec, {**pin, "pipeline": 1})
    found = planned(graph, spec, pin)
    assert found.best.config.stages > 1 and found.peak_bytes <= spec.device.usable_bytes


def test_what_fits_with_model_data_elsewhere_alone_is_planned_so_and_says_it() -> None:
    graph = residual_mlp(layers=6, width=128, batch=16)
    spec = on(1, "4 MiB", host="1 GiB", disk="1 GiB")
    assert "Nor is there" not in refused(graph, spec, {"offload": "none"})
    found = planned(graph, spec)
    plan = document(found)
    assert (plan.offload, plan.pin) == ("auto", {}) and plan.transfer_schedules
    assert "without plans with all model data on the device, since none was found that fits" in unwrapped(plan)
    assert "Keeps model data on the host" in plan.sentence
    again = Plan.from_dict(plan.to_dict())
    assert again == plan and again.pins.tier == "either"
    on_disk = document(planned(graph, on(1, "4 MiB", host="1 MiB", disk="1 GiB")))
    assert on_disk.offload == "disk" and "Keeps model data on disk" in on_disk.sentence
    text = refused(graph, on(1, "4 MiB", host="1 MiB", disk="1 MiB"), {})
    assert "memory_bytes of at least" in text


def test_where_memory_is_ample_the_device_is_proved_to_be_fastest() -> None:
    graph = residual_mlp(layers=2, width=64, batch=64)
    found = planned(graph, on(1, "64 MiB", host="1 GiB"))
    assert (document(found).offload, found.status, found.left_out) == ("none", "optimal", "")


def test_the_host_is_home_where_that_is_faster_too() -> None:
    """On the device the batch has to be cut into micro-batches; without model data there it need not."""
    graph, spec = residual_mlp(layers=4, width=64, batch=512), on(1, "3 MiB", host="1 GiB")
    on_device, found = planned(graph, spec, {"offload": "none"}), planned(graph, spec, time_limit_s=60.0)
    assert on_device.best.config.mesh.micro_batches > 1 and found.best.config.mesh.micro_batches == 1
    assert document(found).offload == "auto" and not found.left_out
    assert found.bound_s <= on_device.bound_s and found.planned_step_s < 0.7 * on_device.planned_step_s


def test_a_plan_on_the_device_says_what_was_not_searched_or_not_proved_beside_it() -> None:
    graph = residual_mlp(layers=4, width=64, batch=512)
    late = search(graph, on(1, "6 MiB", host="1 GiB"), Pins(), Training(), time_limit_s=1e-3)
    found = planned(graph, on(1, "6 MiB", host="64 KiB"))
    assert document(late).offload == document(found).offload == "none"
    elsewhere = "plans with model data elsewhere than on the device"
    assert f"without {elsewhere}, since there was no time" in unwrapped(document(late))
    assert f"without a proof for {elsewhere}" in unwrapped(document(found))


def test_a_plan_on_the_device_stays_where_the_host_turns_out_too_small_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where time is up before what was found is followed."""
    monkeypatch.setattr(offload_search, "_search", offload_search._fitting)
    found = planned(residual_mlp(layers=4, width=64, batch=512), on(1, "6 MiB", host="64 KiB"))
    assert document(found).offload == "none" and NOT_PROVED in found.left_out


def test_what_computes_too_long_with_another_home_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting, met = offload_search._fitting, list[object]()

    def of_nothing_fast_enough(
        context: SearchContext, graph: DecisionGraph, configs: ParallelConfigs, _: float
    ) -> None:
        met.append(fitting(context, graph, configs, 1e-9))

    monkeypatch.setattr(offload_search, "_fitting", of_nothing_fast_enough)
    found = planned(residual_mlp(layers=4, width=64, batch=512), on(1, "3 MiB", host="1 GiB"), time_limit_s=60.0)
    assert met == [None, None] and document(found).offload == "none" and NOT_PROVED in found.left_out


def test_a_home_that_was_chosen_goes_with_a_plan_s_decisions() -> None:
    plan = document(planned(residual_mlp(layers=6, width=128, batch=16), on(1, "4 MiB", host="1 GiB")))
    deeper = residual_mlp(layers=8, width=128, batch=16)
    rebound = rebind(plan, deeper, model_facts(deeper, "ResidualMLP"), plan.cluster)
    assert rebound.offload == plan.offload == "auto" and rebound.transfer_schedules
    assert not any("offload" in change.what for change in rebound.changes)
