"""The transfer schedule of a trace under a memory budget: of fewest seconds on the links, or of the shortest step.

The fewest seconds on the links leave no room to move anything while the device computes: what stays takes all of it.
So the shortest step keeps some moments around every use free, for the eviction and the fetch of items that go, and is
looked for among choices that keep none to many free; each is solved, placed and simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.solve.transfers.gaps import gaps_of
from planner.solve.transfers.place import place
from planner.solve.transfers.simulate import SimulatedTransfers
from planner.solve.transfers.table import Stopped, TransferSchedule
from planner.solve.transfers.trace import Trace

WINDOWS = (0, 1, 4)
"""Moments that are kept free around uses, in turn."""
TIE = 1e-3
"""Part of a step by which two transfer schedules may differ and count as equal: then the one that moves less is
taken.
"""


def fewest_bytes(trace: Trace, budget_bytes: int) -> TransferSchedule:
    """The transfer schedule whose links are busy for the least time found, of all directions together; of these a fast
    one.

    Its ``link_bound_s`` says what no transfer schedule is below, and ``stopped`` why the search ended: with ``proved``
    it is the least there is. With links that are equally fast in both directions it moves the fewest bytes, in the same
    sense.

    Raises:
        InfeasibleError: a moment alone needs more than the budget; ``excess_bytes`` says how much.
    """
    return _best(trace, budget_bytes, (0,), thorough=True)


def shortest_step(trace: Trace, budget_bytes: int) -> TransferSchedule:
    """The transfer schedule of shortest simulated step that was found.

    Raises:
        InfeasibleError: a moment alone needs more than the budget; ``excess_bytes`` says how much.
    """
    return _best(trace, budget_bytes, WINDOWS, thorough=False)


def _best(trace: Trace, budget_bytes: int, windows: Sequence[int], thorough: bool) -> TransferSchedule:
    from planner.solve.transfers.keep import WHOLE, keep  # imports a solver, which most plans do not need

    trace.check_budget(budget_bytes)
    gaps = gaps_of(trace)
    room = [budget_bytes - trace.needed_bytes[place] for place in trace.on_device]
    choices = sum(gap.is_choice for gap in gaps)
    link_bound_s = 0.0
    stopped: Stopped = ""
    found: list[tuple[TransferSchedule, SimulatedTransfers]] = []
    for window in windows:
        kept = keep(trace, gaps, room, window, thorough or (window == 0 and choices <= WHOLE))
        if window == 0:
            link_bound_s, stopped = kept.link_bound_s, kept.stopped
        table, seen = place(trace, budget_bytes, gaps, room, kept.gaps)
        found.append((replace(table, link_bound_s=link_bound_s, stopped=stopped), seen))
        if found[-1][1].exposed_s <= TIE * found[-1][1].step_s:
            break
    least = min(seen.step_s for _, seen in found)
    close = [each for each in found if each[1].step_s <= least * (1 + TIE)]
    best, _ = min(close, key=lambda each: (sum(each[0].link_s.values()), each[1].step_s))
    best.check()
    return best
