"""The best plan on one mesh for tensors that are stored there already: how a further program of a model runs."""

from __future__ import annotations

import time

from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.stored_layouts import StoredLayouts
from planner.formulation.constraints.zero import ways_of_kinds
from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.levels import named_by_kind
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import fold
from planner.ir.graph import Graph
from planner.ir.layout import Mesh
from planner.search.branch_and_bound import ParallelConfigs, Searched
from planner.search.fastest_plan import fastest
from planner.search.parallel_config import ParallelConfig
from planner.search.remat_selection import with_levels_between
from planner.search.search_context import Progress, SearchContext


def search_stored(
    graph: Graph,
    cluster: ClusterSpec,
    mesh: Mesh,
    stored: StoredLayouts,
    training: Training,
    *,
    time_limit_s: float,
    gap: float,
    progress: Progress | None = None,
) -> Searched:
    """The fastest plan that leaves tensors where they are, in one forward and one backward.

    Everything else is open: what was pinned for the first program need not divide the sizes of this one.

    Raises:
        InfeasibleError: none fits in memory.
    """
    start, pins = time.monotonic(), Pins()
    folded = stored.apart(fold(graph))
    rules = rules_of(graph, folded)
    decision_graph = DecisionGraph(folded, rules)
    decision_graph.survey()
    cost = CostModel(cluster)
    levels = named_by_kind(folded, map(pins.levels, ways_of_kinds(folded, pins.zero)))
    levels = with_levels_between(levels, decision_graph, cost)
    deadline, seconds = start + time_limit_s, {"fold": time.monotonic() - start, "build": 0.0, "solve": 0.0}
    configs = ParallelConfigs((ParallelConfig(1, mesh),), ())
    context = SearchContext(cost, training, rules, pins, levels, deadline, progress, seconds, gap=gap, stored=stored)
    return fastest(context, decision_graph, configs)
