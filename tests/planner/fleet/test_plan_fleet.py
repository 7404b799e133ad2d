"""Schedules of fleets: against every schedule of tiny ones, what holds of all, and what is proved about them."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from planner.base.errors import InfeasibleError, InputError
from planner.cost.cluster import ClusterSpec
from planner.fleet.bound import bound_s
from planner.fleet.evolution import EvolutionaryRule
from planner.fleet.exact import FleetProgram, PhaseRule
from planner.fleet.job import Allocation, FleetJob, fastest_allocations
from planner.fleet.migration import migration_s
from planner.fleet.plan_fleet import plan_fleet
from planner.fleet.rules import RULES, fixed_size
from planner.fleet.schedule import FleetSchedule
from planner.fleet.simulate import ActiveJob, simulate

NODE = ClusterSpec.preset("dgx-h100", devices=4)
NODES = ClusterSpec.preset("dgx-h100", nodes=4, devices=16)


def random_fleet(seed: int, jobs: int, sizes: Sequence[int], spread_s: float = 0.0) -> list[FleetJob]:
    """Jobs of a few hundred seconds, whose samples take more devices the longer the more there are."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(jobs):
        efficiency = np.cumprod(np.r_[1.0, rng.uniform(0.55, 1.0, len(sizes) - 1)])
        steps = [Allocation(n, 64, 64 / (10 * n * share)) for n, share in zip(sizes, efficiency, strict=True)]
        samples, state = 10 ** rng.uniform(3, 4), int(rng.uniform(1e9, 1e12))
        arrival_s = spread_s * number * rng.random()
        found.append(
            FleetJob(f"job {number}", samples, fastest_allocations(steps, 64), arrival_s, state, rng.uniform(0, 20))
        )
    return found


class Asked(Exception):
    """A script of allocations is over."""

    def __init__(self, active: Sequence[ActiveJob]) -> None:
        super().__init__()
        self.active = active


def scripted(script: Sequence[Sequence[Allocation | None]]) -> Callable[..., Sequence[Allocation | None]]:
    """A rule that says what is written, and then raises :class:`Asked`."""
    left = iter(script)

    def rule(now_s: float, active: Sequence[ActiveJob]) -> Sequence[Allocation | None]:
        found = next(left, None)
        if found is None:
            raise Asked(active)
        return found

    return rule


def shortest_of_all(jobs: Sequence[FleetJob], cluster: ClusterSpec, script: tuple = ()) -> float:
    """The least average completion time of all schedules that go on after a script, every one simulated."""
    try:
        return simulate(jobs, cluster, scripted(script)).mean_completion_s
    except Asked as asked:
        choices = [(None, *each.job.allocations) for each in asked.active]
    found = float("inf")
    for given in itertools.product(*choices):
        devices = sum(each.devices for each in given if each)
        if devices <= cluster.world_size and any(given):
            found = min(found, shortest_of_all(jobs, cluster, (*script, given)))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_cp_sat_finds_the_shortest_schedule_of_all(seed: int) -> None:
    jobs = random_fleet(seed, 3, (1, 2, 4) if seed < 2 else (1, 4), spread_s=40.0 * (seed > 2))
    least_s = shortest_of_all(jobs, NODE)
    known = simulate(jobs, NODE, RULES["first come first served"](4))
    solved = FleetProgram(known).solve(30.0, 1e-4)
    assert solved is not None
    assert simulate(jobs, NODE, PhaseRule(solved.phases)).mean_completion_s == pytest.approx(least_s, rel=1e-3)
    assert least_s * (1 - 2e-3) <= solved.bound_s <= least_s


def check(schedule: FleetSchedule) -> None:
    """What holds of every schedule."""
    per_node = schedule.cluster.spans[0]
    for first, second in itertools.combinations(schedule.segments, 2):
        if first.start_s < second.end_s and second.start_s < first.end_s:
            assert not {*first.devices} & {*second.devices}
    for job in schedule.jobs:
        own = [each for each in schedule.segments if each.job == job]
        assert own[0].start_s >= job.arrival_s and own[0].moving_s == 0
        assert own[-1].end_s == schedule.end_s[job.name]
        assert sum(each.samples for each in own) == pytest.approx(job.samples, rel=1e-9)
        for each in own:
            assert len({*each.devices}) == each.allocation.devices and each.allocation in job.allocations
            assert {*each.devices} <= {*range(schedule.cluster.world_size)}
            nodes = {device // per_node for device in each.devices}
            assert len(nodes) * per_node == max(per_node, len(each.devices))
        for before, after in itertools.pairwise(own):
            went_on = before.end_s == after.start_s
            bill_s = migration_s(job, schedule.cluster, len(before.devices) * went_on, len(after.devices))
            assert before.end_s <= after.start_s
            assert after.moving_s == pytest.approx(min(bill_s, after.end_s - after.start_s))
            assert not went_on or before.devices != after.devices or before.allocation != after.allocation


@pytest.mark.parametrize("seed", range(4))
def test_every_rule_gives_devices_once_and_lets_all_samples_be_trained_on(seed: int) -> None:
    jobs = random_fleet(seed, 12, (1, 2, 4, 8, 16), spread_s=20.0)
    rules = {name: rule(16) for name, rule in RULES.items()}
    rules["evolution"] = EvolutionaryRule(NODES, seed, generations=5)
    for rule in rules.values():
        schedule = simulate(jobs, NODES, rule)
        check(schedule)
        assert bound_s(jobs, 16) <= schedule.mean_completion_s


def test_jobs_move_to_make_room_for_a_whole_node() -> None:
    steps = [(Allocation(n, 8, 1.0),) for n in (3, 1, 3, 4)]
    small = [FleetJob(str(n), 800.0, each, 0.0, 0, 10.0) for n, each in enumerate(steps[:3])]
    jobs = [*small, FleetJob("whole node", 800.0, steps[3], 50.0)]
    two_nodes = ClusterSpec.preset("dgx-h100", nodes=2, devices=8)
    fixed = [each.allocations[0] for each in jobs]
    schedule = simulate(jobs[:3], two_nodes, scripted([fixed[:3], *[fixed[:2]] * 3]))
    check(schedule)
    assert schedule.moves == 0
    # 3 and 1 fill the first node; the second has one device too few for the whole one, which waits for all of it.
    served = simulate(jobs, two_nodes, RULES["first come first served"](8))
    check(served)
    assert served.end_s["whole node"] == pytest.approx(200.0)


def test_a_move_takes_the_restart_and_the_state_over_the_slower_side() -> None:
    job = FleetJob("moved", 8000.0, (Allocation(1, 8, 1.0), Allocation(4, 32, 1.0)), 0.0, 370 * 10**9, 5.0)
    assert migration_s(job, NODE, 1, 4) == pytest.approx(5 + 1)  # 370 GB at 370 GB/s
    assert migration_s(job, NODE, 4, 2) == pytest.approx(5 + 0.5)
    assert migration_s(job, NODE, 0, 4) == pytest.approx(5 + 0.25)
    other = FleetJob("short", 800.0, (Allocation(3, 8, 1.0),))
    one, four, three = *job.allocations, other.allocations[0]
    schedule = simulate([job, other], NODE, scripted([[one, three], [four]]))
    # 100 s of 8 samples each, 6 s of moving, and 7200 samples at 32 a second.
    assert schedule.end_s == pytest.approx({"short": 100.0, "moved": 100 + 6 + 225})
    assert schedule.moves == 1 and schedule.moved_s == pytest.approx(6)
    check(schedule)


def test_the_bound_is_that_of_one_machine_or_of_jobs_alone() -> None:
    slow = FleetJob("slow", 1000.0, (Allocation(1, 10, 1.0), Allocation(4, 20, 1.0)))
    # Alone 50 s each; on one machine 25 device-... 100 device-seconds on 4 devices, one after another: 25 s and 50 s.
    assert bound_s([slow, FleetJob("other", 1000.0, slow.allocations)], 4) == 50.0
    four = [FleetJob(str(n), 1000.0, slow.allocations) for n in range(4)]
    assert bound_s(four, 4) == (25 + 50 + 75 + 100) / 4
    late = [four[0], FleetJob("late", 100.0, slow.allocations, 1000.0)]
    assert bound_s(late, 4) == (50 + 5) / 2


def test_fixed_sizes_are_half_as_efficient_at_least() -> None:
    steps = tuple(Allocation(n, 8, 1 / rate) for n, rate in ((1, 1.0), (2, 1.8), (4, 2.1), (8, 3.9)))
    assert fixed_size(FleetJob("job", 1.0, steps)).devices == 4
    assert [each.devices for each in fastest_allocations([*steps, Allocation(16, 8, 1.0)], 64)] == [1, 2, 4, 8]


def test_the_same_seed_gives_the_same_schedule() -> None:
    jobs = random_fleet(1, 10, (1, 2, 4, 8), spread_s=10.0)
    first, second = (simulate(jobs, NODES, EvolutionaryRule(NODES, 7, generations=5)) for _ in range(2))
    assert first.segments == second.segments


def test_a_small_fleet_is_planned_with_a_proof_and_a_large_one_with_a_bound() -> None:
    few = plan_fleet(random_fleet(0, 3, (1, 2, 4)), NODE)
    assert few.status == "optimal" and few.found_by == "CP-SAT"
    check(few.schedule)
    assert min(few.others_s.values()) >= few.schedule.mean_completion_s >= few.bound_s
    many = plan_fleet(random_fleet(0, 14, (1, 2, 4, 8), spread_s=5.0), NODES)
    assert many.status == "feasible" and many.found_by != "CP-SAT" and 0 < many.gap < 1
    assert min(many.others_s.values()) >= many.schedule.mean_completion_s
    assert "14 jobs on dgx-h100, 16 x" in str(many) and many.to_svg().count("<title>") >= len(many.schedule.segments)


def test_fleets_that_cannot_be_planned_say_why() -> None:
    jobs = random_fleet(0, 3, (1, 2, 4))
    with pytest.raises(InputError, match="each with a name of its own"):
        plan_fleet([*jobs, jobs[0]], NODE)
    alone_s = max(job.least_s for job in jobs)
    with pytest.raises(InfeasibleError, match=r"'job \d' ends .* late, though each would be in time alone"):
        plan_fleet(jobs, NODE, until_s=alone_s + 1, time_limit_s=0)
