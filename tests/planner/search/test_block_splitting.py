"""Seams: where what does not repeat is cut, what stays together, and that no decision changes."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner.formulation.block_facts
from planner.cost.model import CostModel
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import Folded, fold, fold_off
from planner.ir.graph import Graph, Ref
from planner.ir.layout import Mesh
from planner.search.block_splitting import finer
from planner.solve.choices import solve
from planner.solve.problem import evaluate
from tests.planner.ir.test_folding import WIDTH, stack
from tests.planner.ir.test_folding import Program as Written
from tests.planner.ir.test_folding_random import Program, anything, programs
from tests.planner.plans import Build, cluster, residual_mlp


def rows(widths: list[int], batch: int = 8, names: bool = True) -> Graph:
    """``mean(relu(... linear(x)))``: a linear layer and a relu between each two widths."""
    b = Build()
    value = b.leaf("x", batch, widths[0])
    for i, out in enumerate(widths[1:]):
        value = b.linear(f"linear{i}", value, out, f"layers.{i}.up" if names else "")
        value = b.relu(f"relu{i}", value, f"layers.{i}" if names else "")
    graph = b.mean(value)
    graph.check()
    return graph


def cut(graph: Graph, least: int = 0) -> Folded:
    folded = fold(graph)
    found = finer(folded, rules_of(graph, folded), least)
    found.check()
    return found


def bounds(folded: Folded) -> set[int]:
    return {*accumulate(len(instance.block.nodes) for instance in folded.instances)}


@pytest.mark.parametrize("names", [True, False])
def test_layers_that_are_unlike_become_blocks(names: bool) -> None:
    graph = rows([8, 16, 24, 32, 40, 48, 56], names=names)
    assert len(fold(graph).instances) == 1
    found = cut(graph)
    nodes = [[node.name for node in each.block.nodes] for each in found.instances]
    assert nodes == [*([f"linear{i}", f"relu{i}"] for i in range(5)), ["linear5", "relu5", "loss"]]
    assert found.names[2] == ("layers.2" if names else "linear2..relu2")


def test_cuts_are_where_it_is_narrow_and_between_modules() -> None:
    """Not before a relu, and not amid a wide layer unless an end of the model is beside it."""
    wide = fold_off(rows([64, 640, 64, 600, 64, 560, 64]))
    assert bounds(finer(wide, rules_of(wide.graph))) == {2, 4, 8, 10, 13}


def test_what_repeats_stays_whole_unless_more_is_needed() -> None:
    graph = residual_mlp(layers=6)
    assert cut(graph, 8).instances == fold(graph).instances
    found = cut(graph, 9)
    assert {len(kind) for kind in found.kinds} == {1, 6}
    assert len(found.instances) == 14
    assert len(cut(graph, 10**6).instances) == len(cut(graph, 10**7).instances)


def test_a_model_without_a_place_is_one_block() -> None:
    nodes = rows([8, 16]).nodes[:3]
    graph = Graph(nodes, (Ref("linear0"),))
    assert len(cut(graph, 5).instances) == 1
    assert cut(Graph((), ())).instances == ()


def test_a_small_share_is_no_block() -> None:
    """The first layer has less than its share of the work, and stays with the second."""
    found = cut(rows([8, 80, 800, 900]))
    assert [node.name for node in found.instances[0].block.nodes] == ["linear0", "relu0", "linear1", "relu1"]


def test_what_reads_one_weight_of_its_layer_stays_together() -> None:
    def build(p: Written, x: Ref, i: int) -> Ref:
        weight = p.leaf("param", WIDTH, WIDTH)
        return p.op("gelu", p.linear(p.op("tanh", p.linear(x, weight)), weight))

    found = cut(stack(6, build), 100)
    assert [(len(kind), len(kind[0].block.nodes)) for kind in found.kinds] == [(1, 1), (6, 3), (6, 1), (1, 1), (1, 1)]


@settings(max_examples=60)
@given(st.one_of(anything, programs), st.integers(2, 40))
def test_more_seams_hold_fewer_and_a_number_names_them(program: Program, least: int) -> None:
    graph = program.graph()
    few, more = cut(graph, least), cut(graph, 2 * least)
    assert bounds(fold(graph)) <= bounds(few) <= bounds(more)
    assert cut(graph, len(few.instances)).instances == few.instances
    assert len(few.instances) >= least or few.instances == more.instances


def test_no_decision_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plan costs the same, whatever the blocks: each of their problems has the same optimum, but for additions
    of gradients that different blocks find for one value, which are in no price.
    """
    monkeypatch.setattr(planner.formulation.block_facts, "added_places", lambda *_: ())
    for graph in (residual_mlp(layers=2), rows([16, 32, 48, 16, 64])):
        rules = rules_of(graph)
        best = []
        for folded in (fold(graph), finer(fold(graph), rules), finer(fold(graph), rules, 100), fold_off(graph)):
            space = Space(folded, Mesh.of(data=2, tensor=2), CostModel(cluster(4)), Training(), rules)
            problem = space.problem(None)
            best.append(evaluate(problem, solve(problem).choices))
        assert best[1].time_s == pytest.approx(best[0].time_s, rel=1e-12)
        assert best[2].time_s == pytest.approx(best[0].time_s, rel=1e-12)
        assert best[1].peak_bytes == best[0].peak_bytes
