"""Room: machines and devices that have less than a plan takes of them are refused, before anything is taken."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.runtime.host.memory_check import Room, check
from planner.base import host
from planner.base.errors import InfeasibleError, PlanError
from planner.cost.cluster import ClusterSpec
from tests.autopar.carried import model_of, plan_of

GIB = 2**30


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_ranks_share_the_memory_of_their_machine() -> None:
    ranks = [Room(name, "cpu", 0, None, 0, size * GIB, 10 * GIB) for name, size in (("a", 4), ("a", 6), ("b", 10))]
    check(ranks)
    with pytest.raises(
        InfeasibleError, match=r"11,811,160,064 bytes \(11.0 GiB\) of the memory of 'a' for its 2 ranks, which has"
    ) as caught:
        check([*ranks[1:], Room("a", "cpu", 0, None, 0, 5 * GIB, 10 * GIB)])
    assert caught.value.excess_bytes == GIB


def test_a_device_that_has_less_left_is_named() -> None:
    ranks = [Room("a", f"cuda:{rank}", 6 * GIB, (8 - rank) * GIB, GIB, 0, GIB) for rank in range(3)]
    check(ranks)
    with pytest.raises(
        InfeasibleError,
        match=r"takes 6,442,450,944 bytes .* cuda:3 of rank 3 has 5,368,709,120 bytes \(5.0 GiB\) left"
        r" for it, beside 1,073,741,824 bytes \(1.0 GiB\) of tensors that are there: if the model is, give it",
    ) as caught:
        check([*ranks, Room("a", "cuda:3", 6 * GIB, 5 * GIB, GIB, 0, GIB)])
    assert caught.value.excess_bytes == GIB


def test_a_host_tier_larger_than_the_machine_is_refused_and_nothing_lost(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = model_of("mlp")
    plan, before = plan_of("mlp", {}, 1), {name: value.clone() for name, value in model.state_dict().items()}
    held = 8 + 8 + 8  # a parameter, its gradient, and two moments that are counted as float32
    needed = plan.transfer_schedule.high_water_bytes + held * sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(host, "memory_bytes", lambda: needed // 2)
    with pytest.raises(InfeasibleError, match="less than the cluster says: plan for what is there") as caught:
        autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch)
    told = int(re.search(r"take ([\d,]+) bytes", str(caught.value)).group(1).replace(",", ""))  # type: ignore[union-attr]
    assert needed <= told <= needed + 64 * len(before)  # parameters are aligned
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    monkeypatch.setattr(host, "memory_bytes", lambda: told)
    autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch)


def test_a_plan_for_larger_devices_is_refused() -> None:
    model, batch = model_of("mlp")
    plan = autopar.plan(model, ClusterSpec.local(1, "1 GiB", cores=2), example_kwargs=batch)
    usable = plan.predicted.peak_bytes - 1
    small = ClusterSpec.local(1, memory_bytes=int(usable / 0.9), cores=2)
    with pytest.raises(
        PlanError, match=rf"the plan takes {plan.predicted.peak_bytes:,} bytes .* can use [\d,]+ bytes .*: plan again"
    ):
        autopar.parallelize(model, small, plan=plan, example_kwargs=batch)
