"""Plans a fleet: the schedule with the shortest average completion time, with what is proved about it.

Rules without a search come first, then evolutionary search, and where jobs are few the whole is solved by CP-SAT,
which begins with the best so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.base.errors import InfeasibleError, InputError
from planner.base.formatting import in_duration
from planner.cost.cluster import ClusterSpec
from planner.fleet.bound import bound_s
from planner.fleet.evolution import EvolutionaryRule
from planner.fleet.fleet_plan import GAP, FleetPlan
from planner.fleet.job import FleetJob
from planner.fleet.rules import RULES
from planner.fleet.schedule import FleetSchedule
from planner.fleet.simulate import simulate

EXACT = 300
"""So many triples of a job, an allocation and a phase are solved for together."""
STARTS = 3
"""Evolutionary searches, of which the best is taken."""


def plan_fleet(
    jobs: Sequence[FleetJob],
    cluster: ClusterSpec,
    *,
    until_s: float | None = None,
    seed: int = 0,
    time_limit_s: float = 20.0,
    progress: Callable[[str], object] | None = None,
) -> FleetPlan:
    """The schedule of a fleet.

    Args:
        until_s: by when all jobs shall have ended.
        seed: of the evolutionary search.
        time_limit_s: of CP-SAT's work, about.

    Raises:
        InputError: no jobs, or two of one name.
        InfeasibleError: no schedule was found in which all end in time; says which job is late, and by how much.
    """
    if not jobs or len({job.name for job in jobs}) < len(jobs):
        raise InputError(f"jobs are {[job.name for job in jobs]}; give one at least, each with a name of its own")
    say = progress or (lambda text: None)
    say("simulating rules")
    found = {name: simulate(jobs, cluster, rule(cluster.world_size)) for name, rule in RULES.items()}
    others = {name: schedule.mean_completion_s for name, schedule in found.items()}
    say("searching")
    starts = [simulate(jobs, cluster, EvolutionaryRule(cluster, seed + number)) for number in range(STARTS)]
    found["evolutionary search"] = min(starts, key=lambda each: _rank(each, until_s))
    best_by = min(found, key=lambda name: _rank(found[name], until_s))
    bound = bound_s(jobs, cluster.world_size)
    phases = len(jobs) + sum(job.arrival_s > min(job.arrival_s for job in jobs) for job in jobs)
    if time_limit_s and phases * sum(len(job.allocations) for job in jobs) <= EXACT:
        from planner.fleet.exact import FleetProgram, PhaseRule  # the solver takes a second to import

        say("solving")
        solved = FleetProgram(min(found.values(), key=lambda each: each.mean_completion_s)).solve(
            time_limit_s, GAP / 10
        )
        if solved is not None:
            bound = max(bound, solved.bound_s)
            found["CP-SAT"] = simulate(jobs, cluster, PhaseRule(solved.phases))
            best_by = min(found, key=lambda name: (*_rank(found[name], until_s), name != "CP-SAT"))
    best = found[best_by]
    if until_s is not None and best.last_end_s > until_s:
        last = max(best.end_s, key=lambda name: best.end_s[name])
        raise InfeasibleError(
            f"no schedule was found in which all jobs end by until_s {until_s:g}: in the best, {last!r} ends "
            f"{in_duration(best.last_end_s - until_s)} late, though each would be in time alone; give more time or "
            "devices, or fewer jobs"
        )
    assert bound <= best.mean_completion_s * (1 + GAP), "a schedule is shorter than what none is"
    return FleetPlan(best, min(bound, best.mean_completion_s), best_by, others, until_s)


def _rank(schedule: FleetSchedule, until_s: float | None) -> tuple[float, float]:
    late_s = 0.0 if until_s is None else max(0.0, schedule.last_end_s - until_s)
    return late_s, schedule.mean_completion_s
