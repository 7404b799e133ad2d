"""Lets placements of a model's embedding tables compete: the model is planned as it is, and with tables in slabs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.driver.arguments import say
from autopar.driver.trace import Traced
from planner.base.errors import InfeasibleError, PinError
from planner.base.formatting import in_seconds
from planner.base.globs import is_of
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.filters import pinned_operators
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.plan.plan import Plan
from planner.search.search_context import Progress
from planner.tables.lookups import TableLookup, lookups
from planner.tables.tables_plan import NO_SLAB, SLABS, TablesPlan, kinds_left, plan_tables

MOST = 0.5
"""Where tables are so large a part of all parameters, placements of them are tried, whether or not that is pinned."""
PLACING = 0.1
"""Part of the time limit in which tables are placed."""


def with_tables(
    traced: Traced,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    time_limit_s: float,
    search: Callable[[Traced, float], Plan],
    progress: Progress | None,
) -> Plan:
    """The faster of two plans: with every table decided as any other operator, and with tables in slabs.

    Where pins give tables slabs, or ranks to hold them, there is the second one alone.

    Args:
        time_limit_s: of both together, of which placing takes :data:`PLACING` at most, about.
        search: plans a program in so many seconds.

    Raises:
        PinError: pins are of tables that the model does not have, or that have not the dimensions that are pinned.
        InfeasibleError: neither fits.
    """
    is_pinned = bool(pins.tables) or pins.sizes.get("table", 1) > 1
    found = left_open(traced, pins)
    is_tried = is_pinned or _are_most(found, traced)
    tables = _placed(found, traced, cluster, pins, training, PLACING * time_limit_s, progress) if is_tried else None
    if is_tried and tables is None and not pins.tables:
        say(progress, "no slabs for embedding tables: they do not fit beside the rest of the model, held whole")
    if tables is None or not tables.in_slabs:
        return search(traced, time_limit_s)
    each_s = (1 - PLACING) * time_limit_s / (1 if is_pinned else 2)
    plain, error = None, None
    if not is_pinned:
        try:
            plain = search(traced, each_s)
        except InfeasibleError as infeasible:
            error = infeasible
    say(progress, f"planning with {len(tables.in_slabs)} embedding tables in slabs")
    try:
        placed = search(traced.placing(tables, cluster), each_s)
    except InfeasibleError as refused:
        if plain is None:
            raise error or refused from refused
        say(progress, "in slabs nothing fits")
        return plain
    if plain is None:
        return _saying(placed, tables)
    in_slabs_s, without_s = placed.predicted.step_time_s, plain.predicted.step_time_s
    say(progress, f"in slabs {in_seconds(in_slabs_s)} a step, without {in_seconds(without_s)}")
    if in_slabs_s < without_s:
        return _saying(placed, replace(tables, other_s=without_s))
    return _saying(plain, replace(tables, tables={}, other_s=in_slabs_s))


def _saying(plan: Plan, tables: TablesPlan) -> Plan:
    """The plan, which says where its tables are."""
    return replace(plan, tables=tables, decided=plan.assignment)


def _are_most(found: Sequence[TableLookup], traced: Traced) -> bool:
    """Whether several tables together are most of a model."""
    sizes = [each.table.rows * each.table.features for each in found]
    whole = sum(leaf.results[0].numel for leaf in traced.graph.leaves if leaf.op == "param")
    return len(sizes) > 1 and sum(sizes) > MOST * whole


def _placed(
    found: Sequence[TableLookup],
    traced: Traced,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    time_limit_s: float,
    progress: Progress | None,
) -> TablesPlan | None:
    """The placement; ``None`` where nobody pinned one and tables do not fit beside the rest of the model, held whole by
    every rank. Tables that other pins decide are left out.

    Raises:
        PinError: as :func:`with_tables`.
    """
    names = {each.table.name for each in found}
    unknown = [f", and {glob!r} is none" for glob in pins.tables if not any(is_of(glob, name) for name in names)]
    if unknown or not names:
        there = f"there are {', '.join(sorted(names))}" if names else "there are none"
        raise PinError(
            f"pin {'tables' if unknown else 'table'!r} is of embedding tables that are looked up once, in plain bags "
            f"of ids [batch] or [batch, n]{''.join(unknown[:1])}: {there}"
        )
    others = [leaf.results[0] for leaf in traced.graph.leaves if leaf.op == "param" and leaf.target not in names]
    kept = sum(t.numel * (2 * t.item_bytes + training.optimizer_bytes_per_element) for t in others)
    state = training.optimizer_bytes_per_element // found[0].table.item_bytes
    pinned, usable = dict(pins.tables), cluster.device.usable_bytes
    say(progress, f"placing {len(names)} embedding tables")
    if pins.sizes.get("table", 1) > 1:
        pinned.setdefault("*", (*SLABS,))
    with contextlib.suppress(InfeasibleError):
        return plan_tables(found, cluster, state, usable - kept, pinned, time_limit_s)
    # The rest may be sharded too, and so may tables in no slab, which the search will tell.
    in_slabs = [each for each in found if kinds_left(each.table.name, pinned) != (NO_SLAB,)]
    return plan_tables(in_slabs, cluster, state, usable, pinned, time_limit_s) if pinned and in_slabs else None


def left_open(traced: Traced, pins: Pins) -> list[TableLookup]:
    """The look-ups that no pin decides: neither how they run, nor how one of these tables is stored."""
    stored = [glob for glob in pins.zero if glob != "*"] if isinstance(pins.zero, Mapping) else []
    decided = {node.name for glob in pins.layers for node in pinned_operators(traced.graph, glob)}
    return [
        each
        for each in lookups(traced.graph)
        if each.node not in decided and not any(is_of(glob, each.table.name) for glob in stored)
    ]
