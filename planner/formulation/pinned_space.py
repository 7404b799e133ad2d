"""From a captured graph, a mesh and pins to every decision that is left to take: the space of one mesh."""

from __future__ import annotations

from functools import partial

from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.constraints.filters import filters
from planner.formulation.constraints.labels import label_blocks
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.stored_layouts import StoredLayouts
from planner.formulation.decisions import DecisionGraph
from planner.formulation.pipeline_pace import pace_of
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import Folded
from planner.ir.graph import Graph
from planner.ir.layout import Mesh


def pinned_space(
    graph: Graph,
    folded: Folded,
    mesh: Mesh,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    stages: int = 1,
    stored: StoredLayouts | None = None,
) -> Space:
    """The space of ``graph``, which ``folded`` folds, on the mesh of one of so many pipeline stages.

    Args:
        stored: layouts of parameters, buffers and inputs that are decided already.

    Raises:
        PinError: the pins do not fit the graph or the mesh.
    """
    rules = rules_of(graph, folded)
    decision_graph = DecisionGraph(folded, rules)
    allow, allow_leaf = filters(pins, graph, rules, mesh, partial(label_blocks, decision_graph))
    if stored is not None:
        allow_leaf = stored.allow_leaf(mesh)
    pace = pace_of(stages, mesh.micro_batches, pins.schedule)
    return Space(folded, mesh, CostModel(cluster), training, rules, allow, allow_leaf, decision_graph, pace)
