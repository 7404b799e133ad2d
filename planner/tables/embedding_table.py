"""An embedding table as the planner knows it: its sizes, and how often its rows are looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.base.errors import InputError


def check_whole(what: str, value: object, least: int) -> None:
    """Raises :class:`InputError` unless a value is a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{what} is {value!r}; give a whole number from {least}")


@dataclass(frozen=True)
class EmbeddingTable:
    """One table.

    Attributes:
        name: in errors, placements and states.
        rows, features: its shape.
        pooling: ids of each bag.
        bags: of each sample.
        item_bytes: of a number.
        histogram: how often each row is looked up, in any unit; ``None`` for equally often.
    """

    name: str
    rows: int
    features: int
    pooling: int = 1
    item_bytes: int = 4
    bags: int = 1
    histogram: Sequence[float] | NDArray[np.float64] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"an embedding table is called {self.name!r}: give it a name, which is text")
        for what in ("rows", "features", "pooling", "item_bytes", "bags"):
            check_whole(f"{what} of table {self.name!r}", getattr(self, what), 1)
        if self.histogram is None:
            return
        try:
            counts = np.asarray(self.histogram, dtype=np.float64)
        except (TypeError, ValueError):
            raise InputError(
                f"the histogram of table {self.name!r} holds no numbers: give a count for each row"
            ) from None
        if counts.shape != (self.rows,):
            raise InputError(
                f"the histogram of table {self.name!r} has shape {counts.shape} and the table {self.rows} rows: give "
                "one count for each row"
            )
        if not np.isfinite(counts).all() or counts.min() < 0 or counts.sum() <= 0:
            raise InputError(f"the histogram of table {self.name!r} must hold counts of at least 0, and some above")
        object.__setattr__(self, "histogram", counts)

    def lookups(self, samples: float) -> float:
        """How many ids so many samples look up."""
        return samples * self.bags * self.pooling

    def frequencies(self, part: slice = slice(None)) -> NDArray[np.float64]:
        """The share of all look-ups that falls to each row of a part."""
        if self.histogram is None:
            return np.full(len(range(self.rows)[part]), 1 / self.rows)
        counts: NDArray[np.float64] = np.asarray(self.histogram, dtype=np.float64)
        return np.asarray(counts[part] / counts.sum())

    def share(self, part: slice) -> float:
        """The share of all look-ups that falls to a part of the rows."""
        if self.histogram is None:
            return len(range(self.rows)[part]) / self.rows
        return float(self.frequencies(part).sum())

    def unique_ids(self, lookups: float, part: slice = slice(None)) -> float:
        """How many rows of a part so many look-ups of the table are expected to find: ``sum(1 - (1 - p)**n)``."""
        if self.histogram is None:
            rows = len(range(self.rows)[part])
            return rows if self.rows == 1 else float(-rows * np.expm1(lookups * np.log1p(-1 / self.rows)))
        with np.errstate(divide="ignore"):  # a row that is always looked up
            return float(-np.expm1(lookups * np.log1p(-np.minimum(1, self.frequencies(part)))).sum())
