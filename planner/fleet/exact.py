"""The schedule of a small fleet by CP-SAT, which proves that none has a shorter average completion time, or how much
shorter one may be.

A schedule is a row of phases, each ended by an arrival or by the end of a job, in which every job has one allocation
or waits. Which event ends which phase is decided together with the allocations and the phases' lengths. Where jobs lie
is not: a schedule of several nodes may have to move a job to make room for another, which the simulation then counts
and the bound does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ortools.sat.python import cp_model

from planner.fleet.bound import bound_s
from planner.fleet.job import Allocation, FleetJob
from planner.fleet.migration import migration_s
from planner.fleet.schedule import FleetSchedule
from planner.fleet.simulate import ActiveJob

TICKS = 2 * 10**5
"""Into so many the time is cut in which any schedule worth having ends."""
WORK = 10**5
"""Samples are counted in so many parts of what a job's fastest allocation does in a tick."""


LATE = 4
"""So many times its limit the solver may take where it gets little of the machine."""


class FleetPhase(NamedTuple):
    """What every job has, by name, until a job ends or arrives; who is not named waits."""

    job: str
    ends: bool
    allocations: Mapping[str, Allocation]


class PhaseRule:
    """Gives devices to jobs as a row of phases says, each of which lasts until its event has come."""

    def __init__(self, phases: Sequence[FleetPhase]):
        self.phases, self.at = phases, 0
        self.seen: set[str] = set()

    def __call__(self, now_s: float, active: Sequence[ActiveJob]) -> list[Allocation | None]:
        """The allocation of every job."""
        names = {each.job.name for each in active}
        self.seen |= names
        while self._is_over(self.phases[self.at], names):
            self.at += 1
        return [self.phases[self.at].allocations.get(each.job.name) for each in active]

    def _is_over(self, phase: FleetPhase, active: set[str]) -> bool:
        return phase.job in self.seen and not (phase.ends and phase.job in active)


class SolvedFleet(NamedTuple):
    """Phases, and a bound of the average completion time of all schedules."""

    phases: tuple[FleetPhase, ...]
    bound_s: float


class FleetProgram:
    """The phases of a fleet as a program.

    Every schedule becomes one of the program where times are rounded up to ticks, one tick more for each phase before,
    while moves are rounded down and speeds up: so what is proved of the program holds of all schedules, but for these
    ticks.

    Args:
        known: a schedule to begin with; those that take longer together are left out.
    """

    def __init__(self, known: FleetSchedule):
        self.known, self.cluster = known, known.cluster
        self.jobs = sorted(known.jobs, key=lambda job: job.arrival_s)
        self.devices = known.cluster.world_size
        together_s = known.mean_completion_s * len(self.jobs)
        spare_s = together_s - sum(job.least_s for job in self.jobs)
        self.tick_s = max(job.arrival_s + job.least_s + spare_s for job in self.jobs) / TICKS
        self.later = [job for job in self.jobs if job.arrival_s > self.jobs[0].arrival_s]
        self.count = len(self.jobs) + len(self.later)
        self.most = TICKS + self.count + 1
        self.model = cp_model.CpModel()
        self.starts = [self.model.new_int_var(0, self.most, "") for _ in range(self.count + 1)]
        self.lengths = [self.model.new_int_var(0, self.most, "") for _ in range(self.count)]
        self.ends = {job.name: [self.model.new_bool_var("") for _ in range(self.count)] for job in self.jobs}
        self.comes = {job.name: [self.model.new_bool_var("") for _ in range(self.count)] for job in self.later}
        self.come = [[self.model.new_bool_var("") for _ in range(len(self.later) + 1)] for _ in range(self.count)]
        """By phase: whether so many of the later jobs have come before it."""
        self.has = {
            job.name: [[self.model.new_bool_var("") for _ in (None, *job.allocations)] for _ in range(self.count)]
            for job in self.jobs
        }
        """By job and phase: whether it waits, and then whether it has each of its allocations."""
        self.runs = {
            job.name: [[self.model.new_int_var(0, self.most, "") for _ in job.allocations] for _ in range(self.count)]
            for job in self.jobs
        }
        """By job and phase: ticks on each of its allocations."""
        self._follow_events()
        self._fit()
        for job in self.jobs:
            self._train(job)
        self._minimize()

    def _follow_events(self) -> None:
        """Phases follow one another, and each is ended by one event."""
        add = self.model.add
        add(self.starts[0] == math.ceil(self.jobs[0].arrival_s / self.tick_s))
        for phase in range(self.count):
            add(self.starts[phase + 1] == self.starts[phase] + self.lengths[phase])
            self.model.add_exactly_one(events[phase] for events in (*self.ends.values(), *self.comes.values()))
        for events in (*self.ends.values(), *self.comes.values()):
            self.model.add_exactly_one(events)
        ticks = [math.ceil(job.arrival_s / self.tick_s) for job in self.later]
        for number, job in enumerate(self.later):
            for phase in range(self.count):
                has_come = sum(self.come[phase][number + 1 :])
                add(has_come == sum(self.comes[job.name][:phase]))
        for phase, come in enumerate(self.come):
            self.model.add_exactly_one(come)
            for number, is_so in enumerate(come):
                if number:
                    add(self.starts[phase] >= ticks[number - 1]).only_enforce_if(is_so)
                if number < len(ticks):
                    add(self.starts[phase + 1] <= ticks[number] + self.count).only_enforce_if(is_so)

    def _fit(self) -> None:
        """Jobs run from their arrival to their end, in the last phase for certain, and fit the cluster together."""
        for phase in range(self.count):
            for job in self.jobs:
                waits, *some = self.has[job.name][phase]
                self.model.add_exactly_one(waits, *some)
                has_come = sum(self.comes[job.name][:phase]) if job.name in self.comes else 1
                self.model.add(sum(some) <= has_come - sum(self.ends[job.name][:phase]))
                self.model.add_implication(self.ends[job.name][phase], ~waits)
                for has, ticks, most in zip(some, self.runs[job.name][phase], self._longest(job), strict=True):
                    self.model.add(ticks <= most * has)
                    self.model.add(self.lengths[phase] <= most).only_enforce_if(has)
                self.model.add(sum(self.runs[job.name][phase]) <= self.lengths[phase])
            taken = [(each.devices, job, at) for job in self.jobs for at, each in enumerate(job.allocations)]
            self.model.add(sum(n * self.has[job.name][phase][at + 1] for n, job, at in taken) <= self.devices)
            area = sum(n * self.runs[job.name][phase][at] for n, job, at in taken)
            self.model.add(area <= self.devices * self.lengths[phase])

    def _longest(self, job: FleetJob) -> list[int]:
        """Ticks that a job is on each of its allocations at most: to move there, and for all its samples."""
        move_s = max(migration_s(job, self.cluster, before, 1) for before in (0, 1))
        return [math.ceil((move_s + job.samples / each.samples_per_s) / self.tick_s) + 2 for each in job.allocations]

    def _train(self, job: FleetJob) -> None:
        """A job trains on all of its samples, and on none while it is moved."""
        fastest = job.allocations[-1].samples_per_s
        pace = [math.ceil(each.samples_per_s / fastest * WORK) for each in job.allocations]
        done: list[cp_model.LinearExprT] = [
            each * ticks for runs in self.runs[job.name] for each, ticks in zip(pace, runs, strict=True)
        ]
        devices = [0, *(each.devices for each in job.allocations)]
        for phase in range(1, self.count):
            before, now = self.has[job.name][phase - 1 : phase + 1]
            for source, target in ((s, t) for s in range(len(now)) for t in range(1, len(now)) if s != t):
                move_s = migration_s(job, self.cluster, devices[source], devices[target])
                ticks = math.floor(move_s / self.tick_s)
                if not ticks or (source == 0 and phase == 1):
                    continue
                moves = self.model.new_bool_var("")
                has_run = [~each[0] for each in self.has[job.name][: phase - 1]] if source == 0 else [None]
                for ran in has_run:
                    self.model.add_bool_or(moves, ~before[source], ~now[target], *([] if ran is None else [~ran]))
                done.append(-pace[target - 1] * ticks * moves)
        self.model.add(sum(done) >= math.floor(job.least_s / self.tick_s * WORK))

    def _minimize(self) -> None:
        """The time that jobs are there, together: in each phase so many as have come and not ended."""
        together: list[cp_model.LinearExprT] = []
        for phase, come in enumerate(self.come):
            parts = [self.model.new_int_var(0, self.most, "") for _ in come]
            self.model.add(sum(parts) == self.lengths[phase])
            for number, (part, is_so) in enumerate(zip(parts, come, strict=True)):
                active = len(self.jobs) - len(self.later) + number - (phase - number)
                self.model.add(part <= self.most * is_so)
                together.append(active * part)
                if active < 0:
                    self.model.add(is_so == 0)
        for job in self.jobs:
            least = math.floor((job.arrival_s + job.least_s) / self.tick_s)
            for phase, ends in enumerate(self.ends[job.name]):
                self.model.add(self.starts[phase + 1] >= least).only_enforce_if(ends)
        least_s = bound_s(self.jobs, self.devices) * len(self.jobs)
        self.model.add(sum(together) >= math.floor(least_s / self.tick_s))
        self.model.minimize(sum(together))

    def _begin(self) -> None:
        """Hint at the schedule that is known."""
        self.model.clear_hints()
        events = [(self.known.end_s[job.name], True, job.name) for job in self.jobs]
        events += [(job.arrival_s, False, job.name) for job in self.later]
        start_s = self.jobs[0].arrival_s
        for phase, (until_s, ends, name) in enumerate(sorted(events)):
            self.model.add_hint(self.starts[phase], math.ceil(start_s / self.tick_s) + phase)
            self.model.add_hint((self.ends if ends else self.comes)[name][phase], True)
            running = {
                each.job.name: each.allocation
                for each in self.known.segments
                if each.start_s < until_s and each.end_s > start_s
            }
            for job in self.jobs:
                for at, each in enumerate((None, *job.allocations)):
                    self.model.add_hint(self.has[job.name][phase][at], running.get(job.name) == each)
            start_s = until_s

    def solve(self, time_limit_s: float, gap: float) -> SolvedFleet | None:
        """The best phases found; ``None`` where none were in time."""
        self._begin()
        solver = cp_model.CpSolver()
        solver.parameters.catch_sigint_signal = False  # it would leave Ctrl-C to kill the process afterwards
        solver.parameters.num_workers = 1
        solver.parameters.interleave_search = True  # of all its strategies, in turn
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = time_limit_s  # counts work: answers do not depend on the machine
        solver.parameters.max_time_in_seconds = LATE * time_limit_s
        solver.parameters.relative_gap_limit = gap
        status = solver.solve(self.model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        rounded = 2 * len(self.jobs) * self.count
        phases = tuple(self._phase(solver, phase) for phase in range(self.count))
        return SolvedFleet(phases, (solver.best_objective_bound - rounded) * self.tick_s / len(self.jobs))

    def _phase(self, solver: cp_model.CpSolver, phase: int) -> FleetPhase:
        allocations = {
            job.name: allocation
            for job in self.jobs
            for allocation, has in zip(job.allocations, self.has[job.name][phase][1:], strict=True)
            if solver.value(has)
        }
        for ends, events in ((True, self.ends), (False, self.comes)):
            for name, each in events.items():
                if solver.value(each[phase]):
                    return FleetPhase(name, ends, allocations)
        raise AssertionError("every phase is ended by an event")
