"""The ranks that hold the same part of every pipeline stage, and the process groups over which they send."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autopar.runtime.host.timeouts import patience


@dataclass(frozen=True)
class PipelineRanks:
    """The ranks that hold the same part of every stage.

    What a rank does in one group of nccl is done in order, and one waits for the other; so whoever sends to somebody
    does so in a group of just these two, for that direction.

    Attributes:
        ranks: all of them, for what is not sent from stage to stage.
        ways: by sender and receiver, both neighbours in the ring of ranks, the group of the two.
        device: where they compute.
        made: groups of some of them that were made, by their numbers.
    """

    ranks: ProcessGroup
    ways: Mapping[tuple[int, int], ProcessGroup]
    device: torch.device
    made: dict[frozenset[int], ProcessGroup | None] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def over(cls, ranks: ProcessGroup, device: torch.device) -> PipelineRanks:
        """Make the groups of all pipelines that lie side by side; every process must call this.

        Each is used once, since nccl connects two ranks only then, and both must take part.
        """
        size = ranks.size()
        ways: dict[tuple[int, int], ProcessGroup] = {}
        made = cls(ranks, ways, device)
        neighbours = [(at, (at + 1) % size) for at in range(size if size > 2 else 1)]
        for sender, receiver in (way for low, high in neighbours for way in ((low, high), (high, low))):
            group = made._new_group({sender, receiver})
            if group is None:
                continue
            ways[sender, receiver] = group
            number = torch.zeros(1, device=device)
            if made.rank == sender:
                dist.send(number, made.global_rank(receiver), group)
            else:
                dist.recv(number, made.global_rank(sender), group)
        return made

    def group(self, numbers: Collection[int]) -> ProcessGroup | None:
        """A group of some of them, if this process is among these, made once; every process of all pipelines must call
        this.
        """
        key = frozenset(numbers)
        if key not in self.made:
            self.made[key] = self._new_group(key)
        return self.made[key]

    def _new_group(self, numbers: Collection[int]) -> ProcessGroup | None:
        """Another one each time: each direction between two ranks has its own."""
        members = dist.get_process_group_ranks(self.ranks)
        beside = dist.get_world_size() // self.size  # ranks of a stage; the same rank of the next is so many further
        own = members[0] % beside
        timeout = patience(self.device)
        lists = ([rank + beside * at for at in sorted(numbers)] for rank in range(beside))
        groups = [dist.new_group(ranks, timeout=timeout) for ranks in lists]
        return groups[own] if self.rank in numbers else None

    @property
    def rank(self) -> int:
        """This process's number among them."""
        return dist.get_rank(self.ranks)

    @property
    def size(self) -> int:
        """How many there are."""
        return self.ranks.size()

    def global_rank(self, number: int) -> int:
        """The rank of one of them among all processes."""
        return dist.get_global_rank(self.ranks, number)
