"""The ways to shard one embedding table over the ranks of a cluster, with what each costs a rank in a training step.

A table is held by one rank, by columns or rows over several, or by each of them in full; or by the ranks of one node,
by rows or by columns. These are the dimensions of Mudigere et al. (2022).

A look-up streams bytes. Forward reads every distinct row once, since repeated ones are in the cache, and writes the
bags; backward reads their gradients and adds them to the rows' own, in a dense gradient that is set to 0 first; the
optimizer passes over all rows and its state. Pooled results go to the ranks that have the samples, and their gradients
back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.ir.layout import Axis
from planner.tables.embedding_table import EmbeddingTable

Kind = Literal["table", "column", "row", "data", "table-row", "table-column"]
KINDS: tuple[Kind, ...] = ("table", "column", "row", "data", "table-row", "table-column")
ID_BYTES = 8
PRICED_BYTES = 2**26
"""A collective of all tables together starts once; its price for each byte is that between this size and twice it."""


@dataclass(frozen=True)
class ShardingOption:
    """One way to shard a table.

    Attributes:
        kind: the dimension.
        parts: into so many parts it is cut, each of which goes to another one of ``groups``.
        groups: ranks that may hold a part together.
        seconds: of a step, on each rank of a group that holds a part.
        bytes: there, likewise.
    """

    kind: Kind
    parts: int
    groups: tuple[tuple[int, ...], ...]
    seconds: float
    bytes: int

    @property
    def total_s(self) -> float:
        """Seconds of all ranks together."""
        return self.seconds * self.parts * len(self.groups[0])

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranks together."""
        return self.bytes * self.parts * len(self.groups[0])


@dataclass(frozen=True)
class TableStep:
    """A training step as far as tables are concerned.

    Attributes:
        batch: samples of all ranks together.
        state: numbers that the optimizer keeps for each weight: 2 of Adam, 1 of Adagrad, 0 of SGD.
    """

    batch: int
    state: int = 2


def sharding_options(
    table: EmbeddingTable, cluster: ClusterSpec, step: TableStep, kinds: tuple[Kind, ...] = KINDS
) -> tuple[ShardingOption, ...]:
    """Every way to shard a table; those over nodes where a cluster has several."""
    return tuple(option for option in _Options(table, CostModel(cluster), step).each() if option.kind in kinds)


@dataclass(frozen=True)
class _Options:
    table: EmbeddingTable
    model: CostModel
    step: TableStep

    def each(self) -> Iterator[ShardingOption]:
        table, cluster = self.table, self.model.cluster
        ranks, inside = cluster.world_size, cluster.levels[0].size
        nodes = ranks // inside
        singles = tuple((rank,) for rank in range(ranks))
        everywhere = (tuple(range(ranks)),)
        by_node = tuple(tuple(range(first, first + inside)) for first in range(0, ranks, inside))
        all_ranks, lane, node = Axis("ranks", ranks, 1), Axis("nodes", nodes, inside), Axis("node", inside, 1)
        bags = self.step.batch * table.bags * table.features * table.item_bytes
        there_and_back = 2 * self.collective_s("all_to_all", all_ranks, bags)
        yield self.option("table", 1, singles, there_and_back)
        for parts in range(2, ranks + 1):
            if table.features % parts == 0 and ranks % parts == 0:
                yield self.option("column", parts, singles, there_and_back / parts, columns=parts)
        if ranks > 1:
            shared_s = self.collective_s("reduce_scatter", all_ranks, bags)
            shared_s += self.collective_s("all_gather", all_ranks, bags / ranks)
            yield self.option("row", 1, everywhere, shared_s, row_parts=ranks)
            gradient = table.rows * table.features * table.item_bytes
            summed_s = self.collective_s("all_reduce", all_ranks, gradient)
            yield self.option("data", 1, everywhere, summed_s, sample_parts=ranks)
        if nodes > 1 and inside > 1:
            over_s = 2 * self.collective_s("all_to_all", lane, bags / inside)
            shared_s = self.collective_s("reduce_scatter", node, bags)
            shared_s += self.collective_s("all_gather", node, bags / inside)
            yield self.option("table-row", 1, by_node, over_s + shared_s, row_parts=inside)
            if table.features % inside == 0:
                joined_s = 2 * self.collective_s("all_to_all", node, bags / ranks)
                yield self.option("table-column", 1, by_node, over_s + joined_s, columns=inside)

    def option(
        self,
        kind: Kind,
        parts: int,
        groups: tuple[tuple[int, ...], ...],
        communicating_s: float,
        *,
        row_parts: int = 1,
        columns: int = 1,
        sample_parts: int = 1,
    ) -> ShardingOption:
        """One option, each part of which has so large a share of rows, features and samples."""
        table, step = self.table, self.step
        features = table.features // columns
        slices = _slices(table.rows, row_parts)
        lookups, bags = table.lookups(step.batch) / sample_parts, step.batch * table.bags // sample_parts
        seconds = max(self.part_s(part, features, lookups, bags) for part in slices)
        rows = -(-table.rows // row_parts)
        numbers = rows * features * (2 + step.state) + 2 * features * bags
        return ShardingOption(kind, parts, groups, seconds + communicating_s, numbers * table.item_bytes)

    def part_s(self, part: slice, features: int, lookups: float, count: int) -> float:
        """Seconds of kernels: the look-up, its backward and the update of one part's rows."""
        table = self.table
        rows, width = len(range(table.rows)[part]), features * table.item_bytes
        found, ids = table.unique_ids(lookups, part) * width, lookups * ID_BYTES
        bags = count * width
        forward = ids + found + bags
        backward = ids + bags + 2 * found + rows * width
        update = (2 * (1 + self.step.state) + 1) * rows * width
        return sum(self.model.compute_s(0, moved, "float32") for moved in (forward, backward, update))

    def collective_s(self, kind: str, axis: Axis, bytes_in: float) -> float:
        """A table's share of the seconds of one collective for all tables."""
        if axis.size == 1:
            return 0.0
        more_s = self.model.collective_s(kind, axis, 2 * PRICED_BYTES) - self.model.collective_s(
            kind, axis, PRICED_BYTES
        )
        return bytes_in * more_s / PRICED_BYTES


def _slices(rows: int, parts: int) -> list[slice]:
    """The rows of each part, of which only the last may have fewer; equally often looked up, one stands for all."""
    size = -(-rows // parts)
    return [slice(first, min(rows, first + size)) for first in range(0, rows, size)]
