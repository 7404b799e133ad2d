"""What ranks of ``test_processes`` do that come and go, and the run that goes on meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import autopar
from autopar.checkpoint import exchange, live
from planner.base.errors import CheckpointError
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan

BATCH, WIDTH = 12, 24
FOUR: dict[str, Any] = {"data": 2, "tensor": 2, "zero": 3, "pipeline": 1, "recompute": "none"}
THREE: dict[str, Any] = {"data": 3, "zero": 3, "pipeline": 1, "recompute": "none"}
STAGED: dict[str, Any] = {"pipeline": 2, "data": 2, "zero": 1, "micro_batches": 2, "recompute": "none"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks, a buffer that is saved, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, 6)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5, 3.0]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return ((self.head(x) * self.scale - y) ** 2).mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def example() -> tuple[Tensor, Tensor]:
    return torch.zeros(BATCH, WIDTH).double(), torch.zeros(BATCH, 6).double()


@cache
def data() -> TensorDataset:
    """Five global batches, and a few samples more."""
    generator = torch.Generator().manual_seed(7)
    values = (torch.randn(64, size, generator=generator, dtype=torch.float64) for size in (WIDTH, 6))
    return TensorDataset(*values)


def cluster(ranks: int) -> ClusterSpec:
    return ClusterSpec.local(ranks, memory_bytes="1 GiB", cores=4)


def plan_of(ranks: int, pin: Mapping[str, Any]) -> Plan:
    options = {"optimizer_bytes_per_element": 16, "time_limit_s": 5.0}  # moments in float64
    return autopar.plan(net(), cluster(ranks), example_args=example(), pin=pin, **options)


class Run:
    """A model under a plan, or the original, with AdamW, a schedule, and the position in the data."""

    def __init__(self, document: Mapping[str, Any] | None = None):
        self.model = net()
        if document is not None:
            plan = Plan.from_dict(document)
            self.model = autopar.parallelize(self.model, plan.cluster, plan=plan, example_args=example())
            self.optimizer = self.model.optimizer(torch.optim.AdamW, lr=1e-2)
            self.loader: Any = self.model.dataloader(data(), shuffle=True, seed=3)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            self.loader = _Alone()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    @property
    def extra(self) -> dict[str, Any]:
        return {"loader": self.loader, "schedule": self.schedule}

    def steps(self, count: int) -> list[float]:
        """Losses of so many steps, over the end of an epoch."""
        found: list[float] = []
        while len(found) < count:
            for part in self.loader:
                found.append(self.step(part))
                if len(found) == count:
                    break
        return found

    def step(self, part: Any) -> float:
        """Its loss."""
        self.optimizer.zero_grad()
        loss = self.model(*part)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()  # type: ignore[no-any-return]

    def bits(self) -> dict[str, Any]:
        """All that this rank holds of it, by name."""
        found: dict[str, Any] = {name: _local(value) for name, value in self.model.state_dict().items()}
        state = self.optimizer.state_dict()
        for number, of_parameter in state["state"].items():
            found |= {f"{number}.{key}": _local(value) for key, value in of_parameter.items()}
        found |= {"groups": state["param_groups"], "random": vars(self.model.state.random)}  # type: ignore[union-attr]
        return found | {"extra": [each.state_dict() for each in self.extra.values()]}


class _Alone:
    """The same batches in one process."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Any:
        order = torch.randperm(len(data()), generator=torch.Generator().manual_seed(3 + self.epoch))
        self.epoch += 1
        for at in range(0, len(order) - BATCH + 1, BATCH):
            yield data()[order[at : at + BATCH]]


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def alike(one: Run, other: Run) -> None:
    """To the bit, whatever it is."""
    mine, theirs = one.bits(), other.bits()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name]
        assert same, name


def regroup(store: str, members: Sequence[int], rank: int) -> None:
    """Processes form another group; those that are no members of it are alone."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank in members:
        place = {"rank": members.index(rank), "world_size": len(members), "timeout": timedelta(seconds=60)}
        dist.init_process_group("gloo", init_method=f"file://{store}", **place)


def reshards(documents: Sequence[Mapping[str, Any]], directory: str) -> dict[str, Any]:
    """4 ranks, then 3 of them, then these and another one: by memory as by checkpoints, to the bit.

    Returns:
        All losses, bytes that this rank sent at the first change, and seconds of both ways.
    """
    rank, sent = dist.get_rank(), list[int]()
    four, three, staged = documents
    run = Run(four)
    losses = run.steps(3)
    path = f"{directory}/checkpoint"
    autopar.save_checkpoint(path, run.model, run.optimizer, extra=run.extra)
    alone = autopar.hold(run.model, run.optimizer, extra=run.extra)
    held = autopar.hold(run.model, run.optimizer, extra=run.extra, leaving=[1])
    regroup(f"{directory}/three", [0, 2, 3], rank)
    seconds = dict[str, float]()
    if rank != 1:
        run, other = Run(three), Run(three)
        start = time.monotonic()
        autopar.reshard(held, run.model, run.optimizer, extra=run.extra)
        seconds["live"] = time.monotonic() - start
        start = time.monotonic()
        autopar.load_checkpoint(path, other.model, other.optimizer, extra=other.extra)
        seconds["checkpoint"] = time.monotonic() - start
        alike(run, other)
        other.steps(1)
        with pytest.raises(CheckpointError, match=r"tensors, .* are held by no rank: give a checkpoint of the same"):
            autopar.reshard(alone, other.model, other.optimizer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live, "exchange", lambda *args: sent.append(exchange.exchange(*args)))
            autopar.reshard(alone, other.model, other.optimizer, extra=other.extra, checkpoint=path)
        alike(run, other)
        losses += run.steps(3)
        with pytest.raises(CheckpointError, match=r"different moments: give what one call"):
            autopar.reshard(held if dist.get_rank() else alone, other.model, other.optimizer)
        later = autopar.hold(run.model, run.optimizer, extra=run.extra)
        with pytest.raises(CheckpointError, match=r"is of another moment than what ranks hold: .* values differ"):
            autopar.reshard(later, other.model, other.optimizer, checkpoint=path)
        autopar.save_checkpoint(path, run.model, run.optimizer, extra=run.extra)
    else:
        later, losses = None, []
    regroup(f"{directory}/four", [0, 2, 3, 1], rank)
    run, other = Run(staged), Run(staged)
    autopar.reshard(later, run.model, run.optimizer, extra=run.extra)
    autopar.load_checkpoint(path, other.model, other.optimizer, extra=other.extra)
    alike(run, other)
    losses += run.steps(3)
    return {"losses": losses, "sent": sent, **seconds}
