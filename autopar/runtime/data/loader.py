"""A ``torch.utils.data.DataLoader`` of global batches, of which each rank loads its share and yields its part."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from autopar.runtime.data.batch_share import BatchShare
from autopar.runtime.data.sampler import DistributedBatchSampler, EpochProgress
from autopar.runtime.spmd.input_form import mark
from autopar.runtime.spmd.interface import Interface, LeafSpec
from planner.base.errors import InputError

OURS = ("batch_sampler", "sampler", "generator")
"""Options of a DataLoader that follow from the plan."""


class DistributedDataLoader(DataLoader[Any]):
    """Yields what the parallel module takes, on its device: ``for part in loader: pmodel(**part)``.

    Of a map-style dataset a rank loads its own samples. An iterable dataset is read by every rank, whole, and must be
    the same on each: of every global batch a rank then collates its own samples. ``state_dict()`` says what was handed
    out, whatever workers have loaded ahead.

    Args:
        dataset: map-style or iterable.
        share: what this rank loads of a global batch.
        interface: the inputs of the module.
        shard: makes this rank's part of a smaller last batch, of which it is given all.
        device: the module's.
        shuffle, seed, drop_last: as of :class:`DistributedBatchSampler`.
        collate_fn: makes a batch of samples, in which every sample is a row, whoever loads it.
        options: of the DataLoader.

    Raises:
        InputError: an option is the plan's, or the dataset is iterable and to be shuffled.
    """

    _is_accelerate_prepared = True  # for accelerate: batches are shared out already

    def __init__(
        self,
        dataset: Any,
        share: BatchShare,
        interface: Interface,
        shard: Callable[[Any], Any],
        device: torch.device,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        **options: Any,
    ):
        ours = [name for name in OURS if name in options]
        if ours:
            raise InputError(
                f"{ours[0]} is the plan's to choose, so that ranks load what they compute with: leave it out, or give "
                "pmodel.sampler(...) to a torch.utils.data.DataLoader of your own"
            )
        self._share, self._interface, self._shard, self._device = share, interface, shard, device
        self._seed = seed
        self.progress = EpochProgress()
        collate = default_collate if collate_fn is None else collate_fn
        if isinstance(dataset, IterableDataset):
            if shuffle:
                raise InputError(
                    f"the dataset, a {type(dataset).__name__}, is iterable and comes in its own order: leave out "
                    "shuffle, and shuffle in the dataset, by the same seed on all ranks"
                )
            options |= {"batch_size": share.size, "drop_last": drop_last, "collate_fn": _OwnSamples(collate, share)}
        else:
            sampler = DistributedBatchSampler(dataset, share, shuffle=shuffle, seed=seed, drop_last=drop_last)
            options |= {"batch_sampler": sampler, "collate_fn": collate}
        super().__init__(dataset, generator=torch.Generator(), **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.progress.begin()
        now = self.progress
        first = self._share.samples[0]  # ranks that load the same samples augment them alike, if workers do it
        self.generator.manual_seed(random.Random(f"{self._seed} {now.epoch} {now.position} {first}").getrandbits(63))
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(now.epoch)
        for batch, size in self._loaded():
            part = self._part((batch,) if isinstance(batch, Tensor) else batch, size)
            now.position += size
            yield part
        now.end()

    def _part(self, batch: Any, size: int) -> Any:
        """What the module takes of a collated batch, on its device.

        A batch of another size is here whole: which rows of it a rank takes, if it can be taken at all, ``shard`` says.
        """
        if size != self._share.size:
            return self._shard(batch)
        try:
            return self._interface.each_input(batch, self._placed)
        except InputError as error:
            raise InputError(f"what collate_fn makes of samples does not fit the model: {error}") from None

    def _placed(self, leaf: LeafSpec, value: Any) -> Tensor:
        part = self._share.part(leaf, value).to(self._device, non_blocking=True)
        return mark(part, self._share.cuts[leaf.name].whole)

    def _loaded(self) -> Iterator[tuple[Any, int]]:
        """What this rank loads of every global batch from here on, collated, and how many samples the batch has."""
        if not isinstance(self.batch_sampler, DistributedBatchSampler):
            yield from itertools.islice(super().__iter__(), self._batches_before(), None)
            return
        self.batch_sampler.progress = replace(self.progress, is_under_way=False)
        for batch in super().__iter__():
            yield batch, min(self._share.size, self.batch_sampler.length - self.progress.position)

    def _batches_before(self) -> int:
        """How many batches of an iterable dataset were handed out."""
        count, rest = divmod(self.progress.position, self._share.size)
        if rest:
            raise InputError(
                f"{self.progress.position} samples were handed out when the state was saved, which is no whole number "
                f"of batches of {self._share.size}, and an iterable dataset is read in batches: begin the epoch anew "
                "(set_epoch), or give a map-style dataset"
            )
        return count

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch; one that was loaded goes on where it was."""
        self.progress.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position behind the last batch that was handed out, as plain data: the same on every rank, and for
        any plan.
        """
        return self.progress.state(self._order)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batches that were handed out when ``state`` was; an iterable dataset is read up to there.

        Raises:
            InputError: it is of another dataset, shuffle or seed.
        """
        self.progress.load(state, self._order)

    @property
    def _order(self) -> dict[str, Any]:
        return self.batch_sampler.order if isinstance(self.batch_sampler, DistributedBatchSampler) else {}


@dataclass(frozen=True)
class _OwnSamples:
    """Collates of a global batch, or of the smaller last one all of it, what this rank loads; with the batch's size."""

    collate: Callable[[list[Any]], Any]
    share: BatchShare

    def __call__(self, batch: list[Any]) -> tuple[Any, int]:
        own = [batch[number] for number in self.share.samples] if len(batch) == self.share.size else batch
        return self.collate(own), len(batch)
