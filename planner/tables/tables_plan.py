"""Decides which rank holds which embedding table of a model, whole or cut, and which tables are left to the search.

What a rank, or a node, holds of tables lies in its slab, one below the other. Slabs are one tensor, ``[slab, row,
feature]``, so that all are as wide and as long as the largest. Tables of as many
features are therefore placed by themselves, once with every width that their columns may have, and the placement with
the fastest slowest rank is taken. In each every table may be left out of slabs, too, and is then decided as any other
operator is, in which to shard it by rows, by columns over all ranks or not at all are ways.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planner.base.errors import InfeasibleError, PinError
from planner.base.formatting import in_seconds
from planner.base.globs import is_of
from planner.cost.cluster import ClusterSpec
from planner.tables.embedding_table import EmbeddingTable
from planner.tables.lookups import TableLookup
from planner.tables.place_tables import place
from planner.tables.placement import Options, Placement, Status
from planner.tables.sharding_options import KINDS, Kind, ShardingOption, TableStep, sharding_options

SLABS: Mapping[Kind, Literal["rank", "node"]] = {
    "table": "rank",
    "column": "rank",
    "table-row": "node",
    "table-column": "node",
}
"""The dimensions in which a table lies in slabs, and what has a slab each; others need none."""
SLABS_NAME = "embedding_slabs"
"""Parameters of slabs are called so, with what has one each, and their features behind."""
NO_SLAB = "none"
"""In pins, that a table lies in no slab."""


@dataclass(frozen=True)
class TablePlan:
    """One table.

    Attributes:
        kind: the dimension that the placement gives it; ``row`` and ``data`` are left to the search of all operators.
        slabs: the ranks, or nodes, that hold it or its columns, in the order of the columns.
        takes_s: seconds of a step that it takes of all ranks together, by dimension.
    """

    kind: Kind
    slabs: tuple[int, ...] = ()
    takes_s: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        where = "in no slab, decided as any operator"
        if self.kind in SLABS:
            where = f"slab{'s' * (len(self.slabs) > 1)} {', '.join(map(str, self.slabs))} of {SLABS[self.kind]}s"
        takes = [f"{kind} {in_seconds(seconds)}" for kind, seconds in self.takes_s.items()]
        return f"{self.kind}, {where}" + f"; a step takes of all ranks together: {', '.join(takes)}" * bool(takes)


@dataclass(frozen=True)
class TablesPlan:
    """All tables that were placed.

    Attributes:
        status, gap: of the placement, by itself.
        tables: by the name of their parameter; empty where a plan without slabs is faster.
        other_s: a step of the best plan that was found the other way, without slabs or with; ``None``: there is none,
            or it was not looked for.
    """

    status: Status
    gap: float
    tables: Mapping[str, TablePlan]
    other_s: float | None = None

    def __str__(self) -> str:
        other = (
            f"{'with' if not self.tables else 'without'} slabs {in_seconds(self.other_s)} a step"
            if self.other_s
            else ""
        )
        if not self.tables:
            return f"decided as any operator; {other}"
        kinds = Counter(table.kind for table in self.tables.values())
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if kind in SLABS)
        others = len(self.tables) - len(self.in_slabs)
        rest = f", {others} decided as any operator" if others else ""
        proof = self.status if self.status == "optimal" else f"at most {self.gap:.2%} from the best"
        return f"{len(self.in_slabs)} in slabs ({told}){rest}; placement {proof}" + f"; {other}" * bool(other)

    @property
    def in_slabs(self) -> dict[str, TablePlan]:
        """Those that lie in slabs."""
        return {name: table for name, table in self.tables.items() if table.kind in SLABS}


def plan_tables(
    found: Sequence[TableLookup],
    cluster: ClusterSpec,
    state: int,
    memory_bytes: int,
    pinned: Mapping[str, Sequence[str]],
    time_limit_s: float,
) -> TablesPlan:
    """Place the tables of a model.

    Args:
        found: the look-ups, of one batch.
        state: numbers that the optimizer keeps for each weight.
        memory_bytes: that they may take on a device.
        pinned: as :attr:`planner.formulation.constraints.pins.Pins.tables`.
        time_limit_s: of all placements that are compared.

    Raises:
        InfeasibleError: they do not fit.
        PinError: a table has none of the dimensions that are pinned.
    """
    by_width: dict[tuple[int, int], list[TableLookup]] = defaultdict(list)
    for lookup in found:
        by_width[lookup.table.features, lookup.table.item_bytes].append(lookup)
    plans: dict[str, TablePlan] = {}
    statuses, step_s, bound_s = [], 0.0, 0.0
    for alike in by_width.values():
        step = TableStep(alike[0].batch, state)
        every = {each.table.name: _runnable(each.table, cluster, step) for each in alike}
        if memory_bytes <= 0:
            raise InfeasibleError(
                f"no memory is left for the {len(alike)} embedding tables of {alike[0].table.features} features: those "
                "of other widths, and what every rank holds whole, take all that a device can use; give more devices, "
                "or keep tables on the host"
            )
        placement = _place(every, cluster, memory_bytes, pinned, time_limit_s / len(by_width))
        memory_bytes -= max(placement.bytes)
        statuses.append(placement.status)
        step_s, bound_s = step_s + placement.step_s, bound_s + placement.bound_s
        for table in placement.tables:
            inside = len(table.option.groups[0])
            slabs = tuple(ranks[0] // inside for ranks in table.ranks) if table.kind in SLABS else ()
            plans[table.name] = TablePlan(table.kind, slabs, _takes(every[table.name]))
    status: Status = "optimal" if {*statuses} == {"optimal"} else "feasible"
    return TablesPlan(
        status, max(0.0, 1 - bound_s / step_s) if step_s else 0.0, {t.table.name: plans[t.table.name] for t in found}
    )


def kinds_left(name: str, pinned: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The kinds of slabs, or none, that pins leave a table: of globs the first that matches counts."""
    return tuple(next((kinds for glob, kinds in pinned.items() if is_of(glob, name)), (*SLABS, NO_SLAB)))


def _runnable(table: EmbeddingTable, cluster: ClusterSpec, step: TableStep) -> tuple[ShardingOption, ...]:
    """Options that a plan has: rows are sharded evenly."""
    is_even = table.rows % cluster.world_size == 0
    return tuple(option for option in sharding_options(table, cluster, step) if option.kind != "row" or is_even)


def _place(
    options: Options,
    cluster: ClusterSpec,
    memory_bytes: int,
    pinned: Mapping[str, Sequence[str]],
    time_limit_s: float,
) -> Placement:
    """The fastest of the placements with slabs of one width."""
    placements, refused = [], None
    families = _families(options)
    each_s = time_limit_s / len(families)
    for family in families:
        allowed = {name: _allowed(name, each, family, pinned) for name, each in options.items()}
        try:
            placements.append(place(allowed, cluster.world_size, memory_bytes, time_limit_s=each_s))
        except InfeasibleError as error:
            refused = error
    if not placements:
        assert refused is not None
        raise refused
    return min(placements, key=lambda each: (each.step_s, max(each.bytes)))


def _families(options: Options) -> list[tuple[Kind, int]]:
    """The kinds of slabs that may be: what a table is cut into parts by, and how many parts."""
    return list(dict.fromkeys((o.kind, o.parts) for each in options.values() for o in each if o.kind in SLABS))


def _allowed(
    name: str, options: tuple[ShardingOption, ...], family: tuple[Kind, int], pinned: Mapping[str, Sequence[str]]
) -> tuple[ShardingOption, ...]:
    """The options of a table: in slabs of one kind, or in none, of those that pins leave.

    A table that pins leave other slabs alone has those.
    """
    kinds = kinds_left(name, pinned)
    kept = tuple(o for o in options if (o.kind if o.kind in SLABS else NO_SLAB) in kinds)
    if not kept:
        there = ", ".join(dict.fromkeys(o.kind if o.kind in SLABS else NO_SLAB for o in options))
        raise PinError(
            f"pin 'tables' leaves {name!r} {' or '.join(map(repr, kinds))}, and on this cluster it may be {there}: "
            "columns must divide, and 'table-row' and 'table-column' take several nodes"
        )
    return tuple(o for o in kept if o.kind not in SLABS or (o.kind, o.parts) == family) or kept


def _takes(options: Sequence[ShardingOption]) -> dict[str, float]:
    """Seconds of all ranks together, of the cheapest option of every kind."""
    return {
        kind: min(option.total_s for option in options if option.kind == kind)
        for kind in KINDS
        if any(option.kind == kind for option in options)
    }
