"""Random numbers that agree where ranks hold the same data, and differ where they do not.

Ranks that hold different slices of a tensor draw differently; ranks that hold the same values draw the
same. A region seeds torch's generators from a seed that all ranks share, from how many regions came
before, and from which slice this rank holds, and leaves the generators as it found them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch.distributed._local_tensor import enabled_local_tensor_mode

from autopar.runtime.layers.index import GroupsOrTurns, coordinate
from autopar.runtime.turns import Turns

_SEEDS = 2**62
_STRIDE = 0x9E3779B9  # odd, so that coordinates keep seeds apart modulo 2**32, all that CPU generators use


class RandomState:
    """The position in a stream of random regions; the same on all ranks that run the same program.

    Args:
        seed: shared by all ranks.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.calls = 0
        self._coordinates: dict[tuple[GroupsOrTurns, tuple[int, ...]], int] = {}

    @contextlib.contextmanager
    def region(self, groups: GroupsOrTurns = ()) -> Iterator[None]:
        """Draw as the holder of this rank's slice over ``groups``; ranks that differ elsewhere draw the same."""
        seed = (_mix(self.seed, self.calls) + self._coordinate(groups) * _STRIDE) % _SEEDS
        self.calls += 1
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices), _simulated_ranks_forked():
            torch.manual_seed(seed)
            yield

    def recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """``context_fn`` for :func:`torch.utils.checkpoint.checkpoint`: recomputing draws what was drawn before."""
        calls = 0

        @contextlib.contextmanager
        def first() -> Iterator[None]:
            nonlocal calls
            calls = self.calls
            yield

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            now, self.calls = self.calls, calls
            try:
                yield
            finally:
                self.calls = now

        return first(), again()

    def _coordinate(self, groups: GroupsOrTurns) -> int:
        turns = tuple(group.now for group in groups if isinstance(group, Turns))
        if (groups, turns) not in self._coordinates:
            self._coordinates[groups, turns] = coordinate(groups) if groups else 0
        return self._coordinates[groups, turns]


@contextlib.contextmanager
def _simulated_ranks_forked() -> Iterator[None]:
    """Leave the generators of the ranks that :class:`LocalTensorMode` simulates as they were."""
    mode = enabled_local_tensor_mode()
    if mode is None:
        yield
        return
    before = dict(mode._per_rank_rng_states)
    try:
        yield
    finally:
        mode._per_rank_rng_states.clear()
        mode._per_rank_rng_states.update(before)


def _mix(seed: int, calls: int) -> int:
    """A seed in which every bit depends on every bit of both (splitmix64, Steele et al. 2014, figure 16)."""
    z = (seed + (calls + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % _SEEDS
