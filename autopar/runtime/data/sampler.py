"""The samples of every global batch that a rank loads, in an order that depends neither on ranks nor on the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Sampler

from autopar.runtime.data.batch_share import BatchShare
from planner.base.errors import InputError


@dataclass
class EpochProgress:
    """How far passes over the data have come. Each pass is an epoch, and the next one begins where none was under way.

    Attributes:
        epoch: the number of the pass.
        position: how many samples of it all ranks together have taken.
        is_under_way: whether it has begun in this process.
    """

    epoch: int = 0
    position: int = 0
    is_under_way: bool = False

    def begin(self) -> None:
        """A pass begins: this epoch's, or the next one's if it was broken off."""
        if self.is_under_way:
            self.epoch, self.position = self.epoch + 1, 0
        self.is_under_way = True

    def end(self) -> None:
        """It came to its end."""
        self.epoch, self.position, self.is_under_way = self.epoch + 1, 0, False

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch; one that was loaded goes on where it was."""
        if self.is_under_way or epoch != self.epoch:
            self.epoch, self.position, self.is_under_way = epoch, 0, False

    def state(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """As plain data, beside what the order of samples depends on."""
        return {"epoch": self.epoch, "position": self.position, **order}

    def load(self, state: Mapping[str, Any], order: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`.

        Raises:
            InputError: it is of another order.
        """
        theirs = {name: value for name, value in state.items() if name not in ("epoch", "position")}
        if theirs != dict(order) or not {"epoch", "position"} <= state.keys():
            raise InputError(
                f"the state is of data in the order of {theirs}, and here it is that of {dict(order)}: give the same "
                "dataset, shuffle and seed, or begin an epoch anew (set_epoch)"
            )
        self.epoch, self.position, self.is_under_way = state["epoch"], state["position"], False


class DistributedBatchSampler(Sampler[list[int]]):
    """The numbers of the samples that this rank loads, batch by batch: ``DataLoader(dataset, batch_sampler=...)``.

    The order is that of ``DistributedSampler(dataset, 1, 0, shuffle, seed)`` of torch in one process, whatever the plan
    and the number of ranks: global batch ``b`` is ``order[b * size:(b + 1) * size]``.
    Each pass is an epoch, which is shuffled anew; :meth:`set_epoch` says which is the next.

    Args:
        dataset: of which only the length is asked.
        share: what this rank loads of a global batch.
        shuffle: draw the order, from ``seed`` and the epoch.
        seed: the same on all ranks.
        drop_last: whether to leave out a last batch that is smaller. If not, every rank is given all its samples.

    Raises:
        InputError: the dataset has no length, or is smaller than a batch.
    """

    def __init__(
        self, dataset: Any, share: BatchShare, *, shuffle: bool = False, seed: int = 0, drop_last: bool = True
    ):
        if not isinstance(dataset, Sized):
            raise InputError(
                f"the dataset, a {type(dataset).__name__}, has no length, which a sampler needs: give one with __len__ "
                "and __getitem__, or to pmodel.dataloader a torch.utils.data.IterableDataset"
            )
        if len(dataset) < share.size and (drop_last or not len(dataset)):
            raise InputError(
                f"the dataset has {len(dataset)} samples, and a global batch takes {share.size}: give more, or plan "
                "for a smaller batch"
            )
        self.length, self.share = len(dataset), share
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.progress = EpochProgress()

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return self.length // self.share.size if self.drop_last else -(-self.length // self.share.size)

    def __iter__(self) -> Iterator[list[int]]:
        self.progress.begin()
        order, size = self._order(self.progress.epoch), self.share.size
        own, least = list(self.share.samples), size if self.drop_last else 1
        while len(batch := order[self.progress.position :][:size]) >= least:
            self.progress.position += len(batch)
            yield (batch[own] if len(batch) == size else batch).tolist()
        self.progress.end()

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + epoch))

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch; one that was loaded goes on where it was."""
        self.progress.set_epoch(epoch)

    @property
    def order(self) -> dict[str, Any]:
        """What the order of samples depends on, beside the epoch."""
        return {"length": self.length, "shuffle": self.shuffle, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position, for any plan; a DataLoader with workers has then drawn more than it has handed out."""
        return self.progress.state(self.order)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the samples that were taken when ``state`` was.

        Raises:
            InputError: it is of another dataset, shuffle or seed.
        """
        self.progress.load(state, self.order)
