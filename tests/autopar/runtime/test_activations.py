"""What blocks save for backward leaves the device as planned, comes back in time, and nothing else changes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import autopar
from autopar.measure.local_processes import LocalProcesses
from autopar.runtime.autograd.saved_handle import SavedHandle
from autopar.runtime.offload.activations import Activations
from autopar.runtime.offload.chunk_memory import Arena, CopyEngine, Homes
from planner.analysis.offload.chunks import SAVED
from planner.base.errors import DiskError, InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from planner.solve.transfers import fewest_bytes
from tests.autopar import carried, saved
from tests.autopar.models import MODELS

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("gpt2", {"activations": "all"}, 1),
    ("bert", {"activations": "all", "recompute": "selective", "data": 2, "zero": 0}, 2),
    ("functional-gpt", {"activations": "all", "recompute": "full", "data": 2, "zero": 3}, 2),
    ("shared-layers", {"activations": "all", "recompute": "none"}, 1),
    ("functional-gpt", {"activations": 2, "micro_batches": 4}, 1),
    ("encoder", {"activations": "all", "micro_batches": 2}, 1),  # whose projections save copies of what others read
    ("functional-gpt", {"activations": "all", "pipeline": 2, "micro_batches": 4, "schedule": "gpipe"}, 2),
]


def tight(plan: Plan) -> Plan:
    """The same on the smallest devices that will do, one for each rank."""
    tables = (fewest_bytes(table.trace, max(table.trace.needed_bytes)) for table in plan.transfer_schedules)
    return replace(plan, transfer_schedules=tuple(tables))


def leaving(plan: Plan) -> list[str]:
    """What of all that is saved leaves."""
    entries = (entry for table in plan.transfer_schedules for entry in table.entries)
    return [name for entry in entries for name in entry.evict if name.startswith(SAVED)]


@pytest.mark.parametrize("name, pin, ranks", CASES, ids=str)
def test_any_transfer_schedule_computes_the_same(
    pool: LocalProcesses, name: str, pin: dict[str, Any], ranks: int
) -> None:
    plan = carried.plan_of(name, pin, ranks)
    assert leaving(tight(plan)) and not leaving(plan)
    shares = [0.0, random.Random(name).random() * 0.3]
    pool.run(
        carried.trains_under_any_transfer_schedule, name, plan.to_dict(), shares, carried.trains_as_planned, ranks=ranks
    )


def test_steps_may_go_other_ways(pool: LocalProcesses) -> None:
    plan = tight(carried.plan_of("functional-gpt", {"activations": "all", "data": 2, "zero": 3}, 2))
    pool.run(carried.goes_other_ways, "functional-gpt", plan.to_dict(), ranks=2)


@pytest.mark.parametrize(
    "name, pin, ranks",
    [
        ("gpt2", {"recompute": "none"}, 1),
        ("gpt2", {"recompute": "full"}, 1),
        ("llama", {"recompute": "none", "pipeline": 2, "micro_batches": 4, "schedule": "gpipe"}, 2),
        ("encoder", {"micro_batches": 4}, 1),
        ("t5", {"micro_batches": 4}, 1),
        ("shared-layers", {"recompute": "none", "micro_batches": 2}, 1),
    ],
    ids=str,
)
def test_the_device_holds_what_was_planned(pool: LocalProcesses, name: str, pin: dict[str, Any], ranks: int) -> None:
    pin = {"activations": "all", **pin}
    least = max(
        table.budget_bytes for table in tight(carried.plan_of(name, pin, ranks, outputs="all")).transfer_schedules
    )
    plan = carried.plan_of(name, pin, ranks, memory_bytes=int(least / 0.9) + 1, outputs="all")
    assert leaving(plan)
    for seen, planned in pool.run(carried.holds_no_more_than_planned, name, plan.to_dict(), ranks=ranks):
        assert planned * 0.85 <= seen <= planned * 1.03


def test_steps_micro_batched_go_on(pool: LocalProcesses) -> None:
    """And none of them takes more memory at home than was planned."""
    plan = tight(carried.plan_of("mlp", {"activations": "all", "micro_batches": 4}, 1))
    assert leaving(plan)
    pool.run(saved.takes_no_more_of_the_host, plan.to_dict(), ranks=1)
    pool.run(carried.goes_on_micro_batched, plan.to_dict(), ranks=1)


@pytest.mark.parametrize(
    "name, autocast, micro_batches",
    [("gpt2", False, {}), ("functional-gpt", True, {}), ("gpt2", False, {"micro_batches": 2})],
    ids=str,
)
def test_dropout_and_autocast_compute_the_same_bits(
    pool: LocalProcesses, name: str, autocast: bool, micro_batches: dict[str, int]
) -> None:
    model, batch = MODELS[name].build()
    cluster = ClusterSpec.local(1, "1 GiB", cores=2, host_memory_bytes="1 GiB")
    pins: list[dict[str, Any]] = [{"offload": "host", "activations": "all", **micro_batches}, micro_batches]
    moving, plain = (autopar.plan(model, cluster, example_kwargs=batch, pin=pin) for pin in pins)
    moving = tight(moving)
    assert leaving(moving)
    pool.run(saved.draws_as_without, name, moving.to_dict(), plain.to_dict(), autocast, ranks=1)


def test_a_device_that_holds_a_block_s_trains(pool: LocalProcesses) -> None:
    """One that is too small for all that is saved, and nothing is recomputed."""
    pin = {"recompute": "none", "data": 2, "zero": 3, "micro_batches": 1}
    least = tight(carried.plan_of("functional-gpt", {**pin, "activations": "all"}, 2)).transfer_schedule
    memory = int(least.budget_bytes / 0.9) + 1
    with pytest.raises(InfeasibleError, match="largest working set"):
        carried.plan_of("functional-gpt", {**pin, "activations": "none"}, 2, memory_bytes=memory)
    plan = carried.plan_of("functional-gpt", {**pin, "activations": "all"}, 2, memory_bytes=memory)
    assert leaving(plan)
    pool.run(carried.trains_as_planned, "functional-gpt", plan.to_dict(), ranks=2)


def test_a_transfer_schedule_that_has_it_leave_too_long_is_refused(pool: LocalProcesses) -> None:
    model, batch = MODELS["functional-gpt"].build()
    cluster = ClusterSpec.local(1, "1 GiB", cores=2, host_memory_bytes="1 GiB")
    plan = autopar.plan(model, cluster, example_kwargs=batch, pin={"offload": "host", "activations": "all"})
    pool.run(saved.refuses_what_comes_too_late, "functional-gpt", plan.to_dict(), ranks=1)


@pytest.mark.parametrize("activations", ["none", "all"])
def test_what_backward_needs_may_not_be_written_to(pool: LocalProcesses, activations: str) -> None:
    pool.run(carried.writes_to_what_is_saved, activations, ranks=1)


def test_what_could_not_be_copied_is_read_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step begins while the one before is not undone yet, and the disk fails once, either way."""
    device = torch.device("cpu")
    link, arena, value = CopyEngine(device), Arena(64), torch.randn(4)
    chunk, held = (
        Activations("saved", [value.nbytes], device, arena, link, Homes((), link, "activations")),
        SavedHandle(value),
    )
    chunk.act("make", "forward")
    chunk.hold([[held]])
    for action in ("drop", "fetch"):
        with monkeypatch.context() as failing:
            failing.setattr(link, "start", Mock(side_effect=DiskError("full")))
            with pytest.raises(DiskError):
                chunk.act(action, "a step")
        assert torch.equal(held.read(), value)
        chunk.act(action, "a step")
    assert arena.held_bytes == value.nbytes and torch.equal(held.read(), value)
