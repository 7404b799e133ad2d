"""Attention over a sharded sequence: keys gathered and in a ring, both in zigzag order too, and heads shared, in one
run on local processes.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.measure.local_processes import LocalProcesses
from autopar.runtime.spmd.mesh import groups_of
from autopar.verification.collective_counter import count_collectives, differences
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan

RANKS, TOKENS, HEADS, KV, HEAD, STEPS = 4, 16384, 8, 2, 16, 3
KINDS = ("gather", "zigzag_gather", "ring", "zigzag", "ulysses")
OFTEN = {"all_gather": RANKS - 1, "send": 1.0}
"""How often what a rank passes to a collective leaves it; of others, all but its own part."""


class Layer(nn.Module):
    """Grouped attention of one sequence, and a mean square."""

    def __init__(self, causal: bool):
        super().__init__()
        width = HEADS * HEAD
        self.query, self.result = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, KV * HEAD, bias=False) for _ in range(2))
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (made(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for made in (self.query, self.key, self.value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.result(out.transpose(1, 2).flatten(2)).square().mean()


@dataclass(frozen=True)
class Attended:
    """One way to attend: seconds of each step of the slowest rank, CPU seconds of every rank in the median step.

    Attributes:
        sent_bytes: that leave a rank in a step.
        loss_difference: from one process, relative.
        as_planned: whether the collectives of a step are those that the plan predicts.
    """

    kind: str
    causal: bool
    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...]
    sent_bytes: float
    loss_difference: float
    as_planned: bool

    @property
    def imbalance(self) -> float:
        """CPU seconds of the busiest rank over the mean."""
        return max(self.cpu_s) / statistics.mean(self.cpu_s)


def compare() -> list[Attended]:
    """Every way, with and without a causal mask."""
    found = []
    with LocalProcesses(RANKS, ("torch", "benchmarks.context")) as processes:
        for causal in (True, False):
            kinds = [kind for kind in KINDS if causal or "zigzag" not in kind]
            plans = [_planned(kind, causal) for kind in kinds]
            results = processes.run(_steps, causal, [plan.to_dict() for plan in plans])
            for kind, plan, *ranks in zip(kinds, plans, *results, strict=True):
                seconds = [max(each.seconds[at] for each in ranks) for at in range(STEPS)]
                middle = sorted(range(STEPS), key=seconds.__getitem__)[STEPS // 2]
                found.append(
                    Attended(
                        kind,
                        causal,
                        tuple(seconds),
                        tuple(each.cpu_s[middle] for each in ranks),
                        _sent_bytes(plan),
                        max(each.loss_difference for each in ranks),
                        all(each.as_planned for each in ranks),
                    )
                )
    return found


def _planned(kind: str, causal: bool) -> Plan:
    model, x = _made(causal)
    pin = {"context": RANKS, "context_kind": kind, "pipeline": 1, "micro_batches": 1}
    return autopar.plan(model, ClusterSpec.local(RANKS), example_args=(x,), pin=pin)


def _sent_bytes(plan: Plan) -> float:
    calls = plan.predicted.collectives
    return sum(OFTEN.get(call.kind, (RANKS - 1) / RANKS) * call.bytes_in * count for call, count in calls)


def _made(causal: bool) -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    return Layer(causal), torch.randn(1, TOKENS, HEADS * HEAD)


@dataclass
class _OnRank:
    """What one rank sees of steps in one way."""

    seconds: list[float]
    cpu_s: list[float]
    loss_difference: float = 0.0
    as_planned: bool = True


def _steps(causal: bool, documents: list[dict[str, Any]]) -> list[_OnRank]:
    torch.set_num_threads(1)
    model, x = _made(causal)
    with torch.no_grad():
        whole = float(model(x))
    plans = [Plan.from_dict(document) for document in documents]
    made = [autopar.parallelize(model, plan.cluster, plan=plan, example_args=(x,)) for plan in plans]
    found = [_OnRank([], []) for _ in plans]
    for step in range(STEPS + 1):
        for plan, pmodel, seen in zip(plans, made, found, strict=True):
            args = pmodel.shard((x,))
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            with count_collectives(groups_of(pmodel.device_mesh)) as observed:
                loss = pmodel(*args)
                loss.backward()
            cpu_s, seconds = time.process_time() - start_cpu_s, time.perf_counter() - start_s
            pmodel.zero_grad()
            seen.as_planned &= not differences(dict(plan.predicted.collectives), observed)
            seen.loss_difference = max(seen.loss_difference, abs(loss.item() / whole - 1))
            if step:
                seen.seconds.append(seconds)
                seen.cpu_s.append(cpu_s)
    return found
