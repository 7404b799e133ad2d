"""In flight: of how many micro-batches the stages of a step hold anything, counted while it runs."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.pipeline.stage import Stage


class _Saved:
    """What autograd saves in place of a tensor; there as long as autograd needs it.

    Without the tensor's history: of a result that would be the very node that saves it.
    """

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()


class InFlight:
    """Watches the steps of a :class:`PipelineStep`; holds nothing itself.

    A stage holds a micro-batch while anything is there that came in for it, or that autograd saved of it.

    Args:
        rank_of: the rank of every stage; several may be in this process.
    """

    def __init__(self, step: PipelineStep, rank_of: Sequence[int]):
        self._step, self._rank_of = step, rank_of
        self._things = Counter[tuple[int, int]]()
        self._moments = defaultdict[int, set[tuple[int, ...]]](set)
        watched = {n: replace(stage, program=partial(self._forward, stage)) for n, stage in step.spec.stages.items()}
        step.spec = replace(step.spec, stages=watched)

    def fullest(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """As :attr:`planner.solve.pipeline.schedule.Schedule.held` has it."""
        found = sorted(self._moments[rank], reverse=True)
        return tuple(
            each for at, each in enumerate(found) if not any(all(map(int.__le__, each, other)) for other in found[:at])
        )

    @property
    def now(self) -> int:
        """What is held by all stages together."""
        return len(+self._things)

    def _forward(self, stage: Stage, *args: Any) -> Any:
        key = stage.number, self._step.spec.micro_batches.now
        used = stage.parameters if stage.gather is None else stage.gather.graph.output_node().args[0]
        first = len(used) + len(stage.leaves)  # type: ignore[arg-type]
        for value in args[first : first + len(stage.received)]:
            self._hold(key, value)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._saved(key, tensor), lambda box: box.tensor):
            return stage.program(*args)

    def _saved(self, key: tuple[int, int], tensor: Tensor) -> _Saved:
        box = _Saved(tensor)
        self._hold(key, box)
        return box

    def _hold(self, key: tuple[int, int], thing: object) -> None:
        weakref.finalize(thing, self._drop, key)
        self._things[key] += 1
        rank = self._rank_of[key[0]]
        stages = [stage for stage, home in enumerate(self._rank_of) if home == rank]
        counts = Counter(stage for stage, _ in +self._things)
        self._moments[rank].add(tuple(counts[stage] for stage in stages))

    def _drop(self, key: tuple[int, int]) -> None:
        self._things[key] -= 1
