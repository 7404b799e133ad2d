"""Makes an error of one rank in a checkpoint an error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.runtime.host.timeouts import patience
from planner.base.errors import AutoparError, CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks.

    Attributes:
        group: that nothing else uses; ``None``: this process is alone.
        world: the group of all processes when it was made.
    """

    group: ProcessGroup | None = None
    world: ProcessGroup | None = None

    @staticmethod
    def all() -> Ranks:
        """Every rank must call it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Ranks(world=dist.group.WORLD)
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        return Ranks(dist.new_group(backend="gloo", timeout=patience(device)), dist.group.WORLD)

    @property
    def are_all(self) -> bool:
        """Whether these are still all ranks: the processes may have formed another group since."""
        return self.world is dist.group.WORLD

    @property
    def rank(self) -> int:
        """This rank."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many there are."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def each(self, task: str, make: Callable[[], T]) -> list[T]:
        """What ``make`` returns on every rank.

        Args:
            task: what it is part of, for the error of a rank on which it fails unforeseen.

        Raises:
            AutoparError: what it raised on this rank, or the first that it raised on another.
        """
        mine = self._tried(task, make)
        found: list[Any] = [mine]
        if self.group is not None:
            found = [None] * self.size
            dist.all_gather_object(found, mine, group=self.group)
        return _good(mine, found)

    def first(self, task: str, make: Callable[[], T], then: Callable[[list[T]], None]) -> None:
        """``make`` on every rank, then ``then`` on rank 0 with what all made; errors as in :meth:`each`."""
        mine = self._tried(task, make)
        found: list[Any] = [mine]
        if self.group is not None:
            found = [None] * self.size
            dist.gather_object(mine, found if self.rank == 0 else None, 0, self.group)
        outcome: list[Any] = [None]
        if self.rank == 0:
            outcome = [self._tried(task, lambda: then(_good(mine, found)))]
        if self.group is not None:
            dist.broadcast_object_list(outcome, 0, self.group)
        _good(mine, outcome)

    def _tried(self, task: str, make: Callable[[], T]) -> T | AutoparError:
        try:
            return make()
        except AutoparError as error:
            return error
        except Exception as error:
            other = CheckpointError(f"rank {self.rank} failed while {task}: {type(error).__name__}: {error}")
            other.__cause__ = error
            return other


def _good(mine: Any, found: list[Any]) -> list[Any]:
    for value in (mine, *found):
        if isinstance(value, AutoparError):
            raise value
    return found
