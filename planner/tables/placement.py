"""A placement: which rank holds which embedding table, or which part of it, and what that takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from planner.base.formatting import in_bytes, in_seconds
from planner.tables.sharding_options import Kind, ShardingOption

Status = Literal["optimal", "feasible"]
Options = Mapping[str, tuple[ShardingOption, ...]]
"""The ways to shard each table, by name."""


@dataclass(frozen=True)
class PlacedTable:
    """Which option a table has, and which of its groups have a part, in the order of the parts."""

    name: str
    option: ShardingOption
    groups: tuple[int, ...]

    @property
    def kind(self) -> Kind:
        """The dimension along which it is sharded."""
        return self.option.kind

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each part."""
        return tuple(self.option.groups[group] for group in self.groups)

    @property
    def holders(self) -> tuple[int, ...]:
        """All ranks that hold a part."""
        return tuple(rank for part in self.ranks for rank in part)


@dataclass(frozen=True)
class Placement:
    """A placement of all tables.

    Attributes:
        tables: in the order in which they were given.
        ranks: how many there are.
        status: whether it is proven that no other is faster.
        bound_s: no placement has a slowest rank that is faster.
    """

    tables: tuple[PlacedTable, ...]
    ranks: int
    status: Status
    bound_s: float

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of a step, by rank."""
        return sums(self.tables, self.ranks, "seconds")

    @property
    def bytes(self) -> tuple[int, ...]:
        """By rank."""
        return tuple(map(int, sums(self.tables, self.ranks, "bytes")))

    @property
    def step_s(self) -> float:
        """Seconds of the slowest rank."""
        return max(self.seconds)

    @property
    def gap(self) -> float:
        """By how much, relative to it, a placement could be faster at most."""
        return max(0.0, 1 - self.bound_s / self.step_s) if self.step_s else 0.0

    def __str__(self) -> str:
        proven = self.status if self.status == "optimal" else f"feasible, at most {self.gap:.2%} from the best"
        lines = [
            f"{len(self.tables)} tables on {self.ranks} ranks, {proven}",
            f"slowest rank {in_seconds(self.step_s)} a step, fullest {in_bytes(max(self.bytes))}",
        ]
        width = max(len(table.name) for table in self.tables)
        for table in self.tables:
            where = " ".join(",".join(map(str, part)) if len(part) < self.ranks else "all" for part in table.ranks)
            each = f", 1/{table.option.parts} of the features each" if table.kind == "column" else ""
            takes = f"{in_seconds(table.option.seconds)} and {in_bytes(table.option.bytes)} there"
            lines.append(f"  {table.name:{width}}  {table.kind:12}  {where}{each}: {takes}")
        lines += [
            f"  rank {rank}: {in_seconds(seconds)}, {in_bytes(size)}"
            for rank, (seconds, size) in enumerate(zip(self.seconds, self.bytes, strict=True))
        ]
        return "\n".join(lines)


def sums(tables: Iterable[PlacedTable], ranks: int, what: Literal["seconds", "bytes"]) -> tuple[float, ...]:
    """Seconds or bytes of each rank."""
    total = [0.0] * ranks
    for table in tables:
        for part in table.ranks:
            for rank in part:
                total[rank] += getattr(table.option, what)
    return tuple(total)


def slowest_s(tables: Iterable[PlacedTable], ranks: int) -> float:
    """Seconds of the slowest rank."""
    return max(sums(tables, ranks, "seconds"))
