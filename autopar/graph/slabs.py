"""Says which rows of one large parameter are which embedding table, where a plan puts several tables together.

A slab is what one rank, or node, holds of them: tables, and columns of tables, one below the other. All slabs are one
parameter, ``[slab, row, feature]``, in the place of the tables' own; states of tables become states of slabs, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.graph.rows import Rows, as_slice
from planner.base.errors import InputError


class SlabPart(NamedTuple):
    """Some columns of a table.

    Attributes:
        table: the name of its parameter.
        slab, top, rows: where it lies.
        column: its first.
    """

    table: str
    slab: int
    top: int
    rows: int
    column: int


@dataclass(frozen=True)
class Slabs:
    """The slabs of one parameter.

    Attributes:
        name: of the parameter.
        shape: ``[slab, row, feature]``; slabs have as many rows as the fullest of them, and one more, which stands for
            nothing.
        dtype: of all tables.
        parts: columns of tables, those of a table in order.
    """

    name: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    parts: tuple[SlabPart, ...]

    @property
    def tables(self) -> dict[str, tuple[int, int]]:
        """Shapes of the tables, by name."""
        columns = {part.table: part.column + self.shape[2] for part in self.parts}
        return {part.table: (part.rows, columns[part.table]) for part in self.parts}

    def apart(self, whole: Tensor) -> dict[str, Tensor]:
        """The tables, or what is like them, of whole slabs."""
        found: dict[str, list[Tensor]] = {}
        for part in self.parts:
            found.setdefault(part.table, []).append(whole[part.slab, part.top : part.top + part.rows])
        return {name: torch.cat(columns, 1) for name, columns in found.items()}

    def local(self, rows: Rows, of_table: Callable[[str, Rows], Tensor]) -> Tensor:
        """Some rows and features of some slabs.

        Args:
            rows: which.
            of_table: rows and columns of a table; asked for every part, in order, also for none of its rows.
        """
        own = [_indices(each, size) for each, size in zip(rows, self.shape, strict=True)]
        made: Tensor | None = None
        for part in self.parts:
            slab = (own[0] == part.slab).nonzero().flatten()
            inside = ((own[1] >= part.top) & (own[1] < part.top + part.rows)).nonzero().flatten()
            inside = inside if len(slab) else inside[:0]
            wanted = as_slice(own[1][inside] - part.top), as_slice(own[2] + part.column)
            values = of_table(part.table, wanted)
            if made is None:
                made = values.new_zeros([len(each) for each in own])
            if len(inside):
                made[slab[0], as_slice(inside)] = values
        assert made is not None
        return made


def _indices(rows: slice | Tensor, size: int) -> Tensor:
    return torch.arange(size)[rows]


def _cut(tables: Mapping[str, Tensor], name: str, rows: Rows) -> Tensor:
    return tables[name].detach()[rows]


def apart(slabs: Sequence[Slabs], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by name, tables instead of slabs."""
    named = {each.name: each for each in slabs}
    for name, value in tensors:
        yield from named[name].apart(value).items() if name in named else ((name, value),)


def joined(slabs: Sequence[Slabs], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by name, slabs instead of tables, where these are all there.

    Raises:
        InputError: some tables of a slab are there, and some are not; or one has another shape.
    """
    found = dict(tensors)
    for each in slabs:
        tables = {name: found.pop(name) for name in each.tables if name in found}
        if not tables:
            continue
        for name, shape in each.tables.items():
            if name not in tables:
                raise InputError(f"{name} is missing, and lies in slabs with {', '.join(tables)}: give all of them")
            if tuple(tables[name].shape) != shape:
                raise InputError(
                    f"{name} has shape {tuple(tables[name].shape)} in the state dict, {shape} in the model"
                )
        whole = tuple(slice(0, size) for size in each.shape)
        found[each.name] = each.local(whole, partial(_cut, tables))
    return found
