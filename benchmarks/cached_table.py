"""A cached embedding table at an eighth of the size of Criteo's terabyte: a file on disk, and 1.5 % of its rows cached.

Batches are Zipf's, with hot rows all over the file. Every batch is looked up, goes through a dense tower and trains the
rows that it looked up. Before each of the two runs, with and without prefetching, the system forgets what it has of the
file.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from autopar.tables.cached_embedding_bag import CachedEmbeddingBag
from planner.tables.cached_rows import CachePrediction, predict_cache
from planner.tables.embedding_table import EmbeddingTable

CRITEO_ROWS, FEATURES, LOOKUPS, SAMPLES = 177_944_275, 128, 26, 2048
"""Rows of Criteo's tables together, as many features as MLPerf's, and look-ups of each sample."""
PART, CACHED, EXPONENT, BATCHES = 8, 0.015, 1.1, 60
STATE = 1 / FEATURES
"""Row-wise Adagrad keeps one number for each row."""


@dataclass(frozen=True)
class CachedRun:
    """One run.

    Attributes:
        table_bytes: of the file, with the optimizer's state.
        cache_share: of its rows on the device.
        hit_rate: measured over all batches.
        predicted: from the histogram.
        step_s: seconds of a batch, median.
        lookup_s: of these until its bags are there.
        fetched_bytes: of a batch, mean.
    """

    prefetches: bool
    table_bytes: int
    cache_share: float
    hit_rate: float
    predicted_hit_rate: float
    step_s: float
    lookup_s: float
    fetched_bytes: float


def zipf(rows: int) -> NDArray[np.float64]:
    """Frequencies, the hottest first."""
    found = np.arange(1, rows + 1, dtype=np.float64)
    np.power(found, -EXPONENT, out=found)
    found /= found.sum()
    return found


def full_size() -> tuple[int, CachePrediction]:
    """Bytes of the whole table, and what a cache of it is predicted to do."""
    table = EmbeddingTable("criteo", CRITEO_ROWS, FEATURES, LOOKUPS, histogram=zipf(CRITEO_ROWS))
    row_bytes = FEATURES * 4
    return CRITEO_ROWS * row_bytes, predict_cache(table, int(CACHED * CRITEO_ROWS), SAMPLES, STATE)


def runs(path: Path) -> list[CachedRun]:
    """Without and with prefetching, of the same batches; ``path`` is of a file that is made, and removed."""
    rows = CRITEO_ROWS // PART
    rng = np.random.default_rng(0)
    frequencies, place = zipf(rows), rng.permutation(rows)
    histogram = np.empty(rows)
    histogram[place] = frequencies
    drawn = np.searchsorted(np.cumsum(frequencies), rng.random((BATCHES, SAMPLES, LOOKUPS))).clip(0, rows - 1)
    batches = [torch.from_numpy(place[each]) for each in drawn]
    table = EmbeddingTable("criteo", rows, FEATURES, LOOKUPS, histogram=histogram)
    torch.manual_seed(0)
    found = []
    try:
        for prefetches in (False, True):
            bags = CachedEmbeddingBag(table, int(CACHED * rows), optimizer="rowwise_adagrad", lr=0.05, path=path)
            _forget(path)
            found.append(_run(bags, batches, prefetches, path.stat().st_size))
            del bags
            path.unlink()
    finally:
        path.unlink(missing_ok=True)
    return found


def _run(bags: CachedEmbeddingBag, batches: list[Tensor], prefetches: bool, size: int) -> CachedRun:
    tower = nn.Sequential(nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
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
    predicted = bags.predict(SAMPLES)
    return CachedRun(
        prefetches,
        size,
        bags.capacity / bags.table.rows,
        bags.moved.hit_rate,
        predicted.hit_rate,
        float(np.median(steps[1:])),
        float(np.median(lookups[1:])),
        bags.moved.fetched / len(batches) * FEATURES * 4 * (1 + STATE),
    )


def _forget(path: Path) -> None:
    """Have the system write what it holds of a file, and forget it."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
