"""Slabs: embedding tables, and columns of tables, one below the other, in a slab for each rank or node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from autopar.operators.embedding_slabs import embedding_slabs
from planner.tables.embedding_table import EmbeddingTable


@dataclass(frozen=True)
class TablePart:
    """Some features of a table.

    Attributes:
        first: the column of the table's first id among the ids of a sample.
        features: how many.
        slab: where they lie.
    """

    table: EmbeddingTable
    first: int
    features: int
    slab: int


class TableSlabs(nn.Module):
    """Looks up the bags of all parts at once.

    Attributes:
        parts: those of a table one after another.
        tables: of the parts, each once.
        weight: ``[slab, rows, features]``; slabs have as many rows as the fullest of them, and one more, which stands
            for nothing.
        columns, tops: for each id of each slab, its column among the ids of a sample, and the first row of its table,
            or -1 where a slab has fewer ids than another.
        starts: ``[slab, bag]``, where each bag begins among the ids of its slab.
        order: the bags of all slabs in the order of the parts.
    """

    columns: Tensor
    tops: Tensor
    starts: Tensor
    order: Tensor

    def __init__(self, parts: Sequence[TablePart], count: int, multiple: int, like: Tensor):
        """``multiple``: ranks that may share the rows of a slab; ``like``: a weight of the same device and dtype."""
        super().__init__()
        self.parts = tuple(parts)
        self.tables = tuple({part.table.name: part.table for part in parts}.values())
        self._inside = [[n for n, part in enumerate(parts) if part.slab == slab] for slab in range(count)]
        self._tops = [[*accumulate((parts[n].table.rows for n in each), initial=0)] for each in self._inside]
        rows = -(-(max(tops[-1] for tops in self._tops) + 1) // multiple) * multiple
        self.weight = nn.Parameter(like.new_zeros(count, rows, parts[0].features))
        for name, value in self._lists().items():
            self.register_buffer(name, value.to(like.device), persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As ``nn.EmbeddingBag`` does; rows that no table has are 0."""
        self.weight.zero_()
        for view in self.views(self.weight):
            nn.init.normal_(view)
        for name, value in self._lists().items():
            getattr(self, name).copy_(value)

    def views(self, weight: Tensor) -> list[Tensor]:
        """The parts' places in the weight, or in what is like it."""
        found = {
            number: weight[slab, top : top + self.parts[number].table.rows]
            for slab, (numbers, tops) in enumerate(zip(self._inside, self._tops, strict=True))
            for number, top in zip(numbers, tops, strict=False)
        }
        return [found[number] for number in range(len(self.parts))]

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        """``ids[b, c]``, those of all tables of a model -> of each of :attr:`tables` the bags ``[b, features]``."""
        count, rows, _ = self.weight.shape
        found = torch.where(self.tops < 0, rows - 1, ids.index_select(1, self.columns) + self.tops)
        bags = embedding_slabs(self.weight, found.view(ids.shape[0], count, -1), self.starts)
        widths = [sum(part.features for part in self.parts if part.table is table) for table in self.tables]
        return bags.flatten(1, 2).index_select(1, self.order).flatten(1).split(widths, 1)

    def _lists(self) -> dict[str, Tensor]:
        pooling = [[self.parts[number].table.pooling for number in numbers] for numbers in self._inside]
        count, ids, bags = len(pooling), max(map(sum, pooling)), max(map(len, pooling))
        columns, tops = torch.zeros(count, ids, dtype=torch.int64), torch.full((count, ids), -1)
        starts, order = torch.zeros(count, bags, dtype=torch.int64), torch.zeros(len(self.parts), dtype=torch.int64)
        for slab, numbers in enumerate(self._inside):
            at = 0
            for bag, number in enumerate(numbers):
                first, size = self.parts[number].first, pooling[slab][bag]
                place = slice(at, at + size)
                columns[slab, place] = torch.arange(first, first + size)
                tops[slab, place] = self._tops[slab][bag]
                starts[slab, bag], order[number] = at, slab * bags + bag
                at += size
            starts[slab, len(numbers) :] = at
        return {"columns": columns.flatten(), "tops": tops.flatten(), "starts": starts, "order": order}
