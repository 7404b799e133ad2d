"""Transfers: chunks moved between home and the device as a transfer schedule says, moment after moment.

A step that goes another way than the transfer schedule (backward of two calls, a second backward) is served on demand
until the
next one: each moment's chunks are fetched as it is entered. That is slower, and said once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping

from autopar.runtime.offload.chunk_memory import Arena, ChunkMemory, CopyEngine, Gradients
from planner.analysis.offload.chunks import of_micro_batch
from planner.solve.transfers import TransferSchedule

A_STEP = "a new step"
ON_DEMAND = (
    "a step goes another way than its transfer schedule (backward of several calls of the model at once, or a second "
    "time): until the next call parameters are fetched where they are used, which is slower"
)


class Transfers:
    """Where a step is in its transfer schedule, and which chunks are on the device there.

    Args:
        table: the step's transfer schedule.
        moments: the names of the moments of each block's forward and backward, by its number.
        micro_batched: whether a step is several micro-batches.
        on_host: called with the chunks that a moment uses on the host, as it is passed.

    Attributes:
        arena: what the device may hold of chunks.
        chunks: all that move, by their names in the transfer schedule.
        micro_batch: the one that is computed; ``None``: a step has but one.
        on_demand: whether the step has left the transfer schedule.
        bytes_moved: of the last whole step, by direction.
    """

    def __init__(
        self,
        table: TransferSchedule,
        moments: Mapping[int, tuple[str, str]],
        engine: CopyEngine,
        micro_batched: bool,
        on_host: Callable[[Iterable[ChunkMemory]], None],
    ):
        self.table, self.engine, self.arena = table, engine, Arena(table.budget_bytes)
        self.chunks: dict[str, ChunkMemory] = {}
        self.micro_batch = 0 if micro_batched else None
        self.on_demand = False
        self.bytes_moved: dict[str, int] = {}
        self._moments, self._on_host = moments, on_host
        self._at: int | None = None
        self._absent: set[str] = set()

    # ---- what the transfer schedule says
    # -----------------------------------------------------------------------------------

    def moment(self, number: int, is_backward: bool) -> str:
        """The name of the moment in which a block is entered."""
        return of_micro_batch(self._moments[number][is_backward], self.micro_batch)

    def path(self, number: int) -> str:
        """A block's number and path."""
        return self._moments[number][0].removeprefix("forward ")

    def uses(self, moment: str) -> dict[str, bool]:
        """The chunks that a moment uses -> whether it reads what they hold; none where there is no such moment."""
        place = self.table.trace.place.get(moment)
        return {} if place is None else self._uses(place)

    def _uses(self, place: int) -> dict[str, bool]:
        return {item.name: use.reads for item, use in self.table.trace.used[place]}

    @property
    def used_early(self) -> set[str]:
        """The chunks that the host uses before all blocks run their backward."""
        places = (place for place, moment in enumerate(self.table.trace.moments[:-1]) if moment.on == "host")
        return {name for place in places for name in self._uses(place)}

    @property
    def gradients(self) -> list[Gradients]:
        """The chunks of gradients."""
        return [chunk for chunk in self.chunks.values() if isinstance(chunk, Gradients)]

    # ---- what is done ----------------------------------------------------------------------------------------------

    def begin_at(self, place: int) -> None:
        """A moment is about to be entered: with the first a step begins, and one that does not follow leaves the
        transfer schedule.
        """
        if place == 0:
            self._begin()
        self.on_demand = self.on_demand or self._at is None or place <= self._at

    def enter(self, place: int) -> None:
        """Enter a moment; raises :class:`TransferScheduleError` if what it uses is not on the device then."""
        if self.on_demand:
            self._demand(place)
        else:
            self._follow(place)
        moment = self.table.trace.moments[place]
        for name in self._uses(place):
            self.chunks[name].check_present(moment.name)

    def end(self) -> None:
        """All of a step's backward is over: what is left of the transfer schedule, or at least gradients go home."""
        if not self.on_demand and self._at is not None and self._at >= 0:
            self.follow_to_end()
        else:
            for gradients in self.gradients:
                self._send_home(gradients, "the end of backward")

    def follow_to_end(self) -> None:
        """Do what is left of the transfer schedule."""
        self._follow(len(self.table.entries) - 1)
        self.bytes_moved = dict(self.engine.bytes_moved)

    def forget_gradients(self) -> None:
        """Forget what a backward made that broke off."""
        for gradients in self.gradients:
            gradients.forget()

    def _begin(self) -> None:
        """A step begins: as the one before ended, or with the transfer schedule's beginning."""
        self.engine.compute_here()
        if self.on_demand or self._at != len(self.table.entries) - 1:
            self.forget_gradients()
            for chunk in self.chunks.values():
                self._send_home(chunk, A_STEP)
            self._absent = {name for name, state in self.table.beginning.items() if state == "leaving"}
            self.arena.enter(0)
            for name, state in self.table.beginning.items():
                if state in ("coming", "resident"):
                    self.chunks[name].act("fetch", A_STEP)
                if state == "resident":
                    self.chunks[name].act("fetched", A_STEP)
        self._at, self.on_demand = -1, False
        self.engine.bytes_moved.clear()

    def _follow(self, place: int) -> None:
        """Do what stands in the transfer schedule up to a moment; blocks that backward does not reach are passed."""
        assert self._at is not None
        for passed in range(self._at + 1, place + 1):
            moment = self.table.trace.moments[passed]
            self.arena.enter(moment.other_bytes)
            for action, name in self.table.entries[passed].actions():
                if action == "evicted" and name in self._absent:
                    self._absent.remove(name)
                else:
                    self.chunks[name].act(action, moment.name)
            self.arena.check(moment.name)
            if moment.on == "host":
                self._on_host(self.chunks[name] for name in self._uses(passed))
        self._at = place

    def _demand(self, place: int) -> None:
        """Have on the device what a moment uses, and nothing else."""
        if self._at is not None and self._at >= 0:
            warnings.warn(ON_DEMAND, stacklevel=4)
        moment, used = self.table.trace.moments[place], self._uses(place)
        for name, chunk in self.chunks.items():
            if name not in used or chunk.state != "resident":
                self._send_home(chunk, moment.name)
        self.arena.enter(moment.other_bytes)
        for name, reads in used.items():
            chunk = self.chunks[name]
            if chunk.state == "home":
                chunk.act("fetch" if reads else "make", moment.name)
                if reads:
                    chunk.act("fetched", moment.name)
        self._at = None

    def _send_home(self, chunk: ChunkMemory, moment: str) -> None:
        """Take a chunk off the device; gradients that nothing else holds go to their home."""
        if chunk.state == "coming":
            chunk.act("fetched", moment)
        if chunk.state == "resident" and isinstance(chunk, Gradients) and not chunk.is_empty:
            chunk.act("evict", moment)
        if chunk.state == "resident":
            chunk.act("drop", moment)
        if chunk.state == "leaving":
            chunk.act("evicted", moment)
