"""Rules that give devices to jobs without a search: what schedules are compared with, and what searches begin with.

Jobs of a fixed size run on the most devices that are at least half as efficient as the fewest, as a careful user would
ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from planner.fleet.job import Allocation, FleetJob
from planner.fleet.simulate import ActiveJob

EFFICIENT = 0.5
"""Of the samples per device and second that a job has on its fewest devices, a fixed size keeps at least so much."""
Given = list[Allocation | None]


def fixed_size(job: FleetJob) -> Allocation:
    """What a job runs on where its size does not change."""
    most = job.allocations[0].device_s_per_sample / EFFICIENT
    return [each for each in job.allocations if each.device_s_per_sample <= most][-1]


def first_come_first_served(devices: int) -> Callable[[float, Sequence[ActiveJob]], Given]:
    """Fixed sizes in the order of arrival; who does not fit holds up those behind."""

    def rule(now_s: float, active: Sequence[ActiveJob]) -> Given:
        return _in_order(active, range(len(active)), devices, holds_up=True)

    return rule


def shortest_remaining_first(devices: int) -> Callable[[float, Sequence[ActiveJob]], Given]:
    """Fixed sizes, who would end first in front, and whoever fits beside; others wait, those that ran included."""

    def rule(now_s: float, active: Sequence[ActiveJob]) -> Given:
        left_s = [each.samples / fixed_size(each.job).samples_per_s for each in active]
        return _in_order(active, sorted(range(len(active)), key=left_s.__getitem__), devices, holds_up=False)

    return rule


def _in_order(active: Sequence[ActiveJob], order: Iterable[int], devices: int, holds_up: bool) -> Given:
    given: Given = [None] * len(active)
    for number in order:
        size = fixed_size(active[number].job)
        if size.devices <= devices:
            given[number] = size
            devices -= size.devices
        elif holds_up:
            break
    return given


def greedy_elastic(devices: int) -> Callable[[float, Sequence[ActiveJob]], Given]:
    """The fewest devices for all, the shortest first, and then again and again more for the job whose remaining time
    that shortens most for each device (Optimus, Peng et al. 2018).
    """

    def rule(now_s: float, active: Sequence[ActiveJob]) -> Given:
        level = [-1] * len(active)
        free = devices
        for number in sorted(range(len(active)), key=lambda number: active[number].samples * _first(active[number])):
            if active[number].job.allocations[0].devices <= free:
                level[number] = 0
                free -= active[number].job.allocations[0].devices
        while True:
            gains = [
                (_gain(active[number], at), number)
                for number, at in enumerate(level)
                if 0 <= at < len(active[number].job.allocations) - 1 and _more(active[number], at) <= free
            ]
            if not gains:
                break
            _, best = max(gains)
            free -= _more(active[best], level[best])
            level[best] += 1
        return [each.job.allocations[at] if at >= 0 else None for each, at in zip(active, level, strict=True)]

    return rule


def _first(each: ActiveJob) -> float:
    return 1 / each.job.allocations[0].samples_per_s


def _more(each: ActiveJob, at: int) -> int:
    return each.job.allocations[at + 1].devices - each.job.allocations[at].devices


def _gain(each: ActiveJob, at: int) -> float:
    now, then = each.job.allocations[at : at + 2]
    return each.samples * (1 / now.samples_per_s - 1 / then.samples_per_s) / _more(each, at)


RULES = {
    "first come first served": first_come_first_served,
    "shortest remaining first": shortest_remaining_first,
    "greedy elastic": greedy_elastic,
}
"""All of them, each made for a number of devices."""
