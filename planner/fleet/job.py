"""Training jobs, each with the allocations that it may run on, as fast as its plans say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Allocation:
    """So many devices, the global batch that is trained with on them, and the seconds of a step."""

    devices: int
    batch: int
    step_s: float

    @property
    def samples_per_s(self) -> float:
        """How fast samples are worked off."""
        return self.batch / self.step_s

    @property
    def device_s_per_sample(self) -> float:
        """What a sample takes of the cluster."""
        return self.devices / self.samples_per_s


@dataclass(frozen=True)
class FleetJob:
    """A job of a fleet.

    Attributes:
        samples: that remain to be trained on, at whatever batch.
        allocations: what it may run on: the fewest devices first, each faster than those before.
        arrival_s: when it may start.
        state_bytes: what is moved when it goes from one allocation to another: parameters and optimizer state.
        restart_s: what such a move takes beside that: to stop, to start again, to compile.
    """

    name: str
    samples: float
    allocations: tuple[Allocation, ...]
    arrival_s: float = 0.0
    state_bytes: int = 0
    restart_s: float = 0.0

    @cached_property
    def least_s(self) -> float:
        """Seconds that it takes at least, alone on the cluster."""
        return self.samples / self.allocations[-1].samples_per_s

    @cached_property
    def least_device_s(self) -> float:
        """Device-seconds that it takes at least, where it is most efficient."""
        return self.samples * min(each.device_s_per_sample for each in self.allocations)


def fastest_allocations(steps: Iterable[Allocation], devices: int) -> tuple[Allocation, ...]:
    """What is worth running on, of all that is possible within so many devices: of every number of devices the batch
    with the most samples per second, and no more devices where they are no faster.
    """
    found: list[Allocation] = []
    for each in sorted(steps, key=lambda each: (each.devices, -each.samples_per_s, each.batch)):
        if each.devices <= devices and (not found or each.samples_per_s > found[-1].samples_per_s):
            found.append(each)
    return tuple(found)
