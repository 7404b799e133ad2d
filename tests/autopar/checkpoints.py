"""What the ranks of ``test_processes`` do with checkpoints, and the run of which they are made."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.checkpoint import files, save
from autopar.runtime.module import ParallelModule
from autopar.verification.float64 import exact
from planner.base.errors import CheckpointError
from tests.autopar.workers import batch_of, loss_of, model_of, parallel


class Run:
    """A model, AdamW with no decay on biases and norms, and a schedule of its rate."""

    def __init__(self, model: nn.Module, name: str, dtype: torch.dtype = torch.float64):
        self.model, self.name, self.dtype = model, name, dtype
        others = {name: p for name, p in model.named_parameters() if p.ndim <= 1}
        options: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
        if isinstance(model, ParallelModule):
            groups = [{"params": [*others], "weight_decay": 0.0}]
            self.optimizer = model.optimizer(torch.optim.AdamW, groups, **options)
        else:
            matrices = [p for p in model.parameters() if p.ndim > 1]
            by_hand = [{"params": matrices}, {"params": [*others.values()], "weight_decay": 0.0}]
            self.optimizer = torch.optim.AdamW(by_hand, **options)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)

    def steps(self, seeds: range) -> list[float]:
        """Losses of these steps."""
        found = []
        for seed in seeds:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, batch_of(self.name, seed, self.dtype))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
            found.append(loss.item())
        return found

    def save(self, path: str, **options: Any) -> Any:
        extra = {"scheduler": self.scheduler, "step": 3}
        return autopar.save_checkpoint(path, self.model, self.optimizer, extra=extra, **options)

    def load(self, path: str) -> None:
        found = autopar.load_checkpoint(path, self.model, self.optimizer, extra={"scheduler": self.scheduler})
        assert found["step"] == 3


@exact()
def begins(name: str, document: Mapping[str, Any], path: str) -> list[float]:
    """Three steps, a checkpoint in the background, two more steps."""
    run = Run(parallel(model_of(name), document, batch_of(name)), name)
    run.steps(range(3))
    saving = run.save(path, wait=False)
    losses = run.steps(range(3, 5))
    saving.wait()
    assert saving.done
    return losses


@exact()
def goes_on(name: str, document: Mapping[str, Any], path: str) -> list[float]:
    """The last two steps, from the checkpoint, in a module and an optimizer that had other values."""
    run = Run(parallel(model_of(name), document, batch_of(name)), name)
    run.steps(range(7, 8))
    run.load(path)
    return run.steps(range(3, 5))


@exact()
def goes_on_alone(name: str, path: str) -> list[float]:
    """The same in the original model, in one process; then a checkpoint of that, in turn."""
    run = Run(model_of(name), name)
    run.steps(range(7, 8))
    run.load(path)
    return run.steps(range(3, 5))


def goes_on_to_the_bit(name: str, document: Mapping[str, Any], path: str) -> dict[str, Tensor]:
    """In float32, with dropout: losses and parameters after a restart are those without one. Returns what was saved."""

    def new() -> Run:
        model = model_of(name, 0.2, torch.float32)
        batch = batch_of(name, dtype=torch.float32)
        return Run(parallel(model, document, batch), name, torch.float32)

    run = new()
    run.steps(range(3))
    run.save(path)
    saved = run.model.full_state_dict()  # type: ignore[operator]
    losses = run.steps(range(3, 5))
    again = new()
    again.load(path)
    assert again.steps(range(3, 5)) == losses
    for key, value in run.model.state_dict().items():
        mine = again.model.state_dict()[key]
        locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in (mine, value)]
        assert torch.equal(*locals_), key
    return saved


def raises(error: Exception) -> None:
    """For a lambda."""
    raise error


class Fussy:
    """Takes no state."""

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("not on rank 1")


def fails_together(name: str, document: Mapping[str, Any], path: str) -> None:
    """What goes wrong on one rank is an error on all; what is wrong with the files changes nothing."""
    run = Run(parallel(model_of(name), document, batch_of(name)), name)
    run.steps(range(1))
    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match=r"ranks save to different paths.*/one"):
        run.save(f"{path}/{'one' if rank else 'two'}")
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(save, "_on_host", lambda todo: raises(MemoryError("of rank 1")))
        with pytest.raises(
            CheckpointError, match=r"rank 1 failed while saving the checkpoint .*/one': MemoryError: of rank 1"
        ):
            run.save(f"{path}/one", wait=False)
    dist.barrier()
    assert not list(Path(path).glob("*/save-*"))
    full = run.model.full_state_dict()
    run.save(path)
    dist.barrier()
    files = sorted(Path(path).glob("save-*/*.distcp"))
    assert len(files) == dist.get_world_size()
    run.steps(range(1, 2))
    before = run.model.full_state_dict()
    if rank == 0:
        content = bytearray(files[-1].read_bytes())
        content[len(content) // 2] ^= 1
        files[-1].write_bytes(content)
    dist.barrier()
    with pytest.raises(CheckpointError, match=rf"{files[-1].name}' is damaged: its checksum is"):
        run.load(path)
    after = run.model.full_state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(not torch.equal(before[key], full[key]) for key in before)
    run.save(path)
    with pytest.raises(
        CheckpointError, match=r"rank 1 failed while loading the checkpoint .*RuntimeError: not on rank 1"
    ):
        autopar.load_checkpoint(path, run.model, run.optimizer, extra={"scheduler": Fussy() if rank else run.scheduler})


class Killer:
    """Kills this process at the n-th of the moments around what a save does to files."""

    def __init__(self, moment: int):
        self.left = moment

    def tick(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def around(self, owner: Any, name: str, every: int = 1) -> None:
        done: Callable[..., Any] = getattr(owner, name)
        calls = itertools.count()

        def watched(*args: Any, **kwargs: Any) -> Any:
            counts = not next(calls) % every
            if counts:
                self.tick()
            result = done(*args, **kwargs)
            if counts:
                self.tick()
            return result

        setattr(owner, name, watched)

    def watch(self) -> None:
        for owner, name in ((os, "fsync"), (os, "replace"), (shutil, "rmtree"), (Path, "mkdir"), (Path, "open")):
            self.around(owner, name)
        self.around(files._Summed, "write", every=100)


def small(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer whose every number says when they were saved."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.5)
    for tensor in model.state_dict().values():
        tensor.fill_(value)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return model, optimizer


def value_at(path: str) -> float:
    """The number of which a checkpoint of :func:`small` is full."""
    model, optimizer = small(0.0)
    value = autopar.load_checkpoint(path, model, optimizer)["value"]
    found = [*model.state_dict().values(), *(optimizer.state[p]["momentum_buffer"] for p in model.parameters())]
    assert all((tensor == value).all() for tensor in found)
    assert optimizer.param_groups[0]["lr"] == value
    return float(value)


def save_small(path: str, value: float, wait: bool = True) -> Any:
    return autopar.save_checkpoint(path, *small(value), extra={"value": value}, wait=wait)


def survives_kills(path: str) -> list[float]:
    """The value that is loaded after a kill at each moment of a save that replaces 1 by 2, with micro-batches at once
    or beside.

    For a process that has no threads, since a process that is forked to be killed has but one of them.
    """
    found = []
    status = -1
    while status:
        shutil.rmtree(path, ignore_errors=True)
        save_small(path, 1.0)
        child = os.fork()
        if not child:
            try:
                Killer(len(found)).watch()
                save_small(path, 2.0, wait=len(found) % 2 == 0).wait()
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), "the save failed"
        found.append(value_at(path))
        if len(found) % 5 == 0:
            save_small(path, 3.0)
            assert value_at(path) == 3.0
            assert len(list(Path(path).glob("save-*"))) == 1, "what the killed save left was not removed"
    return found


def loses_a_rank_while_saving(path: str) -> float:
    """Rank 1 is killed before it has written; rank 0 says that the checkpoint was not saved."""
    torch.manual_seed(0)
    save_small(path, 1.0)
    if dist.get_rank() == 1:
        Killer(1).around(files._Summed, "write")
    saving = save_small(path, 2.0, wait=False)
    with pytest.raises(CheckpointError, match="was not saved"):
        saving.wait()
    return 1.0
