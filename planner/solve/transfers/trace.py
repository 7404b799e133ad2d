"""What a training step needs on the device, moment by moment, and how it gets there.

The steps of training repeat, so the moments are a circle: what follows the last moment is the first one, and what is on
the device at the end of a step is there at the beginning of the next. Nothing here knows of models: an item is a chunk
of parameters, gradients, optimizer state or saved activations, and what tells these apart is how they are used.

=====================  ================================================================================================
parameters             read by forward and backward, read and written by the update
gradients              written by backward (what was there before is not read), read by the update
optimizer state        read and written by the update
a saved activation     written by forward, read by backward
=====================  ================================================================================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Literal

from planner.base.errors import InfeasibleError, TransferScheduleError
from planner.base.formatting import in_all_bytes, in_bytes

Access = Literal["r", "w", "rw"]
ACCESSES = ("r", "w", "rw")


@dataclass(frozen=True)
class TierLink:
    """The way between the device and one tier. Both directions run at once."""

    fetch_bytes_per_s: float
    evict_bytes_per_s: float


@dataclass(frozen=True)
class Moment:
    """A stretch of computing during which nothing is moved in or out of use.

    ``other_bytes`` of the budget are taken by what is not an item (activations, temporaries) while it computes. A
    moment ``on`` the host computes there beside the device, on items in their homes; it takes none of the budget.
    """

    name: str
    seconds: float
    other_bytes: int = 0
    on: Literal["device", "host"] = "device"


@dataclass(frozen=True)
class ItemUse:
    """That a moment reads an item, writes the whole of it without reading (``w``), or reads and then writes it."""

    moment: str
    access: Access = "r"

    @property
    def reads(self) -> bool:
        return "r" in self.access

    @property
    def writes(self) -> bool:
        return "w" in self.access


@dataclass(frozen=True)
class Item:
    """A chunk: a flat run of memory that moves as a whole. Its uses are in the order of the moments."""

    name: str
    bytes: int
    uses: tuple[ItemUse, ...]
    home: str = "host"


@dataclass(frozen=True)
class Trace:
    """A step: its moments in order, its items, and the links to the tiers where items have their homes.

    Raises:
        TransferScheduleError: names that are doubled or unknown, numbers below zero, uses out of order.
    """

    moments: tuple[Moment, ...]
    items: tuple[Item, ...]
    links: Mapping[str, TierLink]

    def __post_init__(self) -> None:
        _check_moments(self)
        for tier, link in self.links.items():
            for way, speed in (("fetch", link.fetch_bytes_per_s), ("evict", link.evict_bytes_per_s)):
                if not 0 < speed < math.inf:
                    raise TransferScheduleError(
                        f"the link to {tier} would {way} at {speed} bytes per second; give a finite speed above zero"
                    )
        _no_doubles("item", (item.name for item in self.items))
        for item in self.items:
            _check_item(self, item)

    @cached_property
    def place(self) -> dict[str, int]:
        """Where each moment stands, by its name."""
        return {moment.name: place for place, moment in enumerate(self.moments)}

    @cached_property
    def on_device(self) -> tuple[int, ...]:
        """The places of the moments that compute on the device."""
        return tuple(place for place, moment in enumerate(self.moments) if moment.on == "device")

    @cached_property
    def item(self) -> dict[str, Item]:
        """Every item by its name."""
        return {item.name: item for item in self.items}

    @cached_property
    def used(self) -> tuple[tuple[tuple[Item, ItemUse], ...], ...]:
        """Of each moment: the items that it uses, and how."""
        found: list[list[tuple[Item, ItemUse]]] = [[] for _ in self.moments]
        for item in self.items:
            for use in item.uses:
                found[self.place[use.moment]].append((item, use))
        return tuple(map(tuple, found))

    @cached_property
    def needed_bytes(self) -> tuple[int, ...]:
        """Of each moment: its items and what is taken beside them; 0 for moments on the host."""
        return tuple(
            moment.other_bytes + sum(item.bytes for item, _ in used) if moment.on == "device" else 0
            for moment, used in zip(self.moments, self.used, strict=True)
        )

    def seconds(self, item: Item, way: str) -> float:
        """Seconds of the link that an item takes to ``fetch`` or to ``evict``."""
        link = self.links[item.home]
        return item.bytes / (link.fetch_bytes_per_s if way == "fetch" else link.evict_bytes_per_s)

    def check_budget(self, budget_bytes: int) -> None:
        """Raise :class:`InfeasibleError` if a moment needs more than the budget, whatever is moved."""
        check_whole("a budget", budget_bytes)
        if budget_bytes < 0:
            raise TransferScheduleError(f"a budget of {in_all_bytes(budget_bytes)}; it cannot be below zero")
        most = max(self.needed_bytes)
        if most <= budget_bytes:
            return
        place = self.needed_bytes.index(most)
        moment = self.moments[place]
        largest = sorted((item for item, _ in self.used[place]), key=lambda item: -item.bytes)[:4]
        parts = [f"{item.name} {in_bytes(item.bytes)}" for item in largest]
        if len(self.used[place]) > len(largest):
            parts.append(f"{len(self.used[place]) - len(largest)} smaller ones")
        if moment.other_bytes:
            parts.append(f"{in_bytes(moment.other_bytes)} beside the items")
        raise InfeasibleError(
            f"a budget of {in_all_bytes(budget_bytes)} is below the largest working set: {moment.name} needs "
            f"{in_all_bytes(most)}, {in_all_bytes(most - budget_bytes)} more: {', '.join(parts)}. Give it that much, "
            "make this moment's items smaller, divide it into moments that use fewer of them, or take less beside them",
            most - budget_bytes,
        )


def check_whole(what: str, count: object) -> None:
    """Raise :class:`TransferScheduleError` unless bytes are a whole number."""
    if not isinstance(count, Integral):
        raise TransferScheduleError(f"{what}: {count!r} bytes; give a whole number")


def _check_moments(trace: Trace) -> None:
    _no_doubles("moment", (moment.name for moment in trace.moments))
    if not trace.on_device:
        raise TransferScheduleError(
            "no moment computes on the device: there is nothing to make a transfer schedule for"
        )
    for moment in trace.moments:
        if not 0 <= moment.seconds < math.inf:
            raise TransferScheduleError(
                f"{moment.name} takes {moment.seconds} s; seconds are finite and not below zero"
            )
        check_whole(f"{moment.name} beside its items", moment.other_bytes)
        if moment.other_bytes < 0:
            raise TransferScheduleError(
                f"{moment.name} takes {in_all_bytes(moment.other_bytes)} beside its items; not below zero"
            )
        if moment.on not in ("device", "host"):
            raise TransferScheduleError(
                f"{moment.name} computes on {moment.on!r}; moments are on 'device' or on 'host'"
            )
        if moment.on == "host" and moment.other_bytes:
            raise TransferScheduleError(
                f"{moment.name} computes on the host and cannot take {in_all_bytes(moment.other_bytes)} of the "
                "device's budget"
            )


def _check_item(trace: Trace, item: Item) -> None:
    check_whole(f"item {item.name}", item.bytes)
    if item.bytes < 0:
        raise TransferScheduleError(f"item {item.name} has {in_all_bytes(item.bytes)}; it cannot have fewer than none")
    if item.home not in trace.links:
        known = ", ".join(trace.links) or "none"
        raise TransferScheduleError(
            f"item {item.name} is with their home on {item.home!r}, to which no link leads; links: {known}"
        )
    before = -1
    for use in item.uses:
        if use.access not in ACCESSES:
            raise TransferScheduleError(
                f"item {item.name} is used with access {use.access!r} by {use.moment}; "
                f"there are {', '.join(map(repr, ACCESSES))}"
            )
        if use.moment not in trace.place:
            raise TransferScheduleError(f"item {item.name} is used by {use.moment!r}; there is no such moment")
        place = trace.place[use.moment]
        if place <= before:
            raise TransferScheduleError(
                f"item {item.name} is used by {use.moment} after {trace.moments[before].name}, which does not come "
                "before it; give one use for each moment, in their order"
            )
        if trace.moments[place].on == "host" and item.home != "host":
            raise TransferScheduleError(
                f"{use.moment} computes on the host, but item {item.name} is with their home on {item.home}; give it "
                "its home "
                "on the host, or let the moment compute on the device"
            )
        before = place


def _no_doubles(what: str, names: Iterable[str]) -> None:
    counts = Counter(names)
    for name, count in counts.items():
        if count > 1:
            raise TransferScheduleError(f"{count} {what}s have the name {name!r}; each takes a name of its own")
