"""A step in one piece, put together from simulated blocks, is what following all of it says: to the byte and second."""

from __future__ import annotations

import random

import pytest

from planner.analysis.memory import usage
from planner.analysis.pipeline.staged import in_one_piece
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.assignment import assignment_of
from planner.formulation.constraints.mesh_candidates import candidate_meshes
from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.levels import at_levels
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import fold
from planner.ir.graph import Graph
from planner.search.remat_selection import with_levels_between
from planner.solve.choices import corners
from planner.solve.problem import evaluate
from tests.planner.plans import named, residual_mlp
from tests.planner.search.test_remat_selection import bottlenecks

CLUSTERS = (
    ClusterSpec.local(4, "80 GiB", cores=2, host_memory_bytes="80 GiB"),
    ClusterSpec.preset("dgx-h100", devices=8),
)


@pytest.mark.parametrize("spec", CLUSTERS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("graph", [residual_mlp(layers=3, width=64, batch=32), bottlenecks()], ids=["mlp", "blocks"])
@pytest.mark.parametrize("training", [Training(), Training(tier="host")], ids=lambda training: training.tier)
def test_it_takes_and_holds_what_all_of_it_does(graph: Graph, spec: ClusterSpec, training: Training) -> None:
    rng, cost, rules, folded = random.Random(0), CostModel(spec), rules_of(graph), fold(graph)
    decision_graph = DecisionGraph(folded, rules)
    levels = with_levels_between(named(folded), decision_graph, cost)
    compared = 0
    for mesh in candidate_meshes(spec, 2):
        space = Space(folded, mesh, cost, training, rules, decision_graph=decision_graph)
        for choices in corners(space.problem(None))[:4]:
            wanted = at_levels(folded, [rng.choice(levels.of(each.kind)) for each in folded.instances])
            recompute = assignment_of(space, choices).what_it_comes_to(wanted)
            assignment = assignment_of(space, choices, recompute)
            staged, followed = in_one_piece(assignment), usage(assignment)
            assert staged.peak_bytes == followed.peak_bytes, (mesh.sizes, recompute)
            assert staged.step_s == pytest.approx(evaluate(space.problem(None, recompute), choices).time_s, rel=1e-9)
            compared += 1
    assert compared > 5
