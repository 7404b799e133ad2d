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

Cut = Callable[[Rows], Tensor]
"""Gives some rows and columns of a table."""


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

    def check(self, tables: Mapping[str, Tensor]) -> None:
        """Refuse tables of other shapes than those that lie here."""
        for name, value in tables.items():
            if tuple(value.shape) != self.tables[name]:
                raise InputError(
                    f"{name} has shape {tuple(value.shape)} in the state dict, {self.tables[name]} in the model"
                )

    def apart(self, whole: Tensor) -> dict[str, Tensor]:
        """The tables, or what is like them, of whole slabs."""
        found: dict[str, list[Tensor]] = {}
        for part in self.parts:
            found.setdefault(part.table, []).append(whole[part.slab, part.top : part.top + part.rows])
        return {name: torch.cat(columns, 1) for name, columns in found.items()}

    def local(self, rows: Rows, of_table: Callable[[str], Cut | None], beneath: Tensor | None = None) -> Tensor:
        """Some rows and features of some slabs.

        Args:
            rows: which.
            of_table: what cuts rows and columns out of a table, ``None`` where there are none to take; asked once for
                every table, in order, also for one that has none of ``rows``.
            beneath: what there is where no table is; zeros.
        """
        own = [_indices(each, size) for each, size in zip(rows, self.shape, strict=True)]
        made = None if beneath is None else beneath.detach().clone()
        for table in self.tables:
            cut = of_table(table)
            if cut is None:
                continue
            for part in (part for part in self.parts if part.table == table):
                slab = (own[0] == part.slab).nonzero().flatten()
                inside = ((own[1] >= part.top) & (own[1] < part.top + part.rows)).nonzero().flatten()
                inside = inside if len(slab) else inside[:0]
                values = cut((as_slice(own[1][inside] - part.top), as_slice(own[2] + part.column)))
                made = values.new_zeros([len(each) for each in own]) if made is None else made
                if len(inside):
                    made[slab[0], as_slice(inside)] = values
            del cut  # perhaps a whole table, before the next
        assert made is not None
        return made


def _indices(rows: slice | Tensor, size: int) -> Tensor:
    return torch.arange(size)[rows]


def _cut_from(tables: Mapping[str, Tensor], name: str) -> Cut | None:
    """What cuts rows and columns out of one of some tables, if it is there."""
    return tables[name].detach().__getitem__ if name in tables else None


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
        each.check(tables)
        if missing := each.tables.keys() - tables:
            raise InputError(
                f"{' and '.join(sorted(missing))} missing, in slabs with {', '.join(tables)}: give all of them"
            )
        whole = tuple(slice(0, size) for size in each.shape)
        found[each.name] = each.local(whole, partial(_cut_from, tables))
    return found
