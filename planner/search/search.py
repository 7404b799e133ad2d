"""From a graph and a cluster to the best plan, with what is proved about it.

The cluster's parallel configurations are evaluated best first (:mod:`planner.search.branch_and_bound`), within a limit
to a sum of bytes; what is found is simulated, and the limit moved to what then fits
(:mod:`planner.search.memory_fitting`). Where the home of model data is not the device, there is more to choose
(:mod:`planner.search.offload_search`).

What does not depend on the mesh is found once (:mod:`planner.formulation.decisions`). Ctrl-C ends a search with
:class:`KeyboardInterrupt` and leaves nothing behind; to get the best plan so far instead, give a time limit.
"""

from __future__ import annotations

import time
from dataclasses import replace

from planner.base.errors import InputError, PinError
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.zero import pinned_apart, ways_of_kinds
from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.levels import named_by_kind
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import fold, fold_off
from planner.ir.graph import Graph
from planner.search.axis_names import named
from planner.search.block_splitting import finer
from planner.search.branch_and_bound import ParallelConfigs, Searched
from planner.search.candidate_bounds import Progress, SearchContext
from planner.search.memory_fitting import memory_feasible, using_headroom
from planner.search.offload_search import check_offloads, search_offload
from planner.search.parallel_config import ParallelConfig, dividing, micro_batched, stages_wanted, without_micro_batches
from planner.search.remat_selection import keeping, with_levels_between

GAP = 0.01
"""Part of a step that a plan's proof leaves open where nobody asks for another: to close it takes most of the time."""
FIRST = 0.5
"""Part of the time after which proofs give way to a search for a plan that takes the room of the one found."""


def search(
    graph: Graph,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    *,
    folding: bool = True,
    max_axes: int = MAX_AXES,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    pipelines: bool = False,
    progress: Progress | None = None,
) -> Searched:
    """The fastest plan that fits the cluster's memory, over all meshes that the pins allow.

    With ``pipelines``, or where the pins ask for it, also over stages and micro-batches, see
    :mod:`planner.search.parallel_config`.

    A mesh that is not pinned has up to ``max_axes`` axes, at most three, along the levels of the cluster; what is
    proved is proved of these. With three an operator has up to a thousand ways to run, and to bound a mesh takes about
    ten times as long as with two.
    The same graph, cluster and pins give the same plan in every process, unless the time limit cuts the search short.

    Args:
        gap: what is bounded is not searched where no plan can be faster by more than this part of the best plan's time.

    Raises:
        InputError: the time limit is not positive, or the gap is no part.
        PinError: the pins do not fit the model or the cluster.
        ClusterError: the model cannot be divided among so many devices at all.
        InfeasibleError: nothing fits in memory; says by how much, and what would.
    """
    check_time_limit(time_limit_s)
    check_gap(gap)
    check_axes(max_axes)
    start = time.monotonic()
    training = replace(training, tier=pins.tier, update=pins.update, activations=pins.activations or 0)
    if training.tier != "device":
        check_offloads(cluster, pins, pipelines)
    plain = without_micro_batches(cluster, pins, max_axes)
    if not pipelines and plain and (pins.schedule or pins.virtual_stages):
        raise PinError("pins 'schedule' and 'virtual_stages' are a pipeline's: pin 'pipeline' too, or search pipelines")
    if not folding and (pipelines or not plain):
        raise InputError(
            "folding is off, and pipelines and micro-batches are cut between folded blocks: plan without one"
        )
    folded = fold(graph) if folding else fold_off(graph)
    rules = rules_of(graph, folded)
    in_parts: tuple[ParallelConfig, ...] = ()
    if pipelines or not plain:
        folded = finer(folded, rules, stages_wanted(pins))
        in_parts = micro_batched(cluster, pins, graph, len(folded.instances), max_axes, pipelines)
        plain = dividing(plain, graph) if in_parts else plain
    configs = ParallelConfigs(plain, in_parts)
    folded = pinned_apart(folded, pins.zero)
    decision_graph = DecisionGraph(folded, rules)
    decision_graph.survey()
    levels = named_by_kind(folded, map(pins.levels, ways_of_kinds(folded, pins.zero)))
    cost = CostModel(cluster)
    if pins.recompute is None:
        levels = with_levels_between(levels, decision_graph, cost)
    elif pins.keep:
        levels = keeping(levels, decision_graph, pins.keep)
    context = SearchContext(cost, training, rules, pins, levels, start + time_limit_s, progress, gap=gap)
    context.seconds.update(fold=time.monotonic() - start, build=0.0, solve=0.0)
    if training.tier != "device":
        return named(context, search_offload(context, decision_graph, configs))
    first = context
    if not in_parts and pins.recompute is None:
        first = replace(first, deadline=start + FIRST * time_limit_s)
    found = memory_feasible(first, decision_graph, configs)
    return named(context, using_headroom(context, decision_graph, configs, found))


def check_time_limit(seconds: float) -> None:
    """Raises :class:`InputError` unless ``seconds`` is a number above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InputError(f"time_limit_s is {seconds!r}; give seconds, more than 0")


def check_gap(gap: float) -> None:
    """Raises :class:`InputError` unless ``gap`` is a number from 0 to below 1."""
    if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap < 1:
        raise InputError(f"gap is {gap!r}; give the part of a step that need not be proved, at least 0 and below 1")


def check_axes(count: int) -> None:
    """Raises :class:`InputError` unless ``count`` is a number of axes that a mesh may have."""
    if type(count) is not int or count not in (1, 2, 3):
        raise InputError(f"max_axes is {count!r}; give how many axes a mesh may have at most: 1, 2 or 3")
