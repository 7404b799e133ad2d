"""Evolutionary search for the allocations of a fleet's jobs, which goes on whenever a job arrives or ends.

An individual gives every active job one of its allocations, or none. Its fitness is what all jobs wait and run from now
on: exactly until the first of them ends. What is left then begins when all that is shorter is worked off by all
devices, where it is most efficient, and runs as fast as it can.

The population lives on from one event to the next, as that of ONES does (Bian et al. 2021), whose genes and fitness are
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.cluster import ClusterSpec
from planner.fleet.job import Allocation
from planner.fleet.rules import first_come_first_served, greedy_elastic, shortest_remaining_first
from planner.fleet.simulate import ActiveJob

POPULATION, GENERATIONS = 48, 20
NEVER_S = 1e30
"""An individual in which nobody runs waits so long."""
MUTATED = 0.15
"""Probability that a job of a child has another allocation than its parents."""

Floats = NDArray[np.float64]
Genes = NDArray[np.int64]
"""Individuals by jobs: the number of a job's allocation, 0 where it waits."""


class EvolutionaryRule:
    """Gives devices to jobs as the best of a population says.

    Args:
        seed: of all that is random; the same seed gives the same schedule.
    """

    def __init__(self, cluster: ClusterSpec, seed: int = 0, generations: int = GENERATIONS):
        self.cluster, self.generations = cluster, generations
        self._random = np.random.default_rng(seed)
        self._known: list[dict[str, int]] = []
        devices = cluster.world_size
        self._rules = (first_come_first_served(devices), shortest_remaining_first(devices), greedy_elastic(devices))

    def __call__(self, now_s: float, active: Sequence[ActiveJob]) -> list[Allocation | None]:
        """The allocation of every job."""
        problem = _Situation.of(active, self.cluster)
        population = self._first(now_s, active, problem)
        score = problem.score(population)
        for _ in range(self.generations):
            children = self._children(population, score, problem)
            both = np.concatenate([population, children])
            both, places = np.unique(both, axis=0, return_index=True)
            scores = np.concatenate([score, problem.score(children)])[places]
            best = np.argsort(scores, kind="stable")[:POPULATION]
            population, score = both[best], scores[best]
        names = [each.job.name for each in active]
        self._known = [dict(zip(names, map(int, row), strict=True)) for row in population]
        return [each.job.allocations[at - 1] if at else None for each, at in zip(active, population[0], strict=True)]

    def _first(self, now_s: float, active: Sequence[ActiveJob], problem: _Situation) -> Genes:
        """What is running, what rules say, what lives on, and others at random."""
        numbers = [{None: 0} | {a: n for n, a in enumerate(each.job.allocations, 1)} for each in active]
        given = [[each.allocation for each in active], *(rule(now_s, active) for rule in self._rules)]
        rows = [[numbers[j][a] for j, a in enumerate(row)] for row in given]
        rows += [[known.get(each.job.name, 0) for each in active] for known in self._known[: POPULATION // 2]]
        some = self._random.integers(0, problem.choices, (max(0, POPULATION - len(rows)), len(active)))
        return np.unique(self._fitting(np.concatenate([np.array(rows), some]), problem), axis=0)

    def _children(self, population: Genes, score: Floats, problem: _Situation) -> Genes:
        """Each job as in one of two parents, which are better than another each, and a few jobs changed."""
        count, jobs = POPULATION, population.shape[1]
        rivals = self._random.integers(0, len(population), (4, count))
        first, second = (np.where(score[a] <= score[b], a, b) for a, b in (rivals[:2], rivals[2:]))
        of_first = self._random.random((count, jobs)) < 0.5
        children = np.where(of_first, population[first], population[second])
        changed = self._random.random((count, jobs)) < max(MUTATED, 1 / jobs)
        step = children + self._random.choice([-1, 1], (count, jobs))
        anything = self._random.integers(0, problem.choices, (count, jobs))
        new = np.where(self._random.random((count, jobs)) < 0.5, step, anything)
        children = np.where(changed, np.clip(new, 0, problem.choices - 1), children)
        return self._fitting(children, problem)

    def _fitting(self, genes: Genes, problem: _Situation) -> Genes:
        """Individuals that take no more devices than there are: jobs in a random order take what is left to them, and
        in half of the individuals then more, where some is free.
        """
        rows, genes = np.arange(len(genes)), genes.copy()
        order = self._random.permuted(np.tile(np.arange(genes.shape[1]), (len(genes), 1)), axis=1)
        free = np.full(len(genes), self.cluster.world_size)
        for job in order.T:
            genes[rows, job] = np.minimum(genes[rows, job], problem.most(job, free))
            free -= problem.devices[job, genes[rows, job]]
        filled = self._random.random(len(genes)) < 0.5
        for job in order.T:
            has = problem.devices[job, genes[rows, job]]
            genes[rows, job] = np.where(filled, problem.most(job, free + has), genes[rows, job])
            free -= problem.devices[job, genes[rows, job]] - has
        return genes


@dataclass(frozen=True, eq=False)
class _Situation:
    """The active jobs as arrays, by job and number of the allocation, of which 0 is to wait.

    Attributes:
        choices: how many numbers each job has.
        bill_s: until it trains on an allocation.
    """

    choices: Genes
    devices: Genes
    rate: Floats
    bill_s: Floats
    samples: Floats
    least_device_s: Floats
    fastest: Floats
    world_size: int

    @staticmethod
    def of(active: Sequence[ActiveJob], cluster: ClusterSpec) -> _Situation:
        """The jobs at this moment."""
        widest = max(len(each.job.allocations) for each in active) + 1
        devices = np.full((len(active), widest), cluster.world_size + 1)
        devices[:, 0] = 0
        rate, bill = np.zeros(devices.shape), np.zeros(devices.shape)
        for row, each in enumerate(active):
            for at, allocation in enumerate(each.job.allocations, 1):
                stays = allocation == each.allocation
                devices[row, at], rate[row, at] = allocation.devices, allocation.samples_per_s
                bill[row, at] = each.moving_s if stays else each.move_to_s(cluster, allocation)
        return _Situation(
            np.array([len(each.job.allocations) + 1 for each in active]),
            devices,
            rate,
            bill,
            np.array([each.samples for each in active]),
            np.array([each.job.least_device_s / each.job.samples for each in active]),
            np.array([each.job.allocations[-1].samples_per_s for each in active]),
            cluster.world_size,
        )

    def most(self, job: Genes, free: Genes) -> Genes:
        """Of a job by individual, the allocation with the most devices that are free in that individual."""
        return np.asarray((self.devices[job] <= free[:, None]).sum(axis=1) - 1)

    def score(self, genes: Genes) -> Floats:
        """Seconds from now to the ends of all jobs, together, of every individual; the less the better."""
        jobs = np.arange(genes.shape[1])
        rate, bill_s = self.rate[jobs, genes], self.bill_s[jobs, genes]
        with np.errstate(divide="ignore"):
            ends_s = np.where(rate > 0, bill_s + self.samples / rate, np.inf)
        first_s = np.minimum(ends_s.min(axis=1, keepdims=True), NEVER_S)
        left = np.maximum(0.0, self.samples - rate * np.maximum(0.0, first_s - bill_s))
        left = np.where(ends_s <= first_s, 0.0, left)
        work_s = np.sort(left * self.least_device_s, axis=1) / self.world_size
        starts_s = (np.cumsum(work_s, axis=1) - work_s) * (work_s > 0)
        return np.asarray(len(jobs) * first_s[:, 0] + starts_s.sum(axis=1) + (left / self.fastest).sum(axis=1))
