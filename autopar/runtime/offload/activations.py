"""Activations saved for backward, in chunks that may leave the device after forward.

On the device a chunk is the storages that autograd saved, or others like them when it has come back; at home it is one
memory, of those in which all chunks take turns. What backward asks for is made a tensor of its storage again
(:class:`autopar.runtime.autograd.saved_handle.Held`).

The step after, or a backward that does not follow the transfer schedule, may find some of it still asked for: then what
is not at home goes there before it leaves the device, and is read from there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.autograd.saved_handle import SavedHandle
from autopar.runtime.offload.chunk_memory import Arena, ChunkMemory, CopyEngine, Homes


class Activations(ChunkMemory):
    """What some blocks save in one forward.

    Args:
        sizes: bytes of the storages that were planned to leave.
        homes: memories at home, one of its size for when the transfer schedule has it leave.
    """

    def __init__(
        self, name: str, sizes: Sequence[int], device: torch.device, arena: Arena, engine: CopyEngine, homes: Homes
    ):
        super().__init__(name, sum(sizes), arena, engine)
        self._sizes, self._device, self._homes = Counter(sizes), device, homes
        self._saved: _Storages | None = None

    def hold(self, storages: Iterable[Sequence[SavedHandle]]) -> None:
        """Take what was saved, of each storage all that is held of it: those of planned sizes, and of others (under
        autocast all are smaller) what there is room for besides.
        """
        self.check_present("forward")
        self._saved, planned, others = _Storages(self.engine, self._device), self._sizes.copy(), []
        for flat, held in ((_flat(each[0]), each) for each in storages):
            if planned[flat.numel()]:
                planned[flat.numel()] -= 1
                self._saved.take(flat, held)
            else:
                others.append((flat, held))
        for flat, held in sorted(others, key=lambda each: -each[0].numel()):
            if self._saved.bytes + flat.numel() <= self.bytes:
                self._saved.take(flat, held)

    def _make(self) -> None:
        self._saved = None

    def _evict(self) -> None:
        self.started = self._go_home()

    def _go_home(self) -> Any:
        """Start to copy what is there into memory that nobody reads any more."""
        if self._saved is None:
            return None
        home = self._homes.take(self.bytes)
        home = self.engine.home(self.bytes, self.name) if home is None else home
        return self._saved.go(home.detach())  # another tensor of the same storage, so that who holds it is counted

    def _drop(self) -> None:
        if self._saved is None:
            return
        if self._saved.is_asked_for and self._saved.home is None:
            self.engine.wait(self._go_home())
        self._saved.here = []
        if not self._saved.is_asked_for:
            self._saved = None

    def _fetch(self) -> None:
        if self._saved is not None:
            self.started = self._saved.come()


class _Storages:
    """The storages of one forward.

    Attributes:
        here: the bytes of each, while they are on the device.
        home: where they are when they are not.
    """

    def __init__(self, engine: CopyEngine, device: torch.device):
        self.here: list[Tensor] = []
        self.home: Tensor | None = None
        self._engine, self._device = engine, device
        self._starts = [0]
        self._asking: weakref.WeakSet[SavedHandle] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Of all."""
        return self._starts[-1]

    @property
    def is_asked_for(self) -> bool:
        """Whether backward may still read some of it."""
        return len(self._asking) > 0

    def take(self, flat: Tensor, held: Iterable[SavedHandle]) -> None:
        """Take a storage, by its bytes, and all that is held of it."""
        for each in held:
            each.leave(self, len(self.here))
            self._asking.add(each)
        self.here.append(flat)
        self._starts.append(self._starts[-1] + flat.numel())

    def flat(self, number: int) -> Tensor:
        """The bytes of a storage on the device."""
        if self.here:
            return self.here[number]
        source = self._at_home()[number]
        found = torch.empty(source.numel(), dtype=torch.uint8, device=self._device)
        self._engine.wait(self._engine.start("fetch", [(found, source)]))
        return found

    def go(self, home: Tensor) -> Any:
        """Start to copy all of it home."""
        started = self._engine.start("evict", [*zip(self._parts(home), self.here, strict=True)])
        self.home = home
        return started

    def come(self) -> Any:
        """Start to copy all of it to the device."""
        homes = self._at_home()
        here = [torch.empty(each.numel(), dtype=torch.uint8, device=self._device) for each in homes]
        started = self._engine.start("fetch", [*zip(here, homes, strict=True)])
        self.here = here
        return started

    def _at_home(self) -> list[Tensor]:
        """The bytes of each storage at home."""
        assert self.home is not None
        return self._parts(self.home)

    def _parts(self, home: Tensor) -> list[Tensor]:
        """The part of a home for each storage."""
        return [home[start:stop] for start, stop in pairwise(self._starts)]


def _flat(held: SavedHandle) -> Tensor:
    """The bytes of the storage of what is held."""
    assert held.tensor is not None
    storage = held.tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=held.tensor.device).set_(storage)
