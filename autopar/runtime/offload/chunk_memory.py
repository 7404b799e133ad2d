"""Memory of chunks: parameters and gradients in host memory or in files, and the device copies of those in use.

On a machine without an accelerator the device is a budget of host memory: an :class:`Arena` counts there as everywhere
what is on the device, and what moves is really copied.

The tensors that a program reads are views of a chunk's memory on the device, which is the same for good. While the
chunk is away that memory is empty; what autograd saved of it is whole again when the chunk is back.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.autograd.recompute import memory_of
from autopar.runtime.host.disk import OffloadFiles
from autopar.runtime.host.error_notes import add_note
from autopar.runtime.host.gradient_buckets import is_held_elsewhere
from autopar.runtime.host.pages import READ, WRITE
from autopar.runtime.host.pinned_memory import pinned
from planner.base.errors import TransferScheduleError
from planner.base.formatting import in_all_bytes
from planner.solve.transfers.table import ACTIONS

REMEMBERED = 8
"""So many of the last things that were done with a chunk are told where one is used that is not there."""


class Arena:
    """What chunks may take of a device, less what is beside them.

    Attributes:
        budget_bytes: of chunks and all that is beside them.
        beside_bytes: what is beside them just now.
        held_bytes: what chunks take just now.
        high_water_bytes: the most that both took.
    """

    def __init__(self, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self.beside_bytes = self.held_bytes = self.high_water_bytes = 0

    def enter(self, beside_bytes: int) -> None:
        """What is beside chunks from here on."""
        self.beside_bytes = beside_bytes

    def take(self, size: int, what: str) -> None:
        """Take bytes.

        Raises:
            TransferScheduleError: they are not free.
        """
        self.held_bytes += size
        try:
            self.check(f"{what}, which takes {in_all_bytes(size)}")
        except TransferScheduleError:
            self.held_bytes -= size
            raise

    def check(self, what: str) -> None:
        """Raise :class:`TransferScheduleError` if what is taken is over the budget."""
        total = self.held_bytes + self.beside_bytes
        if total > self.budget_bytes:
            raise TransferScheduleError(
                f"{what}: chunks take {in_all_bytes(self.held_bytes)} on the device, and what is beside them "
                f"{in_all_bytes(self.beside_bytes)}, {in_all_bytes(total - self.budget_bytes)} more than its "
                f"{in_all_bytes(self.budget_bytes)}"
            )
        self.high_water_bytes = max(self.high_water_bytes, total)

    def give(self, size: int) -> None:
        """Give bytes back."""
        self.held_bytes -= size


class CopyEngine:
    """Copies between a device and home, each direction in order, beside what the device computes.

    On a CPU, where the device is the host, a copy is made at once.

    Args:
        disk: where home is in files.

    Attributes:
        bytes_moved: by direction, ``fetch`` and ``evict``.
        computing: the stream that the program runs on, on a GPU; backward computes there too.
    """

    def __init__(self, device: torch.device, disk: OffloadFiles | None = None):
        self.bytes_moved: Counter[str] = Counter()
        self.disk = disk
        self.computing: Any = None
        self._streams: dict[str, Any] = {}
        if device.type == "cuda":
            self._streams = {way: torch.cuda.Stream(device) for way in ("fetch", "evict")}

    def start(self, way: str, copies: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """Start to copy, of each pair, the second into the first, after what was computed so far; what to wait for.

        Raises:
            DiskError: home is in a file that cannot be read, or not be written.
        """
        if self.disk is not None:
            self.disk.ask((pair[way == "fetch"] for pair in copies), READ if way == "fetch" else WRITE)
        self.bytes_moved[way] += sum(source.numel() * source.element_size() for _, source in copies)
        if not self._streams:
            for target, source in copies:
                target.copy_(source)
            return None
        stream = self._streams[way]
        stream.wait_stream(self.computing)
        with torch.cuda.stream(stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        return done

    def home(self, size: int, what: str) -> Tensor:
        """New bytes at home, all 0: in memory that copies beside computing need pinned, or in a file."""
        if self.disk is not None:
            return self.disk.memory(size, what)
        return pinned(size) if self._streams else torch.zeros(size, dtype=torch.uint8)

    def compute_here(self) -> None:
        """The program runs on the stream that is current now."""
        if self._streams:
            self.computing = torch.cuda.current_stream()

    def wait(self, started: Any) -> None:
        """Let the device wait for what was started."""
        if started is not None:
            self.computing.wait_event(started)

    @staticmethod
    def settle(started: Any) -> None:
        """Let the host wait for it."""
        if started is not None:
            started.synchronize()


@dataclass
class ChunkMemory(ABC):
    """A chunk of the transfer schedule: its name there, its state, and what was done with it.

    States and actions are those of :data:`planner.solve.transfers.table.ACTIONS`.
    """

    name: str
    bytes: int
    arena: Arena
    engine: CopyEngine
    state: str = field(default="home", init=False)
    history: list[str] = field(default_factory=list, init=False)
    started: Any = field(default=None, init=False)

    def act(self, action: str, moment: str) -> None:
        """Do what a transfer schedule says on entering a moment.

        Raises:
            TransferScheduleError: the chunk is not in the state that the action starts from, or there is no room for
                it.
        """
        before, after = ACTIONS[action]
        if self.state != before:
            raise TransferScheduleError(
                f"{action} {self.name} on entering {moment}: it is {self.state}, not {before}; {self.told}"
            )
        if before == "home":
            self.arena.take(self.bytes, f"{action} {self.name} on entering {moment}")
        try:
            getattr(self, f"_{action}")()
        except BaseException as error:
            if before == "home":
                self.arena.give(self.bytes)
            add_note(error, f"{action} {self.name} on entering {moment}")
            raise
        if after == "home":
            self.arena.give(self.bytes)
        self.state = after
        self.history = [*self.history[1 - REMEMBERED :], f"{action} on entering {moment}"]

    def check_present(self, user: str) -> None:
        """Raise :class:`TransferScheduleError` unless the chunk is on the device."""
        if self.state != "resident":
            raise TransferScheduleError(f"{user} uses {self.name}, which is {self.state}, not resident; {self.told}")

    @property
    def told(self) -> str:
        """What was done with the chunk, last first."""
        return f"last: {'; before: '.join(reversed(self.history)) or 'nothing'}"

    def _evicted(self) -> None:
        self.engine.wait(self.started)
        self._drop()

    def _fetched(self) -> None:
        self.engine.wait(self.started)
        self.started = None

    @abstractmethod
    def _drop(self) -> None:
        """Leave the device."""


class Parameters(ChunkMemory):
    """A chunk of parameters.

    Args:
        starts: the byte at which each begins, by name; the memory between them is not used.
        device: where they are computed with.

    Attributes:
        here: their memory on the device, empty while they are away; the same from the first time that they come.
        leaves: the parameters there by name, the same ones from then on; gradients of micro-batches add up in them.
        kept: the parameters at home, by name.
    """

    def __init__(
        self, name: str, size: int, starts: Mapping[str, int], device: torch.device, arena: Arena, engine: CopyEngine
    ):
        super().__init__(name, size, arena, engine)
        self.starts, self.device = starts, device
        self.here: Tensor | None = None
        self._home = engine.home(size, name)
        self.kept: dict[str, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}

    def keep(self, name: str, part: Tensor) -> Tensor:
        """Take a parameter in; its new self, at home."""
        # A storage of its own over the same memory: copies of a DTensor take a part of another storage for no tensor.
        start = self.starts[name]
        memory = torch.from_numpy(self._home.numpy()[start : start + part.numel() * part.element_size()])
        self.kept[name] = _view(memory, 0, part)
        self.kept[name].copy_(part)
        return self.kept[name]

    def values(self) -> tuple[Tensor, ...]:
        """The parameters on the device."""
        assert self.here is not None
        return tuple(_view(self.here, start, self.kept[name]) for name, start in self.starts.items())

    def _fetch(self) -> None:
        if self.here is None:
            self.here = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
            starts = self.starts.items()
            self.leaves = {name: _view(self.here, start, self.kept[name]).detach() for name, start in starts}
        self.here.untyped_storage().resize_(self.bytes)
        with torch.autograd._unsafe_preserve_version_counter(self.here):
            self.started = self.engine.start("fetch", [(self.here, self._home)])

    def _drop(self) -> None:
        if self.here is not None:
            self.here.untyped_storage().resize_(0)


class Homes:
    """Memories at home in which chunks take turns: gradients that are used as they arrive, and what blocks save.

    Args:
        sizes: bytes of each, falling.
        what: they are for.
        wait: for what holds some to be over; whether there was anything to wait for.
    """

    def __init__(self, sizes: Sequence[int], engine: CopyEngine, what: str, wait: Callable[[], bool] = lambda: False):
        self._sizes, self._engine, self._what, self._wait = sizes, engine, what, wait
        self._made: dict[int, Tensor] = {}

    def make(self) -> None:
        """Make all of them, before any is wanted."""
        for number, size in enumerate(self._sizes):
            self._made[number] = self._engine.home(size, self._what)

    def take(self, size: int) -> Tensor | None:
        """The smallest one of at least so many bytes that nobody holds, as soon as there is one; ``None``: somebody
        keeps them all.
        """
        while True:
            for number in reversed(range(bisect_right(self._sizes, -size, key=operator.neg))):
                if number not in self._made:
                    self._made[number] = self._engine.home(self._sizes[number], self._what)
                if not is_held_elsewhere(self._made[number]):
                    return self._made[number]
            if not self._wait():
                return None


class Gradients(ChunkMemory):
    """The gradients of a chunk of parameters: on the device the tensors that autograd made, at home one memory.

    Args:
        like: the parameters that are trained, by name, at home.
        shared: where that is taken from, if it is shared.
    """

    def __init__(
        self, name: str, like: Mapping[str, Tensor], arena: Arena, engine: CopyEngine, shared: Homes | None = None
    ):
        super().__init__(name, sum(value.numel() * value.element_size() for value in like.values()), arena, engine)
        self.like = dict(sorted(like.items(), key=lambda each: -each[1].element_size()))  # so that all begin well
        self._made: dict[str, Tensor] = {}
        self._arriving: dict[str, Tensor] = {}
        self._shared = shared
        self._homes = [] if shared is not None else [engine.home(self.bytes, name)]

    def made(self, grads: Mapping[str, Tensor | None]) -> None:
        """Take what backward made."""
        for name, grad in grads.items():
            if grad is not None:
                self._made[name] = self._made[name] + grad if name in self._made else grad

    def take(self) -> dict[str, Tensor]:
        """What arrived at home since the last time, whole."""
        found, arriving = self.leave()
        self.engine.settle(arriving)
        return found

    def leave(self) -> tuple[dict[str, Tensor], Any]:
        """What is on its way home, and what to wait for until it has arrived."""
        found, self._arriving = self._arriving, {}
        return found, self.started

    def forget(self) -> None:
        """Nobody takes what was made: a backward that was not finished."""
        self._made, self._arriving = {}, {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was made of it since it came to the device."""
        return not self._made

    def _make(self) -> None:
        self._made = {}

    def _evict(self) -> None:
        home, at = self._free_home(), 0
        leaving, sums = {}, {}
        for name, value in self.like.items():
            if name in self._made:
                leaving[name], sums[name] = _view(home, at, value), self._made[name]
                if name in self._arriving:
                    sums[name] = sums[name] + self._arriving[name].to(sums[name].device)
            at += value.numel() * value.element_size()
        self.started = self.engine.start("evict", [(view, sums[name]) for name, view in leaving.items()])
        self._made, self._arriving = sums, {**self._arriving, **leaving}  # not before the copies are under way

    def _drop(self) -> None:
        self._made = {}

    def _free_home(self) -> Tensor:
        """Memory for what leaves, that nobody holds: no parameter's ``.grad``, and not the user."""
        if self._shared is not None and (found := self._shared.take(self.bytes)) is not None:
            return found
        for home in self._homes:
            if not is_held_elsewhere(home):
                return home
        self._homes = [*self._homes[-1:], self.engine.home(self.bytes, self.name)]
        return self._homes[-1]


class Sums(Gradients):
    """The gradients of a chunk over micro-batches: sums of several backwards, on the device the ``.grad`` of its
    parameters there. What has left for its home before the last of them comes back for the next.

    Args:
        parameters: the chunk of which they are.
    """

    def __init__(self, name: str, like: Mapping[str, Tensor], parameters: Parameters, arena: Arena, engine: CopyEngine):
        super().__init__(name, like, arena, engine)
        self._parameters = parameters
        self._home: Tensor | None = None

    def made(self, grads: Mapping[str, Tensor | None]) -> None:
        """Add what a backward made; the first is copied, since autograd may have given others the same memory."""
        for name, grad in grads.items():
            if grad is not None:
                leaf = self._parameters.leaves[name]
                leaf.grad = grad.clone() if leaf.grad is None else leaf.grad.add_(grad)

    def leave(self) -> tuple[dict[str, Tensor], Any]:
        """What is on its way home, all of it summed up."""
        self._home = None
        return super().leave()

    def forget(self) -> None:
        """Nobody takes what was made."""
        super().forget()
        self._home = None
        self._drop()

    @property
    def is_empty(self) -> bool:
        """Whether no backward made any of it yet."""
        return not self._present

    @property
    def _present(self) -> dict[str, Tensor]:
        """What is on the device, by name."""
        found = ((name, leaf.grad) for name, leaf in self._parameters.leaves.items())
        return {name: grad for name, grad in found if grad is not None}

    def _make(self) -> None:
        self._drop()

    def _fetch(self) -> None:
        memory, at = torch.empty(self.bytes, dtype=torch.uint8, device=self._parameters.device), 0
        coming = {}
        for name, value in self.like.items():
            if name in self._arriving:
                coming[name] = _view(memory, at, value)
            at += value.numel() * value.element_size()
        self.started = self.engine.start("fetch", [(view, self._arriving[name]) for name, view in coming.items()])
        for name, view in coming.items():
            self._parameters.leaves[name].grad = view

    def _evict(self) -> None:
        if self._home is None:
            self._home = self._free_home()
        present, at = self._present, 0
        leaving = {}
        for name, value in self.like.items():
            if name in present:
                leaving[name] = _view(self._home, at, value)
            at += value.numel() * value.element_size()
        self.started = self.engine.start("evict", [(view, present[name]) for name, view in leaving.items()])
        self._arriving |= leaving

    def _drop(self) -> None:
        for leaf in self._parameters.leaves.values():
            leaf.grad = None


def chunk_at(chunks: Mapping[str, Parameters], tensor: Tensor) -> Parameters | None:
    """The chunk whose memory on the device a tensor shares."""
    memory = memory_of(tensor)
    return next((each for each in chunks.values() if each.here is not None and memory_of(each.here) == memory), None)


def _view(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """The part of a flat memory that holds a tensor like another one."""
    size = like.numel() * like.element_size()
    return flat[start : start + size].view(like.dtype).view(like.shape)
