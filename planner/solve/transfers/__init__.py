"""Transfer schedules by themselves: what is fetched, evicted and dropped when, so that a step fits into a budget of
memory.

Knows nothing of models, layouts or chunks' contents; whoever has these makes a :class:`Trace` of them.
"""

from planner.solve.transfers.plan import fewest_bytes, shortest_step
from planner.solve.transfers.simulate import LaneSpan, SimulatedTransfers, simulate
from planner.solve.transfers.table import Entry, TransferSchedule
from planner.solve.transfers.trace import Item, ItemUse, Moment, TierLink, Trace

__all__ = [
    "Entry",
    "Item",
    "ItemUse",
    "LaneSpan",
    "Moment",
    "SimulatedTransfers",
    "TierLink",
    "Trace",
    "TransferSchedule",
    "fewest_bytes",
    "shortest_step",
    "simulate",
]
