"""The rows of a table at home: in the host's memory, or in a file of which only rows that were written take space.

A row that was never written has its initial values, which are drawn when they are read. So a table may be larger than
the disk, as long as the rows that are trained are not: the system would end a process that writes to memory for which
its file gets no room, so there is an error before.
"""

from __future__ import annotations

import mmap
import os
import shutil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planner.base.errors import DiskError
from planner.base.formatting import in_bytes

PIECE = 2**11
"""Rows that are drawn at a time: few enough for the processor's caches."""


class TableHome:
    """Rows ``[rows, width]``, of which the first ``features`` numbers are weights and the others begin as zeros.

    Args:
        path: of the file, a sparse one; ``None`` for memory.
    """

    def __init__(self, rows: int, features: int, width: int, dtype: torch.dtype, path: str | os.PathLike[str] | None):
        self._path = None if path is None else os.path.abspath(path)
        if self._path is None:
            self._values = torch.empty(rows, width, dtype=dtype)
        else:
            file = torch.from_file(self._path, shared=True, size=rows * width, dtype=dtype)
            self._values = file.view(rows, width)
        self._features = features
        self._seed = 0
        self._is_written = torch.zeros(rows, dtype=torch.bool)

    def begin(self, seed: int) -> None:
        """Have no row written."""
        self._seed = seed
        self._is_written.zero_()

    def whole(self) -> Tensor:
        """All rows, in place: those that were not are written now, and take space.

        Raises:
            DiskError: the disk has no room for them.
        """
        others = (~self._is_written).nonzero().flatten()
        self._check_room(len(others), self._row_bytes)
        for rows in others.split(PIECE):
            self[rows] = self._drawn(rows)
        return self._values

    def fill(self, values: Tensor) -> None:
        """Write the first numbers of all rows; the others are zeros.

        Raises:
            DiskError: the disk has no room for them.
        """
        self._check_room(int((~self._is_written).sum()), self._row_bytes)
        self._values[:, : values.shape[1]] = values
        self._values[:, values.shape[1] :] = 0
        self._is_written.fill_(True)

    def __getitem__(self, rows: Tensor) -> Tensor:
        is_written = self._is_written[rows]
        found = self._values.new_empty(len(rows), self._values.shape[1])
        found[is_written] = self._values[rows[is_written]]
        found[~is_written] = self._drawn(rows[~is_written])
        return found

    def __setitem__(self, rows: Tensor, values: Tensor) -> None:
        self._check_room(int((~self._is_written[rows]).sum()), self._row_bytes + mmap.PAGESIZE)
        self._values[rows] = values
        self._is_written[rows] = True

    @property
    def _row_bytes(self) -> int:
        return self._values.shape[1] * self._values.element_size()

    def _check_room(self, rows: int, each_bytes: int) -> None:
        """Raises :class:`DiskError` unless the file can have so many rows more."""
        if self._path is None or not rows:
            return
        found = os.stat(self._path)
        needed = min(rows * each_bytes, found.st_size - 512 * found.st_blocks)  # pages may have been written for others
        free = shutil.disk_usage(os.path.dirname(self._path)).free
        if needed > free:
            raise DiskError(
                f"to write {rows:,} rows more to {self._path!r}, which has {int(self._is_written.sum()):,} of "
                f"{len(self._values):,}, may take {in_bytes(needed)}, and its disk has {in_bytes(free)} left: make "
                "room, or take a path on a larger disk; to read all weights or a state_dict() writes every row"
            )

    def _drawn(self, rows: Tensor) -> Tensor:
        found = self._values.new_zeros(len(rows), self._values.shape[1])
        found[:, : self._features] = standard_normal(self._seed, rows, self._features)
        return found


def standard_normal(seed: int, rows: Tensor, features: int) -> Tensor:
    """Standard normal ``[len(rows), features]`` in float64: each number follows from the seed, its row and its column.

    Which rows are drawn together, and when, changes none of them: number ``i`` of the table is output ``i`` of
    SplitMix64 (Steele, Lea and Flood 2014), through the inverse of the normal distribution.
    """
    place = rows.numpy().astype(np.uint64)[:, None] * np.uint64(features) + np.arange(features, dtype=np.uint64)
    bits: Any = (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    between_0_and_1 = ((bits >> np.uint64(12)) + 0.5) * 2.0**-52
    return torch.special.ndtri(torch.from_numpy(between_0_and_1))
