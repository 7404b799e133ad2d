"""Labels of distinct blocks are those of the whole graph."""

from __future__ import annotations

import pytest

from planner.formulation.constraints.labels import LABELS, label_blocks
from planner.formulation.decisions import DecisionGraph
from planner.formulation.strategies import rules_of
from planner.ir.folding import fold, fold_off
from planner.ir.graph import Graph, Ref
from tests.planner.plans import residual_mlp
from tests.planner.search.test_search import chain

GRAPHS = {
    "mlp": residual_mlp(),
    "deep": residual_mlp(layers=12, width=64),
    "strange": residual_mlp(strange=True),
    "chain": chain(5, width=32),
}


def check_labels(graph: Graph) -> None:
    """Every value has the labels on distinct blocks that it has operator by operator."""
    folded = fold(graph)
    rules = rules_of(graph, folded)
    for label in LABELS:
        blocks, whole = (label_blocks(DecisionGraph(each, rules), label) for each in (folded, fold_off(graph)))
        for node in graph.nodes:
            for ref in (Ref(node.name, index) for index in range(len(node.results))):
                assert {*blocks.of(ref)} == {*whole.of(ref)}, (label, ref)


@pytest.mark.parametrize("name", GRAPHS)
def test_values_of_equal_blocks_have_the_same_labels(name: str) -> None:
    check_labels(GRAPHS[name])
