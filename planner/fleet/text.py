"""A fleet's schedule in characters: a row per job over time, and what it has when."""

from __future__ import annotations

from planner.base.formatting import in_duration
from planner.fleet.schedule import FleetSchedule, FleetSegment

WIDTH = 72
LEVELS = "▁▂▃▄▅▆▇█"
"""Eighths of the cluster, rounded up."""
WAITS, MOVES = "·", "m"


def drawing(found: FleetSchedule) -> list[str]:
    """A row for each job, the time, and what the signs are."""
    label = max(len(job.name) for job in found.jobs)
    return [
        *(f"{job.name:<{label}} {_row(found, job.name)}" for job in found.jobs),
        f"{'':<{label}} 0{in_duration(found.last_end_s):>{WIDTH - 1}}",
        f"{'':<{label}} {LEVELS[0]} to {LEVELS[-1]} share of the devices   {WAITS} waits   {MOVES} is moved",
    ]


def stretches(found: FleetSchedule) -> list[str]:
    """What each job has when, a line for every stretch."""
    lines = []
    for job in found.jobs:
        took = in_duration(found.end_s[job.name] - job.arrival_s)
        lines.append(
            f"{job.name}: ends {took} after its arrival" + f" at {in_duration(job.arrival_s)}" * bool(job.arrival_s)
        )
        lines += [_stretch(each) for each in found.segments if each.job == job]
    return lines


def _stretch(each: FleetSegment) -> str:
    devices, moved = _ranges(each.devices), f", of which {in_duration(each.moving_s)} to move" if each.moving_s else ""
    return (
        f"  {in_duration(each.start_s)} to {in_duration(each.end_s)}: {each.allocation.devices} "
        f"device{'s' * (each.allocation.devices > 1)} ({devices}), batch {each.allocation.batch}{moved}"
    )


def _ranges(devices: tuple[int, ...]) -> str:
    """``"0-7, 16-23"``."""
    ranges: list[list[int]] = []
    for device in devices:
        if ranges and ranges[-1][1] == device - 1:
            ranges[-1][1] = device
        else:
            ranges.append([device, device])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _row(found: FleetSchedule, name: str) -> str:
    """A sign for the middle of each stretch of time."""
    arrival_s = next(job.arrival_s for job in found.jobs if job.name == name)
    segments = [each for each in found.segments if each.job.name == name]
    signs = []
    for place in range(WIDTH):
        at_s = (place + 0.5) / WIDTH * found.last_end_s
        running = next((each for each in segments if each.start_s <= at_s < each.end_s), None)
        if running is None:
            signs.append(WAITS if arrival_s <= at_s < found.end_s[name] else " ")
        elif at_s < running.start_s + running.moving_s:
            signs.append(MOVES)
        else:
            signs.append(LEVELS[-(-running.allocation.devices * len(LEVELS) // found.cluster.world_size) - 1])
    return "".join(signs).rstrip()
