"""Which rows of a table whose home is the host are on the device, and how often a look-up finds its rows there.

The rows that are looked up most often stay; the others come when a batch needs them, and go when the next needs room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.base.errors import InputError
from planner.tables.embedding_table import EmbeddingTable, check_whole


@dataclass(frozen=True)
class CachePrediction:
    """What a batch is expected to do.

    Attributes:
        staying: rows that never leave the device.
        unique_rows: distinct rows of a batch.
        missing_rows: those of them that are not on the device, and are fetched.
        hit_rate: the share of distinct rows that are.
        moved_bytes: that are fetched, and as many written back, with what the optimizer keeps of them.
    """

    staying: int
    unique_rows: float
    missing_rows: float
    hit_rate: float
    moved_bytes: float


def predict_cache(table: EmbeddingTable, capacity: int, batch: int, optimizer_state: float = 1.0) -> CachePrediction:
    """The steady state of a cache of ``capacity`` rows.

    Of ``n`` look-ups, a row of frequency ``p`` gets one with probability ``q = 1 - (1 - p)**n``. With the rows in the
    order of their frequencies, the first ``k`` stay, where ``k`` and the sum of ``q`` over all others make up the
    capacity; another row is there if the batch before has looked it up, too.

    Args:
        batch: samples of a batch, each with ``table.lookups(1)`` look-ups.
        optimizer_state: numbers that move with each weight.

    Raises:
        InputError: a number is none, or a batch is expected to look up more distinct rows than there is room for.
    """
    check_whole("batch", batch, 1)
    check_whole("capacity", capacity, 1)
    lookups = table.lookups(batch)
    needed = np.sort(table.frequencies())[::-1]  # in place from here: a large table has hundreds of millions
    np.negative(np.minimum(1, needed, out=needed), out=needed)
    with np.errstate(divide="ignore"):  # a row that is always looked up
        np.log1p(needed, out=needed)
    np.negative(np.expm1(np.multiply(needed, lookups, out=needed), out=needed), out=needed)
    unique = float(needed.sum())
    if unique > capacity:
        raise InputError(
            f"a batch of {batch} samples looks up {unique:,.0f} distinct rows of table {table.name!r} on average, and "
            f"its cache holds {capacity:,}: give it more rows, or take smaller batches"
        )
    stay = np.append(0.0, np.cumsum(1 - needed))  # the more stay, the more are there
    staying = int(np.searchsorted(stay, capacity - unique + 1e-9, side="right")) - 1
    rest = needed[staying:]
    missing = float((rest * (1 - rest)).sum())
    row_bytes = table.features * table.item_bytes * (1 + optimizer_state)
    return CachePrediction(staying, unique, missing, 1 - missing / unique, missing * row_bytes)
