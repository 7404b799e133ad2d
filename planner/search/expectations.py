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

LIKELY = 0.02
"""A pipeline that is likely to be faster than the best plan by this part is cut before others are bounded closely."""
DOUBT = 1.5
"""So many times longer a step is expected where samples are too few for the ranks; see :func:`doubt_of`."""


def doubt_of(config: ParallelConfig, batch: int, span: int) -> float:
    """How many times longer than bounds say a step is expected: some where micro-batches have fewer samples than ranks
    to share them, unless the last axis is within a node and there are enough for the others.
    """
    samples = max(1, batch) // config.mesh.micro_batches
    ranks, last = config.mesh.size, config.mesh.sizes[-1]
    return 1.0 if samples >= ranks or (last <= span and samples >= ranks // last) else DOUBT


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
        expected_s = max(cut.expected_s, cut.bound_s * cut.pipeline.stretch)
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

    def is_likely(self, branch: Branch, best: FoundPlan | None) -> bool:
        """Whether a pipeline's relaxation is known, it was not cut, and is expected to be faster than the best plan."""
        is_solved = branch.likely_s > 0.0 and branch.is_by_itself and not branch.is_sought
        return is_solved and (best is None or self.of(branch) < best.evaluation.time_s * (1 - LIKELY))

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
