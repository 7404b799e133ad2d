"""Advice: what a refusal says would fit does, when it is planned as it says; and what would not is not said."""

from __future__ import annotations

import re
from typing import Any

import pytest

from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.search.advice import Request, search_or_advise
from planner.search.branch_and_bound import Searched
from planner.search.search import search
from tests.planner.plans import WHOLE, residual_mlp

BATCH = 512


def on(devices: int, memory: int, host: int | None = None) -> ClusterSpec:
    return ClusterSpec.local(devices, memory, cores=2, host_memory_bytes=host)


def refusal(cluster: ClusterSpec, pin: dict[str, Any], **asked: Any) -> str:
    graph = residual_mlp(layers=2, width=64, batch=BATCH)
    with pytest.raises(InfeasibleError) as caught:
        search_or_advise(Request(graph, cluster, Pins.parse(pin), Training(), **asked))
    assert caught.value.excess_bytes > 0
    return str(caught.value)


def planned(cluster: ClusterSpec, pin: dict[str, Any], batch: int = BATCH) -> Searched:
    return search(residual_mlp(layers=2, width=64, batch=batch), cluster, Pins.parse(pin), Training())


def least(devices: int, pin: dict[str, Any]) -> int:
    """The memory that a refusal says would do."""
    text = refusal(on(devices, 1), pin)
    found = re.search(r"memory_bytes of at least ([\d,]+) bytes", text)
    assert found is not None and "and fits, too" not in text
    return int(found[1].replace(",", ""))


def test_what_one_device_is_advised_fits_when_it_is_planned() -> None:
    memory, host = least(1, WHOLE) * 9 // 10, 2**30
    text = refusal(on(1, memory, host), {**WHOLE, "offload": "none"})
    micro_batches = re.search(r"and fits, too: (\d+) micro-batches \(pin 'micro_batches'\)", text)
    batch, devices = re.search(r"a global batch of (\d+);", text), re.search(r"(\d+) devices like these\.$", text)
    assert planned(on(1, memory), {"pipeline": 1, "micro_batches": int(micro_batches[1])}).staged is not None
    assert "leaving out pins 'pipeline', 'micro_batches' (micro" in text and planned(on(1, memory), {})
    assert "model data on the host (without pin 'offload')" in text and planned(on(1, memory, host), WHOLE)
    assert 0 < int(batch[1]) < BATCH and planned(on(1, memory), WHOLE, int(batch[1]))
    with pytest.raises(InfeasibleError):
        planned(on(1, memory), {"recompute": "none", **WHOLE}, BATCH)
    assert int(devices[1]) == 2 and planned(on(2, memory), WHOLE)


def test_more_devices_are_not_advised_where_each_holds_all_parameters() -> None:
    memory = 1_200_000  # parameters, gradients and optimizer state take 1.2 MB
    pin = {"zero": 0, **WHOLE}
    text = refusal(on(4, memory), pin)
    assert "devices like these" not in text and "a global batch" not in text and "cro-batches (pin" not in text
    for devices in (8, 16, 32):
        with pytest.raises(InfeasibleError):
            planned(on(devices, memory), pin)
    assert re.search(r"leaving out pins 'zero', 'pipeline', 'micro_batches' \(\w+ \d", text)
    assert planned(on(4, memory), {}) and planned(on(4, memory), {"zero": 0}).best.config.stages > 1


@pytest.mark.parametrize(
    "pin", [{"tensor": 1, "recompute": "none"}, {"tensor": 1, "replicate": 4, "recompute": "none"}]
)
def test_every_pin_that_was_left_out_is_named(pin: dict[str, Any]) -> None:
    """One of size 1 too: without it there are axes that shard."""
    pin = {**pin, **WHOLE}
    found = re.search(r"leaving out pins (.*?) \(", refusal(on(4, 1_200_000), pin))
    assert found is not None and set(found[1].split(", ")) == set(map(repr, pin))
    assert planned(on(4, 1_200_000), {})


def test_more_micro_batches_than_are_pinned_are_advised() -> None:
    pin = {"data": 2, "micro_batches": 2}
    memory = least(2, pin) * 4 // 5
    found = re.search(r"; (\d+) micro-batches|and fits, too: (\d+) micro-batches", refusal(on(2, memory), pin))
    count = int(found[1] or found[2])
    assert count in (4, 8, 16) and planned(on(2, memory), {**pin, "micro_batches": count})
    with pytest.raises(InfeasibleError):
        planned(on(2, memory), pin)


def test_what_is_left_out_is_said_where_nothing_fits() -> None:
    memory = least(1, WHOLE) * 9 // 10
    text = refusal(on(1, memory), {}, folding=False)
    assert "Not looked at: pipelines and micro-batches, since folding is off" in text
    assert "micro-batches (pin" not in refusal(on(1, memory), WHOLE, folding=False)


def test_no_time_is_spent_on_advice_beyond_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = least(1, WHOLE) * 9 // 10
    monkeypatch.setattr("planner.search.advice.ADVICE_S", 0.0)
    assert "and fits, too" not in refusal(on(1, memory, 2**30), {**WHOLE, "offload": "none"})
