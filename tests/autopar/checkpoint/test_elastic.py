"""A run under torchrun's elastic launch whose ranks are killed, come and go, beside one that nothing disturbs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from autopar.checkpoint import live
from autopar.checkpoint.exchange import Region, Transfer, exchange
from autopar.checkpoint.parts import Box
from autopar.checkpoint.together import Ranks
from planner.base.errors import CheckpointError, InputError
from tests.autopar import elastic, elastic_agents
from tests.autopar.elastic_agents import EVERY, STEPS

ROOT = Path(__file__).parents[3]


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_a_run_goes_on_with_whatever_ranks_there_are(tmp_path: Path) -> None:
    for ranks, pin in ((4, elastic.FOUR), (3, elastic.THREE)):
        elastic.plan_of(ranks, pin).save(tmp_path / f"{ranks}.json")
    seed = int(time.time())
    ours = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    program = [sys.executable, elastic_agents.__file__, str(tmp_path), str(seed)]
    result = subprocess.run(program, cwd=ROOT, env={**os.environ, **ours}, capture_output=True, text=True)
    assert result.returncode == 0, f"seed {seed}: {result.stderr[-4000:]}"
    lines = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
    whole = elastic.Run().steps(STEPS)
    assert {line["step"] for line in lines} == {*range(STEPS)}
    for line in lines:
        assert line["loss"] == pytest.approx(whole[line["step"]], rel=1e-6), f"seed {seed}: {line}"
    worlds = [line["ranks"] for line in lines]
    assert worlds[0] == worlds[-1] == 4 and 3 in worlds, f"seed {seed}: {worlds}"
    again = [one["step"] + 1 - other["step"] for one, other in pairwise(lines)]
    assert all(0 <= steps <= EVERY for steps in again), f"seed {seed}: no more than since the last checkpoint: {again}"
    came = [steps for steps, change in zip(again, pairwise(worlds), strict=True) if change == (3, 4)]
    assert set(came) == {0}, f"seed {seed}: SIGTERM saves"


def small(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module with a weight of two names, and an optimizer with state."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=value)
    torch.manual_seed(int(value))
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_one_process_reshards_from_what_it_holds() -> None:
    model, optimizer = small(1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    held = autopar.hold(model, optimizer, extra={"schedule": schedule, "step": 3})
    other, another = small(2.0)
    into = torch.optim.lr_scheduler.StepLR(another, 5)
    assert autopar.reshard(held, other, another, extra={"schedule": into})["step"] == 3
    assert into.state_dict() == schedule.state_dict()
    for mine, theirs in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(
        another.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


class Machines(Ranks):
    """All ranks of machines with so many each, in this process."""

    here = (4, 3)

    @property
    def size(self) -> int:
        return sum(self.here)

    def each(self, task: str, make: Callable[[], Any]) -> list[Any]:
        """What ``make`` returns where torchrun has said how many ranks are on the machine."""
        found = []
        for count in self.here:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LOCAL_WORLD_SIZE", str(count))
                found += [make()] * count
        return found


@pytest.mark.parametrize("here, near", [((4, 3), 1), ((4, 2), 2), ((4, 4), 4)])
def test_ranks_agree_on_who_is_near(here: tuple[int, ...], near: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank works out who sends: one that is told of 3 neighbours must not wait for whom others do not choose."""
    monkeypatch.setattr(Machines, "here", here)
    for count in here:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
        assert live._spans(Machines(), live.RESHARDING) == (near, sum(here))


@pytest.mark.parametrize("rank, messages", [(0, 1), (2, 0)])
def test_all_ranks_of_a_new_group_meet_before_some_exchange_messages(
    rank: int, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str) -> None:
        call = getattr(dist, name)
        monkeypatch.setattr(dist, name, lambda *args, **kwargs: (calls.append(name), call(*args, **kwargs))[1])

    noted("all_reduce"), noted("batch_isend_irecv")
    whole, values = Region((0,), (4,)), torch.ones(4)
    held = {"w": [(Box((0,), (4,), (0,)), values)]} if rank == 0 else {}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        found, way = [Transfer("w", 0, 1, whole)], (dist.group.WORLD, torch.device("cpu"))
        assert exchange(found, held, {}, {"w": values.dtype}, rank, *way) == messages * values.nbytes
    finally:
        dist.destroy_process_group()
    assert calls == ["all_reduce", *["batch_isend_irecv"] * messages]


def test_what_cannot_be_resharded_says_so() -> None:
    model, optimizer = small(1.0)
    held = autopar.hold(model, optimizer)
    with pytest.raises(CheckpointError, match=r"no rank holds anything: go on with autopar\.load_checkpoint"):
        autopar.reshard(None, model, optimizer)
    with pytest.raises(CheckpointError, match=r"held is of type dict: give what autopar.hold returned"):
        autopar.reshard({}, model, optimizer)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"the state that ranks hold lacks 2 tensors of the module, '3.weight'"):
        autopar.reshard(held, nn.Sequential(*model, nn.Linear(4, 4)))
    with pytest.raises(CheckpointError, match=r"0.weight has shape \(4, 4\) in the checkpoint, \(6, 4\) in"):
        autopar.reshard(held, nn.Sequential(nn.Linear(4, 6)))
    with pytest.raises(CheckpointError, match=r"leaving is \[0\], and there are ranks 0 to 0: name some of them"):
        autopar.hold(model, optimizer, leaving=[0])
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        autopar.reshard(autopar.hold(model), model, optimizer)


def run_of(path: Path, value: float, batches: int = 6) -> autopar.ElasticRun:
    model, optimizer = small(value)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8 * batches, 4)), batch_size=8)
    loader.state_dict, loader.load_state_dict = dict, lambda state: None  # type: ignore[attr-defined]
    return autopar.ElasticRun(path, model, optimizer, loader, every=4)


def test_sigterm_saves_when_the_step_is_over(tmp_path: Path) -> None:
    run, before = run_of(tmp_path, 1.0), signal.getsignal(signal.SIGTERM)

    def killed() -> None:
        for _ in run.steps(20):
            if run.step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"):
        killed()
    assert signal.getsignal(signal.SIGTERM) == before
    again = run_of(tmp_path, 2.0)
    assert again.step == 7
    assert [again.step for _ in again.steps(9)] == [7, 8] and run_of(tmp_path, 2.0).step == 9
    assert [*again.steps(9)] == []


def test_a_run_that_cannot_be_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="every is 0: give a number of steps"):
        autopar.ElasticRun(tmp_path, *small(1.0), [], every=0)
    with pytest.raises(CheckpointError, match=r"extra has \['loader'\], which a run saves by itself"):
        autopar.ElasticRun(tmp_path, *small(1.0), [], every=1, extra={"loader": 1})
    run = autopar.ElasticRun(tmp_path / "none", *small(1.0), [], every=1)
    with pytest.raises(InputError, match="the loader has no batch"):
        [*run.steps(1)]
    with pytest.raises(InputError, match=r"until is 1.5"):
        [*run.steps(1.5)]  # type: ignore[arg-type]
    model, _ = small(1.0)
    autopar.save_checkpoint(tmp_path, nn.Sequential(*model, nn.Linear(4, 4)), extra={"loader": {}, "step": 1})
    with pytest.raises(CheckpointError, match=r"another model|without an optimizer"):
        run_of(tmp_path, 1.0)
