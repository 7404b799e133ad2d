"""Minimum-memory plans: budgets near what these need."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.analysis.offload.step_timing import largest_working_set
from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.search.branch_and_bound import Searched
from planner.search.search import search
from tests.planner.plans import residual_mlp, whole

PINS = ({}, {"offload": "host"}, {"offload": "auto", "recompute": "full"}, {"recompute": "none"}, {"zero": 3})
MICRO_BATCHED = {"pipeline": 2, "micro_batches": 4}


def searched(graph: Graph, memory: int, pin: dict[str, Any], devices: int = 1) -> Searched:
    spec = ClusterSpec.local(devices, memory, cores=2, host_memory_bytes="1 GiB")
    found = search(graph, spec, whole(pin), Training())
    needed = (
        found.evaluation.peak_bytes
        if found.memory is None
        else largest_working_set(found.assignment, found.memory).bytes
    )
    assert needed <= spec.device.usable_bytes and math.isfinite(found.evaluation.time_s)
    return found


def at_least(graph: Graph, memory: int, pin: dict[str, Any], devices: int = 1) -> int:
    """The memory that a refusal says would do, whose numbers are right."""
    with pytest.raises(InfeasibleError) as caught:
        searched(graph, memory, pin, devices)
    text = str(caught.value)
    found = re.search(
        r"can use ([\d,]+) bytes.*(?:needs|takes) ([\d,]+) bytes \(.*\), ([\d,]+) bytes .*too many.*"
        r"memory_bytes of at least ([\d,]+) bytes",
        text,
    )
    assert found is not None, text
    usable, needs, over, least = (int(number.replace(",", "")) for number in found.groups())
    assert over == caught.value.excess_bytes == needs - usable > 0 and least > memory
    return least


@pytest.mark.parametrize("pin", PINS[:2], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
def test_every_budget_from_what_is_said_to_do_on_plans_and_none_below(layers: int, pin: dict[str, Any]) -> None:
    """One device: there is only how much is recomputed to decide."""
    graph = residual_mlp(layers=layers, width=8, batch=4)
    least = at_least(graph, 1, pin)
    below = (1, least - 2, least - 1, least * 9 // 10)
    assert {at_least(graph, memory, pin) for memory in below} == {least}
    for memory in (*range(least, least + 2), *range(least * 7 // 6, least * 3 // 2, least // 6)):
        searched(graph, memory, pin)


@given(
    st.sampled_from((2, 4)),
    st.sampled_from((8, 12)),
    st.sampled_from((4, 8)),
    st.sampled_from((*PINS, MICRO_BATCHED)),
    st.floats(1.0, 1.5),
)
@settings(max_examples=6, deadline=None)
def test_what_is_said_to_do_does_on_several_devices(
    devices: int, width: int, batch: int, pin: dict[str, Any], share: float
) -> None:
    graph = residual_mlp(layers=1, width=width, batch=batch)
    least = at_least(graph, 1, pin, devices)
    searched(graph, least, pin, devices)
    searched(graph, math.ceil(least * share), pin, devices)


def test_what_just_fits_is_found() -> None:
    graph = residual_mlp(layers=4, width=32, batch=64)
    least = at_least(graph, 1, {})
    found = searched(graph, least, {})
    assert found.bound_s <= found.evaluation.time_s
    roomy = searched(graph, 2 * least, {})
    assert roomy.status == "optimal" and roomy.evaluation.time_s < found.evaluation.time_s


def test_what_less_memory_holds_is_not_ruled_out_by_what_is_proved_with_more() -> None:
    """Plans that were found after the limit was lowered claim no more than what was proved before."""
    graph, pin = residual_mlp(layers=3, width=32, batch=64), {"offload": "host"}
    least, fastest_s = at_least(graph, 1, pin), math.inf
    for memory in range(least, 2 * least, least // 7):
        found = searched(graph, memory, pin)
        fastest_s = min(fastest_s, found.evaluation.time_s)
        assert found.bound_s <= fastest_s * (1 + 1e-9)


def test_with_less_the_same_is_said_to_do() -> None:
    graph = residual_mlp(layers=1, width=32, batch=64)
    least = at_least(graph, 1, {}, 4)
    assert at_least(graph, least * 98 // 100, {}, 4) == least
    found = searched(graph, least, {}, 4)
    assert [row.status for row in found.candidates if row.config == found.best.config] == ["feasible"]
