"""Pipeline: how long simulating a schedule and cutting a chain of 126 equal blocks take, and how far from proved."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.base.errors import InfeasibleError
from planner.solve.pipeline.partition import cut
from planner.solve.pipeline.schedule import NAMES, VIRTUAL_STAGES, schedule
from planner.solve.pipeline.simulate import Times, simulate, step_s
from planner.solve.pipeline.stages import Chain, ChainBlock, Pipeline, RematOption

RANKS = 16
MIB, GIB = 2**20, 2**30
SAVINGS = (RematOption(0.0, 400 * MIB), RematOption(0.15, 150 * MIB), RematOption(1.0, 34 * MIB))
CHAIN: Chain = [
    (ChainBlock("embedding", 0.1, 0.05, 0.1, 6 * GIB, (RematOption(0.0, 34 * MIB),), 0.05), 1),
    (ChainBlock("layer", 1.0, 1.0, 1.0, 3 * GIB, SAVINGS, 0.05), 126),
    (ChainBlock("head", 1.3, 1.3, 1.3, 6 * GIB, (RematOption(0.0, 500 * MIB),), 0.05), 1),
]
"""Made-up figures in the proportions of a model of 405 billion parameters; a layer's forward is one second."""
LIMITS = (None, 60 * GIB, 45 * GIB)
CUTS = tuple(
    Pipeline(name, RANKS, 64, virtual)
    for name, virtual in (
        ("1f1b", 1),
        ("zero_bubble", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 4),
        ("interleaved_1f1b", 8),
        ("zbv", 2),
        ("2bw", 1),
    )
)


@dataclass(frozen=True)
class Simulated:
    """CPU seconds on this machine; ``again`` is with the order at hand, as a search asks for it."""

    schedule: str
    virtual_stages: int
    micro_batches: int
    first_s: float
    again_s: float
    whole_s: float


@dataclass(frozen=True)
class Found:
    """A cut: CPU seconds that it took to find, its step in seconds of the chain, and what is left unproved."""

    schedule: str
    virtual_stages: int
    micro_batches: int
    limit_gib: int | None
    search_s: float
    step_s: float | None
    gap: float | None


def simulations(micro_batches: int = 512) -> list[Simulated]:
    """Every schedule on random times."""
    rng = np.random.default_rng(0)
    found = []
    for name in NAMES:
        least, most = VIRTUAL_STAGES[name]
        for virtual in sorted({least, most or 8}):
            stages = RANKS * virtual
            times = Times(rng.random(stages), rng.random(stages), rng.random(stages), rng.random(stages - 1) / 10)
            schedule.cache_clear()
            step = partial(step_s, name, RANKS, micro_batches, virtual, times)
            first_s, again_s = _seconds(step), _seconds(step)
            order = schedule(name, RANKS, micro_batches, virtual)
            simulate(order, times)
            whole_s = _seconds(partial(simulate, order, times))
            found.append(Simulated(name, virtual, micro_batches, first_s, again_s, whole_s))
    return found


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def cuts() -> list[Found]:
    """The chain on sixteen ranks by every schedule and limit."""
    found = []
    for pipeline in CUTS:
        for limit in LIMITS:
            start = time.process_time()
            try:
                best = cut(pipeline, CHAIN, limit)
            except InfeasibleError:
                best = None
            found.append(
                Found(
                    pipeline.schedule,
                    pipeline.virtual_stages,
                    pipeline.micro_batches,
                    limit and limit // GIB,
                    time.process_time() - start,
                    best.step_s if best else None,
                    best.gap if best else None,
                )
            )
    return found
