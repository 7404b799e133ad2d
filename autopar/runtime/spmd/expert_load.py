"""How unevenly tokens went to the ranks that share experts, as it was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from planner.base.errors import InputError


@dataclass(frozen=True)
class ExpertLoad:
    """What the busiest rank had over the average; what a cluster states as ``expert_imbalance``.

    Attributes:
        calls: of experts that were seen, each of a layer and a step, or micro-batch.
        imbalance: rows of the busiest rank over the average, on the average of all calls.
        worst: the same of the most uneven call.
    """

    calls: int
    imbalance: float
    worst: float

    def __str__(self) -> str:
        return (
            f"the busiest rank had {self.imbalance:.2f} times the average rank's rows in {self.calls} calls of "
            f"experts, {self.worst:.2f} times in the most uneven one"
        )


def load_of(rows: Sequence[int], stage: int) -> ExpertLoad:
    """The load of all ranks, on each of them; every rank must call it.

    Args:
        rows: what this rank had, call by call.
        stage: whose experts these are; ranks of one stage make the same calls.

    Raises:
        InputError: nothing was seen.
    """
    everybody: list[tuple[int, Sequence[int]]] = [(stage, rows)] * dist.get_world_size()
    dist.all_gather_object(everybody, (stage, rows))
    ratios = []
    for number in sorted({each for each, _ in everybody}):
        for call in zip(*(seen for each, seen in everybody if each == number), strict=True):
            ratios.append(max(call) * len(call) / (sum(call) or 1))
    if not ratios:
        raise InputError(
            "no load of experts was seen: run a step first, with a plan whose ranks share experts (pin 'expert'); "
            "load() tells of the steps since it was called last"
        )
    return ExpertLoad(len(ratios), sum(ratios) / len(ratios), max(ratios))
