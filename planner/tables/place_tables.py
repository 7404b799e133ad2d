"""Places embedding tables on ranks: the slowest as fast as it can be within the memory of each, the fullest as empty.

Of every table one option is taken (:mod:`planner.tables.sharding_options`), and each of its parts is given to a group
of ranks, no group having two. Seconds and bytes of a rank are sums. What a rule finds is proven to be the best by a
bound, or solved further where there are few choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planner.base.errors import InfeasibleError, InputError
from planner.base.formatting import in_bytes
from planner.cost.cluster import ClusterSpec
from planner.tables.average_rank import average_rank
from planner.tables.embedding_table import EmbeddingTable, check_whole
from planner.tables.largest_first import improve, largest_first
from planner.tables.placement import Options, PlacedTable, Placement, slowest_s, sums
from planner.tables.sharding_options import KINDS, Kind, TableStep, sharding_options

EXACT = 20_000
"""So many pairs of an option and a group are decided together."""
GAP = 1e-4
"""Relative; closer than this to the bound a placement is called optimal."""
EMPTYING = 0.1
"""Of the time limit, for the fullest rank."""


def place_tables(
    tables: Sequence[EmbeddingTable],
    cluster: ClusterSpec,
    *,
    batch: int,
    optimizer_state: int = 2,
    kinds: Sequence[Kind] | Kind = KINDS,
    memory_bytes: int | None = None,
    time_limit_s: float = 10.0,
) -> Placement:
    """Place tables on the ranks of a cluster.

    Args:
        batch: samples of all ranks together.
        optimizer_state: numbers that the optimizer keeps for each weight: 2 of Adam, 1 of Adagrad, 0 of SGD.
        kinds: the dimensions to choose from.
        memory_bytes: that tables may take on a device; what is left to all but the runtime, when left out.
        time_limit_s: of the solver's work, about; then the best placement so far is returned with its gap.

    Raises:
        InputError: two tables have one name, the kinds leave a table nothing, or an argument is of no use.
        InfeasibleError: they do not fit; says how many bytes they take, and what there is.
    """
    tables, kinds = _checked(tables, cluster, batch, optimizer_state, kinds)
    if memory_bytes is not None:
        check_whole("memory_bytes", memory_bytes, 1)
    if twice := [name for name, count in Counter(table.name for table in tables).items() if count > 1]:
        raise InputError(f"two embedding tables are called {twice[0]!r}: give each a name of its own")
    limit = cluster.device.usable_bytes if memory_bytes is None else memory_bytes
    step = TableStep(batch, optimizer_state)
    options = {table.name: sharding_options(table, cluster, step, tuple(kinds)) for table in tables}
    if none := [name for name, each in options.items() if not each]:
        raise InputError(
            f"table {none[0]!r} cannot be sharded by {' or '.join(kinds)} on {cluster.name!r}: columns must divide, "
            f"and 'table-row' and 'table-column' take several nodes; kinds are: {', '.join(KINDS)}"
        )
    return place(options, cluster.world_size, limit, time_limit_s=time_limit_s)


def _checked(
    tables: object, cluster: object, batch: object, optimizer_state: object, kinds: Sequence[Kind] | Kind
) -> tuple[Sequence[EmbeddingTable], tuple[Kind, ...]]:
    """The tables and kinds that are given, if all arguments are of use."""
    found = [*tables] if isinstance(tables, Sequence) else []
    if not found or not all(isinstance(table, EmbeddingTable) for table in found):
        raise InputError(f"tables is {tables!r}; give a list of autopar.EmbeddingTable, one at least")
    if not isinstance(cluster, ClusterSpec):
        raise InputError(f"cluster is {cluster!r}; give a ClusterSpec, such as ClusterSpec.local(4)")
    check_whole("batch", batch, 1)
    check_whole("optimizer_state", optimizer_state, 0)
    each: tuple[Kind, ...] = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    unknown = [kind for kind in each if kind not in KINDS]
    if unknown or not each:
        what = f"has no {unknown[0]!r}" if unknown else "is empty"
        raise InputError(f"kinds {what}; there are: {', '.join(KINDS)}")
    return found, each


def place(
    options: Options, ranks: int, memory_bytes: int, *, time_limit_s: float = 10.0, gap: float = GAP
) -> Placement:
    """Place tables of which the options are known; see :func:`place_tables`."""
    bound_s, cheapest = average_rank(options, ranks, memory_bytes)
    first_options = {name: each[:1] for name, each in options.items()}
    starts = [largest_first(each, ranks, memory_bytes) for each in (cheapest, options, first_options)]
    improved = [improve(start, options, ranks, memory_bytes) for start in starts if start is not None]
    tables = min(improved, key=lambda tables: slowest_s(tables, ranks), default=())
    is_optimal = bool(tables) and _is_within(tables, ranks, bound_s, gap)
    if sum(len(option.groups) for each in options.values() for option in each) <= EXACT:
        from planner.tables.exact import PlacementProgram  # the solver takes a second to import

        program = PlacementProgram(options, ranks, memory_bytes, bound_s, gap)
        if not is_optimal and (solved := program.fastest(tables, time_limit_s)) is not None:
            found = improve(solved.tables, options, ranks, memory_bytes)
            tables = min((solved.tables, found, tables or found), key=lambda each: slowest_s(each, ranks))
            bound_s = max(bound_s, solved.bound_s)
            is_optimal = solved.is_optimal or _is_within(tables, ranks, bound_s, gap)
        if tables:
            emptier = program.emptiest(tables, slowest_s(tables, ranks), EMPTYING * time_limit_s)
            tables = min((tables, emptier), key=lambda each: (slowest_s(each, ranks), max(sums(each, ranks, "bytes"))))
    if not tables:
        raise _does_not_fit(options, ranks, memory_bytes)
    step_s = slowest_s(tables, ranks)
    return Placement(tables, ranks, "optimal" if is_optimal else "feasible", min(bound_s, step_s))


def _is_within(tables: Sequence[PlacedTable], ranks: int, bound_s: float, gap: float) -> bool:
    step_s = slowest_s(tables, ranks)
    return step_s - bound_s <= gap * step_s


def _does_not_fit(options: Options, ranks: int, memory_bytes: int) -> InfeasibleError:
    least = {name: min(option.total_bytes for option in each) for name, each in options.items()}
    part = {name: min(option.bytes for option in each) for name, each in options.items()}
    largest = max(part, key=lambda name: part[name])
    return InfeasibleError(
        f"no placement of {len(options)} tables fits {ranks} devices of {in_bytes(memory_bytes)}: with gradients and "
        f"optimizer state they take {in_bytes(sum(least.values()))} at least, and the smallest part of {largest!r} "
        f"{in_bytes(part[largest])}; give more devices, or an optimizer with less state, or keep tables on the host"
    )
