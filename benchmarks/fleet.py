"""Fleets: synthetic arrivals on 64 GPUs under every rule, and small fleets beside what CP-SAT proves.

Jobs train a Transformers model, whose step times over devices and batch come of its plans on parts of the cluster; how
many samples remain, within which batches, and when jobs arrive is random.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from autopar.driver.trace import trace
from benchmarks.plan_time import Case, llama
from planner.cost.cluster import ClusterSpec
from planner.fleet.bound import bound_s
from planner.fleet.curves import planned_steps
from planner.fleet.evolution import EvolutionaryRule
from planner.fleet.exact import FleetProgram, PhaseRule
from planner.fleet.job import Allocation, FleetJob, fastest_allocations
from planner.fleet.jobs_file import StatedJob
from planner.fleet.rules import RULES
from planner.fleet.schedule import FleetSchedule
from planner.fleet.simulate import simulate
from planner.ir.graph import Graph

SEEDS, JOBS, NODES = 30, 30, 8
SMALL, SMALL_JOBS = 12, 4
"""Small fleets on one node; in every other one all jobs arrive at once."""
LIMIT_S, GAP = 5.0, 1e-3
"""Of CP-SAT's work on a small fleet, and where its proof may end."""
PLANNING_S = 4.0
"""Of each search for a plan."""
BATCHES, SEQUENCE = (16, 1024), 1024
LOAD = 0.8
"""Device-seconds that jobs take at least, over those that there are while they arrive."""
RESTART_S = 30.0
EVOLUTION = "evolutionary search"
MODELS = {
    "a Llama of 16 layers of width 512": Case("Llama", "narrow", 16, "dgx-h100", 64, BATCHES[1], SEQUENCE),
}


@dataclass(frozen=True)
class PlannedCurve:
    """Step times of a model, what its state takes, and the CPU seconds of planning it."""

    model: str
    steps: tuple[Allocation, ...]
    state_bytes: int
    cpu_s: float


@dataclass(frozen=True)
class SimulatedFleet:
    """A fleet: average completion times, moves and busy devices by rule; a bound of all; CPU seconds of the search.

    ``exact_s`` is CP-SAT's, of a small fleet.
    """

    seed: int
    mean_s: Mapping[str, float]
    moves: Mapping[str, int]
    busy: Mapping[str, float]
    bound_s: float
    cpu_s: float
    exact_s: float | None = None


def curves() -> Iterator[PlannedCurve]:
    """Of every model, in bfloat16."""
    cluster = ClusterSpec.preset("dgx-h100", nodes=NODES)
    for name, case in MODELS.items():
        start = time.process_time()
        job = StatedJob(name=name, samples=1.0, batch=BATCHES, model=name)
        steps = tuple(planned_steps(job, cluster, partial(_captured, case), PLANNING_S))
        model, _ = _made(case, 1)
        state = sum(each.numel() * (each.element_size() + job.optimizer_bytes) for each in model.parameters())
        yield PlannedCurve(name, steps, state, time.process_time() - start)


def _made(case: Case, batch: int) -> tuple[Any, Any]:
    return llama(case.layers, batch, case.sequence, case.shape)


def _captured(case: Case, batch: int) -> tuple[Graph, Mapping[str, Any]]:
    model, inputs = _made(case, batch)
    traced = trace(model, example_kwargs=inputs)
    return traced.graph, traced.facts


def random_jobs(seed: int, count: int, devices: int, known: list[PlannedCurve], at_once: bool) -> list[FleetJob]:
    """Jobs of a few minutes to five hours on the devices that are half as efficient as the fewest."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        curve = known[rng.integers(len(known))]
        least = int(rng.choice([16, 32, 64]))
        most = min(BATCHES[1], least << int(rng.integers(1, 5)))
        allocations = fastest_allocations((each for each in curve.steps if least <= each.batch <= most), devices)
        device_s = 10 ** rng.uniform(3.3, 5.3) * devices / 64
        samples = float(device_s / min(each.device_s_per_sample for each in allocations))
        found.append(FleetJob(f"job {number}", samples, allocations, 0.0, curve.state_bytes, RESTART_S))
    if at_once:
        return found
    between_s = float(np.mean([job.least_device_s for job in found])) / (devices * LOAD)
    arrivals = np.cumsum(rng.exponential(between_s, count))
    return [replace(job, arrival_s=float(at - arrivals[0])) for job, at in zip(found, arrivals, strict=True)]


def arrivals(known: list[PlannedCurve]) -> Iterator[SimulatedFleet]:
    """Every seed on 64 GPUs; no rule knows of a job before it arrives."""
    cluster = ClusterSpec.preset("dgx-h100", nodes=NODES)
    for seed in range(SEEDS):
        jobs = random_jobs(seed, JOBS, cluster.world_size, known, at_once=False)
        yield _simulated(seed, jobs, cluster)[0]


def small_fleets(known: list[PlannedCurve]) -> Iterator[SimulatedFleet]:
    """Every small fleet, CP-SAT beginning with the best that is known."""
    cluster = ClusterSpec.preset("dgx-h100")
    for seed in range(SMALL):
        jobs = random_jobs(1000 + seed, SMALL_JOBS, cluster.world_size, known, at_once=seed % 2 == 0)
        found, best = _simulated(seed, jobs, cluster)
        start = time.process_time()
        solved = FleetProgram(best).solve(LIMIT_S, GAP / 10)
        cpu_s = time.process_time() - start
        if solved is None:
            yield replace(found, cpu_s=cpu_s)
            continue
        exact_s = min(simulate(jobs, cluster, PhaseRule(solved.phases)).mean_completion_s, best.mean_completion_s)
        yield replace(found, cpu_s=cpu_s, exact_s=exact_s, bound_s=max(found.bound_s, solved.bound_s))


def _simulated(seed: int, jobs: list[FleetJob], cluster: ClusterSpec) -> tuple[SimulatedFleet, FleetSchedule]:
    found = {name: simulate(jobs, cluster, rule(cluster.world_size)) for name, rule in RULES.items()}
    start = time.process_time()
    found[EVOLUTION] = simulate(jobs, cluster, EvolutionaryRule(cluster, seed))
    cpu_s = time.process_time() - start
    told = SimulatedFleet(
        seed,
        {name: each.mean_completion_s for name, each in found.items()},
        {name: each.moves for name, each in found.items()},
        {name: each.busy for name, each in found.items()},
        bound_s(jobs, cluster.world_size),
        cpu_s,
    )
    return told, min(found.values(), key=lambda each: each.mean_completion_s)
