"""Predicted and measured step times of local gloo plans, after the machine was profiled.

The same model under several plans: each is planned for the profiled machine with its pin, so that the plan's own
prediction is compared, then trained on local processes. Steps of all plans on the same number of ranks are taken with
micro-batches, so that a disturbance of the machine does not hit one of them alone, and medians are compared. All of it
is
done several times, with a profile of its own each time: a shared machine changes its speed between a profile and the
steps that it is for, so that a single comparison says as much of that as of the prediction.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.measure.local_processes import LocalProcesses
from autopar.measure.profile import measured_cluster, profile
from benchmarks.gpt import GPT, Shape
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan

PRELOAD = ("torch", "benchmarks.predicted")
STEPS, WARMUP = 5, 2
REPEATS = 5
RANKS = (2, 4)


@dataclass(frozen=True)
class Case:
    """A plan by its pin, on so many ranks."""

    ranks: int
    pin: Mapping[str, int]


CASES = tuple(
    Case(ranks, pin)
    for ranks in RANKS
    for pin in ({"data": ranks, "zero": 0}, {"data": ranks, "zero": 3}, {"tensor": ranks})
)


@dataclass(frozen=True)
class Compared:
    """Seconds of a step: predicted, by use, and measured; CPU seconds of the busiest rank; seconds of profiling."""

    case: Case
    profile_s: float
    predicted: Mapping[str, float]
    measured_s: tuple[float, ...]
    cpu_s: tuple[float, ...]

    @property
    def predicted_s(self) -> float:
        return sum(self.predicted.values())

    @property
    def median_s(self) -> float:
        return statistics.median(self.measured_s)

    @property
    def error(self) -> float:
        """Relative, positive where the prediction is too long."""
        return self.predicted_s / self.median_s - 1


def median_error(found: Sequence[Compared]) -> float:
    """Of several comparisons of one case."""
    return statistics.median(each.error for each in found)


def compare(ranks: int, shape: Shape) -> list[Compared]:
    """Profile with so many ranks; then plan, train and compare every case of that many."""
    start = time.perf_counter()
    calibration = profile(ranks)
    return compare_on(measured_cluster(calibration), shape, time.perf_counter() - start)


def compare_on(cluster: ClusterSpec, shape: Shape, profile_s: float) -> list[Compared]:
    """Plan for a cluster that was profiled here, train and compare."""
    cases = [case for case in CASES if case.ranks == cluster.world_size]
    plans = [_plan(cluster, case.pin, shape) for case in cases]
    with LocalProcesses(cluster.world_size, PRELOAD) as processes:
        times = processes.run(train, [plan.to_dict() for plan in plans], cluster.to_dict(), shape)[0]
    return [
        Compared(case, profile_s, dict(plan.predicted.time_s), *zip(*found, strict=True))
        for case, plan, found in zip(cases, plans, times, strict=True)
    ]


def _plan(cluster: ClusterSpec, pin: Mapping[str, int], shape: Shape) -> Plan:
    return autopar.plan(_model(shape), cluster, example_kwargs=_batch(shape, 0), pin=pin)


def train(plans: Sequence[Any], cluster: Any, shape: Shape) -> list[list[tuple[float, float]]]:
    """One rank: a step of each micro-batched plan; wall and CPU seconds of the slowest rank, by plan and step."""
    warnings.simplefilter("ignore")
    sides = []
    for data in plans:
        batch = _batch(shape, 0)
        plan, where = Plan.from_dict(data), ClusterSpec.from_dict(cluster)
        pmodel = autopar.parallelize(_model(shape), where, plan=plan, example_kwargs=batch)
        sides.append((pmodel, torch.optim.AdamW(pmodel.parameters(), lr=1e-3, fused=True)))
    times: list[list[tuple[float, float]]] = [[] for _ in sides]
    for step in range(WARMUP + STEPS):
        for found, (pmodel, optimizer) in zip(times, sides, strict=True):
            batch = pmodel.shard(_batch(shape, step))
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            pmodel(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if step >= WARMUP:
                found.append((spent[0].item(), spent[1].item()))
    return times


def _model(shape: Shape) -> GPT:
    torch.manual_seed(0)
    return GPT(shape).train()


def _batch(shape: Shape, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, shape.vocab, (shape.batch, shape.sequence), generator=generator)
    return {"ids": ids, "labels": ids.roll(-1, 1)}
