"""The transfer schedule: what is moved between the device and the tiers on entering each moment of a step, as data.

On entering a moment on the device, in this order: items are dropped; evictions are started; those that must be finished
are waited for; items of which nothing is read are made (memory without contents); fetches are started; those that must
be finished are waited for. Then the moment computes. On entering a moment on the host items are only dropped and
evictions started. A moment on the host waits by itself for the evictions of its items, and a fetch for the moments on
the host that write the item: the order says which.

An item takes its bytes from the moment on whose entry its fetch is started until the one on whose entry its eviction
has been waited for. So a transfer schedule that passes :meth:`TransferSchedule.check` stays within its budget however
slow a link is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

from planner.base.errors import TransferScheduleError
from planner.base.formatting import in_all_bytes, in_bytes
from planner.base.json_schema import Misread, fields_of, read_fields
from planner.solve.transfers.trace import Access, Item, ItemUse, Moment, TierLink, Trace, check_whole

ACTIONS: dict[str, tuple[str, str]] = {
    "drop": ("resident", "home"),
    "evict": ("resident", "leaving"),
    "evicted": ("leaving", "home"),
    "make": ("home", "resident"),
    "fetch": ("home", "coming"),
    "fetched": ("coming", "resident"),
}
"""What each action makes of an item, in the order in which they are done on entering a moment."""
TAKES = {action: (after != "home") - (before != "home") for action, (before, after) in ACTIONS.items()}
"""Whether its bytes are taken by an action (1), given back (-1), or neither (0)."""
ON_HOST = ("drop", "evict")
"""Those that entering a moment on the host may do."""
Stopped = Literal["proved", "nodes", "choices", "solver", ""]
"""Why the search for the least seconds on the links ended: nothing less is possible, to a solver's tolerances; it took
as many nodes as it may; there are too many choices to search them whole; the solver gave no answer. Nothing where there
was none.
"""
WORDS = {"evicted": "wait for the eviction of", "fetched": "wait for"}


@dataclass(frozen=True)
class Entry:
    """What is done on entering a moment: names of items by action, see :data:`ACTIONS`."""

    drop: tuple[str, ...] = ()
    evict: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    make: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()
    fetched: tuple[str, ...] = ()

    def actions(self) -> Iterator[tuple[str, str]]:
        """Every action and its item, in order."""
        return ((action, name) for action in ACTIONS for name in getattr(self, action))

    def text(self) -> str:
        """``evict a, b; fetch c; wait for d``."""
        named = ((WORDS.get(field.name, field.name), getattr(self, field.name)) for field in fields(self))
        return "; ".join(f"{word} {', '.join(names)}" for word, names in named if names)


@dataclass(frozen=True)
class TransferSchedule:
    """An entry for every moment of a trace.

    ``link_bound_s`` is proved: no choice of what stays on the device keeps the links busy for less, all directions
    added up. It bounds nothing else, such as the seconds of a step. ``stopped`` says why the search for it ended.
    """

    trace: Trace
    budget_bytes: int
    entries: tuple[Entry, ...]
    link_bound_s: float = 0.0
    stopped: Stopped = ""

    @cached_property
    def beginning(self) -> dict[str, str]:
        """The state of every item as a step begins: ``home``, ``coming``, ``resident`` or ``leaving``.

        Before the first step of all, what is resident or coming has to be fetched; nothing is leaving.
        """
        states = {
            item.name: "resident" if any(self._on_device(use) for use in item.uses) else "home"
            for item in self.trace.items
        }
        for entry in reversed(self.entries):
            for action, name in reversed([*entry.actions()]):
                states[name] = ACTIONS[action][0]
        return states

    @property
    def begun_bytes(self) -> int:
        """What items take as a step begins, in the middle of a run."""
        return sum(self.trace.item[name].bytes for name, state in self.beginning.items() if state != "home")

    @cached_property
    def occupied_bytes(self) -> tuple[int, ...]:
        """Of each moment: what items on the device, coming or leaving take, and others beside them."""
        held, found = self.begun_bytes, []
        for moment, entry in zip(self.trace.moments, self.entries, strict=True):
            held += sum(self.trace.item[name].bytes * TAKES[action] for action, name in entry.actions())
            found.append(held + moment.other_bytes)
        return tuple(found)

    @property
    def high_water_bytes(self) -> int:
        """The most that is taken of the budget at any moment, however slow the links are."""
        return max(self.occupied_bytes)

    @cached_property
    def bytes_moved(self) -> dict[tuple[str, str], int]:
        """Bytes of a step by tier and direction, ``("host", "fetch")``."""
        moved = {(tier, way): 0 for tier in self.trace.links for way in ("fetch", "evict")}
        for way, item in self._moves():
            moved[item.home, way] += item.bytes
        return moved

    @cached_property
    def link_s(self) -> dict[tuple[str, str], float]:
        """Seconds of a step for which each direction of each link is busy."""
        busy = {(tier, way): 0.0 for tier in self.trace.links for way in ("fetch", "evict")}
        for way, item in self._moves():
            busy[item.home, way] += self.trace.seconds(item, way)
        return busy

    def _moves(self) -> Iterator[tuple[str, Item]]:
        for entry in self.entries:
            for way, names in (("fetch", entry.fetch), ("evict", entry.evict)):
                for name in names:
                    yield way, self.trace.item[name]

    def _on_device(self, use: ItemUse) -> bool:
        return self.trace.moments[self.trace.place[use.moment]].on == "device"

    def check(self) -> None:
        """Raise :class:`TransferScheduleError` unless the transfer schedule can be carried out, step after step, within
        the budget.

        Every action must find its item in the state that it starts from; every moment its items on the device, with the
        values that were last written; every fetch the value at home; a step must end as it begins. The error names the
        moment, the action and what was done with the item before.
        """
        check_whole("a budget", self.budget_bytes)
        if len(self.entries) != len(self.trace.moments):
            raise TransferScheduleError(
                f"{len(self.entries)} entries for {len(self.trace.moments)} moments; each takes one"
            )
        for place, entry in enumerate(self.entries):
            for action, name in entry.actions():
                if name not in self.trace.item:
                    raise TransferScheduleError(
                        f"{self.trace.moments[place].name}: {action} {name}: there is no such item"
                    )
        state = _ItemStates(self)
        state.step(settled=False)
        for name, begun in self.beginning.items():
            if state.where[name] != begun:
                raise TransferScheduleError(
                    f"{name} is {begun} as a step begins, but {state.where[name]} as it ends; "
                    f"last: {state.history[name]}"
                )
        state.step(settled=True)

    def text(self) -> str:
        """What is moved in all, what is on the device as a step begins, and a line for each moment."""
        moved = ", ".join(f"{way} {in_bytes(n)} ({tier})" for (tier, way), n in self.bytes_moved.items() if n)
        lines = [
            f"budget {in_bytes(self.budget_bytes)}, at most {in_bytes(self.high_water_bytes)} taken; "
            f"a step moves: {moved or 'nothing'}"
        ]
        for state in ("resident", "coming", "leaving"):
            names = [name for name, each in self.beginning.items() if each == state]
            if names:
                lines.append(f"{state} as a step begins: {', '.join(names)}")
        for moment, entry in zip(self.trace.moments, self.entries, strict=True):
            lines.append(f"{moment.name}: {entry.text()}".rstrip(": "))
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """The transfer schedule with its trace as JSON has it; :meth:`from_dict` reads it back to an equal one."""
        moments = [
            {**_short(moment), **_short(entry)} for moment, entry in zip(self.trace.moments, self.entries, strict=True)
        ]
        items = [{**_short(item), "uses": {use.moment: use.access for use in item.uses}} for item in self.trace.items]
        links = {tier: asdict(link) for tier, link in self.trace.links.items()}
        return {
            "budget_bytes": self.budget_bytes,
            "link_bound_s": self.link_bound_s,
            "stopped": self.stopped,
            "links": links,
            "moments": moments,
            "items": items,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TransferSchedule:
        """What :meth:`to_dict` gave, perhaps edited; checked.

        Raises:
            TransferScheduleError: fields that are missing or unknown, a trace or a transfer schedule that cannot be.
        """
        try:
            read_ = read_fields(data, FIELDS, frozenset(FIELDS), {tuple[Moment, Entry]: _read_moment, Item: _read_item})
            if read_["link_bound_s"] < 0:
                raise Misread(f"is {read_['link_bound_s']!r}, and bounds are not below zero", ("link_bound_s",))
        except Misread as error:
            raise TransferScheduleError(
                f"a transfer schedule that cannot be read: {error}; take one that to_dict wrote"
            ) from error
        moments, entries = ([each[part] for each in read_["moments"]] for part in (0, 1))
        trace = Trace(tuple(moments), read_["items"], read_["links"])
        found = TransferSchedule(trace, read_["budget_bytes"], tuple(entries), read_["link_bound_s"], read_["stopped"])
        found.check()
        return found


FIELDS = {
    "budget_bytes": int,
    "link_bound_s": float,
    "stopped": Stopped,
    "links": Mapping[str, TierLink],
    "moments": tuple[tuple[Moment, Entry], ...],
    "items": tuple[Item, ...],
}
"""Those of a transfer schedule as JSON."""


def _read_moment(data: Any) -> tuple[Moment, Entry]:
    """A moment, and what is done on entering it."""
    (kinds, required), (actions, _) = fields_of(Moment), fields_of(Entry)
    found = read_fields(data, {**kinds, **actions}, required)
    done = {action: found.pop(action) for action in actions if action in found}
    return Moment(**found), Entry(**done)


def _read_item(data: Any) -> Item:
    kinds, required = fields_of(Item)
    found = read_fields(data, {**kinds, "uses": Mapping[str, Access]}, required)
    return Item(**{**found, "uses": tuple(ItemUse(*use) for use in found["uses"].items())})


def _short(each: Moment | Entry | Item) -> dict[str, Any]:
    """The fields that are not as they are by default."""
    values = {field.name: (getattr(each, field.name), field.default) for field in fields(each)}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, (value, default) in values.items()
        if value != default
    }


class _ItemStates:
    """Items as a transfer schedule is simulated: where they are, and on which side their value is that was last
    written.

    In the first step it is not known yet which homes are behind; ``settled`` steps hold values, too.
    """

    def __init__(self, table: TransferSchedule):
        self.table, self.trace = table, table.trace
        self.where = dict(table.beginning)
        self.here = {name: state in ("resident", "coming") for name, state in self.where.items()}
        self.at_home = dict.fromkeys(self.where, True)
        self.history = dict.fromkeys(self.where, "nothing")
        self.held = table.begun_bytes

    def step(self, settled: bool) -> None:
        """Follow the transfer schedule once around."""
        for place, entry in enumerate(self.table.entries):
            moment = self.trace.moments[place]
            for done, count in Counter(entry.actions()).items():
                if count > 1:
                    raise TransferScheduleError(f"{moment.name}: {' '.join(done)} is there {count} times")
            for action, name in entry.actions():
                self._act(moment, action, name, settled)
            total = self.held + moment.other_bytes
            if moment.on == "device" and total > self.table.budget_bytes:
                came = ", ".join((*entry.fetch, *entry.make)) or "nothing"
                raise TransferScheduleError(
                    f"{moment.name}: {in_all_bytes(total)} are taken with those that are coming and leaving, "
                    f"{in_all_bytes(total - self.table.budget_bytes)} over the budget of "
                    f"{in_all_bytes(self.table.budget_bytes)}; fetched or made on entering it: {came}"
                )
            for item, use in self.trace.used[place]:
                (self._on_device if moment.on == "device" else self._on_host)(moment, item, use, settled)

    def _act(self, moment: Moment, action: str, name: str, settled: bool) -> None:
        before, after = ACTIONS[action]
        what = f"{moment.name}: {action} {name}"
        if moment.on == "host" and action not in ON_HOST:
            raise TransferScheduleError(f"{what}: on entering a moment on the host items are only dropped or evicted")
        if self.where[name] != before:
            raise TransferScheduleError(
                f"{what}: it must be {before}, but is {self.where[name]}; last: {self.history[name]}"
            )
        if action == "fetch" and settled and not self.at_home[name]:
            raise TransferScheduleError(f"{what}: its home does not hold the value; last: {self.history[name]}")
        if action == "evict":
            if settled and not self.here[name]:
                raise TransferScheduleError(
                    f"{what}: what is on the device is not its value; last: {self.history[name]}"
                )
            self.at_home[name] = True
        if action in ("drop", "evict", "make", "fetch"):
            self.here[name] = action == "fetch"
        self.held += self.trace.item[name].bytes * TAKES[action]
        self.where[name] = after
        self.history[name] = f"{action} on entering {moment.name}"

    def _on_device(self, moment: Moment, item: Item, use: ItemUse, settled: bool) -> None:
        name = item.name
        if self.where[name] != "resident":
            raise TransferScheduleError(
                f"{moment.name} uses {name}, which is {self.where[name]}, not resident; last: {self.history[name]}"
            )
        if settled and use.reads and not self.here[name]:
            raise TransferScheduleError(
                f"{moment.name} reads {name}, whose value is not on the device; last: {self.history[name]}"
            )
        if use.writes:
            self.here[name], self.at_home[name] = True, False
            self.history[name] = f"written by {moment.name}"

    def _on_host(self, moment: Moment, item: Item, use: ItemUse, settled: bool) -> None:
        name = item.name
        if settled and use.reads and not self.at_home[name]:
            raise TransferScheduleError(
                f"{moment.name} reads {name} at home, where its value is not; last: {self.history[name]}"
            )
        if use.writes:
            if self.where[name] == "coming":
                raise TransferScheduleError(
                    f"{moment.name} writes {name} at home while it is fetched; {self.history[name]}"
                )
            self.here[name], self.at_home[name] = False, True
            self.history[name] = f"written at home by {moment.name}"
