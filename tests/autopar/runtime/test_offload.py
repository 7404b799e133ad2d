"""Model data on the host: what the offload moves, that it is never over the budget, and that nothing else changes."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.measure.local_processes import LocalProcesses
from autopar.runtime.offload.chunk_memory import Arena, CopyEngine, Gradients, Homes, Parameters, Sums
from planner.base.errors import DiskError, TransferScheduleError
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from planner.solve.transfers import fewest_bytes
from planner.solve.transfers.table import ACTIONS
from tests.autopar import beside_the_loss, carried, drawn, on_disk, updated

pytestmark = pytest.mark.usefixtures("capturing_once")

CASES: list[tuple[str, dict[str, Any], int, int]] = [  # the last: how many budgets
    ("mlp", {"data": 2, "zero": 0}, 2, 2),
    ("gpt2", {}, 1, 2),
    ("shared-layers", {"tensor": 2, "recompute": "full"}, 2, 2),
    ("functional-gpt", {"micro_batches": 4}, 1, 2),
    ("shared-layers", {"data": 2, "zero": 3, "micro_batches": 2, "recompute": "full", "activations": "all"}, 2, 2),
    ("encoder", {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b", "activations": "all"}, 2, 2),
    ("shared-layers", {"pipeline": 2, "micro_batches": 2, "virtual_stages": 2}, 2, 1),
]
EARLY: list[tuple[str, dict[str, Any], int, int]] = [
    ("functional-gpt", {"data": 2, "zero": 3, "recompute": "full"}, 2, 2),
    ("shared-layers", {"tensor": 2}, 2, 1),
    ("encoder", {"data": 2, "zero": 0}, 2, 1),
]


@pytest.mark.parametrize("name, pin, ranks, budgets", CASES, ids=str)
def test_any_transfer_schedule_computes_the_same(
    pool: LocalProcesses, name: str, pin: dict[str, Any], ranks: int, budgets: int
) -> None:
    document = carried.plan_of(name, pin, ranks).to_dict()
    draw = random.Random(name)
    shares = [draw.random() * most for most in (0.1, 0.0)[:budgets]]
    pool.run(carried.trains_under_any_transfer_schedule, name, document, shares, carried.trains_as_planned, ranks=ranks)


@pytest.mark.parametrize("name, pin, ranks, budgets", EARLY, ids=str)
def test_updates_in_backward_compute_the_same(
    pool: LocalProcesses, name: str, pin: dict[str, Any], ranks: int, budgets: int
) -> None:
    document = carried.plan_of(name, {**pin, "update": "backward"}, ranks).to_dict()
    draw = random.Random(name)
    shares = [draw.random() * most for most in (0.1, 0.4)[:budgets]]
    pool.run(carried.trains_under_any_transfer_schedule, name, document, shares, updated.trains_as_planned, ranks=ranks)
    if name == "shared-layers":
        pool.run(updated.refuses_clipping_on_all_ranks, name, document, ranks=ranks)


def test_updates_on_devices_in_backward_compute_the_same(pool: LocalProcesses) -> None:
    pins = [{"data": 2, "zero": 0}, {"data": 2, "zero": 3, "recompute": "full"}, {"tensor": 2}]
    pool.run(updated.trains_on_devices, pins, ranks=2)


def test_a_device_of_an_eighth_of_the_model_data_trains(pool: LocalProcesses) -> None:
    pool.run(carried.trains_in_an_eighth, ranks=1)


@pytest.mark.parametrize("ranks, seeds", [(1, (1, 10, 20)), (2, (4, 15, 26))])
def test_drawn_models_are_carried(pool: LocalProcesses, ranks: int, seeds: tuple[int, ...]) -> None:
    """Models, pins, budgets and transfer schedules at random."""
    for seed in seeds:
        pool.run(drawn.trains, seed, drawn.plan_of(seed, ranks).to_dict(), ranks=ranks)


def test_odd_models_are_carried(pool: LocalProcesses) -> None:
    pool.run(carried.handles_odd_models, ranks=1)


@pytest.mark.parametrize(
    "pin",
    [{"data": 2, "zero": 0}, {"data": 2, "zero": 3, "recompute": "full"}, {"data": 2, "zero": 3, "micro_batches": 2}],
    ids=str,
)
def test_outputs_beside_the_loss_are_carried(pool: LocalProcesses, pin: dict[str, Any]) -> None:
    pool.run(beside_the_loss.trains, pin, ranks=2)


def test_gradients_in_one_memory_add_up_apart(pool: LocalProcesses) -> None:
    pool.run(beside_the_loss.adds_up_apart, ranks=1)


def test_what_stays_on_the_device_is_trained_there(pool: LocalProcesses) -> None:
    pin = {"data": 2, "zero": 0, "offload": "auto", "recompute": "none"}
    least = carried.plan_of("functional-gpt", {**pin, "offload": "host"}, 2).transfer_schedule
    room = max(least.trace.needed_bytes) + 3 * sum(item.bytes for item in least.trace.items) // 4
    plan = carried.plan_of("functional-gpt", pin, 2, memory_bytes=int(room / 0.9), updates_at=1e7)
    assert 0 < len(plan.transfer_schedule.trace.items) < len(least.trace.items)
    pool.run(carried.trains_as_planned, "functional-gpt", plan.to_dict(), ranks=2)


@pytest.mark.parametrize("zero", [3, {"*.bias": 0, "*": 3}], ids=str)
def test_model_data_may_be_in_files(pool: LocalProcesses, tmp_path: Path, zero: object) -> None:
    (tmp_path / "offload").mkdir()
    pool.run(on_disk.trains, on_disk.plan_of(2, zero=zero).to_dict(), str(tmp_path / "offload"), ranks=2)


def test_files_that_cannot_be_read_are_errors_that_lose_nothing(pool: LocalProcesses, tmp_path: Path) -> None:
    (tmp_path / "offload").mkdir()
    pool.run(on_disk.loses_nothing, on_disk.plan_of(1).to_dict(), str(tmp_path / "offload"), ranks=1)


def test_files_that_cannot_be_used_end_nothing_of_ours(pool: LocalProcesses, tmp_path: Path) -> None:
    (tmp_path / "offload").mkdir()
    pool.run(on_disk.is_not_ended, on_disk.plan_of(1).to_dict(), str(tmp_path / "offload"), ranks=1)


def test_a_stage_that_cannot_write_its_files_is_an_error_of_all(pool: LocalProcesses, tmp_path: Path) -> None:
    (tmp_path / "offload").mkdir()
    plan = on_disk.plan_of(2, pipeline=2, micro_batches=2)
    said = pool.run(on_disk.fails_on_all_stages, plan.to_dict(), str(tmp_path / "offload"), ranks=2)
    assert said[0] == said[1] and "cannot write" in said[0]


def test_steps_may_go_other_ways(pool: LocalProcesses) -> None:
    document = carried.plan_of("mlp", {"data": 2, "zero": 3}, 2).to_dict()
    pool.run(carried.goes_other_ways, "mlp", document, ranks=2)


def test_steps_micro_batched_go_on(pool: LocalProcesses) -> None:
    plan = carried.plan_of("mlp", {"micro_batches": 4}, 1)
    table = fewest_bytes(plan.transfer_schedule.trace, max(plan.transfer_schedule.trace.needed_bytes))
    assert any("gradients" in name for entry in table.entries for name in entry.fetch)  # sums leave and come back
    pool.run(carried.goes_on_micro_batched, replace(plan, transfer_schedules=(table,)).to_dict(), ranks=1)


@pytest.mark.parametrize("pin, ranks", [({"data": 2, "zero": 3, "micro_batches": 2}, 2), ({"pipeline": 2}, 2)], ids=str)
def test_a_plan_micro_batched_is_verified(pin: dict[str, Any], ranks: int) -> None:
    model, batch = carried.model_of("mlp")
    assert autopar.verify(model, carried.plan_of("mlp", pin, ranks), example_kwargs=batch)


@pytest.mark.parametrize(
    "name, pin",
    [
        ("gpt2", {}),
        ("gpt2", {"offload": "host"}),
        ("t5", {}),
        ("t5", {"offload": "host"}),
        ("shared-layers", {"offload": "host", "update": "backward", "activations": "all"}),
    ],
    ids=str,
)
def test_one_rank_computes_the_same_bits(pool: LocalProcesses, name: str, pin: dict[str, Any]) -> None:
    model, batch = carried.model_of(name, torch.float32)
    cluster = ClusterSpec.local(1, memory_bytes="1 GiB", cores=2, host_memory_bytes="1 GiB")
    plan = autopar.plan(model, cluster, example_kwargs=batch, pin=pin)
    pool.run(carried.is_bit_equal, name, plan.to_dict(), ranks=1)


def test_micro_batches_add_up_the_same_bits(pool: LocalProcesses) -> None:
    model, batch = carried.model_of("gpt2", torch.float32)
    cluster = ClusterSpec.local(1, memory_bytes="1 GiB", cores=2, host_memory_bytes="1 GiB")
    pins: list[dict[str, Any]] = [{"micro_batches": 2, "offload": "host"}, {"micro_batches": 2}]
    moving, plain = (autopar.plan(model, cluster, example_kwargs=batch, pin=pin) for pin in pins)
    tight = fewest_bytes(moving.transfer_schedule.trace, max(moving.transfer_schedule.trace.needed_bytes))
    documents = replace(moving, transfer_schedules=(tight,)).to_dict(), plain.to_dict()
    pool.run(carried.adds_up_as_without, "gpt2", *documents, ranks=1)


def test_what_goes_to_the_host_by_itself_trains_as_the_original(pool: LocalProcesses) -> None:
    """Nothing is pinned, and nothing fits on the device; by a plan from a file, and by one of its own."""
    model, batch = carried.model_of("mlp")
    needed = max(carried.plan_of("mlp", {}, 1).transfer_schedule.trace.needed_bytes)
    cluster = ClusterSpec.local(1, memory_bytes=int(1.3 * needed / 0.9), cores=2, host_memory_bytes="1 GiB")
    plan = autopar.plan(model, cluster, example_kwargs=batch)
    assert plan.offload == "auto" and not plan.pin
    assert autopar.evaluate(model, Plan.from_dict(plan.to_dict()), example_kwargs=batch).predicted == plan.predicted
    pool.run(carried.trains_as_planned, "mlp", plan.to_dict(), ranks=1)
    pool.run(carried.goes_by_itself, cluster.to_dict(), ranks=1)


def test_models_that_do_not_train_are_carried_too(pool: LocalProcesses) -> None:
    model, batch = carried.model_of("mlp")
    cluster = ClusterSpec.local(1, memory_bytes="1 GiB", cores=2, host_memory_bytes="1 GiB")
    plan = autopar.plan(model.eval(), cluster, example_kwargs=batch, pin={"offload": "host"})
    pool.run(carried.runs_in_eval, "mlp", plan.to_dict(), ranks=1)


def test_what_does_not_fit_is_refused(pool: LocalProcesses) -> None:
    pool.run(carried.refuses_what_does_not_fit, carried.plan_of("mlp", {}, 1).to_dict(), ranks=1)


HELD: list[tuple[str, dict[str, Any], int]] = [
    ("gpt2", {}, 1),
    ("llama", {}, 1),
    ("gpt2", {"micro_batches": 2}, 1),
    ("llama", {"pipeline": 2, "micro_batches": 4}, 2),
]


@pytest.mark.parametrize("name, pin, ranks", HELD, ids=str)
def test_the_device_holds_what_was_planned(pool: LocalProcesses, name: str, pin: dict[str, Any], ranks: int) -> None:
    found = carried.plan_of(name, pin, ranks)
    tight = carried.plan_of(name, pin, ranks, memory_bytes=int(found.predicted.peak_bytes))
    for seen, planned in pool.run(carried.holds_no_more_than_planned, name, tight.to_dict(), ranks=ranks):
        assert planned * 0.85 <= seen <= planned * 1.05


# ---- chunks by themselves --------------------------------------------------------------------------------------------


def chunk(budget_bytes: int = 1024) -> Parameters:
    cpu = torch.device("cpu")
    made = Parameters("parameters a", 128, {"weight": 0, "bias": 64}, cpu, Arena(budget_bytes), CopyEngine(cpu))
    made.keep("weight", torch.arange(8.0))
    made.keep("bias", torch.arange(4.0))
    return made


@given(st.lists(st.sampled_from([*ACTIONS]), max_size=12))
def test_only_legal_transitions_happen(actions: list[str]) -> None:
    like = {"weight": torch.zeros(8), "bias": torch.zeros(4)}
    arena, done = Arena(1024), []
    made = Gradients("gradients a", like, arena, CopyEngine(torch.device("cpu")))
    state = "home"
    for action in actions:
        if action in ("fetch", "fetched"):
            continue  # gradients are never fetched
        before, after = ACTIONS[action]
        if state != before:
            with pytest.raises(
                TransferScheduleError, match=rf"{action} gradients a .* it is {state}, not {before}; last: "
            ):
                made.act(action, "a moment")
        else:
            made.act(action, "a moment")
            state = after
            done.append(action)
        assert made.state == state
        assert arena.held_bytes == (0 if state == "home" else 48)
    assert made.told.count("on entering a moment") == min(len(done), 8)


def test_parameters_come_and_go() -> None:
    made = chunk()
    with pytest.raises(
        TransferScheduleError, match="forward uses parameters a, which is home, not resident; last: nothing"
    ):
        made.check_present("forward")
    for _ in range(2):
        made.act("fetch", "forward")
        made.act("fetched", "forward")
        weight, bias = made.values()
        assert torch.equal(weight, torch.arange(8.0)) and torch.equal(bias, torch.arange(4.0))
        version = weight._version
        made.act("drop", "backward")
        made.act("fetch", "backward")
        assert weight._version == version and torch.equal(weight, torch.arange(8.0))
        made.act("fetched", "backward")
        made.act("drop", "update")
        assert weight.untyped_storage().nbytes() == 0
    assert made.engine.bytes_moved == {"fetch": 4 * 128}
    assert made.arena.high_water_bytes == 128 and made.arena.held_bytes == 0


def test_gradients_take_turns_in_memories_at_home() -> None:
    """The smallest that is free, once what holds one is over, and none where somebody keeps them all."""
    held: list[torch.Tensor] = []

    def ends() -> bool:
        return bool(held) and held.pop(0) is not None

    homes = Homes((64, 32, 32), CopyEngine(torch.device("cpu")), "gradients", ends)
    for size in (16, 32, 32):
        found = homes.take(size)
        held.append(found[:1])
        del found
    assert [each.untyped_storage().nbytes() for each in held] == [32, 32, 64]
    first, last = held[0].data_ptr(), held[2].data_ptr()
    found = homes.take(32)
    assert found is not None and found.data_ptr() == first and len(held) == 2
    held.append(found[:1])
    del found
    found = homes.take(48)  # only one is as large
    assert found is not None and found.data_ptr() == last and len(held) == 1
    kept = [found[:1], held[0]]
    held.clear()
    del found
    third = homes.take(8)
    assert third is not None and third.data_ptr() not in (first, last)
    kept.append(third[:1])
    del third
    assert homes.take(8) is None and len(homes._made) == 3


def test_an_arena_is_never_over_its_budget() -> None:
    made = chunk(budget_bytes=150)
    made.arena.enter(beside_bytes=40)
    with pytest.raises(
        TransferScheduleError,
        match=r"fetch parameters a on entering forward, which takes 128 bytes: .* 18 bytes more than its 150 bytes",
    ):
        made.act("fetch", "forward")
    assert made.state == "home" and made.arena.held_bytes == 0
    made.arena.enter(beside_bytes=22)
    made.act("fetch", "forward")
    assert made.arena.high_water_bytes == 150


def test_a_device_that_runs_full_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be fetched is still at home, and takes nothing of the device."""
    made = chunk(budget_bytes=128)

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(made.engine, "start", fails)
        with pytest.raises(torch.OutOfMemoryError):
            made.act("fetch", "forward")
    assert made.state == "home" and made.arena.held_bytes == 0
    made.act("fetch", "forward")
    made.act("fetched", "forward")
    assert torch.equal(made.values()[0], torch.arange(8.0)) and made.arena.held_bytes == 128


@pytest.mark.parametrize("micro_batched", [False, True])
def test_gradients_that_could_not_move_are_where_they_were(
    monkeypatch: pytest.MonkeyPatch, micro_batched: bool
) -> None:
    """The disk fails each time once; what is made then adds up to what had arrived."""
    parameters = chunk()
    parameters.act("fetch", "forward")
    kind = functools.partial(Sums, parameters=parameters) if micro_batched else Gradients
    made = kind("gradients a", parameters.kept, arena=Arena(1024), engine=parameters.engine)

    def acts(action: str) -> None:
        if action in ("fetch", "evict"):
            state, was_empty, arrived = made.state, made.is_empty, [*made._arriving]
            with monkeypatch.context() as failing:
                failing.setattr(made.engine, "start", Mock(side_effect=DiskError("full")))
                with pytest.raises(DiskError):
                    made.act(action, "backward")
            assert (made.state, made.is_empty, [*made._arriving]) == (state, was_empty, arrived)
        made.act(action, "backward")

    again = ("fetch", "fetched") if micro_batched else ("make",)  # sums come back for what is added to them
    for grad, actions in ((1.0, ("make",)), (2.0, again)):
        for action in actions:
            acts(action)
        made.made({"weight": torch.full((8,), grad), "bias": None})
        acts("evict")
        acts("evicted")
    found = made.take()
    assert found.keys() == {"weight"} and torch.equal(found["weight"], torch.full((8,), 3.0))
