"""The gaps between two uses of an item on the device, in which it may stay or be evicted.

A gap's moments are those on the device, numbered through the step and on into the next: it begins after the use at
``after`` and ends with the use at ``before``, which is larger, also where a step ends in between. What happens to an
item that goes depends on who needs its value next:

* Nobody reads it before it is written again (gradients after the update): it is dropped, and made anew.
* Its home holds the value (parameters that were only read): it is dropped and fetched.
* Its home does not: it is evicted and fetched. Of the gaps between two writes only the first in which it goes costs the
  eviction; then its home holds the value.
* A moment on the host uses it (an update there): it must go, and cannot be fetched before the moment that writes it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from planner.solve.transfers.trace import Item, Trace


@dataclass(frozen=True)
class Gap:
    """A stretch between two uses of an item on the device.

    Attributes:
        number: of the gap, among all of the trace.
        needed: whether the value is read again, here or at home, before the next write.
        reads: whether the use at its end reads, so that an item that went must be fetched.
        written: the moment that wrote the value, which the home does not hold since; ``None`` where it does. Gaps of
            one item with the same moment share the cost of one eviction.
        forced: whether a moment on the host uses the item meanwhile.
        ready: the first moment on the device at whose entry it may be fetched.
    """

    number: int
    item: Item
    after: int
    before: int
    needed: bool
    reads: bool
    written: int | None
    forced: bool
    ready: int

    @property
    def inside(self) -> range:
        """The moments between the two uses."""
        return range(self.after + 1, self.before)

    @property
    def is_choice(self) -> bool:
        """Whether the item may stay or go, and it makes a difference."""
        return not self.forced and self.needed and len(self.inside) > 0

    @property
    def must_go(self) -> bool:
        """Whether the item goes whatever is chosen: the host uses it, or nobody reads what it holds."""
        return self.forced or (not self.needed and len(self.inside) > 0)


def gaps_of(trace: Trace) -> list[Gap]:
    """Every gap of every item, by item and in the order of the moments."""
    steps = len(trace.on_device)
    number = {place: at for at, place in enumerate(trace.on_device)}
    found: list[Gap] = []
    for item in trace.items:
        uses = [(trace.place[use.moment], use) for use in item.uses]
        for at, (place, _) in enumerate(uses):
            if place not in number:
                continue
            later = [*uses[at + 1 :], *uses[: at + 1]]
            earlier = [*reversed(uses[: at + 1]), *reversed(uses[at + 1 :])]
            end = next(where for where, (each, _) in enumerate(later) if each in number)
            after = number[place]
            ready = after + 1
            for each, use in later[:end]:
                if use.writes:
                    ready = _past(bisect_left(trace.on_device, each), after, steps)
            write = next((each for each, use in earlier if use.writes), None)
            found.append(
                Gap(
                    number=len(found),
                    item=item,
                    after=after,
                    before=_past(number[later[end][0]], after, steps),
                    needed=later[0][1].reads,
                    reads=later[end][1].reads,
                    written=None if write is None else number.get(write),
                    forced=end > 0,
                    ready=ready,
                )
            )
    return found


def _past(moment: int, after: int, steps: int) -> int:
    """A moment of this step or, where it is not past ``after``, of the next."""
    return moment if moment > after else moment + steps
