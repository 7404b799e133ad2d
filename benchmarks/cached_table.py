"""A cached embedding table of the size of Criteo's terabyte, 91 GB in a file, with 1.5 % of its rows cached.

Batches are Zipf's, with hot rows all over the file. Every batch is looked up, goes through a dense tower and trains the
rows that it looked up. Of the whole table rows take space on disk once they have been trained, and others are drawn
when they are first looked up. Of an eighth of it all rows are written to disk first, and read from there: before each
run the system forgets what it has of the file.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from autopar.tables.cached_embedding_bag import CachedEmbeddingBag
from planner.tables.cached_rows import predict_cache
from planner.tables.embedding_table import EmbeddingTable

CRITEO_ROWS, FEATURES, LOOKUPS, SAMPLES = 177_944_275, 128, 26, 2048
"""Rows of Criteo's tables together, as many features as MLPerf's, and look-ups of each sample."""
CACHED, EXPONENT, BATCHES = 0.015, 1.1, 60
STATE = 1 / FEATURES
"""Row-wise Adagrad keeps one number for each row."""


@dataclass(frozen=True)
class Part:
    """What is trained.

    Attributes:
        of: 1 for the whole table, 8 for an eighth of its rows.
        is_full: whether all rows are written to disk before.
    """

    of: int
    is_full: bool


PARTS = Part(1, False), Part(8, True)


@dataclass(frozen=True)
class CachedRun:
    """One run.

    Attributes:
        table_bytes: of the file, with the optimizer's state.
        disk_bytes: that it takes on disk in the end.
        cache_share: of its rows on the device.
        cache_bytes: of those.
        hit_rate: measured over all batches.
        predicted_hit_rate: from the histogram.
        step_s: seconds of a batch, median.
        lookup_s: of these until its bags are there.
        read_s, written_s: seconds a batch that rows are read or drawn, and written back, on the thread behind; means.
        fetched_bytes, written_bytes: of a batch, means.
    """

    part: Part
    prefetches: bool
    table_bytes: int
    disk_bytes: int
    cache_share: float
    cache_bytes: int
    hit_rate: float
    predicted_hit_rate: float
    step_s: float
    lookup_s: float
    read_s: float
    written_s: float
    fetched_bytes: float
    written_bytes: float


class _TimedHome:
    """A home with the seconds that reading from it and writing to it take."""

    def __init__(self, home: Any):
        self.home, self.read_s, self.written_s = home, 0.0, 0.0

    def __getitem__(self, rows: Tensor) -> Tensor:
        begin = time.perf_counter()
        found: Tensor = self.home[rows]
        self.read_s += time.perf_counter() - begin
        return found

    def __setitem__(self, rows: Tensor, values: Tensor) -> None:
        begin = time.perf_counter()
        self.home[rows] = values
        self.written_s += time.perf_counter() - begin


def zipf(rows: int) -> NDArray[np.float64]:
    """Frequencies, the hottest first."""
    found = np.arange(1, rows + 1, dtype=np.float64)
    np.power(found, -EXPONENT, out=found)
    found /= found.sum()
    return found


def runs(folder: Path, part: Part) -> list[CachedRun]:
    """Without and with prefetching, of the same batches, each with a new file in a folder.

    They are left there: to remove one that is sparse takes long where the system tells its disk of each hole.
    """
    rows = CRITEO_ROWS // part.of
    rng = np.random.default_rng(0)
    place, frequencies = rng.permutation(rows), zipf(rows)
    shape = BATCHES, SAMPLES, LOOKUPS
    batches = list(
        torch.from_numpy(place[np.searchsorted(np.cumsum(frequencies), rng.random(shape)).clip(0, rows - 1)])
    )
    histogram = np.empty(rows)
    histogram[place] = frequencies
    del place, frequencies
    table, capacity = EmbeddingTable("criteo", rows, FEATURES, LOOKUPS, histogram=histogram), int(CACHED * rows)
    predicted = predict_cache(table, capacity, SAMPLES, STATE).hit_rate
    found = []
    for prefetches in (False, True):
        path = folder / f"{part.of} {prefetches}"
        torch.manual_seed(0)
        bags = CachedEmbeddingBag(table, capacity, optimizer="rowwise_adagrad", lr=0.05, path=path)
        if part.is_full:
            _ = bags.weight
        _forget(path)
        found.append(_run(bags, batches, prefetches, part, predicted, path))
        del bags
    return found


def _run(
    bags: CachedEmbeddingBag, batches: list[Tensor], prefetches: bool, part: Part, predicted: float, path: Path
) -> CachedRun:
    tower = nn.Sequential(nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    timed: Any = _TimedHome(bags._home)
    bags._home = timed
    steps, lookups = [], []
    for number, ids in enumerate(batches):
        begin = time.perf_counter()
        found = bags(ids)
        looked_up = time.perf_counter()
        if prefetches and number + 1 < len(batches):
            bags.prefetch(batches[number + 1])
        tower(found).square().mean().backward()
        bags.step()
        steps.append(time.perf_counter() - begin)
        lookups.append(looked_up - begin)
    read_s, written_s = timed.read_s, timed.written_s
    row_bytes = FEATURES * 4 * (1 + STATE)
    moved = bags.moved.fetched, bags.moved.written_back
    bags.write_back()
    _forget(path)
    return CachedRun(
        part,
        prefetches,
        path.stat().st_size,
        path.stat().st_blocks * 512,
        bags.capacity / bags.table.rows,
        int(bags.capacity * row_bytes),
        bags.moved.hit_rate,
        predicted,
        float(np.median(steps[1:])),
        float(np.median(lookups[1:])),
        read_s / len(batches),
        written_s / len(batches),
        *(rows / len(batches) * row_bytes for rows in moved),
    )


def _forget(path: Path) -> None:
    """Have the system write what it holds of a file, and forget it."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
