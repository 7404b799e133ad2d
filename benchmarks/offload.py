"""Offload: a GPT that trains on devices of ever less memory, beside the same one on a device that holds it all; without
micro-batches, and in micro-batches.

One process, whose device is a budget of host memory. Steps of all plans take turns, so that what disturbs one disturbs
all; nothing moves beside computing there, so that ratios show what moving costs where nothing hides it.
"""

from __future__ import annotations

import copy
import itertools
import time
from dataclasses import dataclass
from statistics import median

import torch

import autopar
from autopar.measure.local_processes import LocalProcesses
from autopar.runtime.module import ParallelModule
from benchmarks.gpt import GPT, Shape
from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec

SHAPE = Shape(layers=12, hidden=256, heads=4, vocab=2048, batch=4, sequence=64)
MICRO_BATCHED_PLANS = (1, 4)
"""Micro-batches."""
SHARES = (None, 2, 4, 8, 16)
"""The device has the model's data divided by so much; ``None``: all that it takes without offloading."""
ROUNDS = 9
BYTES_PER_PARAMETER = 16


@dataclass(frozen=True)
class Row:
    """A device and micro-batches: bytes that a plan may fill, what was taken of them, what a step moved and was to
    move, seconds.

    ``differs`` is the largest relative difference of a loss from that of the plan on the device that holds all.
    """

    micro_batches: int
    share: int | None
    data_bytes: int
    budget_bytes: int
    high_water_bytes: int
    moved: dict[str, int]
    planned: dict[str, int]
    predicted_s: float
    seconds: float
    differs: float


def measure() -> list[Row]:
    """A row for each number of micro-batches and share; those below what any plan needs are left out."""
    with LocalProcesses(1, ("torch", "benchmarks.offload")) as processes:
        (rows,) = processes.run(_rows)
    return [Row(**row) for row in rows]


def _rows() -> list[dict[str, object]]:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    tokens = torch.randint(0, SHAPE.vocab, (SHAPE.batch, SHAPE.sequence))
    batch = {"ids": tokens, "labels": tokens.roll(-1, 1)}
    data_bytes = BYTES_PER_PARAMETER * sum(p.numel() for p in model.parameters())
    found: dict[tuple[int, int | None], tuple[ParallelModule, torch.optim.Optimizer, float]] = {}
    for micro_batches, share in itertools.product(MICRO_BATCHED_PLANS, SHARES):
        memory = 8 * data_bytes if share is None else data_bytes // share
        cluster = ClusterSpec.local(1, memory_bytes=memory, host_memory_bytes="16 GiB", cores=1)
        pin = {"micro_batches": micro_batches, **({} if share is None else {"offload": "host"})}
        try:
            plan = autopar.plan(model, cluster, example_kwargs=batch, pin=pin)
        except InfeasibleError:
            continue
        pmodel = autopar.parallelize(copy.deepcopy(model), cluster, plan=plan, example_kwargs=batch)
        found[micro_batches, share] = pmodel, pmodel.optimizer(torch.optim.AdamW, lr=1e-4), plan.predicted.step_time_s
    seconds: dict[tuple[int, int | None], list[float]] = {key: [] for key in found}
    losses: dict[tuple[int, int | None], list[float]] = {key: [] for key in found}
    for _ in range(ROUNDS):
        for key, (pmodel, optimizer, _) in found.items():
            begun = time.perf_counter()
            loss = pmodel(**pmodel.shard(batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds[key].append(time.perf_counter() - begun)
            losses[key].append(loss.item())
    rows: list[dict[str, object]] = []
    for (micro_batches, share), (pmodel, _, predicted_s) in found.items():
        offload = pmodel.offload
        rows.append(
            {
                "micro_batches": micro_batches,
                "share": share,
                "data_bytes": data_bytes,
                "budget_bytes": 0 if offload is None else offload.transfers.arena.budget_bytes,
                "high_water_bytes": 0 if offload is None else offload.transfers.arena.high_water_bytes,
                "moved": {} if offload is None else dict(offload.transfers.bytes_moved),
                "planned": {}
                if offload is None
                else {way: n for (_, way), n in offload.transfers.table.bytes_moved.items()},
                "predicted_s": predicted_s,
                "seconds": median(seconds[micro_batches, share][2:]),
                "differs": max(
                    abs(a / b - 1) for a, b in zip(losses[micro_batches, share], losses[1, None], strict=True)
                ),
            }
        )
    return rows
