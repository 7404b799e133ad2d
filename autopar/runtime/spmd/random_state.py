"""Random numbers that agree where ranks hold the same data, and differ where they do not.

Ranks that hold different slices of a tensor draw differently; ranks that hold the same values draw the
same. A region seeds torch's generators from a seed that all ranks share, from how many regions came
before, and from which slice this rank holds, and leaves the generators as it found them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch.distributed._local_tensor import enabled_local_tensor_mode

from autopar.runtime.spmd.micro_batch import MicroBatches
from autopar.runtime.spmd.rank_index import GroupsOrMicroBatches, coordinate

_SEEDS = 2**62
_STRIDE = 0x9E3779B9  # odd, so that coordinates keep seeds apart modulo 2**32, all that CPU generators use


class RandomState:
    """The position in a stream of random regions; the same on all ranks that run the same program.

    Args:
        seed: shared by all ranks.

    Attributes:
        calls: how many regions came before.
        now: inside a region of a recording or of its replay: the region's number in the recording.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.calls = 0
        self.now: int | None = None
        self._recording: list[int] | None = None
        self._replay: Iterator[tuple[int, int]] | None = None
        self._coordinates: dict[tuple[GroupsOrMicroBatches, tuple[int, ...]], int] = {}

    @property
    def is_replaying(self) -> bool:
        """Whether regions are entered once more."""
        return self._replay is not None

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Keep for backward what a recording finds again, to make it anew; nothing is drawn, and no place is taken in
        the stream.
        """
        self.now, _ = self._entered(0)
        try:
            yield
        finally:
            self.now = None

    @contextlib.contextmanager
    def drawing(self, groups: GroupsOrMicroBatches = ()) -> Iterator[None]:
        """A region that draws as the holder of this rank's slice over ``groups``; ranks that differ elsewhere draw the
        same.
        """
        self.now, seed = self._entered(0 if self.is_replaying else self._next_seed(groups))
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        try:
            with torch.random.fork_rng(devices), _simulated_ranks_forked():
                torch.manual_seed(seed)
                yield
        finally:
            self.now = None

    def _next_seed(self, groups: GroupsOrMicroBatches) -> int:
        """The seed at this position in the stream, which goes on."""
        seed = (_mix(self.seed, self.calls) + self.coordinate(groups) * _STRIDE) % _SEEDS
        self.calls += 1
        return seed

    def _entered(self, seed: int) -> tuple[int | None, int]:
        """The number in the recording, if there is one, and the seed of the region that begins: ``seed``, or that of
        the recording which is replayed.
        """
        if self._replay is not None:
            return next(self._replay)
        if self._recording is None:
            return None, seed
        self._recording.append(seed)
        return len(self._recording) - 1, seed

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[int]]:
        """Write down the seed of every region that is entered."""
        before, self._recording = self._recording, []
        try:
            yield self._recording
        finally:
            self._recording = before

    @contextlib.contextmanager
    def replayed(self, regions: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Enter regions of a recording once more, by number and seed, in order; the position in the stream stays."""
        before, self._replay = self._replay, iter(regions)
        try:
            yield
        finally:
            self._replay = before

    def coordinate(self, groups: GroupsOrMicroBatches) -> int:
        """This rank's number among those of ``groups``, the first group being the major one; worked out once."""
        micro_batches = tuple(group.now for group in groups if isinstance(group, MicroBatches))
        if (groups, micro_batches) not in self._coordinates:
            self._coordinates[groups, micro_batches] = coordinate(groups) if groups else 0
        return self._coordinates[groups, micro_batches]


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
