"""How long a pipeline takes at least while it fills and empties, whatever its stages are cut into.

The first micro-batch comes to a rank's stage through all stages before it, and the last one goes back through them. In
between the rank does all that it has, less what it may do before and after: of its stages before that one, a round of
micro-batches, forward and backward. So no step is shorter than what is on this path, and there is one for each stage. A
mix of them has the work of every stage as often as that of any other: then it does not matter how blocks are shared
out, and the mix is a bound of all cuts.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from planner.solve.pipeline.schedule import OUT_OF_ORDER, per_round
from planner.solve.pipeline.stages import Pipeline


def least_rounds(pipeline: Pipeline) -> float:
    """How often a step takes at least what all stages together take for one micro-batch, forward and backward."""
    ranks, micro_batches = pipeline.ranks, pipeline.micro_batches
    if pipeline.schedule in OUT_OF_ORDER:
        return micro_batches / ranks
    if ranks == 1 or micro_batches < ranks:
        return max(1.0, micro_batches / ranks)
    return max(micro_batches / ranks, _least_rounds(ranks, micro_batches, pipeline.virtual_stages))


@lru_cache(maxsize=2**14)
def _least_rounds(ranks: int, micro_batches: int, virtual_stages: int) -> float:
    """Row ``s`` says how often the path of stage ``s`` has each stage's work; weights make all columns equal."""
    numbers = np.arange(ranks * virtual_stages)
    stage, other = numbers[:, None], numbers
    is_before, is_of_rank = other < stage, (stage - other) % ranks == 0
    skipped = per_round(ranks, micro_batches, virtual_stages)
    paths = micro_batches * is_of_rank + is_before - skipped * (is_of_rank & is_before)
    weights = np.maximum(0.0, np.linalg.solve(paths.T, np.ones(len(numbers))))
    return float((weights @ paths).min() / weights.sum())
