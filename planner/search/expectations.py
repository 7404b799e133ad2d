"""What a search expects plans to take, from their bounds and from what it learned of others.

Bounds say what plans take at least; which branch is worth its evaluation depends on how much more they will take. Two
parts of that are alike wherever they were met. Smaller micro-batches leave products smaller and calls as many, by about
as much for each micro-batch and rank that shares it, on all meshes. And where memory decides, plans take longer than
relaxations say, the more so the more a rank holds: with fewer micro-batches, which are larger, and with more virtual
stages.
"""

from __future__ import annotations

import math
from statistics import median_low
from typing import NamedTuple, TypeAlias

from planner.formulation.unsharding import Unsharding
from planner.search.candidates import Branch, FoundPlan
from planner.search.parallel_config import ParallelConfig

FreeSeconds: TypeAlias = dict[ParallelConfig, dict[int, float]]
"""What plans take at least if memory and waiting cost nothing, by configuration whatever its micro-batches
(:attr:`ParallelConfig.any_micro_batches`), and by these.
"""


class Expectations:
    """Seconds that plans of branches are expected to take.

    Args:
        batch: samples of a step.
    """

    def __init__(self, batch: int):
        self._batch = max(1, batch)
        self._added: dict[ParallelConfig, float] = {}
        self._usually_added = 0.0
        self._excess: dict[_Fullness, float] = {}

    def learn_work(self, free_s: FreeSeconds) -> None:
        """Learn what micro-batches add to work and communication, from all that is known by now."""
        for config, by_count in free_s.items():
            known = sorted((count, seconds) for count, seconds in by_count.items() if 0.0 < seconds < math.inf)
            if len(known) > 1:
                (fewest, fewest_s), (most, most_s) = known[0], known[-1]
                self._added[config] = max(0.0, most_s / fewest_s - 1.0) / ((most - fewest) * self._share(config))
        self._usually_added = median_low([*self._added.values()] or [0.0])

    def learn_excess(self, cut: Branch, best: FoundPlan) -> None:
        """Learn from a pipeline that was cut for its relaxation: its plan, or it had none faster than the ``best``."""
        assert cut.pipeline is not None
        found_s, held = min(cut.candidate.objective_s, best.evaluation.time_s), _Fullness.by(cut)
        expected_s = max(cut.expected_s, cut.bound_s * (1.0 + cut.pipeline.bubble))
        excess = max(1.0, found_s / expected_s) if expected_s > 0.0 else 1.0
        self._excess[held] = min(excess, self._excess.get(held, math.inf))

    def of(self, branch: Branch) -> float:
        """Those of a branch: the least of its bounds while its pipelines are not told apart."""
        if branch.pipeline is None or branch.bounded_by is None:
            return branch.expected_s
        config, held = branch.candidate.config, _Fullness.by(branch)
        excess = max((each for other, each in self._excess.items() if held.is_no_less_than(other)), default=1.0)
        more = config.mesh.micro_batches - branch.bounded_by.mesh.micro_batches
        added = self._added.get(config.any_micro_batches, self._usually_added) * more * self._share(config)
        return branch.expected_s * excess * (1.0 + added)

    def _share(self, config: ParallelConfig) -> float:
        """Ranks for each sample that there would be with one micro-batch."""
        return config.mesh.size / self._batch


class _Fullness(NamedTuple):
    """What decides how much of its stages a rank of a pipeline holds."""

    stages: int
    unsharding: Unsharding
    micro_batches: int
    virtual_stages: int

    @classmethod
    def by(cls, branch: Branch) -> _Fullness:
        """What does of a branch."""
        config = branch.candidate.config
        assert branch.pipeline is not None
        return cls(config.stages, config.unsharding, config.mesh.micro_batches, branch.pipeline.virtual_stages)

    def is_no_less_than(self, other: _Fullness) -> bool:
        """Whether as much is held as by another at least."""
        is_alike = (self.stages, self.unsharding) == (other.stages, other.unsharding)
        return is_alike and self.micro_batches <= other.micro_batches and self.virtual_stages >= other.virtual_stages
