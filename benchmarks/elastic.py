"""Moving a training run from 4 processes to 3: from memory, and through a checkpoint, in the same run.

Both begin with a module under the old plan, and end with one under the new plan that can train. The modules are made
before, and what both have in common, the new process group, is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.checkpoint import exchange, live
from autopar.measure.local_processes import LocalProcesses
from planner.cost.cluster import ClusterSpec
from planner.plan.moving.bill import moving_bill
from planner.plan.plan import Plan

WIDTH, LAYERS, BATCH, LOST = 768, 6, 12, 2
RANKS = 4, 3
SHARDED: dict[str, Any] = {"zero": 3, "pipeline": 1, "micro_batches": 1, "recompute": "none"}


@dataclass(frozen=True)
class MovingRun:
    """One change of the ranks.

    Attributes:
        state_bytes: of parameters and optimizer state, once.
        sent_bytes: by all ranks together in ``reshard``, what ``hold`` had given them of the rank that leaves included.
        live_s: seconds of ``hold`` and ``reshard`` on the slowest rank.
        hold_s: of these, what emptying the rank that leaves takes.
        save_s, load_s: of a checkpoint instead.
    """

    state_bytes: int
    sent_bytes: int
    hold_s: float
    live_s: float
    save_s: float
    load_s: float


class Layers(nn.Module):
    """Linear layers with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.back = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.layers, self.back, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


def plan_of(ranks: int) -> Plan:
    """Sharded over the data ranks."""
    cluster = ClusterSpec.local(ranks, memory_bytes="2 GiB", cores=2)
    example = (torch.zeros(BATCH, WIDTH),)
    return autopar.plan(Layers(), cluster, example_args=example, pin={**SHARDED, "data": ranks}, time_limit_s=10)


def made(document: Mapping[str, Any]) -> tuple[Any, Any]:
    """A module under a plan, and its optimizer."""
    plan = Plan.from_dict(document)
    torch.manual_seed(0)
    module = autopar.parallelize(Layers(), plan.cluster, plan=plan, example_args=(torch.zeros(BATCH, WIDTH),))
    return module, module.optimizer(torch.optim.AdamW, lr=1e-3)


def moves(documents: Sequence[Mapping[str, Any]], directory: str, times: int) -> list[dict[str, float]]:
    """What one rank sees of so many changes; every rank but the one that leaves takes part in the second half."""
    return [seen for number in range(times) if (seen := _move(documents, directory, number)) is not None]


def _move(documents: Sequence[Mapping[str, Any]], directory: str, number: int) -> dict[str, float] | None:
    module, optimizer = made(documents[0])
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    module(*module.shard((x,))).backward()
    optimizer.step()
    path, world, seen = f"{directory}/checkpoint", dist.get_rank(), dict[str, float]()
    _, seen["save_s"] = _timed(partial(autopar.save_checkpoint, path, module, optimizer))
    held, seen["hold_s"] = _timed(partial(autopar.hold, module, optimizer, leaving=[LOST]))
    _regroup(f"{directory}/three{number}", [rank for rank in range(RANKS[0]) if rank != LOST], world)
    if world != LOST:
        new, stepped = made(documents[1])
        with mock.patch.object(live, "exchange", side_effect=exchange.exchange) as carried:
            _, seen["reshard_s"] = _timed(partial(autopar.reshard, held, new, stepped))
        seen["sent_bytes"] = _sent_bytes(carried)
        _, seen["load_s"] = _timed(partial(autopar.load_checkpoint, path, new, stepped))
    _regroup(f"{directory}/four{number}", [*range(RANKS[0])], world)
    return None if world == LOST else seen


def _sent_bytes(carried: mock.Mock) -> int:
    """What this rank sent, of the transfers that it was given."""
    (found, _, _, dtypes, rank, *_), _ = carried.call_args
    sent = (each for each in found if each.source == rank != each.target)
    return sum(math.prod(each.region.sizes) * dtypes[each.name].itemsize for each in sent)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and how long it takes until all ranks are done."""
    dist.barrier()
    start = time.monotonic()
    found = work()
    dist.barrier()
    return found, time.monotonic() - start


def _regroup(store: str, members: Sequence[int], rank: int) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank in members:
        patience = timedelta(seconds=120)
        dist.init_process_group("gloo", f"file://{store}", patience, len(members), members.index(rank))


def runs(folder: Path, times: int = 4) -> list[MovingRun]:
    """So many changes, the first of which warms up."""
    plans = [plan_of(ranks) for ranks in RANKS]
    bill = moving_bill(plans[0], plans[1], [rank for rank in range(RANKS[0]) if rank != LOST])
    with LocalProcesses(RANKS[0], ("torch", "autopar.driver.parallelize"), timeout_s=120) as processes:
        ranks = processes.run(moves, [plan.to_dict() for plan in plans], str(folder), times)
    staying = [ranks[rank] for rank in range(RANKS[0]) if rank != LOST]
    found = []
    for number in range(1, times):
        of_ranks = [rank[number] for rank in staying]
        slowest = {key: max(each[key] for each in of_ranks) for key in of_ranks[0]}
        found.append(
            MovingRun(
                state_bytes=bill.state_bytes,
                sent_bytes=int(sum(each["sent_bytes"] for each in of_ranks)),
                hold_s=slowest["hold_s"],
                live_s=slowest["hold_s"] + slowest["reshard_s"],
                save_s=slowest["save_s"],
                load_s=slowest["load_s"],
            )
        )
    return found
