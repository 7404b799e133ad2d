"""Tracks the live storages of one rank and their peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Direction = Literal["forward", "backward"]
BEFORE = -1
"""The number that stands for what is done before the first block, and undone after it; one less for each stage."""
Place = tuple[Direction, int]
"""A direction and the number of a block."""

SHOWN = 20
"""So many tensors are listed at the peak."""

USES = ("parameters", "gradients", "optimizer", "gathered", "activations", "temporary")
"""What storages are used for."""


def is_before(number: int) -> bool:
    """Whether a number stands for what is done before the first block of a stage, and for no block."""
    return number <= BEFORE


@dataclass(frozen=True)
class Held:
    """A storage that is alive: its bytes, what it is used for (of :data:`USES`), and the value it belongs to.

    ``times``: so many instances of a block hold one like it; it has the name of a first one. ``block``: the number of
    the block that made it, of a first one like it, or :data:`BEFORE`.
    """

    name: str
    use: str
    bytes: int
    times: int = 1
    block: int = BEFORE

    @property
    def title(self) -> str:
        """The name, ``x 4`` where there are four like one."""
        return f"{self.name} x {self.times}" if self.times > 1 else self.name

    @property
    def all_bytes(self) -> int:
        """Bytes of all that are like it."""
        return self.bytes * self.times if self.times > 1 else self.bytes


@dataclass(frozen=True)
class PeakReport:
    """The fullest moment of a step on the rank with the highest peak.

    Attributes:
        bytes: alive then.
        at: what runs then; with micro-batches also how many micro-batches are in flight, and on which rank of the
            pipeline.
        alive: every storage then, largest first; together they are :attr:`bytes`.
    """

    bytes: int
    at: str
    alive: tuple[Held, ...]

    def __str__(self) -> str:
        """The moment and what fills it, largest first."""
        shown = (held for held in self.alive[:SHOWN] if held.bytes)
        rows = [f"  {held.bytes:>16,}  {held.use:<12}{held.title}" for held in shown]
        rest, count = (sum(getattr(held, what) for held in self.alive[SHOWN:]) for what in ("all_bytes", "times"))
        more = [f"  {rest:>16,}  in {count} more"] if rest else []
        return "\n".join([f"{self.bytes:,} bytes in {self.at}", *rows, *more])

    def by_use(self) -> dict[str, int]:
        """Bytes by use, also such that are none of :data:`USES`."""
        found = dict.fromkeys(USES, 0)
        for held in self.alive:
            found[held.use] = found.get(held.use, 0) + held.all_bytes
        return found

    @property
    def largest(self) -> tuple[tuple[str, int], ...]:
        """All of them by name, ``x 4`` where there are four like one, and the bytes of those together."""
        return tuple((held.title, held.all_bytes) for held in self.alive)


class Storage:
    """A piece of memory with a count of who holds it, the block and direction in which it was made, and its number
    among all that were made.
    """

    __slots__ = ("bytes", "held", "holders", "made", "number")

    def __init__(self, held: Held, made: Place, number: int):
        self.held, self.holders, self.made, self.bytes, self.number = held, 1, made, held.all_bytes, number


class StorageTracker:
    """All storages that are alive, and the peak so far.

    Args:
        away: numbers of storages -> the block from whose forward on they are not counted: they are in a chunk then.
    """

    def __init__(self, away: Mapping[int, int] | None = None) -> None:
        self._away = away or {}
        self._going: dict[int, list[Storage]] = {}
        self._count = 0
        self.alive: dict[Storage, None] = {}
        self.total = self.peak = 0
        self.peak_at = "before the step"
        self._changes: list[Storage] = []  # each once when it is made, and again when it is freed
        self._changes_to_peak = 0
        self._block: Place = ("forward", BEFORE)
        self.moments: list[tuple[str, int]] = [(self.peak_at, 0)]
        self._moments_of: list[Place] = [self._block]
        self.by_block: dict[Place, int] = {}

    def enter(self, direction: Direction, number: int) -> None:
        """A block runs from here on."""
        self._block = direction, number
        for storage in self._going.pop(number, ()):
            self.total -= storage.bytes
            storage.bytes = 0
        self.by_block[self._block] = max(self.by_block.get(self._block, 0), self.total)

    def moment(self, what: str) -> None:
        """Something else runs from here on."""
        self.moments.append((what, self.total))
        self._moments_of.append(self._block)

    def starts_next(self) -> None:
        """From here on parameters of the block that runs next are gathered."""

    def settle(self, storage: Storage | None, name: str) -> None:
        """The gradient of a parameter of this name is complete, and stays."""

    def totals(self) -> dict[Place, list[int]]:
        """Bytes of the moments of every block, in order."""
        found: dict[Place, list[int]] = {}
        for place, (_, total) in zip(self._moments_of, self.moments, strict=True):
            found.setdefault(place, []).append(total)
        return found

    def repeat(self, direction: Direction, numbers: range, times: int) -> list[Storage]:
        """What these blocks made and is alive, so many times more."""
        like = [each.held for each in self.alive if each.made[0] == direction and each.made[1] in numbers]
        return [self._add(replace(held, times=times)) for held in like]

    def _add(self, held: Held) -> Storage:
        storage = Storage(held, self._block, self._count)
        self._count += 1
        goes = self._away.get(storage.number)
        if goes is not None and self._block == ("forward", goes):
            storage.bytes = 0
        elif goes is not None:
            self._going.setdefault(goes, []).append(storage)
        self.alive[storage] = None
        self._changes.append(storage)
        self.total += storage.bytes
        return storage

    def new(self, name: str, use: str, size: int, times: int = 1) -> Storage:
        """A storage with one holder; ``times``: it stands for so many."""
        storage = self._add(Held(name, use, size, times, self._block[1]))
        what, most = self.moments[-1]
        if self.total > most:
            self.moments[-1] = what, self.total
        if self.total > self.by_block.get(self._block, 0):
            self.by_block[self._block] = self.total
        if self.total > self.peak:
            self.peak, self.peak_at = self.total, what
            self._changes_to_peak = len(self._changes)
        return storage

    def at_peak(self) -> tuple[Held, ...]:
        """Every storage that was alive at the peak, in the order in which they were made."""
        alive: dict[Storage, None] = {}
        for storage in self._changes[: self._changes_to_peak]:
            if storage in alive:
                del alive[storage]
            else:
                alive[storage] = None
        return tuple(each.held for each in alive)

    def hold(self, storage: Storage) -> Storage:
        storage.holders += 1
        return storage

    def drop(self, storage: Storage) -> None:
        storage.holders -= 1
        if not storage.holders:
            del self.alive[storage]
            self._changes.append(storage)
            self.total -= storage.bytes
